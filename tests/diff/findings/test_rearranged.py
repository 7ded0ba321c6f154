"""The right numbers in the wrong places, found again whatever the values are."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lydite.diff.findings import find
from support.findings import PRECISIONS, Array, causes, evidence, recorded, values

SEEDS = st.integers(0, 2**32 - 1)
SHUFFLED = np.random.default_rng(3).permutation(20)
TOKENS, SPACE = (2, 12, 48), (1, 8, 16, 20)


@dataclass(frozen=True)
class Case:
    """A rearrangement, and words of its evidence."""

    cause: str
    shape: tuple[int, ...]
    change: Callable[[Array], Array]
    words: str


def split(n: int, axis: int = -1) -> Callable[[Array], Array]:
    def change(x: Array) -> Array:
        axis_ = axis % x.ndim
        shape = x.shape
        parts = x.reshape(*shape[:axis_], n, shape[axis_] // n, *shape[axis_ + 1 :])
        return parts.swapaxes(axis_, axis_ + 1).reshape(shape)

    return change


def chunks(order: list[int]) -> Callable[[Array], Array]:
    return lambda x: x.reshape(*x.shape[:-1], len(order), -1)[..., order, :].reshape(x.shape)


CASES = [
    Case("transposed", (1, 16, 16, 8), lambda x: x.swapaxes(1, 2), "transpose(0, 2, 1, 3)"),
    Case("transposed", (24, 24), lambda x: x.T, "axes 0 and 1 swapped"),
    Case("transposed", (7, 7, 7), lambda x: x.transpose(2, 0, 1), "transpose(2, 0, 1)"),
    Case("transposed", SPACE, lambda x: x.transpose(0, 2, 3, 1), "transpose(0, 2, 3, 1)"),
    Case("transposed", (2, 3, 4, 5, 6), lambda x: x.transpose(4, 2, 0, 1, 3), "(4, 2, 0, 1, 3)"),
    Case("transposed", (9, 1, 11), lambda x: x.transpose(1, 2, 0), "transpose(1, 2, 0)"),
    Case("flipped", SPACE, lambda x: x[:, :, ::-1], "along axis 2"),
    Case("flipped", (1, 16, 16, 3), lambda x: x[..., ::-1], "along axis 3"),
    Case("flipped", SPACE, lambda x: x[:, :, ::-1, ::-1], "axis 2 and axis 3"),
    Case(
        "memory-order",
        SPACE,
        lambda x: x.transpose(0, 2, 3, 1).reshape(x.shape),
        "transpose(0, 2, 3, 1) reshaped to [1, 8, 16, 20]",
    ),
    Case("memory-order", TOKENS, lambda x: x.swapaxes(1, 2).reshape(x.shape), "(0, 2, 1)"),
    Case("reshaped", TOKENS, lambda x: x.reshape(2, 12, 6, 8), "[2, 12, 6, 8]"),
    Case("heads-swapped", TOKENS, split(6), "split as 8 × 6 instead of 6 × 8"),
    Case("heads-swapped", TOKENS, split(12), "split as 4 × 12 instead of 12 × 4"),
    Case("even-odd", TOKENS, split(2), "halves channels, in the port even and odd"),
    Case("even-odd", TOKENS, split(24), "even and odd channels, in the port halves"),
    Case("interleaved", (2, 12, 6, 10), split(3, axis=1), "axis 1 of 12 read as 3 × 4"),
    Case(
        "heads-merged-wrongly",
        TOKENS,
        lambda x: x.reshape(2, 12, 6, 8).swapaxes(1, 2).reshape(x.shape),
        "split into 6 × 8",
    ),
    Case("halves-swapped", TOKENS, lambda x: np.roll(x, 24, -1), "two halves of axis 2"),
    Case("halves-swapped", (2, 8, 5, 7), lambda x: np.roll(x, 4, 1), "two halves of axis 1"),
    Case("parts-reordered", TOKENS, chunks([1, 0, 2, 4, 3, 5]), "0 and 1, 3 and 4 of axis 2"),
    Case("parts-reordered", TOKENS, chunks([2, 0, 1]), "0 = 2, 1 = 0, 2 = 1"),
    Case("parts-reordered", (1, 576), chunks([0, 1, 2, 3, 4, 5, 7, 8, 6]), "9 chunks"),
    Case("parts-repeated", TOKENS, chunks([0, 0, 2]), "1 = 0"),
    Case("batch-swapped", TOKENS, lambda x: x[::-1], "batch rows 0 and 1 of axis 0"),
    Case("batch-swapped", (3, 9, 8), lambda x: x[[1, 2, 0]], "0 = 1, 1 = 2, 2 = 0"),
    Case("parts-reordered", (1, 20, 6, 9), lambda x: x[:, SHUFFLED], "20 entries"),
    Case(
        "patch-order",
        (1, 9, 48),
        lambda x: x.reshape(1, 9, 2, 2, 12).swapaxes(2, 3).reshape(x.shape),
        "(column row channel) instead of (row column channel)",
    ),
    Case(
        "patch-order",
        (1, 9, 48),
        lambda x: x.reshape(1, 9, 2, 2, 12).transpose(0, 1, 4, 2, 3).reshape(x.shape),
        "(channel row column) instead of (row column channel)",
    ),
]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.cause}-{case.words}")
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_a_rearrangement_is_named(case: Case, precision: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    x = values(case.shape, draw)
    findings = find(evidence(x, recorded(case.change(x), precision, draw), precision))
    by_cause = {finding.cause: finding.evidence for finding in findings}
    assert case.cause in by_cause, by_cause
    assert case.words in by_cause[case.cause]
    if case.cause != "patch-order":
        assert findings[0].cause == case.cause


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=SEEDS, data=st.data())
def test_any_order_of_any_axes(precision: str, seed: int, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(3, 6), min_size=2, max_size=5)))
    order = data.draw(st.permutations(range(len(shape))))
    draw = np.random.default_rng(seed)
    x = values(shape, draw)
    moved = x.transpose(order)
    found = causes(evidence(x, recorded(moved, precision, draw), precision))
    if order == list(range(len(shape))):
        assert found == []
    elif moved.size >= 64:
        assert found[0] == "transposed"


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=SEEDS, heads=st.integers(3, 9), size=st.integers(3, 9), tokens=st.integers(2, 9))
def test_heads_and_their_size(seed: int, heads: int, size: int, tokens: int) -> None:
    draw = np.random.default_rng(seed)
    x = values((1, tokens, heads * size), draw)
    found = find(evidence(x, recorded(split(heads)(x), "f32", draw)))
    words = f"split as {size} × {heads} instead of {heads} × {size}"
    assert any(words in finding.evidence for finding in found)


def test_red_and_blue_are_named() -> None:
    x = values((1, 8, 9, 3), np.random.default_rng(0))
    (finding,) = find(evidence(x, x[..., ::-1]))
    assert "BGR" in finding.fix


def test_the_port_is_told_how_to_turn_back() -> None:
    x = values((1, 8, 9, 10), np.random.default_rng(0))
    (finding,) = find(evidence(x, x.transpose(0, 2, 3, 1)))
    assert "(0, 3, 1, 2)" in finding.fix
    (finding,) = find(evidence(x[0, 0], x[0, 0].T))
    assert "(1, 0)" in finding.fix


def test_a_large_value_is_searched_by_a_sample_and_judged_whole() -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((1, 96, 128, 128), dtype=np.float32)
    assert causes(evidence(x, x.swapaxes(2, 3).copy())) == ["transposed"]
    spoilt = x.swapaxes(2, 3).copy()
    spoilt[0, :48] = draw.standard_normal(spoilt[0, :48].shape)
    assert causes(evidence(x, spoilt)) == []


def test_one_wrong_row_among_thousands_is_enough() -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((2, 4096, 256), dtype=np.float32)
    wrong = x.copy()
    wrong[1, 77] = x[1, 77, ::-1]
    assert causes(evidence(x, wrong)) == ["axis-slice"]
