"""The histogram: exact counts, quantiles within the bound it states."""

import numpy as np
import pytest
from numpy.typing import NDArray

from lydite.calibrate.activations.moments import (
    BINS,
    BOUND,
    EDGES,
    FLOOR,
    ZERO,
    count_bins,
    quantile,
)

SHARES = (0.0, 0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999, 1.0)
RNG = np.random.default_rng(0)
DATA = {
    "normal": RNG.standard_normal(5000),
    "wide": np.exp(8 * RNG.standard_normal(5000)) * RNG.choice([-1, 1], 5000),
    "one-sided": np.abs(RNG.standard_normal(5000)),
    "after GELU": np.maximum(RNG.standard_normal(5000), -0.17),
    "mostly zero": np.where(RNG.random(5000) < 0.9, 0, RNG.standard_normal(5000)),
    "tiny": RNG.standard_normal(5000) * 1e-6,
    "one value": np.array([-3.7]),
}


@pytest.mark.parametrize("name", DATA)
def test_quantiles_are_within_the_stated_bound(name: str) -> None:
    values = DATA[name].astype(np.float32)
    values = values[np.abs(values) < 2**16]
    counts = count_bins(values[:, None])[0]
    for share in SHARES:
        true = float(np.quantile(values, share, method="inverted_cdf"))
        found = quantile(counts, share, float(values.min()), float(values.max()))
        assert abs(found - true) <= abs(true) * BOUND + FLOOR, (share, true, found)


def test_every_float32_has_its_bin_and_bins_follow_the_order_of_values() -> None:
    assert EDGES[0] == FLOOR and EDGES[-1] == 2.0**16
    ends = EDGES[:-1].astype(np.float32)
    magnitudes = np.concatenate([ends, np.nextafter(ends[1:], np.float32(0))])
    values = np.sort(np.concatenate([magnitudes, -magnitudes, [0, 1e30, -1e30]])).astype("f4")
    found = [int(count_bins(np.array([[value]], np.float32))[0].argmax()) for value in values]
    assert found == sorted(found)
    assert found[0] == 0 and found[-1] == BINS - 1
    assert count_bins(np.array([[0.0], [-0.0], [1e-9]], np.float32))[0, ZERO] == 3


def test_beyond_two_to_sixteen_a_quantile_is_the_extreme() -> None:
    values = np.array([[1.0], [1e6], [2e6]], np.float32)
    assert quantile(count_bins(values)[0], 0.9, 1.0, 2e6) == 2e6


def test_counts_add_up_in_any_order_and_grouping() -> None:
    values: NDArray[np.float32] = RNG.standard_normal((600, 12)).astype(np.float32)
    whole = count_bins(values, group=4)
    parts = [count_bins(part, group=4) for part in np.array_split(values, 7)]
    np.testing.assert_array_equal(sum(reversed(parts)), whole)
    np.testing.assert_array_equal(whole.sum(axis=0), count_bins(values)[0])
    assert whole.shape == (3, BINS) and whole.sum() == values.size


def test_a_last_group_may_be_smaller() -> None:
    counts = count_bins(np.ones((2, 5), np.float32), group=4)
    assert counts.sum(axis=1).tolist() == [8, 2]
