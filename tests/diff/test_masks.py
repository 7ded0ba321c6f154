"""Masks of attention in other forms say the same where they hide the same tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.diff.findings import find
from lydite.diff.measure.masks import are_inverted, as_masks
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter
from support.findings import evidence

SEEN = np.arange(7)[None] < np.array([[3], [6]])
BIAS = np.where(SEEN, 0, -10000.0).astype(np.float32)[:, None]
FORMS = (
    SEEN[:, None, None],
    SEEN.astype(np.float32),
    np.where(SEEN, 0, -np.inf).astype(np.float32)[:, None, None],
    np.broadcast_to(SEEN[:, None, None], (2, 4, 5, 7)),
)


def write(folder: Path, mask: Any, last: float = 1.0) -> Trace:
    values = np.random.default_rng(1).standard_normal((6, 2, 3, 5)).astype(np.float32)
    with TraceWriter(folder, Header()) as writer:
        writer.add("net/tokens", values[0], kind="input")
        writer.add("net/attention", values[1], slot="in.0")
        writer.add("net/attention", mask, slot="in.mask")
        for n in range(2, 6):
            writer.add(f"net/layer.{n}", values[n] * (last if n == 5 else 1))
    return Trace.open(folder)


@pytest.mark.parametrize("mask", FORMS)
def test_a_mask_in_another_form_agrees(mask: Any, tmp_path: Path) -> None:
    found = compare(write(tmp_path / "r", BIAS), write(tmp_path / "p", mask, last=2.0))
    assert found.port_site == "net/layer.5", found.sentence
    assert any("masks of attention" in row.note for row in found.rows if row.agrees)


@pytest.mark.parametrize("mask", FORMS[:3])
def test_a_mask_that_hides_other_tokens_is_named(mask: Any, tmp_path: Path) -> None:
    other = np.roll(mask, 1, -1)
    found = compare(write(tmp_path / "r", BIAS), write(tmp_path / "p", other, last=2.0))
    assert (found.site, found.slot) == ("net/attention", "in.mask"), found.sentence
    assert found.findings and found.findings[0].cause == "other-mask"


def test_an_inverted_mask_is_no_bug_where_what_follows_agrees(tmp_path: Path) -> None:
    found = compare(write(tmp_path / "r", BIAS), write(tmp_path / "p", ~SEEN[:, None]))
    assert found.verdict == "agree", found.sentence


def test_what_is_a_mask() -> None:
    scores = np.random.default_rng(2).standard_normal((2, 7)).astype(np.float32)
    assert as_masks(scores, BIAS[:, 0]) is None
    assert as_masks(np.maximum(scores, 0), -np.maximum(scores, 0)) is None
    assert as_masks(SEEN, SEEN) is None  # compared as they are
    assert are_inverted(~SEEN, SEEN) and are_inverted(~SEEN, BIAS) and not are_inverted(SEEN, BIAS)
    zeros, ones = as_masks(np.zeros((2, 7)), BIAS[:, 0]) or (None, None)
    assert zeros is not None and ones is not None and zeros.all() and not ones.all()


def test_the_masks_of_two_prompts_do_not_show_their_order(tmp_path: Path) -> None:
    def run(folder: Path, text: Any, mask: Any) -> Trace:
        with TraceWriter(folder, Header()) as writer:
            writer.add("text", text.astype(np.float32), kind="input")
            writer.add("mask", mask, kind="input")
            writer.add("hidden", np.tanh(text).astype(np.float32) * mask[..., None])
        return Trace.open(folder)

    text = np.random.default_rng(3).standard_normal((2, 7, 4))
    reference = run(tmp_path / "r", text, SEEN)
    assert compare(reference, run(tmp_path / "p", text[::-1], SEEN[::-1])).verdict == "agree"
    found = compare(reference, run(tmp_path / "q", text[::-1], SEEN))
    assert found.port_site == "mask" and "exchanged" in found.findings[0].evidence


def test_a_mask_that_is_not_causal_but_hides_padding() -> None:
    right = np.tri(7, dtype=bool) & SEEN[:, None]
    wrong = np.repeat(SEEN[:, None], 7, 1)
    (found,) = find(evidence(right, wrong, "bool"))
    assert found.cause == "other-mask" and "not causal" in found.evidence
