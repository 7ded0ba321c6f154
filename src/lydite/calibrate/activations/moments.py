"""Statistics of one place, channel by channel, that can be added up in any grouping.

Counts, extremes and histograms add up exactly. Means and sums of squares are kept in float64 and
joined by the rule of Chan, Golub and LeVeque (1979), which subtracts no large numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.activations.histogram import Counts, count, quantile

AT_ONCE = 1 << 20  # values
FIELDS = ("low", "high", "mean", "squares", "zeros", "negative", "counts")


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
        parts = min(-(-values.size // AT_ONCE), len(values))
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
            _counted(values == 0),
            _counted(values < 0),
            count(values, group),
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


def _counted(hits: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many of each channel; most layers have no zero at all."""
    if not hits.any():
        return np.zeros(hits.shape[1], np.int64)
    return np.count_nonzero(hits, axis=0).astype(np.int64)
