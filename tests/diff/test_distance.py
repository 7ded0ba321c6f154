"""Distances with known answers."""

import ml_dtypes
import numpy as np
import pytest

from lydite.diff.measure.distance import distance, relative_error, wide


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
