"""Statistics of one place, channel by channel, that can be added up in any grouping.

Counts, extremes and histograms add up exactly. Means and sums of squares are kept in float64 and
joined by the rule of Chan, Golub and LeVeque (1979), which subtracts no large numbers.

A histogram has 32 bins an octave. The number of a bin is the sign, the exponent and the first five
bits of the fraction of a float32, so counting is a shift. A quantile q read from it is off by at
most |q| / 64 + 2⁻¹⁶ while |q| < 2¹⁶; beyond that, where float16 ends too, it is the extreme.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

VALUES_AT_ONCE = 1 << 20  # values
FIELDS = ("low", "high", "mean", "squares", "zeros", "negative", "counts")
FINE = 5  # bits of the fraction: 2⁵ bins an octave
LOWEST, HIGHEST = -16, 16  # octaves: values below 2⁻¹⁶ share one bin with 0
BOUND, FLOOR = 2.0 ** -(FINE + 1), 2.0**LOWEST  # of the error: relative, and absolute beside it
SHIFT = 23 - FINE
FIRST = ((127 + LOWEST) << FINE) - 1  # comes before the bin of 2⁻¹⁶
OVER = ((HIGHEST - LOWEST) << FINE) + 1  # magnitude of the bin of all that is too large
_HALF = 1 << (31 - SHIFT)  # patterns of those bits for one sign
ZERO, BINS = OVER, 2 * OVER + 1
GROUPS_AT_ONCE = 64  # groups, so that the patterns of all fit into some megabytes

Counts = NDArray[np.int64]  # (..., BINS), from the most negative bin to the most positive


@dataclass(frozen=True, eq=False)
class Moments:
    """What was seen at one place: `count` values in each of C channels."""

    count: int
    low: NDArray[np.float32]  # (C,)
    high: NDArray[np.float32]
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]  # sum of squared distances from the mean
    zeros: NDArray[np.int64]
    negative: NDArray[np.int64]
    counts: Counts  # (groups, bins)

    @classmethod
    def of(cls, values: NDArray[np.float32], group: int = 0) -> "Moments":
        """Of (N, C) values, some of them at a time: their float64 copy stays small."""
        parts = min(-(-values.size // VALUES_AT_ONCE), len(values))
        found = (cls._of(part, group) for part in np.array_split(values, parts))
        return reduce(Moments.joined, found)

    @classmethod
    def _of(cls, values: NDArray[np.float32], group: int) -> Self:
        wide = values.astype(np.float64)
        mean = wide.mean(axis=0)
        wide -= mean
        return cls(
            values.shape[0],
            values.min(axis=0),
            values.max(axis=0),
            mean,
            np.einsum("nc,nc->c", wide, wide),
            _count_true(values == 0),
            _count_true(values < 0),
            count_bins(values, group),
        )

    def joined(self, other: "Moments") -> "Moments":
        """Both together."""
        total = self.count + other.count
        share, apart = other.count / total, other.mean - self.mean
        return Moments(
            total,
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
            self.mean + apart * share,
            self.squares + other.squares + apart**2 * (self.count * share),
            self.zeros + other.zeros,
            self.negative + other.negative,
            self.counts + other.counts,
        )

    @property
    def variance(self) -> NDArray[np.float64]:
        """Of each channel, over all its values (not N - 1)."""
        return self.squares / self.count

    @property
    def absmax(self) -> NDArray[np.float32]:
        """The largest magnitude of each channel."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    @property
    def is_finite(self) -> bool:
        """Whether no NaN and no Inf was among the values."""
        return bool(np.isfinite(self.low).all() and np.isfinite(self.high).all())

    def whole(self) -> tuple[float, float]:
        """Mean and variance over all channels together."""
        mean = float(self.mean.mean())
        within, between = float(self.variance.mean()), float(np.square(self.mean - mean).mean())
        return mean, within + between

    def quantile(self, share: float, group: int | None = None) -> float:
        """Of all channels, or of one group of them."""
        counts = self.counts.sum(axis=0) if group is None else self.counts[group]
        return quantile(counts, share, float(self.low.min()), float(self.high.max()))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The statistics by name, but for the count."""
        return {name: getattr(self, name) for name in FIELDS}

    @classmethod
    def from_arrays(cls, count: int, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Back from `arrays`."""
        return cls(count, **{name: np.array(arrays[name]) for name in FIELDS})


def _count_true(hits: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many of each channel; most layers have no zero at all."""
    if not hits.any():
        return np.zeros(hits.shape[1], np.int64)
    return np.count_nonzero(hits, axis=0).astype(np.int64)


def count_bins(values: NDArray[np.float32], group: int = 0) -> Counts:
    """Histograms of (N, C) over neighbouring channels, `group` of them in each; 0: all in one."""
    channels = values.shape[1]
    group = group or channels
    parts = [
        _count_groups(values[:, first : first + GROUPS_AT_ONCE * group], group)
        for first in range(0, channels, GROUPS_AT_ONCE * group)
    ]
    return np.concatenate(parts)


def quantile(counts: Counts, share: float, low: float, high: float) -> float:
    """The least value that `share` of all do not exceed; `low` and `high` are the extremes."""
    rank = max(1, int(np.ceil(share * counts.sum())))
    found = int(np.searchsorted(np.cumsum(counts), rank))
    return float(np.clip(MIDDLES[found], low, high))


def _count_groups(values: NDArray[np.float32], group: int) -> Counts:
    """By the first bits of each value, all of them, and then put together where they are one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) >> SHIFT
    groups = -(-values.shape[1] // group)
    if groups > 1:
        bits += (np.arange(values.shape[1]) // group * (2 * _HALF)).astype(np.uint32)
    raw = np.bincount(bits.reshape(-1), minlength=groups * 2 * _HALF).reshape(groups, 2, _HALF)
    counts = np.zeros((groups, BINS), np.int64)
    for sign, side in enumerate((counts[:, ZERO:], counts[:, ZERO::-1])):  # from 0 outwards
        side[:, 0] += raw[:, sign, : FIRST + 1].sum(axis=1)
        side[:, 1:OVER] = raw[:, sign, FIRST + 1 : FIRST + OVER]
        side[:, OVER] = raw[:, sign, FIRST + OVER :].sum(axis=1)
    return counts


def _edges() -> NDArray[np.float64]:
    """The lower ends of the magnitudes 1 … OVER."""
    bits = (np.arange(1, OVER + 1, dtype=np.int32) + FIRST) << SHIFT
    return bits.view(np.float32).astype(np.float64)


def _middles() -> NDArray[Any]:
    edges = _edges()
    upper = np.concatenate([(edges[:-1] + edges[1:]) / 2, [np.inf]])  # the last is the extreme
    return np.concatenate([-upper[::-1], [0.0], upper])


EDGES = _edges()
MIDDLES = _middles()  # of every bin
