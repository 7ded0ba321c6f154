"""The distance of two values, measured in one pass with bounded memory."""

from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 2**15  # values at a time: three chunks stay in a core's cache
LARGEST = 1e150  # whose square is finite: what stands for infinity may be larger


@dataclass(frozen=True)
class Distance:
    """The difference of a value from its reference."""

    error: float  # relative L2; inf when one is NaN or infinite where the other is not
    peak: float  # largest absolute difference over the reference's rms
    cosine: float
    count: int


def distance(value: NDArray[Any], reference: NDArray[Any]) -> Distance:
    """Relative L2 and peak difference; both must have the same shape.

    Where both are NaN, or infinite with one sign, they agree. An all-zero reference agrees with
    zeros only.
    """
    if "c" in (value.dtype.kind, reference.dtype.kind):
        value, reference = (x if x.dtype.kind == "c" else x + 0j for x in (value, reference))
    squares = powers = own = cross = 0.0
    largest, mismatched = 0.0, False
    with np.errstate(invalid="ignore", over="ignore"):
        for a, b in zip(_chunks(value), _chunks(reference), strict=True):
            sums, peak = _sums(a, b)
            if not np.isfinite(sums).all():  # something is not finite, or float32 is too narrow
                a, b, mismatch = _finite_part(a, b)
                mismatched |= mismatch
                sums, peak = _sums(a, b)
            squares, powers, own, cross = np.add((squares, powers, own, cross), sums).tolist()
            largest = max(largest, peak)
    count = value.size
    if mismatched:
        return Distance(inf, inf, 0.0, count)
    if powers == 0.0:
        error = 0.0 if squares == 0.0 else inf
        return Distance(error, error, 1.0 if error == 0.0 else 0.0, count)
    cosine = cross / sqrt(powers * own) if own else 0.0
    return Distance(sqrt(squares / powers), largest / sqrt(powers / count), cosine, count)


def relative_error(value: NDArray[Any], reference: NDArray[Any]) -> float:
    """Relative L2 of `value` against `reference`, or inf when the shapes differ."""
    return distance(value, reference).error if value.shape == reference.shape else inf


def correlation(value: NDArray[Any], reference: NDArray[Any]) -> float:
    """Pearson correlation of the values finite in both; 0 where one of them is constant.

    A complex value has twice the numbers of a real one of its shape: they have none.
    """
    if value.size != reference.size:
        return 0.0
    a, b, _ = _finite_part(value.reshape(-1), reference.reshape(-1))
    a, b = (x - x.mean() for x in (a, b))
    own, power, cross = (float(np.einsum("i,i->", x, y)) for x, y in ((a, a), (b, b), (a, b)))
    return cross / sqrt(own * power) if own and power else 0.0


def wide(array: NDArray[Any]) -> NDArray[Any]:
    """The values as float32, or float64 where that would lose something."""
    if array.dtype in (np.float32, np.float64):
        return array
    if array.dtype.kind == "c":
        return _parts(array)
    exact = array.dtype.kind in "iu" and array.dtype.itemsize > 2
    return array.astype(np.float64 if exact else np.float32)


def _chunks(array: NDArray[Any]) -> Any:
    if array.dtype.kind == "c":
        array = _parts(array)
    flat = array.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        yield wide(flat[start : start + CHUNK])


def _parts(array: NDArray[Any]) -> NDArray[Any]:
    """Real and imaginary parts side by side."""
    half = np.float32 if array.dtype.itemsize == 8 else np.float64
    return np.ascontiguousarray(array).view(half)


def _sums(a: NDArray[Any], b: NDArray[Any]) -> tuple[list[float], float]:
    """Squares of the difference, of b and of a, their product, and the largest difference."""
    gap = a - b
    peak = max(float(gap.max()), -float(gap.min())) if gap.size else 0.0
    # einsum, not dot: BLAS would wake all its threads for a few thousand values
    products = ((gap, gap), (b, b), (a, a), (a, b))
    return [float(np.einsum("i,i->", x, y)) for x, y in products], peak


def _finite_part(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], bool]:
    """Both in float64 where both are finite, and whether they disagree elsewhere."""
    finite = np.isfinite(a) & np.isfinite(b)
    same = (np.isnan(a) & np.isnan(b)) | (a == b)
    a, b = (np.clip(x[finite].astype(np.float64), -LARGEST, LARGEST) for x in (a, b))
    return a, b, not bool(same[~finite].all())
