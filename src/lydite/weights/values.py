"""Checks of one tensor's values: NaN, zeros, a constant, a fresh initialisation."""

import math

import numpy as np

from lydite.core.dtypes import NAMES, widen
from lydite.weights.layout import Array

# Exponent bits all set is NaN or Inf; integer tests are many times faster than isfinite on bf16.
_EXPONENT_MASKS = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F80_0000, "F64": 0x7FF0 << 48}
_CHUNK = 1 << 22  # elements per pass: the temporary stays small beside any real tensor
_SAMPLE = 1 << 18  # elements looked at for statistics


def count_nonfinite(array: Array) -> tuple[int, int]:
    """How many values are NaN and how many infinite."""
    name = NAMES.get(array.dtype, "")
    if array.dtype.kind in "biu":
        return 0, 0
    flat = array.reshape(-1)
    nan = inf = 0
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        if mask := _EXPONENT_MASKS.get(name):
            bits = part.view(f"u{part.dtype.itemsize}")
            part = part[(bits & bits.dtype.type(mask)) == mask]
        wide = widen(part)
        nan += int(np.isnan(wide).sum())
        inf += int(np.isinf(wide).sum())
    return nan, inf


def suspicion(name: str, array: Array) -> str | None:
    """Why these finite values look wrong, in a few words, or None. Never a proof: a note."""
    if array.size < 2 or array.dtype.kind in "biu":
        return None
    sample = _sample(array)
    low, high = float(sample.min()), float(sample.max())
    vector = array.ndim < 2
    if low == high and _all_equal(array):
        if vector and (name.endswith("bias") and low == 0.0):
            return None  # zero biases are common and harmless
        return "all zero" if low == 0.0 else f"constant ({low:g})"
    if vector or sample.size < 1024:
        return None
    return _fresh(array, sample)


def _fresh(array: Array, sample: Array) -> str | None:
    """Uniform within ±1/√fan_in, or normal with σ 0.02 or 1: what torch and transformers draw."""
    bound = 1 / math.sqrt(math.prod(array.shape[1:]))
    mean, std, peak = float(sample.mean()), float(sample.std()), float(np.abs(sample).max())
    noise = 4 / math.sqrt(sample.size)  # four standard errors, relative
    if abs(mean) > noise * std:
        return None
    if 0.97 * bound < peak < 1.005 * bound and abs(std * math.sqrt(3) / bound - 1) < noise:
        return f"looks freshly initialised (uniform ±{bound:.4g} = 1/√fan_in)"
    kurtosis = float(((sample - mean) ** 4).mean()) / std**4
    if abs(kurtosis - 3) < 6 * math.sqrt(24 / sample.size):
        for sigma in (0.02, 1.0):
            if abs(std / sigma - 1) < noise:
                return f"looks freshly initialised (normal, σ {sigma:g})"
    return None


def _sample(array: Array) -> Array:
    flat = array.reshape(-1)
    stride = max(1, flat.size // _SAMPLE)
    return widen(flat[::stride]).astype(np.float64)


def _all_equal(array: Array) -> bool:
    flat = array.reshape(-1)
    return all(
        bool((flat[start : start + _CHUNK] == flat[0]).all())
        for start in range(0, flat.size, _CHUNK)
    )
