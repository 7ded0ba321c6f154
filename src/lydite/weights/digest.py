"""Hashes of a tensor's values that survive a change of storage precision."""

import hashlib
from dataclasses import dataclass

import numpy as np

from lydite.core.dtypes import NAMES, NUMPY_DTYPES, widen
from lydite.weights.rules import Array


@dataclass(frozen=True)
class Digest:
    """Shape, stored dtype, and a hash of the values rounded to each precision of a cast."""

    shape: tuple[int, ...]
    dtype: str
    float32: str
    float16: str
    bfloat16: str


def digest(array: Array) -> Digest:
    """Hash the values as float32 and rounded to each half precision."""
    with np.errstate(over="ignore", invalid="ignore"):  # beyond fp16's range is Inf on both sides
        wide = np.ascontiguousarray(widen(array), dtype=np.float32).reshape(-1)
        hashes = [
            hashlib.sha256(wide.astype(NUMPY_DTYPES[name]).view(np.uint8).data).hexdigest()
            for name in ("F32", "F16", "BF16")
        ]
    return Digest(tuple(array.shape), NAMES[array.dtype], *hashes)


def comparable(first: Digest, second: Digest) -> bool:
    """Whether one of the two could be a plain cast of the other.

    F16 and BF16 could not, neither holds the other's values. F8 might be a cast of a cast, which
    rounds differently from a cast of the original.
    """
    dtypes = {first.dtype, second.dtype}
    return len(dtypes) == 1 or (dtypes <= {"F64", "F32", "F16", "BF16"} and len(dtypes & _HALF) < 2)


def same_values(first: Digest, second: Digest) -> bool:
    """Equal at the narrower of the two stored precisions."""
    if first.shape != second.shape:
        return False
    if "F16" in (first.dtype, second.dtype):
        return first.float16 == second.float16
    if "BF16" in (first.dtype, second.dtype):
        return first.bfloat16 == second.bfloat16
    return first.float32 == second.float32


_HALF = {"F16", "BF16"}
