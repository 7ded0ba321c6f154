"""A digest is the same for the same values in another precision, and for no others."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lydite.weights.digest import comparable, digest, same_values

TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
FLOAT32 = hnp.arrays(
    np.float32,
    hnp.array_shapes(max_dims=3, max_side=4),
    elements=st.floats(-(2**17), 2**17, width=32),
)
X = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)


@pytest.mark.parametrize("name", ["F64", "F32", "F16", "BF16"])
@given(x=FLOAT32)
def test_a_cast_is_the_same(name: str, x: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        ours, theirs = digest(x.astype(TYPES[name])), digest(x)
    assert comparable(ours, theirs) and same_values(ours, theirs)
    assert comparable(theirs, ours) and same_values(theirs, ours)


@given(x=FLOAT32, data=st.data())
def test_one_other_value_is_different(x: np.ndarray, data: st.DataObject) -> None:
    y = x.copy()
    index = data.draw(st.integers(0, x.size - 1))
    y.flat[index] = np.nextafter(y.flat[index], np.float32(np.inf))
    assert not same_values(digest(x), digest(y))


@pytest.mark.parametrize("ours", TYPES)
@pytest.mark.parametrize("theirs", TYPES)
def test_which_types_can_be_compared(ours: str, theirs: str) -> None:
    wide = {"F64", "F32"}
    expected = (
        ours == theirs or {ours, theirs} <= {"F16", *wide} or {ours, theirs} <= {"BF16", *wide}
    )
    assert comparable(digest(X.astype(TYPES[ours])), digest(X.astype(TYPES[theirs]))) == expected


def test_another_shape_or_order_is_different() -> None:
    assert not same_values(digest(X), digest(X.reshape(5, 6)))
    assert not same_values(digest(X[:5]), digest(X[:5].T))
    assert same_values(digest(X.T), digest(np.ascontiguousarray(X.T)))


def test_a_difference_below_the_narrower_precision_is_none() -> None:
    y = X * np.float32(1 + 2e-7)
    assert not same_values(digest(X), digest(y))
    assert same_values(
        digest(X.astype(np.float16)), digest(X.astype(np.float16).astype(np.float32))
    )
    z = X * 1.01
    assert not same_values(digest(X.astype(ml_dtypes.bfloat16)), digest(z))
