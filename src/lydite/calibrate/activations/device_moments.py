"""Statistics of one place, made by MLX where the values are.

A call of SD3-medium shows seven billion values. A GPU that handed them all to NumPy would wait for
it a thousand times as long as it works itself, so here only sums come back. Extremes and counts are
exact, as NumPy's are, but for subnormal numbers, which Metal takes for zeros; means and squares are
summed over 1024 values at most in float32, about their mean, and joined in float64.
"""

from collections.abc import Callable, Iterator
from functools import reduce

import mlx.core as mx
import numpy as np

from lydite.calibrate.activations.moments import BINS, FIRST, OVER, SHIFT, ZERO, Moments
from lydite.trace.arrays import to_numpy

AT_ONCE = 1 << 24  # values
RUN = 32  # values that are summed one after the other in float32
SUMS = ("rows", "centre", "apart", "squares")  # (parts, 1), and (parts, C) each
COPIES = 512  # of a histogram, at most: threads that count the same bin wait for each other


class DeviceMoments:
    """Makes statistics where the values are, one part ahead of the one that is waited for.

    Without waiting, everything that a network makes of a sample would be in memory at once.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, mx.array] = {}

    def __call__(self, values: mx.array, group: int) -> Callable[[], Moments]:
        """Begin the statistics of (…, C) values; the answer waits for them."""
        values = values.reshape(-1, values.shape[-1])
        rows = max(1, AT_ONCE // values.shape[1])
        parts: list[dict[str, mx.array]] = []
        for start in range(0, len(values), rows):
            parts.append(_measured(values[start : start + rows], group))
            mx.async_eval(parts[-1])
            mx.eval(self._under_way)
            self._under_way = parts[-1]
        return lambda: reduce(Moments.joined, map(_read, parts))


def _measured(values: mx.array, group: int) -> dict[str, mx.array]:
    """Of (N, C) values."""
    values = values.astype(mx.float32)
    found = {
        "low": values.min(axis=0),
        "high": values.max(axis=0),
        "zeros": (values == 0).sum(axis=0),
        "negative": (values < 0).sum(axis=0),
        "counts": _histograms(values, group),
        "finite": mx.isfinite(values).all(),
    }
    sums = [_sums(part) for part in _parts(values)]
    found |= {name: mx.concatenate([each[name] for each in sums]) for name in SUMS}
    return found


def _read(found: dict[str, mx.array]) -> Moments:
    arrays = {name: to_numpy(array) for name, array in found.items()}
    rows, centre, apart, squares = (arrays.pop(name).astype(np.float64) for name in SUMS)
    shift = apart / rows  # of the centre, which float32 has rounded
    each = centre + shift
    mean = (rows * each).sum(axis=0) / rows.sum()
    spread = squares - rows * shift**2 + rows * (each - mean) ** 2
    if not arrays.pop("finite"):
        arrays["low"] = np.full_like(arrays["low"], np.nan)
    for name in ("zeros", "negative", "counts"):
        arrays[name] = arrays[name].astype(np.int64)
    return Moments(int(rows.sum()), mean=mean, squares=spread.sum(axis=0), **arrays)


def _parts(values: mx.array) -> Iterator[mx.array]:
    """(N, C) as (parts, rows, C) with 1024 rows each, then what is left with 32, then with one."""
    start = 0
    for rows in (RUN * RUN, RUN, 1):
        stop = start + (len(values) - start) // rows * rows
        if stop > start:
            yield values[start:stop].reshape(-1, rows, values.shape[1])
        start = stop


def _sums(values: mx.array) -> dict[str, mx.array]:
    """Of (parts, rows, C): how many rows, a centre, and the sums of distances from it."""
    parts, rows, _ = values.shape
    centre = _total(values) / rows
    apart = values - centre[:, None]
    sums = mx.full((parts, 1), rows), centre, _total(apart), _total(apart**2)
    return dict(zip(SUMS, sums, strict=True))


def _total(values: mx.array) -> mx.array:
    """Over the rows of (parts, rows, C), at most RUN at a time."""
    parts, rows, channels = values.shape
    return values.reshape(parts, -1, min(rows, RUN), channels).sum(axis=2).sum(axis=1)


def _histograms(values: mx.array, group: int) -> mx.array:
    """As `moments.count_bins` makes them of (N, C): (groups, BINS)."""
    rows, channels = values.shape
    groups = -(-channels // group) if group else 1
    bits = values.view(mx.int32)
    magnitude = mx.clip(((bits & 0x7FFFFFFF) >> SHIFT) - FIRST, 0, OVER)
    number = mx.where(bits < 0, ZERO - magnitude, ZERO + magnitude)
    copies = max(1, COPIES // groups)
    copy = (mx.arange(rows) % copies)[:, None] * groups
    if group:
        copy = copy + mx.arange(channels) // group
    number = (number + copy * BINS).reshape(-1)
    zeros = mx.zeros((copies * groups * BINS,), mx.int32)
    counts = zeros.at[number].add(mx.array(1, mx.int32))
    return counts.reshape(copies, groups, BINS).sum(axis=0)
