"""Statistics that a GPU makes by itself: NumPy's, but for the rounding of means and squares."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from lydite.calibrate.activations.collect import Selection, collect
from lydite.calibrate.activations.device_moments import DeviceMoments
from lydite.calibrate.activations.file import read_file
from lydite.calibrate.activations.moments import Moments
from lydite.calibrate.store.reader import CalibrationSet
from lydite.pipelines.pipeline import Pipeline

EXACT = ("low", "high", "zeros", "negative", "counts")


def check(found: Moments, right: Moments) -> None:
    assert found.count == right.count
    for name in EXACT:
        ours, numpys = found.arrays()[name], right.arrays()[name]
        assert ours.dtype == numpys.dtype
        np.testing.assert_array_equal(ours, numpys, name)
    deviation, size = np.sqrt(right.variance), right.absmax
    assert (np.abs(found.mean - right.mean) <= 1e-6 * deviation + 1e-9 * size).all()
    np.testing.assert_allclose(found.variance, right.variance, rtol=1e-5, atol=0)


def values_of(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Channels of very different sizes, off centre, with zeros, outliers and tiny values."""
    rng = np.random.default_rng(0)
    widths = np.exp(3 * rng.standard_normal(shape[-1]))
    values = (rng.standard_normal(shape) * widths + 7).astype(np.float32)
    values.flat[::97] = 0
    values.flat[3:6] = -0.0, 1e-7, 1e6
    return values


@pytest.mark.parametrize("group", [0, 1, 5])
@pytest.mark.parametrize("shape", [(5, 3), (3, 70, 48), (2500, 16), (1024, 8), (2, 1100, 6)])
def test_they_are_numpys(shape: tuple[int, ...], group: int) -> None:
    values = values_of(shape)
    right = Moments.of(values.reshape(-1, shape[-1]), group)
    check(DeviceMoments()(mx.array(values), group)(), right)


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    values = (np.random.default_rng(0).standard_normal((4000, 3)) + 3000).astype(np.float32)
    check(DeviceMoments()(mx.array(values), 0)(), Moments.of(values))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen(bad: float) -> None:
    values = np.ones((50, 4), np.float32)
    values[7, 2] = bad
    assert not DeviceMoments()(mx.array(values), 0)().is_finite


def test_a_collection_is_the_same(
    opened: CalibrationSet,
    pipeline: Pipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {}
    for cpu in (True, False):
        monkeypatch.setattr("lydite.calibrate.activations.places.on_cpu", lambda cpu=cpu: cpu)
        collect(opened, pipeline, tmp_path / f"{cpu}.sqlite", Selection())
        found[cpu] = read_file(tmp_path / f"{cpu}.sqlite")
    assert found[True].keys == found[False].keys
    assert found[True].table.keys() == found[False].table.keys()
    for key, right in found[True].table.items():
        check(found[False].table[key], right)
