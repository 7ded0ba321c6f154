"""A histogram of float32 values with 32 bins an octave, from which quantiles are read.

The number of a bin is the sign, the exponent and the first five bits of the fraction of a value, so
that counting is a shift. Counts add up exactly, in any order and grouping. A quantile q is off by
at most |q| / 64 + 2⁻¹⁶ while |q| < 2¹⁶; beyond that, where float16 ends too, it is the extreme.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

FINE = 5  # bits of the fraction: 2⁵ bins an octave
LOWEST, HIGHEST = -16, 16  # octaves: values below 2⁻¹⁶ share one bin with 0
BOUND, FLOOR = 2.0 ** -(FINE + 1), 2.0**LOWEST  # of the error: relative, and absolute beside it
SHIFT = 23 - FINE
FIRST = ((127 + LOWEST) << FINE) - 1  # comes before the bin of 2⁻¹⁶
OVER = ((HIGHEST - LOWEST) << FINE) + 1  # magnitude of the bin of all that is too large
_HALF = 1 << (31 - SHIFT)  # patterns of those bits for one sign
ZERO, BINS = OVER, 2 * OVER + 1
AT_ONCE = 64  # groups, so that the patterns of all fit into some megabytes

Counts = NDArray[np.int64]  # (..., BINS), from the most negative bin to the most positive


def count(values: NDArray[np.float32], group: int = 0) -> Counts:
    """Histograms of (N, C) over neighbouring channels, `group` of them in each; 0: all in one."""
    channels = values.shape[1]
    group = group or channels
    parts = [
        _count(values[:, first : first + AT_ONCE * group], group)
        for first in range(0, channels, AT_ONCE * group)
    ]
    return np.concatenate(parts)


def quantile(counts: Counts, share: float, low: float, high: float) -> float:
    """The least value that `share` of all do not exceed; `low` and `high` are the extremes."""
    rank = max(1, int(np.ceil(share * counts.sum())))
    found = int(np.searchsorted(np.cumsum(counts), rank))
    return float(np.clip(MIDDLES[found], low, high))


def _count(values: NDArray[np.float32], group: int) -> Counts:
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
