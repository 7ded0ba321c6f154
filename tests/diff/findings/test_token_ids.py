"""Token ids, as a CLIP tokenizer gives them and as ports get them wrong."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lydite.diff.findings import find
from support.findings import causes, evidence

BOS, EOS = 49406, 49407
TEXTS = st.lists(st.integers(1, 40_000), min_size=3, max_size=20, unique=True)


def row(text: list[int], pad: int = EOS, *, length: int = 30, bos: bool = True, eos: bool = True):
    ids = ([BOS] if bos else []) + text + ([EOS] if eos else [])
    return ids + [pad] * (length - len(ids))


def found(reference: list[list[int]], port: list[list[int]]) -> dict[str, str]:
    e = evidence(np.array(reference), np.array(port, np.int32), "i32", kind="ids")
    return {finding.cause: finding.evidence for finding in find(e)}


@settings(max_examples=20, deadline=None, derandomize=True)
@given(text=TEXTS, other=TEXTS, data=st.data())
def test_what_tokenizers_do(text: list[int], other: list[int], data: st.DataObject) -> None:
    pad = data.draw(st.sampled_from([EOS, 0]))
    right = row(text, pad)

    assert not found([right], [right])
    pads = f"position {len(text) + 2} of row 0 on the reference pads with {pad}, the port with 5"
    for port, cause, numbers in (
        (row(text, 5), "pad-id", pads),
        (row(text, pad, bos=False), "bos-missing", f"misses the id {BOS} at the start"),
        (row([BOS, *text], pad), "bos-extra", f"adds the id {BOS} at the start"),
        (row(text, pad, length=40), "length-differs", "port has 40 ids, the reference 30"),
        ([id_ + 2 for id_ in right], "ids-offset", "reference's +2"),
        ([id_ - 3 for id_ in right], "ids-offset", "reference's -3"),
    ):
        findings = found([right], [port])
        assert next(iter(findings)) == cause and numbers in findings[cause]
    changed = list(right)
    place = data.draw(st.integers(1, len(text)))
    changed[place] += 1
    numbers = f"Row 0 differs first at position {place}: {changed[place]} instead of {right[place]}"
    assert f"{numbers}; 1 of 30 ids" in found([right], [changed])["ids-differ"]
    assert "pad-id" not in found([text], [[*text[:-1], 40_001]])  # one token is no padding
    if text != other:
        swapped = found([right, row(other, pad)], [row(other, pad), right])
        assert next(iter(swapped)) == "batch-swapped" and "(1, 0)" in swapped["batch-swapped"]


def test_the_end_token_is_missing() -> None:
    findings = found([row([7, 8, 9], 0)], [row([7, 8, 9], 0, eos=False)])
    assert next(iter(findings)) == "eos-missing"
    assert f"misses the id {EOS} at the end" in findings["eos-missing"]
    findings = found([row([7, 8, 9], 0)], [row([7, 8, 9, EOS], 0)])
    assert (
        next(iter(findings)) == "eos-extra"
        and f"adds the id {EOS} at the end" in findings["eos-extra"]
    )


def test_the_pad_id_is_named() -> None:
    findings = found([row([7, 8]), row([5])], [row([7, 8], 0), row([5], 0)])
    assert "49407, the port with 0" in findings["pad-id"]


def test_a_template_cut_off() -> None:
    findings = found([[1, 2, 3, 4, 10, 11, 12]], [[10, 11, 12]])
    assert "misses the ids 1, 2, 3, 4" in findings["prefix-differs"]


@pytest.mark.parametrize("reverse", [False, True])
def test_padding_on_the_other_side(reverse: bool) -> None:
    pair = [[5, 6, 7, 8] + [0] * 9], [[0] * 9 + [5, 6, 7, 8]]
    findings = found(*(pair[::-1] if reverse else pair))
    assert f"at the {'end' if reverse else 'start'}" in findings["pad-side"]
    assert "with 9 ids" in findings["pad-side"]


def test_a_vocabulary_numbered_anew() -> None:
    right = [BOS, 320, 1125, 539, 320, 2368, 320, 1125, EOS, EOS, EOS]
    new = {id_: number for number, id_ in enumerate(sorted(set(right)))}
    findings = found([right], [[new[id_] for id_ in right]])
    assert "6 of 6 tokens have another number" in findings["other-vocabulary"]


def test_other_ids_are_only_said_to_differ() -> None:
    draw = np.random.default_rng(0)
    for _ in range(100):
        shape = (int(draw.integers(1, 4)), int(draw.integers(1, 40)))
        a, b = draw.integers(0, 49408, shape), draw.integers(0, 49408, shape)
        assert causes(evidence(a, b, "i64", kind="ids")) in (["ids-differ"], [])
