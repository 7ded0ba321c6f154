"""Where a value is wrong, what it repeats, what it was taken for, how it was rounded."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lydite.diff.findings import Evidence, HypothesisFailed, find, is_another_form
from lydite.diff.findings.evidence import Recorded
from support.findings import PRECISIONS, Array, causes, evidence, recorded, values

SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("cause", "shape", "dims", "where", "words"),
    [
        ("one-batch-row", (2, 12, 48), None, np.s_[1], "entry 1 of axis 0"),
        ("trailing-positions", (2, 12, 48), None, np.s_[:, 9:], "entries 9 to 11 of axis 1"),
        ("leading-positions", (2, 12, 48), None, np.s_[:, :2], "entries 0 to 1 of axis 1"),
        ("axis-slice", (2, 12, 48), None, np.s_[:, 4:6], "entries 4 to 5 of axis 1"),
        ("one-head", (2, 12, 48), None, np.s_[..., 16:24], "part 2 of 6"),
        ("one-head", (2, 6, 12, 8), "b h s d", np.s_[:, 3], "entry 3 of axis 1 (h)"),
        ("channel-slice", (2, 12, 48), None, np.s_[..., 5:22], "entries 5 to 21 of axis 2"),
    ],
)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_a_part_of_one_axis(
    cause: str,
    shape: tuple[int, ...],
    dims: str | None,
    where: Any,
    words: str,
    precision: str,
    seed: int,
) -> None:
    draw = np.random.default_rng(seed)
    x = draw.standard_normal(shape).astype(np.float32)
    wrong = x.copy()
    wrong[where] = draw.standard_normal(wrong[where].shape)
    found = find(evidence(x, recorded(wrong, precision, draw), precision, dims=dims))
    assert [finding.cause for finding in found] == [cause]
    assert words in found[0].evidence
    assert found[0].label == f"{cause} (observed; no cause known)" and found[0].advice == "next"


def padded(x: Array, mode: Any) -> Array:
    """A box filter of three pixels."""
    wide = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), mode)
    height, width = x.shape[-2:]
    parts = [wide[..., i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return np.mean(parts, axis=0)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("last", [False, True])
def test_another_padding(precision: str, last: bool) -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((1, 8, 24, 16))
    right, wrong = padded(x, "constant"), padded(x, "reflect")
    if last:
        right, wrong = np.moveaxis(right, 1, -1), np.moveaxis(wrong, 1, -1)
    (finding,) = find(evidence(right, recorded(wrong, precision, draw), precision))
    assert finding.cause == "border"
    assert "top, bottom, left, right" in finding.evidence


def test_one_side_only_needs_to_be_known_as_space() -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((1, 8, 24, 16)).astype(np.float32)
    wrong = x.copy()
    wrong[..., -1] = 0
    assert causes(evidence(x, wrong))[0] == "axis-slice"
    finding, _ = find(evidence(x, wrong, dims="b c h w"))
    assert finding.cause == "border" and "at the right" in finding.evidence


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=SEEDS, down=st.integers(-3, 3), right=st.integers(-3, 3), last=st.booleans())
def test_pixels_further(precision: str, seed: int, down: int, right: int, last: bool) -> None:
    draw = np.random.default_rng(seed)
    x = values((1, 20, 16, 16, 4), draw)[:, 0] if last else values((1, 4, 16, 16), draw)
    axes = (1, 2) if last else (2, 3)
    moved = np.roll(x, (down, right), axes)
    for axis, by in zip(axes, (down, right), strict=True):  # what comes in is new
        edge = [slice(None)] * 4
        edge[axis] = slice(0, by) if by > 0 else slice(16 + by, 16)
        moved[tuple(edge)] = x.std() * draw.standard_normal(moved[tuple(edge)].shape)
    found = find(evidence(x, recorded(moved, precision, draw), precision))
    if down == right == 0:
        assert found == ()
        return
    assert found[0].cause == "shifted-pixels"
    for axis, by in zip(axes, (-down, -right), strict=True):
        assert (f"{by:+d} along axis {axis}" in found[0].evidence) == (by != 0)


def test_a_token_further() -> None:
    draw = np.random.default_rng(0)
    x = values((2, 12, 48), draw)
    wrong = np.concatenate([x[:, 1:], draw.standard_normal((2, 1, 48))], axis=1)
    (finding,) = find(evidence(x, recorded(wrong, "f32", draw)))
    assert finding.cause == "shifted-positions"
    assert "+1 along axis 1" in finding.evidence


@pytest.mark.parametrize("precision", PRECISIONS)
def test_more_or_fewer_tokens(precision: str) -> None:
    draw = np.random.default_rng(0)
    x = values((2, 12, 48), draw)
    (finding,) = find(evidence(x, recorded(x[:, 3:], precision, draw), precision))
    assert finding.cause == "cropped" and "3 entries of axis 1, the first" in finding.evidence
    (finding,) = find(evidence(x[:, :-1], recorded(x, precision, draw), precision))
    assert finding.cause == "not-cropped" and "1 entries more" in finding.evidence
    assert causes(evidence(x, recorded(values((2, 9, 48), draw), precision, draw), precision)) == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_another_value(precision: str) -> None:
    draw = np.random.default_rng(0)
    q, k, v = (values((2, 12, 48), draw) for _ in range(3))
    others = [("to_q", q), ("to_k", k), ("small", k[0])]
    found = find(evidence(v, recorded(k, precision, draw), precision, others=others))
    assert [finding.cause for finding in found] == ["another-value"]
    assert "to_k" in found[0].evidence


def test_other_values_are_asked_for_only_when_something_is_wrong() -> None:
    x = values((4, 8), np.random.default_rng(0))

    def others() -> list[tuple[str, Array]]:
        raise AssertionError("read for nothing")

    e = evidence(x, x)
    object.__setattr__(e, "others", others)
    assert find(e) == ()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_input_in_the_output(precision: str) -> None:
    draw = np.random.default_rng(0)
    given_, made = values((2, 12, 48), draw), values((2, 12, 48), draw)
    given_ *= np.linalg.norm(made) / np.linalg.norm(given_)
    inputs = {"in.0": (given_, recorded(given_, precision, draw))}
    for wrong, cause in (
        (given_, "passed-through"),
        (made, "residual-missing"),
        (2 * given_ + made, "residual-twice"),
    ):
        port = recorded(wrong, precision, draw)
        assert causes(evidence(given_ + made, port, precision, inputs=inputs)) == [cause]


def test_an_input_that_is_its_own_input_is_nothing() -> None:
    draw = np.random.default_rng(0)
    x, y = values((4, 16), draw), values((4, 16), draw)
    assert causes(evidence(x, y, slot="in.0", inputs={"in.0": (x, y)})) == []


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_same_again_along_an_axis(axis: int) -> None:
    x = values((3, 12, 48), np.random.default_rng(0))
    wrong = np.broadcast_to(np.take(x, [0], axis), x.shape)
    found = find(evidence(x, wrong))
    assert found[0].cause == "repeated" and f"axis {axis}" in found[0].evidence
    assert find(evidence(wrong, wrong)) == ()


def test_constants() -> None:
    x = values((3, 12), np.random.default_rng(0))
    assert causes(evidence(x, np.zeros_like(x))) == ["all-zero"]
    (finding,) = find(evidence(x, np.full_like(x, 0.25)))
    assert finding.cause == "constant" and "0.25" in finding.evidence


def test_not_finite_says_how_many_where_and_from_what() -> None:
    x = values((3, 12), np.random.default_rng(0))
    wrong = x.copy()
    wrong[1, 5], wrong[2, 0] = np.nan, np.inf
    (finding,) = find(evidence(x, wrong))
    assert finding.cause == "not-finite"
    assert "1 NaN and 1 Inf of 36 values, the first at [1, 5]" in finding.evidence
    (finding,) = find(evidence(x, wrong, inputs={"in.0": (x, x)}))
    assert "from finite inputs" in finding.evidence
    (finding,) = find(evidence(x, wrong, inputs={"in.0": (x, wrong)}))
    assert "already in its inputs" in finding.evidence


def test_overflow_of_float16_is_told_apart() -> None:
    x = np.linspace(0, 1e5, 64, dtype=np.float32)
    with np.errstate(over="ignore"):
        port = x.astype(np.float16)
    (finding,) = find(evidence(x, port, "f16"))
    assert finding.cause == "f16-overflow" and "1e+05" in finding.evidence
    for dtype, size in (("f16", 1.0), ("f16", 65504.0), ("bf16", 1e5), ("f32", 1e5)):
        x = np.linspace(0, size, 64, dtype=np.float32)
        wrong = np.where(np.arange(64) == 5, np.nan, x)
        assert causes(evidence(x, wrong, dtype)) == ["not-finite"], (dtype, size)


def test_masks_of_minus_infinity() -> None:
    causal = np.where(np.tri(16, dtype=bool), 0.0, -np.inf)
    assert find(evidence(causal, causal)) == ()
    shifted, differs = find(evidence(causal, np.where(np.tri(16, k=3, dtype=bool), 0.0, -np.inf)))
    assert (shifted.cause, differs.cause) == ("shifted-positions", "mask-differs")
    assert "−Inf at 0 " in differs.evidence and "finite at 42 " in differs.evidence


def softmax(scores: Array, axis: int = -1) -> Array:
    e = np.exp(scores - scores.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention(precision: str) -> None:
    draw = np.random.default_rng(0)
    scores = draw.standard_normal((1, 4, 20, 20))
    padding = np.where(np.arange(20) > 15, -1e9, 0)

    def told(right: Array, wrong: Array) -> list[str]:
        return causes(evidence(right, recorded(wrong, precision, draw), precision))

    assert told(softmax(scores), softmax(scores, -2)) == ["softmax-axis"]
    assert told(softmax(scores + padding), softmax(scores)) == ["mask-missing"]
    assert told(softmax(scores), softmax(scores + padding)) == ["mask-extra"]
    assert told(softmax(scores + padding), softmax(scores + padding[::-1])) == ["mask-differs"]
    assert told(softmax(scores), softmax(8 * scores)) == []
    assert told(scores, scores * 20**0.5) == ["scaled"]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.float16, "float16"),
        (ml_dtypes.float8_e4m3fn, "float8 e4m3"),
    ],
)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_rounded_once(dtype: type, name: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((12, 48)).astype(np.float32)
    port = recorded(x, "f32", draw).astype(dtype).astype(np.float32)
    (finding,) = find(evidence(x, port))
    assert finding.cause == "rounded" and name in finding.evidence


def test_more_than_one_rounding_leaves_the_grid() -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((12, 48)).astype(np.float32)
    port = (x * (1 + 4e-3 * draw.standard_normal(x.shape))).astype(ml_dtypes.bfloat16)
    (finding,) = find(evidence(x, port.astype(np.float32)))
    assert finding.cause == "lower-precision" and "last 16 bits" in finding.evidence
    assert causes(evidence(x, port, "bf16")) == []  # said to be bf16


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("low", "high"), [(-1, 1), (0, 1), (-np.inf, 1.5), (-0.5, np.inf)])
def test_clipped(precision: str, low: float, high: float) -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((1, 3, 16, 16)).astype(np.float32)
    port = np.clip(recorded(x, precision, draw).astype(np.float32), low, high)
    (finding,) = find(evidence(x, port, precision))
    assert finding.cause == "clipped"
    assert ("below" in finding.evidence) == np.isfinite(low)
    assert ("above" in finding.evidence) == np.isfinite(high)


def test_pixels_cut_off_instead_of_rounded() -> None:
    pixels = np.random.default_rng(0).uniform(0, 255, (16, 16, 3))
    (finding,) = find(evidence(np.rint(pixels), np.trunc(pixels), "u8"))
    assert finding.cause == "truncated" and "one too low" in finding.evidence


def test_only_another_form_decides_what_rounding_leaves_open() -> None:
    value = values((2, 8, 16), np.random.default_rng(0))
    coarse = value.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert causes(evidence(value, coarse)) and not is_another_form(evidence(value, coarse))
    assert causes(evidence(value, 1.5 * value)) and not is_another_form(
        evidence(value, 1.5 * value)
    )
    assert is_another_form(evidence(value, value[:, ::-1]))


def test_a_cause_that_cannot_be_looked_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of ours in one rule does not lose what the others find."""

    def broken(_: Evidence) -> None:
        raise ValueError("zip() argument 2 is shorter")

    x = np.random.default_rng(0).standard_normal((2, 12, 16)).astype(np.float32)
    monkeypatch.setattr("lydite.diff.findings.REPLAYED", (broken,))
    with pytest.warns(HypothesisFailed, match=r"the cause broken: ValueError\('zip"):
        assert causes(evidence(x, -x)) == ["negated"]


@pytest.mark.parametrize(("hidden", "says"), [([5, 6], "tokens 5 to 6"), ([], "no token")])
def test_a_moved_mask_of_padding(hidden: list[int], says: str) -> None:
    x = np.random.default_rng(7).standard_normal((2, 9, 6)).astype(np.float32)
    right, wrong = x.copy(), x.copy()
    right[1, 7:], wrong[1, hidden] = 0, 0
    (found,) = find(evidence(right, wrong))[:1]
    assert found.cause == "padding-mask" and says in found.evidence
    wrong[0] += 0.1
    assert not find(evidence(right, wrong)) or find(evidence(right, wrong))[0] != found


def test_a_part_from_the_other_end_with_zeros_for_padding() -> None:
    x = np.random.default_rng(8).standard_normal((2, 12, 6)).astype(np.float32)
    shown = np.arange(9)[:, None] < np.array([9, 5])[:, None, None]
    before = [Recorded("net/features", x)]
    e = replace(evidence(x[:, 3:] * shown, x[:, :-3] * shown), before=lambda: before)
    (found,) = find(e)[:1]
    assert found.cause == "another-chunk" and "drops 3 at the end" in found.evidence
