"""Hashes of a tensor's values that survive a change of storage precision."""

import hashlib
from dataclasses import dataclass

import numpy as np

from lydite.core.dtypes import NAMES, NUMPY_DTYPES, widen
from lydite.weights.layout import Array

# A checkpoint cast from another is equal to it at the narrower of the two precisions. F16 and BF16
# are not comparable: neither holds the other's values.
_PRECISIONS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Digest:
    """Shape, stored dtype, and one hash per precision the values were rounded to."""

    shape: tuple[int, ...]
    dtype: str
    hashes: dict[str, str]


def digest(array: Array) -> Digest:
    """Hash the values as float32 and rounded to each half precision."""
    wide = np.ascontiguousarray(widen(array), dtype=np.float32)
    with np.errstate(
        over="ignore"
    ):  # a value beyond fp16's range becomes Inf, equally on both sides
        hashes = {
            name: hashlib.sha256(wide.astype(NUMPY_DTYPES[name]).tobytes()).hexdigest()
            for name in _PRECISIONS
        }
    return Digest(tuple(array.shape), NAMES[array.dtype], hashes)


def comparable(ours: Digest, theirs: Digest) -> bool:
    """Whether one of the two could be a plain cast of the other."""
    dtypes = {ours.dtype, theirs.dtype}
    return dtypes <= {"F64", "F32", "F16", "BF16"} and dtypes != {"F16", "BF16"}


def same_values(ours: Digest, theirs: Digest) -> bool:
    """Equal at the narrower of the two stored precisions."""
    if ours.shape != theirs.shape:
        return False
    precision = ours.dtype if ours.dtype in {"F16", "BF16"} else theirs.dtype
    if precision not in {"F16", "BF16"}:
        precision = "F32"
    return ours.hashes[precision] == theirs.hashes[precision]
