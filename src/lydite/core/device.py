"""How MLX computes: on which device, and without shortcuts that cost digits.

Metal and CUDA may multiply float32 as TF32 (10 bits of mantissa), and Metal computes 3 × 3
convolutions by Winograd's method, whose bfloat16 form has 30 times the error of a direct one. Both
are off here unless the user has set MLX's own variables. MLX reads TF32's at its first product, so
they are set when lydite is imported.

On Linux MLX's arrays come from malloc, which gives freed memory back to the system: a decoder of
128² then waits for 8,000 pages in every call, a fifth of its time. Up to `KEPT` bytes are kept.
"""

import contextlib
import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from types import ModuleType
from typing import Any

from lydite.core.errors import ConfigError

VARIABLE = "LYDITE_DEVICE"
DEVICES = ("auto", "cpu", "gpu")  # auto: what MLX takes by itself
TF32, WINOGRAD = "MLX_ENABLE_TF32", "MLX_CONV_WINOGRAD"
_MEMORY_KEYS = ("max_recommended_working_set_size", "memory_size", "total_memory")
_CONTAINER = Path("/sys/fs/cgroup/memory.max")
KEPT = 2**28
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_LARGE = 2**25  # bytes from which malloc always asks the system: glibc allows no more
_named_by: dict[str, str] = {}  # device -> the option that named it, in place of the variable
GPU_BRANCHES = "LYDITE_GPU_BRANCHES"  # for tests on a CPU: `on_cpu` answers no


@dataclass(frozen=True)
class Device:
    """What a run computes on, for files and reports."""

    kind: str  # cpu or gpu
    chip: str
    memory: int  # bytes that the device can use
    tf32: bool
    winograd: bool

    @property
    def shortcuts(self) -> str:
        """`TF32 not used, Winograd not used`, for instance."""
        used = {"TF32": self.tf32, "Winograd": self.winograd}
        return ", ".join(f"{name} {'used' if on else 'not used'}" for name, on in used.items())

    def describe(self) -> str:
        """In one line: what last bits depend on."""
        on = [name for name, used in (("TF32", self.tf32), ("Winograd", self.winograd)) if used]
        return f"{self.chip} ({self.kind.upper()}){''.join(f', {name}' for name in on)}"


def prepare_mlx() -> None:
    """Set MLX's variables, and choose the device when MLX is imported, or now if it is."""
    for name in (TF32, WINOGRAD):
        os.environ.setdefault(name, "0")
    _keep_freed_memory()
    if "mlx.core" in sys.modules:
        use_device(sys.modules["mlx.core"])
    else:
        sys.meta_path.insert(0, _BeforeAndAfterMLX())


def request_device(name: str | None) -> None:
    """Take a device by its name, as `--device` does; None leaves it as it is."""
    if name is not None:
        os.environ[VARIABLE] = name
        _named_by[name] = f"--device {name}"
        if "mlx.core" in sys.modules:
            use_device(sys.modules["mlx.core"])


def use_device(mx: Any) -> None:
    """Make the device that LYDITE_DEVICE names MLX's default."""
    name = os.environ.get(VARIABLE) or "auto"
    source = _named_by.get(name, f"{VARIABLE}={name}")
    if name not in DEVICES:
        raise ConfigError(f"{source}: expected one of {', '.join(DEVICES)}.")
    if name == "gpu" and not has_gpu(mx):
        raise ConfigError(
            f"{source}: this MLX has no GPU here. Expected Apple silicon, or Linux with "
            "CUDA and `pip install mlx[cuda13]`. `lydite doctor` says what it found."
        )
    if name != "auto":
        mx.set_default_device(mx.cpu if name == "cpu" else mx.gpu)


def has_gpu(mx: Any) -> bool:
    return bool(mx.metal.is_available() or mx.cuda.is_available())


def current_device() -> Device:
    """What MLX computes on now."""
    mx: Any = import_module("mlx.core")
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    info: dict[str, Any] = mx.device_info()
    sizes = (info.get(key) for key in _MEMORY_KEYS)
    memory = next(filter(None, sizes), None)
    return Device(
        kind="gpu" if on_gpu else "cpu",
        chip=str(info.get("device_name") or platform.machine()),
        memory=int(memory) if memory else _main_memory(),
        tf32=on_gpu and os.environ.get(TF32, "1") != "0",
        winograd=on_gpu and mx.metal.is_available() and os.environ.get(WINOGRAD, "1") != "0",
    )


def avoid_cuda_graphs(together: int) -> None:
    """On CUDA, have MLX launch kernel by kernel; it must not have computed on the GPU before.

    MLX gathers kernels into CUDA graphs and keeps what a graph reads and writes until all of it has
    run. It cannot use a graph again if a kernel runs in clusters along two axes, as those of
    convolutions and large products do, and builds it anew: a picture of SDXL took 1.9 s, and takes
    1.1 s without. Memory is free again when all kernels that were committed `together` are done.
    """
    mx: Any = import_module("mlx.core")
    if mx.cuda.is_available():
        os.environ.setdefault("MLX_USE_CUDA_GRAPHS", "0")
        os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", str(together))


def compiles_kernels_first() -> bool:
    """Whether MLX has compiled no kernel on this machine yet, which it does while it computes."""
    mx: Any = import_module("mlx.core")
    if mx.default_device() != mx.Device(mx.gpu) or not mx.cuda.is_available():
        return False
    folder = os.environ.get("MLX_PTX_CACHE_DIR")
    path = Path(folder) if folder else Path(gettempdir(), "mlx", mx.__version__, "ptx")
    return not (path.is_dir() and any(path.iterdir()))


def _keep_freed_memory() -> None:
    """Let malloc keep what is freed, unless the user has chosen; only glibc has these options."""
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, KEPT)


def _main_memory() -> int:
    """Bytes of the machine, or of the container it runs in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = _CONTAINER.read_text().strip() if _CONTAINER.is_file() else ""
    return min(total, int(text)) if text.isdecimal() else total


class _BeforeAndAfterMLX:
    """Loads a fast BLAS before mlx.core is imported, by whomever, and sets the device after it."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != "mlx.core":
            return None
        sys.meta_path.remove(self)
        from lydite.core.fast_blas import preload

        preload()
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # pyright: ignore[reportAttributeAccessIssue]
        return spec


class _Loader:
    """The loader of mlx.core; when the module is there, its default device is set."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        use_device(module)
