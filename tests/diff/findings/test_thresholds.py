"""Hypotheses on both sides of their numbers: how many values, what share, how clear a gap."""

import ml_dtypes
import numpy as np
import pytest

from lydite.diff.findings.affine import _name_factor
from lydite.diff.findings.attention import mask
from lydite.diff.findings.degenerate_values import constant, repeated
from lydite.diff.findings.displaced import _moves
from lydite.diff.findings.parts import parts_reordered
from lydite.diff.findings.per_channel import scaled_per_channel, shifted_per_channel
from lydite.diff.findings.precision import clipped, low_precision, not_clipped, rounded, truncated
from lydite.diff.findings.regions import border, slice_of_axis
from lydite.diff.findings.token_ids import other_vocabulary
from support.findings import Array, evidence

DRAW = np.random.default_rng(3)
X = DRAW.standard_normal((40, 50)).astype(np.float32)


def beyond(count: int, *, high: bool) -> tuple[Array, Array]:
    """A value, and the same with its `count` largest or smallest numbers at a bound."""
    numbers = np.sort(X.reshape(-1))
    bound = numbers[-count - 1] if high else numbers[count]
    return X, np.minimum(X, bound) if high else np.maximum(X, bound)


@pytest.mark.parametrize("high", [True, False])
@pytest.mark.parametrize(("count", "found"), [(2, False), (3, True)])
def test_how_many_numbers_show_a_bound(count: int, found: bool, high: bool) -> None:
    free, bounded = beyond(count, high=high)
    for hypothesis, e in (
        (clipped, evidence(free, bounded)),
        (not_clipped, evidence(bounded, free)),
    ):
        told = hypothesis(e)
        assert (told is not None) == found
        if told is not None:
            assert f"{count} " in told.evidence


@pytest.mark.parametrize(("between", "found"), [(31, False), (32, True)])
def test_enough_numbers_lie_between_the_bounds(between: int, found: bool) -> None:
    inner = np.linspace(-0.9, 0.9, between)
    free, bounded = np.r_[inner, 2, 3, 4, 5], np.r_[inner, 1, 1, 1, 1]
    low = np.r_[-1.0]  # one number at the lower end is not between
    free, bounded = (np.r_[low, side].astype(np.float32) for side in (free, bounded))
    assert (clipped(evidence(free, bounded)) is not None) == found
    assert (not_clipped(evidence(bounded, free)) is not None) == found


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize(
    ("share", "found"), [(0.09, False), (0.11, True), (0.89, True), (0.91, False)]
)
def test_the_share_of_truncated_numbers(share: float, found: bool, step: int) -> None:
    right = np.arange(1000.0)
    port = right + step * (np.arange(1000) < 1000 * share)
    told = truncated(evidence(right, port))
    assert (told is not None) == found
    if told is not None:
        assert f"one too {'low' if step < 0 else 'high'}" in told.evidence
    assert truncated(evidence(right, right + 2 * step * (right < 500))) is None
    assert truncated(evidence(right[:31], port[:31])) is None  # too few to tell


@pytest.mark.parametrize(("share", "found"), [(0.89, False), (0.91, True)])
def test_most_numbers_are_the_reference_rounded(share: float, found: bool) -> None:
    port = X.astype(ml_dtypes.bfloat16).astype(np.float32)
    other = DRAW.permutation(X.size) >= X.size * share
    port.reshape(-1)[other] = np.nextafter(port.reshape(-1)[other], np.float32(9))
    assert (rounded(evidence(X, port)) is not None) == found


@pytest.mark.parametrize(("times", "found"), [(0.2, False), (0.4, True), (25, True), (35, False)])
def test_the_error_has_the_size_of_the_coarser_grid(times: float, found: bool) -> None:
    port = X.astype(ml_dtypes.bfloat16).astype(np.float32)
    gap = DRAW.standard_normal(X.shape)
    gap *= times * 1.7e-3 * np.linalg.norm(port) / np.linalg.norm(gap)
    told = low_precision(evidence((port + gap).astype(np.float32), port))
    assert (told is not None and "a bfloat16 (the last 16 bits" in told.evidence) == found


@pytest.mark.parametrize(("width", "found"), [(15, False), (16, True)])
def test_enough_numbers_repeat_others(width: int, found: bool) -> None:
    right = DRAW.standard_normal((2, width)).astype(np.float32)
    port = np.broadcast_to(right[:1], right.shape).copy()
    assert (repeated(evidence(right, port)) is not None) == found
    port[1, -1] += 1
    assert repeated(evidence(right, port)) is None
    assert repeated(evidence(port, np.full_like(port, 2.0))) is None  # constant, not repeated


def test_one_number_is_not_constant() -> None:
    ones = np.ones(2, np.float32)
    assert constant(evidence(np.r_[1.0, 2.0], ones)) and not constant(evidence(ones, ones))
    assert not constant(evidence(np.r_[1.0], np.r_[2.0]))
    assert not constant(evidence(np.r_[1.0, 2.0, 3.0], np.r_[1.0, 1.0, 2.0]))


@pytest.mark.parametrize(
    ("wrong", "found"),
    [(slice(3, 4), True), (slice(0, 20), True), (slice(0, 21), False), (slice(0, 40, 2), False)],
)
def test_a_part_of_an_axis_is_one_range_of_at_most_half(wrong: slice, found: bool) -> None:
    port = X.copy()
    port[wrong] = DRAW.standard_normal(port[wrong].shape)
    assert (slice_of_axis(evidence(X, port)) is not None) == found


