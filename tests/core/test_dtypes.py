"""Every dtype: its bytes, and its conversions without loss."""

import re

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.dtypes import FLOAT_NAMES, NAMES, NUMPY_DTYPES, itemsize, mlx_to_numpy, widen


def test_each_dtype_has_its_own_name_and_size() -> None:
    assert {NAMES[dtype]: dtype for dtype in NUMPY_DTYPES.values()} == NUMPY_DTYPES
    bits = {name: re.search(r"\d+", name) for name in NUMPY_DTYPES}
    sizes = {name: int(found[0]) if found else 8 for name, found in bits.items()}
    assert {name: 8 * itemsize(name) for name in NUMPY_DTYPES} == sizes


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_only_narrow_floats_are_widened_and_exactly(name: str) -> None:
    dtype = NUMPY_DTYPES[name]
    values = np.ones(3, dtype)
    wide = widen(values)
    narrow = name.startswith(("F8", "F16", "BF16"))
    assert wide.dtype == (np.float32 if narrow else dtype) and (wide is values) != narrow
    np.testing.assert_array_equal(wide, values.astype(wide.dtype))


def test_what_a_weight_may_be_is_a_float_with_a_sign() -> None:
    floats = {name for name in NUMPY_DTYPES if name.startswith(("F", "BF"))}
    assert floats - {"F8_E8M0"} == FLOAT_NAMES  # a scale: no sign, no zero


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool_"])
def test_mlx_to_numpy_keeps_every_bit(dtype: str) -> None:
    array = mx.array([0, 1, 3]).astype(getattr(mx, dtype)) * mx.array(1, getattr(mx, dtype))
    found = mlx_to_numpy(array)
    assert str(found.dtype) == dtype.rstrip("_")
    assert found.astype(np.float32).tolist() == array.astype(mx.float32).tolist()
