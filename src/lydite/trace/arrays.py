"""Arrays of any framework as NumPy and back.

No framework is imported here: a caller with one of its arrays has imported it already.
"""

import sys
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lydite.core.dtypes import NAMES, mlx_to_numpy
from lydite.core.errors import TraceError, shown

# torch converts nothing narrower than f16 to NumPy; the bits are viewed as integers
_TORCH_BITS = {
    "bfloat16": ("int16", ml_dtypes.bfloat16),
    "float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3fn),
    "float8_e5m2": ("uint8", ml_dtypes.float8_e5m2),
}


def framework_of(value: object) -> str:
    """`torch 2.13.0` for a torch tensor, `python` for a plain number."""
    name = type(value).__module__.split(".")[0]
    if name == "builtins":
        return "python"
    module = sys.modules.get("mlx.core" if name == "mlx" else name)
    return f"{name} {getattr(module, '__version__', '')}".strip()


def is_array(value: object) -> bool:
    """Whether a value is an array of some framework; Python's own numbers are not."""
    kind = type(value)
    return hasattr(kind, "__array__") or hasattr(kind, "__dlpack__")


def to_numpy(value: Any) -> NDArray[Any]:
    """The evaluated value without loss; a view of its memory where possible."""
    framework = type(value).__module__.split(".")[0]
    try:
        if framework == "torch":
            return _from_torch(value)
        if framework == "mlx":
            return mlx_to_numpy(value)
        if hasattr(type(value), "__dlpack__") and not hasattr(type(value), "__array__"):
            array = np.from_dlpack(value)
        else:
            array = np.asarray(value)
    except (RuntimeError, TypeError, ValueError, BufferError) as error:
        reason = str(error).strip().split("\n")[0]
        raise TraceError(
            f"a {type(value).__name__} cannot be read as an array: {reason}"
        ) from error
    if array.dtype.kind not in "biufc" and array.dtype not in NAMES:
        raise TraceError(f"a {type(value).__name__} is not an array of numbers: {shown(value)}.")
    return array


def like(value: Any, new: NDArray[Any]) -> Any:
    """`new` in the framework, dtype and on the device of `value`."""
    with np.errstate(all="ignore"):  # beyond the dtype's range: Inf, which the trace shows
        new = np.array(new, dtype=to_numpy(value).dtype, order="C")
    framework = type(value).__module__.split(".")[0]
    if framework == "torch":
        return _to_torch(value, new)
    if framework == "mlx":
        return sys.modules["mlx.core"].array(new, dtype=value.dtype)
    if isinstance(value, np.ndarray):
        return new
    if isinstance(value, np.generic):
        return new[()]
    if isinstance(value, bool | int | float | complex | list):
        return new.tolist()
    if hasattr(value, "__array_namespace__"):
        return value.__array_namespace__().asarray(new)
    raise TraceError(
        f"a value cannot be injected as a {framework_of(value)} {type(value).__name__}: expected "
        "an array of NumPy, MLX, torch, or with __array_namespace__. Inject a NumPy array instead."
    )


def _from_torch(tensor: Any) -> NDArray[Any]:
    torch = sys.modules["torch"]
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    bits, dtype = _TORCH_BITS.get(str(tensor.dtype).removeprefix("torch."), (None, None))
    if bits is None:
        return tensor.numpy()
    return tensor.view(getattr(torch, bits)).numpy().view(dtype)


def _to_torch(tensor: Any, new: NDArray[Any]) -> Any:
    torch = sys.modules["torch"]
    bits, _ = _TORCH_BITS.get(str(tensor.dtype).removeprefix("torch."), (None, None))
    if bits is not None:
        new = new.view(getattr(np, bits))
    return torch.from_numpy(new).view(tensor.dtype).to(tensor.device)
