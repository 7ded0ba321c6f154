"""Distances with known answers."""

from itertools import permutations

import ml_dtypes
import numpy as np
import pytest

from lydite.diff.measure.aligned import AlignedPair, measure_pair
from lydite.diff.measure.distance import distance, relative_error, wide
from lydite.diff.pairing.paired_events import Pair
from lydite.trace.events import Event, Stats


def test_a_known_distance() -> None:
    found = distance(np.array([3.0, 4.5]), np.array([3.0, 4.0]))
    assert found.error == pytest.approx(0.5 / 5)
    assert found.peak == pytest.approx(0.5 / np.sqrt(12.5))


@pytest.mark.parametrize("size", [1, 2**16, 2**16 + 1, 300_001])
def test_pieces_add_up(size: int) -> None:
    g = np.random.default_rng(0)
    a, b = g.standard_normal((2, size)).astype(np.float32)
    expected = np.linalg.norm(a.astype(float) - b) / np.linalg.norm(b.astype(float))
    assert distance(a, b).error == pytest.approx(expected, rel=1e-5)


def test_nan_in_the_same_places_agrees_and_elsewhere_does_not() -> None:
    a = np.array([1.0, np.nan, np.inf])
    assert distance(a, a.copy()).error == 0.0
    assert distance(a, np.array([1.0, 2.0, np.inf])).error == np.inf
    assert distance(a, np.array([1.0, np.nan, -np.inf])).error == np.inf


def test_zeros_agree_with_zeros_only() -> None:
    assert distance(np.zeros(4), np.zeros(4)).error == 0.0
    assert distance(np.full(4, 1e-9), np.zeros(4)).error == np.inf


def test_empty_values_agree() -> None:
    assert distance(np.zeros((0, 3)), np.zeros((0, 3))).error == 0.0


def test_other_shapes_are_infinitely_far() -> None:
    assert relative_error(np.zeros(3), np.zeros(4)) == np.inf


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16, np.int32, np.bool_, np.uint8]
)
def test_widening_changes_no_value(dtype: type) -> None:
    values = np.arange(8).astype(dtype)
    assert np.array_equal(wide(values).astype(float), values.astype(float))
    assert wide(values).dtype in (np.float32, np.float64)


def test_bfloat16_specials_survive() -> None:
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-40], dtype=ml_dtypes.bfloat16)
    assert np.array_equal(wide(special), special.astype(np.float32), equal_nan=True)
    assert np.signbit(wide(special))[3]


def test_huge_values_do_not_overflow() -> None:
    a = np.full(10, 3e30, np.float32)
    assert distance(a, a * np.float32(2)).error == pytest.approx(0.5)


def kept(level: str, nan: int, inf: int) -> Event:
    """A value of which a summary was kept, the same but for the counts."""
    stats = Stats(8, nan=nan, inf=inf)
    if nan + inf < 8:
        stats = Stats(8, -1.0, 1.0, 0.0, 1.0, 1.0, nan, inf)
    sketch = (1.0,) * 1024 if level == "sketch" else None
    return Event(0, "net/a", (8,), "f32", stats=stats, sketch=sketch)


@pytest.mark.parametrize("level", ["sketch", "stats"])
@pytest.mark.parametrize(
    ("one", "other"),
    list(permutations([(0, 0), (1, 0), (0, 1), (2, 1), (1, 2), (8, 0), (0, 8)], 2)),
)
def test_summaries_of_other_counts_of_nan_and_inf_are_infinitely_far(
    one: tuple[int, int], other: tuple[int, int], level: str
) -> None:
    pair = Pair((kept(level, *one),), (kept(level, *other),), "name")
    found = measure_pair(pair, AlignedPair(None, None))
    assert found is not None and found.error == np.inf


@pytest.mark.parametrize("level", ["sketch", "stats"])
@pytest.mark.parametrize(
    ("counts", "error"),
    [((0, 0), 0.0), ((1, 0), 0.0), ((0, 1), 0.0), ((2, 1), 0.0), ((8, 0), None), ((0, 8), None)],
)
def test_summaries_of_equal_counts_are_compared_by_what_is_finite(
    counts: tuple[int, int], error: float | None, level: str
) -> None:
    """Where nothing is, they may be infinite with either sign."""
    event = kept(level, *counts)
    found = measure_pair(Pair((event,), (event,), "name"), AlignedPair(None, None))
    assert (found and found.error) == error
