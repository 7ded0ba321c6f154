"""Statistics against NumPy's own, sketches against the distance they estimate."""

import ml_dtypes
import numpy as np
import pytest

from lydite.trace.statistics import PIECE, distance, measure, sketch


@pytest.mark.parametrize("size", [1, 7, PIECE - 1, PIECE, 2 * PIECE + 5])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_moments_are_those_of_the_values(size: int, dtype: type) -> None:
    values = (np.random.default_rng(size).standard_normal(size) * 3 + 1).astype(dtype)
    wide = values.astype(np.float64)
    stats = measure(values)
    assert (stats.count, stats.min, stats.max) == (size, wide.min(), wide.max())
    found = (stats.mean, stats.std, stats.rms)
    expected = (wide.mean(), wide.std(), np.sqrt((wide**2).mean()))
    np.testing.assert_allclose(np.array(found, float), expected, rtol=1e-12, atol=1e-12)


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    values = np.array([np.nan, np.inf, -np.inf, np.nan, 0.0, -0.0, 3.0, -1.0], np.float32)
    stats = measure(values)
    assert (stats.nan, stats.inf, stats.zero, stats.count) == (2, 2, 2, 8)
    assert (stats.min, stats.max, stats.mean) == (-1.0, 3.0, 0.5)


@pytest.mark.parametrize("values", [np.array([]), np.array([np.nan, np.inf])])
def test_without_a_finite_value_the_moments_are_none(values: np.ndarray) -> None:
    stats = measure(values)
    assert (stats.min, stats.max, stats.mean, stats.std, stats.rms) == (None,) * 5
    assert stats.count == values.size


def test_float64_values_whose_squares_overflow_are_finite_all_the_same() -> None:
    stats = measure(np.array([1e200, -1e200]))
    assert (stats.nan, stats.inf, stats.max, stats.mean, stats.rms) == (0, 0, 1e200, 0.0, None)


def test_integers_booleans_and_complex_values_have_statistics() -> None:
    assert measure(np.array([3, 0, -3], np.int8)).min == -3
    assert measure(np.array([True, False])).mean == 0.5
    assert measure(np.array([3 + 4j], np.complex64)).rms == pytest.approx(12.5**0.5)
    assert measure(np.array(7.0)).max == 7.0


def test_a_strided_view_is_measured_as_its_values() -> None:
    values = np.arange(24.0).reshape(2, 3, 4)
    assert measure(values.transpose(2, 0, 1)[::2]) == measure(values.transpose(2, 0, 1)[::2].copy())


@pytest.mark.parametrize("error", [1e-6, 1e-3, 0.1, 1.0])
@pytest.mark.parametrize("size", [5_000, 300_000])
def test_the_difference_of_sketches_estimates_the_error(size: int, error: float) -> None:
    rng = np.random.default_rng(0)
    one = rng.standard_normal(size)
    other = one + error * rng.standard_normal(size)
    true = np.linalg.norm(other - one) / np.linalg.norm(one)
    # seven digits of a bucket's sum: errors far below are lost in them
    assert distance(sketch(other), sketch(one)) == pytest.approx(true, rel=0.1)


def test_the_sketch_is_the_one_of_the_format() -> None:
    def splitmix(n: int) -> int:
        mask = 2**64 - 1
        z = n + 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    values = np.random.default_rng(1).standard_normal(3000)
    for start in (0, PIECE - 1000, 2 * PIECE):  # values are read in pieces
        buckets = [0.0] * 1024
        for n, value in enumerate(values, start):
            z = splitmix(n)
            buckets[z & 1023] += -value if z >> 63 else value
        whole = np.concatenate([np.zeros(start), values])
        np.testing.assert_allclose(sketch(whole), buckets, rtol=1e-6)
    assert splitmix(0) == 0xE220A8397B1DCDAF  # the published first output of splitmix64


def test_a_sketch_has_only_finite_numbers_of_few_digits() -> None:
    values = np.random.default_rng(2).standard_normal(4096).astype(np.float32)
    values[:3] = np.nan, np.inf, -np.inf
    numbers = sketch(values)
    assert np.isfinite(numbers).all() and any(numbers)
    assert max(len(repr(number)) for number in numbers) <= 14
    assert (
        len(sketch(np.full(5000, 1e308))) == 1024
        and np.isfinite(sketch(np.full(5000, 1e308))).all()
    )


def test_distance_of_zeros() -> None:
    nothing, something = sketch(np.zeros(4)), sketch(np.ones(4))
    assert distance(nothing, nothing) == 0.0
    assert distance(something, nothing) == float("inf")


@pytest.mark.parametrize("values", [[0.0, 0.0, 2.0], [-1.0, 0.0, 0.0], [0.0, 0.0]])
def test_zeros_at_the_end_of_the_range_are_counted(values: list[float]) -> None:
    assert measure(np.array(values)).zero == 2


def test_moments_beyond_the_range_of_numbers_are_none() -> None:
    stats = measure(np.full(4, 1.7e308))
    assert (stats.min, stats.max) == (1.7e308, 1.7e308)
    assert (stats.mean, stats.std, stats.rms) == (None, None, None)


def test_rounding_makes_no_variance_of_a_constant_negative() -> None:
    for value in np.random.default_rng(0).standard_normal(50):
        assert (measure(np.full(7, value)).std or 0.0) < 1e-7