@pytest.mark.parametrize(("gap", "found"), [(3.5, False), (4.5, True)])
def test_the_wrong_part_is_clearly_worse_than_the_rest(gap: float, found: bool) -> None:
    error = np.full((40, 1), 3.9 * 1e-3)
    error[7] = 3.9e-3 * gap
    rows = X / np.linalg.norm(X, axis=1, keepdims=True)
    assert (slice_of_axis(evidence(rows, rows * (1 + error), floor=1e-3)) is not None) == found


@pytest.mark.parametrize(("right", "found"), [(31, False), (32, True)])
def test_enough_numbers_agree_elsewhere(right: int, found: bool) -> None:
    value = np.zeros((2, 40), np.float32)
    value[0] = X[0, :40]
    value[1, :right] = X[1, :right]
    port = value.copy()
    port[0] += 1
    assert (slice_of_axis(evidence(value, port)) is not None) == found


@pytest.mark.parametrize(("thick", "found"), [(1, True), (3, True), (4, False)])
def test_how_thick_a_border_is(thick: int, found: bool) -> None:
    value = DRAW.standard_normal((1, 4, 20, 20)).astype(np.float32)
    port = DRAW.standard_normal(value.shape).astype(np.float32)
    inside = np.s_[..., thick:-thick, thick:-thick]
    port[inside] = value[inside]
    told = border(evidence(value, port))
    assert (told is not None) == found
    if told is not None:
        assert f"outermost {thick} at the top, bottom, left, right" in told.evidence


def test_shifts_that_are_tried() -> None:
    single = {moves[0] for moves in _moves((100, 20)) if len(moves) == 1}
    expected = {(0, by) for by in range(-8, 9) if by} | {(1, by) for by in range(-5, 6) if by}
    assert single == expected and not any(len(moves) > 1 for moves in _moves((100, 20)))
    pairs = [moves for moves in _moves((1, 4, 8)) if len(moves) == 2]
    assert {tuple(axis for axis, _ in moves) for moves in pairs} == {(1, 2)}
    reach = [sum(abs(by) for _, by in moves) for moves in pairs]
    assert reach == sorted(reach) and len(pairs) == 2 * 4


@pytest.mark.parametrize(
    ("off", "tolerance", "named"),
    [(1.9e-3, 1.0, True), (2.1e-3, 1.0, False), (0.9e-5, 0.0, True), (1.1e-5, 0.0, False),
     (0.9e-4, 1e-4, True), (1.1e-4, 1e-4, False)],
)  # fmt: skip
@pytest.mark.parametrize(("factor", "name"), [(2.0, "2"), (-0.5, "−1/2"), (12**0.5, "√12")])
def test_factors_are_named_within_their_tolerance(
    factor: float, name: str, off: float, tolerance: float, named: bool
) -> None:
    assert _name_factor(factor * (1 + off), tolerance, (7, 12)) == (name if named else None)


@pytest.mark.parametrize(("rows", "found"), [(3, False), (4, True)])
def test_enough_numbers_for_each_fitted_one(rows: int, found: bool) -> None:
    x = DRAW.standard_normal((rows, 64))
    port = x + DRAW.standard_normal(64)
    assert (shifted_per_channel(evidence(x, port)) is not None) == found


@pytest.mark.parametrize(("times", "found"), [(95, True), (105, False)])
def test_a_factor_that_no_weight_has_is_a_fit_of_noise(times: float, found: bool) -> None:
    factors = np.full(50, 1.3)
    factors[[3, 9]] = 1.3 * times, 1.2
    assert (scaled_per_channel(evidence(X, X * factors)) is not None) == found


@pytest.mark.parametrize(("tokens", "found"), [((2, 3), False), ((2, 3, 4), True)])
def test_enough_tokens_repeat_to_show_another_vocabulary(
    tokens: tuple[int, ...], found: bool
) -> None:
    ids = np.array([[1, 2, 3, 4, 5, 6, *tokens, 7, 0, 0, 0, 0]])
    told = other_vocabulary(evidence(ids, np.where(ids, ids * 3 + 5, 0), kind="ids"))
    assert (told is not None) == found


@pytest.mark.parametrize(
    ("count", "found"), [(2, True), (6, True), (9, True), (10, False), (11, False)]
)
def test_into_how_many_chunks_an_axis_is_split(count: int, found: bool) -> None:
    x = DRAW.standard_normal((2, 12, 8 * count))
    assert (parts_reordered(evidence(x, np.roll(x, 8, axis=-1))) is not None) == found


@pytest.mark.parametrize(("masked", "found"), [(15, False), (16, True)])
def test_enough_positions_are_masked_on_one_side(masked: int, found: bool) -> None:
    scores = np.exp(DRAW.standard_normal((8, 20)))
    cut = scores.copy()
    cut.reshape(-1)[:masked] = 0  # of the first row
    right, wrong = (side / side.sum(-1, keepdims=True) for side in (scores, cut))
    assert (mask(evidence(right, wrong)) is not None) == found
    assert (mask(evidence(wrong, right)) is not None) == found
