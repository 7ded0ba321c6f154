"""Which range of values a grid covers: all of them, a percentile, or what makes least error."""

from typing import Any, Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lydite.models.layers import on_cpu

Range = Literal["minmax", "percentile", "mse"]
RANGES: tuple[Range, ...] = ("minmax", "percentile", "mse")
POWER = 2.4  # of the error, as in QDrop and TaQ-DiT
CANDIDATES = 40  # shares of the range that are tried
SMALLEST = 0.3  # of them
PERCENTILE = 99.9
Floats = NDArray[np.float32]


def range_search(values: Floats, bits: int, search: Range = "minmax") -> tuple[Floats, Floats]:
    """The lowest and highest value to cover, over the last axis."""
    low, high = values.min(axis=-1), values.max(axis=-1)
    if search == "minmax":
        return low, high
    if search == "percentile":
        return (
            np.percentile(values, 100 - PERCENTILE, axis=-1).astype(np.float32),
            np.percentile(values, PERCENTILE, axis=-1).astype(np.float32),
        )
    return _least_error(values, bits, low, high)


def _least_error(values: Floats, bits: int, low: Floats, high: Floats) -> tuple[Floats, Floats]:
    """The share of the range, around its middle, whose rounding error is least."""
    middle, half = (low + high) / 2, (high - low) / 2
    best, best_half = np.full(low.shape, np.inf, np.float32), half
    tried = on_device(values)
    for share in np.linspace(1, SMALLEST, CANDIDATES, dtype=np.float32):
        error = rounding_error(tried, middle - share * half, middle + share * half, bits)
        best_half = np.where(error < best, share * half, best_half).astype(np.float32)
        best = np.minimum(error, best)
    return (middle - best_half).astype(np.float32), (middle + best_half).astype(np.float32)


def on_device(values: Floats) -> Floats | mx.array:
    """Values of a search on the GPU; on a CPU NumPy is faster than MLX."""
    return values if on_cpu() else mx.array(values)


def rounding_error(values: Floats | mx.array, low: Floats, high: Floats, bits: int) -> Floats:
    """The mean of |error| ** 2.4 of rounding to 2 ** bits values from low to high."""
    most = 2**bits - 1
    scale, offset = np.maximum((high - low) / most, 1e-12)[..., None], low[..., None]
    x: Any = mx if isinstance(values, mx.array) else np
    if x is mx:
        scale, offset = mx.array(scale), mx.array(offset)
    steps = x.clip(x.round((values - offset) / scale), 0, most)
    return np.array((x.abs(values - (steps * scale + offset)) ** POWER).mean(axis=-1))
