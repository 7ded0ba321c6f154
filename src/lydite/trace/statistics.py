"""Statistics and sketches of a value, a bounded piece at a time."""

from collections.abc import Iterator
from functools import lru_cache
from math import isfinite, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.core.dtypes import widen
from lydite.trace.events import Stats

BUCKETS = 1024
PIECE = 2**17  # values processed together: the working set stays inside a CPU's cache
ROW = 2**13
DIGITS = 7  # of a sketch's numbers, which are text on disk


def pieces(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The values in C order, widened to at least float32, a bounded number at a time."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, PIECE):
        yield widen(flat[start : start + PIECE])


def measure(array: NDArray[Any]) -> Stats:
    """Count, range and moments of the finite values; how many are NaN, infinite or zero."""
    array = _real(array)
    low, high, total, squares = np.inf, -np.inf, 0.0, 0.0
    nan = inf = zero = 0
    buffer = np.empty(min(array.size, PIECE))  # one: fresh memory costs more than the arithmetic
    with np.errstate(all="ignore"):
        for values in pieces(array):
            wide = buffer[: values.size]
            wide[:] = values
            power = _squares(wide)
            if not isfinite(power):  # NaN, Inf, or float64 values above 1e154
                finite = np.isfinite(wide)
                nans = int(np.count_nonzero(np.isnan(wide)))
                nan, inf = nan + nans, inf + wide.size - int(np.count_nonzero(finite)) - nans
                values = wide = wide[finite]
                power = _squares(wide)
            if values.size:
                least, most = float(values.min()), float(values.max())
                low, high = min(low, least), max(high, most)
                zero += int(np.count_nonzero(values == 0)) if least <= 0 <= most else 0
                total += float(wide.sum())
                squares += power
    if (count := array.size - nan - inf) == 0:
        return Stats(array.size, nan=nan, inf=inf)
    mean, power = total / count, squares / count
    std = sqrt(max(power - mean * mean, 0.0)) if isfinite(power) else None
    rms = sqrt(power) if isfinite(power) else None
    return Stats(array.size, low, high, mean if isfinite(mean) else None, std, rms, nan, inf, zero)


def sketch(array: NDArray[Any]) -> tuple[float, ...]:
    """A count-sketch: every value added to one of 1,024 buckets with a sign.

    Bucket and sign come from splitmix64 of the flat index: the low ten bits and the top one. The
    difference of two sketches estimates the distance of two values to a few per cent. What is not
    finite counts as 0.
    """
    signed = np.zeros(2 * BUCKETS)  # buckets of the values that are added, then of the others
    with np.errstate(all="ignore"):
        for number, values in enumerate(pieces(_real(array))):
            where = _buckets(number)[: values.size]
            signed += np.bincount(where, weights=_finite(values), minlength=2 * BUCKETS)
        return tuple(_rounded(_finite(signed[:BUCKETS] - signed[BUCKETS:])).tolist())


def distance(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The relative L2 distance of two values, estimated from their sketches; of the second."""
    first, second = np.array(one), np.array(other)
    norm = float(np.linalg.norm(second))
    apart = float(np.linalg.norm(first - second))
    return apart / norm if norm else (0.0 if apart == 0 else float("inf"))


def _real(array: NDArray[Any]) -> NDArray[Any]:
    """Complex values as pairs."""
    if array.dtype.kind != "c":
        return array
    parts = np.float32 if array.dtype.itemsize == 8 else np.float64
    return np.ascontiguousarray(array).reshape(-1).view(parts)


def _squares(wide: NDArray[np.float64]) -> float:
    # In rows that BLAS sums on one thread: waiting for others costs far more than the sum.
    whole = wide.size - wide.size % ROW
    rows, rest = wide[:whole].reshape(-1, ROW), wide[whole:]
    return float(np.vecdot(rows, rows).sum()) + float(rest @ rest)


def _finite(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind != "f" or isfinite(float(values.sum(dtype=np.float64))):
        return values
    return np.where(np.isfinite(values), values, 0)


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """To a few digits, so that the shortest text of each number is short."""
    exponent = np.floor(np.log10(np.maximum(np.abs(values), 1e-290)))
    scale = 10.0 ** (DIGITS - 1 - np.clip(exponent, -290, 290))
    rounded = np.rint(values * scale) / scale
    return np.where(np.isfinite(rounded), rounded, values)


@lru_cache(maxsize=32)
def _buckets(piece: int) -> NDArray[np.int64]:
    """The bucket of every index of one piece; those with the minus sign lie 1,024 higher."""
    with np.errstate(over="ignore"):
        index = np.arange(PIECE, dtype=np.uint64) + np.uint64(piece * PIECE)
        z = index + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z & np.uint64(BUCKETS - 1) | (z >> np.uint64(63)) << np.uint64(10)).astype(np.int64)
