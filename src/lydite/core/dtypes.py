"""Dtype names as safetensors writes them, their NumPy types, and conversions between them."""

import sys
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

# safetensors name -> NumPy dtype. F4 and the F6 types are packed below a byte and not read here.
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}

NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}

# What a weight may be stored as. F8 here means a plain cast, as in SD3's t5xxl_fp8 files.
FLOAT_NAMES = frozenset({"F8_E5M2", "F8_E4M3", "F16", "BF16", "F32", "F64"})


def itemsize(name: str) -> int:
    """Bytes per element."""
    return NUMPY_DTYPES[name].itemsize


def widen(array: NDArray[Any]) -> NDArray[Any]:
    """Float arrays narrower than 32 bits as float32, exactly; everything else unchanged."""
    if NAMES.get(array.dtype) in {"F8_E5M2", "F8_E4M3", "F8_E8M0", "F16", "BF16"}:
        return array.astype(np.float32)
    return array


def mlx_to_numpy(array: Any) -> NDArray[Any]:
    """An MLX array, evaluated, as a view of its memory; NumPy's buffer protocol has no bf16."""
    mx = sys.modules["mlx.core"]  # imported by whoever made the array
    mx.eval(array)
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16), copy=False).view(ml_dtypes.bfloat16)
    return np.array(array, copy=False)
