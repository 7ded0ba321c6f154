"""Arrays of every framework to NumPy and back, without loss."""

import re
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import TraceError
from lydite.trace.arrays import framework_of, is_array, like, to_numpy

MLX = [mx.float32, mx.float16, mx.bfloat16, mx.int64, mx.int8, mx.uint16, mx.bool_, mx.complex64]


@pytest.mark.parametrize("dtype", MLX)
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3, 4)])
def test_mlx_there_and_back(dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    value = mx.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    array = to_numpy(value)
    assert array.shape == shape and array.dtype.itemsize == dtype.size
    back = like(value, array)
    assert isinstance(back, mx.array) and back.dtype == dtype
    assert mx.array_equal(back, value).item()


def test_mlx_views_are_read_as_their_values() -> None:
    a = mx.arange(24).reshape(2, 3, 4)
    for dtype in (mx.float32, mx.bfloat16):
        b, c = a.astype(dtype), np.arange(24).reshape(2, 3, 4)
        pairs = [(b.transpose(2, 0, 1), c.transpose(2, 0, 1)), (b[:, ::2, 1::2], c[:, ::2, 1::2])]
        pairs.append((mx.broadcast_to(b[0, 0], (3, 4)), np.broadcast_to(c[0, 0], (3, 4))))
        for ours, theirs in pairs:
            np.testing.assert_array_equal(to_numpy(ours).astype(np.float32), theirs)


@pytest.mark.parametrize("value", [3, 2.5, True, [1.0, 2.0], np.float32(4)])
def test_plain_numbers_stay_plain(value: Any) -> None:
    back = like(value, np.asarray(to_numpy(value)) * 1)
    assert type(back) is type(value) and back == value


def test_another_precision_is_cast_to_the_value_s_own() -> None:
    value = np.zeros(3, ml_dtypes.bfloat16)
    back = like(value, np.array([1.0, 1.00390625, 1e39]))
    assert back.dtype == ml_dtypes.bfloat16
    assert back.astype(np.float32).tolist() == [1.0, 1.0, np.inf]


class OnlyDLPack:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("error", [BufferError, RuntimeError, TypeError, ValueError])
def test_a_framework_that_cannot_hand_its_array_over_is_one_error(error: type[Exception]) -> None:
    class Refuses:
        def __dlpack__(self, **_: Any) -> Any:
            raise error("on another device\nas a second line says")

        def __dlpack_device__(self) -> Any:
            return (1, 0)

    with pytest.raises(
        TraceError, match=r"a Refuses cannot be read as an array: on another device$"
    ):
        to_numpy(Refuses())


def test_an_array_with_only_dlpack_is_read_and_not_injected() -> None:
    value = OnlyDLPack(np.arange(3.0))
    assert is_array(value) and to_numpy(value).tolist() == [0, 1, 2]
    with pytest.raises(TraceError, match="cannot be injected"):
        like(value, np.zeros(3))


def test_an_array_of_the_array_api_is_injected_as_its_own_kind() -> None:
    class Standard:
        """An array of a library that only follows the array API."""

        def __init__(self, array: Any) -> None:
            self.array = np.asarray(array)

        def __array__(self, *_: Any, **__: Any) -> Any:
            return self.array

        def __array_namespace__(self) -> Any:
            return SimpleNamespace(asarray=Standard)

    made = like(Standard(np.arange(3, dtype=np.float32)), np.ones(3))
    assert isinstance(made, Standard) and made.array.dtype == np.float32
    assert made.array.tolist() == [1, 1, 1]


@pytest.mark.parametrize("value", ["text", {"a": 1}, object(), [[1], [2, 3]], None])
def test_what_is_no_array_is_refused(value: Any) -> None:
    assert not is_array(value)
    with pytest.raises(TraceError):
        to_numpy(value)


def test_frameworks_are_named_with_their_version() -> None:
    assert re.fullmatch(r"mlx \d+\.\d+\.\d+.*", framework_of(mx.array(1)))
    assert framework_of(np.zeros(1)) == f"numpy {np.__version__}"
    assert framework_of(1.0) == "python"


@pytest.mark.parity
def test_torch_there_and_back() -> None:
    torch = pytest.importorskip("torch")
    names = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
    names += ["int64", "int8", "uint8", "uint16", "bool", "complex64", "complex128"]
    for name in names:
        dtype = getattr(torch, name)
        value = torch.arange(24).reshape(2, 3, 4).to(dtype).permute(2, 0, 1)
        array = to_numpy(value)
        assert array.dtype.itemsize == dtype.itemsize
        wide = np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1)
        exact = wide.astype(array.dtype)
        assert array.tobytes() == exact.tobytes(), name
        back = like(value, array)
        assert back.dtype == dtype
        assert to_numpy(back).tobytes() == array.tobytes()


@pytest.mark.parity
def test_torch_oddities_are_read_or_refused() -> None:
    torch = pytest.importorskip("torch")
    grown = torch.ones(3, requires_grad=True) * 2
    assert to_numpy(grown).tolist() == [2, 2, 2]
    turned = torch.tensor([1 + 2j]).conj()
    assert to_numpy(turned)[0] == 1 - 2j
    assert to_numpy(torch.tensor([1 + 2j]).conj().imag)[0] == -2
    assert to_numpy(torch.tensor(1.5, dtype=torch.bfloat16)).shape == ()
    with pytest.raises(TraceError):
        to_numpy(torch.zeros(2, device="meta"))
    with pytest.raises(TraceError):
        to_numpy(torch.eye(2).to_sparse())
