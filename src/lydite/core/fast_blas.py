"""A fast BLAS for MLX on Linux, whose CPU wheel carries the reference one (5 GFLOP/s).

MLX takes three functions from BLAS, cblas_sgemm, cblas_dgemm and cblas_cgemm, and binds them while
it is imported. A few lines of C put these names, and no others, before the wheel's and forward to
OpenBLAS: MLX's LAPACK and torch ask for other names (sgemm_, cblas_sgemm_batch) and keep theirs.
torch's library has no cblas_sgemm. Made global it serves the sgemm_ below the wheel's cblas_sgemm,
and most of MLX's LAPACK with it.
"""

import contextlib
import ctypes
import ctypes.util
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lydite.core.errors import ConfigError, FileError
from lydite.core.files import atomic_path, cache_folder

THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
CHOICES = ("auto", "torch", "openblas", "system", "off")


@dataclass(frozen=True)
class Blas:
    """What MLX multiplies with: `torch`, `openblas`, `system`, `off`, `none` found, or `native`."""

    kind: str
    detail: str  # the library, or why there is none

    def describe(self) -> str:
        """One sentence for people."""
        own = {"torch": "torch's BLAS", "openblas": "OpenBLAS", "system": "the system's BLAS"}
        name = {**own, "native": "its own BLAS"}.get(self.kind, "the slow BLAS of its wheel")
        return f"MLX multiplies with {name}: {self.detail}."


@functools.cache
def preload() -> Blas:
    """Give MLX's Linux CPU wheel a fast BLAS; only works before mlx.core is imported.

    `import lydite` has it called when MLX is imported; later calls return what was chosen then.
    """
    choice = os.environ.get("LYDITE_BLAS") or "auto"
    if choice not in CHOICES:
        raise ConfigError(f"LYDITE_BLAS={choice}: expected one of {', '.join(CHOICES)}.")
    if sys.platform != "linux" or not _is_cpu_wheel():
        return Blas("native", "this is not MLX's Linux CPU wheel")
    if choice == "off":
        return Blas("off", "LYDITE_BLAS=off")
    if "mlx.core" in sys.modules:  # Python loads extensions with RTLD_NOW: all names are bound
        return Blas("none", "mlx.core was imported before lydite could load a faster one")
    if hasattr(ctypes.CDLL(None), "cblas_sgemm"):
        return Blas("native", "the process had a cblas_sgemm already, perhaps by LD_PRELOAD")
    return _first_that_loads(choice)


def use_one_thread() -> None:
    """The same bits whatever the number of cores; only works before mlx.core is imported.

    OpenBLAS cuts large products into pieces by the number of its threads, and the last bits follow:
    on two threads two pictures of sixteen of the embedded model have another pixel.
    """
    os.environ.update(dict.fromkeys(THREADS, "1"))


def cpu_threads() -> int:
    """Cores that arithmetic may use: as many as the variables of BLAS say, or all there are."""
    values = (os.environ.get(name, "") for name in THREADS)
    chosen = next((int(value) for value in values if value.isdecimal()), 0)
    if chosen:
        return chosen
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


_NAMES = ("sgemm", "dgemm", "cgemm")
# Below this many multiplications, 2 ms, one thread does the work: the other cores have another
# stream of MLX to run, or another process. OpenBLAS has one number of threads for all callers,
# so a product on several runs alone: its last bits would follow the number.
_SMALL = 1 << 27
_SHIM = rf"""
void (*lydite_set_threads)(int);
int lydite_threads;
int pthread_rwlock_rdlock(void *), pthread_rwlock_wrlock(void *), pthread_rwlock_unlock(void *);
static long lock[16]; /* zeros: a pthread_rwlock_t that nobody holds */
static int begin(long work)
{{
  int many = work >= {_SMALL}L && lydite_set_threads && lydite_threads > 1;
  many ? pthread_rwlock_wrlock(lock) : pthread_rwlock_rdlock(lock);
  if (many) lydite_set_threads(lydite_threads);
  return many;
}}
static void end(int many)
{{
  if (many) lydite_set_threads(1);
  pthread_rwlock_unlock(lock);
}}
#define FORWARD(name, scalar) \
  void (*lydite_##name)(int, int, int, int, int, int, scalar, const void *, int, \
                        const void *, int, scalar, void *, int); \
  void cblas_##name(int order, int ta, int tb, int m, int n, int k, scalar alpha, const void *a, \
                    int lda, const void *b, int ldb, scalar beta, void *c, int ldc) \
  {{ int many = begin((long)m * n * k); \
     lydite_##name(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc); \
     end(many); }}
FORWARD(sgemm, float)
FORWARD(dgemm, double)
FORWARD(cgemm, const void *)
"""


def _is_cpu_wheel() -> bool:
    spec = find_spec("mlx")
    sites = [Path(place).parent for place in (spec and spec.submodule_search_locations) or []]
    cuda = any(any(site.glob("mlx_cuda*.libs")) for site in sites)  # installs over mlx-cpu's files
    return not cuda and any((site / "mlx_cpu.libs").is_dir() for site in sites)


def _first_that_loads(choice: str) -> Blas:
    sources = {"openblas": _load_openblas, "torch": _load_torch, "system": _load_system}
    # The same order whether or not torch is there: MLX's last bits should not depend on that.
    reasons: list[str] = []
    for kind in sources if choice == "auto" else [choice]:
        try:
            return Blas(kind, "; ".join([sources[kind](), *reasons]))
        except (OSError, ValueError, AttributeError, ImportError, subprocess.SubprocessError) as e:
            reasons.append(f"no {kind}, {e}")
    if choice != "auto":
        raise ConfigError(f"LYDITE_BLAS={choice}: {reasons[0]}.")
    return Blas("none", "; ".join(reasons))


def _load_openblas() -> str:
    library = next(_package("scipy_openblas32").glob("lib/libscipy_openblas*.so"), None)
    if library is None:
        raise OSError("scipy_openblas32 holds no library")
    return _forward_to(str(library), "scipy_cblas_")


def _load_torch() -> str:
    path = str(_package("torch") / "lib" / "libtorch_cpu.so")
    if not all(hasattr(ctypes.CDLL(path), f"{name}_") for name in _NAMES):
        raise OSError(f"{path} exports no sgemm_")
    ctypes.CDLL(path, os.RTLD_GLOBAL)
    return path


def _load_system() -> str:
    name = ctypes.util.find_library("openblas") or ctypes.util.find_library("mkl_rt")
    if name is None:
        raise OSError("neither libopenblas nor libmkl_rt is installed")
    return _forward_to(name, "cblas_")  # made global, it would also give torch its sgemm_


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise OSError(f"{name} is not installed")
    return Path(spec.origin).parent


def _forward_to(library: str, prefix: str) -> str:
    functions = ctypes.CDLL(library)
    targets = [ctypes.cast(functions[prefix + name], ctypes.c_void_p).value for name in _NAMES]
    shim, where = _load_shim()
    for name, target in zip(_NAMES, targets, strict=True):
        ctypes.c_void_p.in_dll(shim, f"lydite_{name}").value = target
    openblas = prefix.removesuffix("cblas_") + "openblas_"
    with contextlib.suppress(AttributeError):  # MKL has neither, and chooses by itself
        threads = ctypes.c_int.in_dll(shim, "lydite_threads")
        threads.value = functions[f"{openblas}get_num_threads"]()
        set_threads = functions[f"{openblas}set_num_threads"]
        set_threads(1)
        setter = ctypes.cast(set_threads, ctypes.c_void_p)
        ctypes.c_void_p.in_dll(shim, "lydite_set_threads").value = setter.value
    return f"{library} through {where}"


def _load_shim() -> tuple[ctypes.CDLL, str]:
    """The shim from the user's cache, compiled there if need be; else one for this process."""
    cache = cache_folder() or Path(os.devnull)  # no home: nothing can be kept
    key = hashlib.sha256(f"{_SHIM}{os.uname().machine}".encode()).hexdigest()[:16]
    cached = cache / "blas" / f"shim-{key}.so"
    with contextlib.suppress(OSError):
        if _is_ours(cached.parent) and _is_ours(cached) and _is_whole(cached.read_bytes()):
            return ctypes.CDLL(str(cached), os.RTLD_GLOBAL), str(cached)
    shim = _compile()
    with contextlib.suppress(OSError, FileError):
        _keep(shim, cached)
        return ctypes.CDLL(str(cached), os.RTLD_GLOBAL), str(cached)
    with tempfile.TemporaryDirectory() as private:
        path = Path(private, cached.name)
        path.write_bytes(shim)
        loaded = ctypes.CDLL(str(path), os.RTLD_GLOBAL)
    return loaded, f"a shim for this process only, {cached.parent} being unfit to keep it"


def _is_ours(path: Path) -> bool:
    """Nobody else can change it; we are about to run what it holds."""
    status = path.lstat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _is_whole(shim: bytes) -> bool:
    """Half a library crashes the process that loads it, so each shim ends with its digest."""
    return hashlib.sha256(shim[:-32]).digest() == shim[-32:]


def _compile() -> bytes:
    named = shlex.split(os.environ.get("CC", ""))
    choices = [named] if named else [["cc"], ["gcc"], ["clang"]]
    command = next((choice for choice in choices if shutil.which(choice[0])), None)
    if command is None:
        raise OSError("no C compiler to make the shim with")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "shim.so")
        flags = ["-shared", "-fPIC", "-O2", "-nostdlib", "-o", str(output), "-x", "c", "-"]
        done = subprocess.run(
            [*command, *flags], input=_SHIM, capture_output=True, text=True, timeout=60
        )
        if done.returncode != 0:
            raise OSError(f"{command[0]} failed: {done.stderr.strip().rpartition(chr(10))[2]}")
        shim = output.read_bytes()
    return shim + hashlib.sha256(shim).digest()


def _keep(shim: bytes, path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(path.parent):
        raise FileError(f"{path.parent}: others can write here.")
    with atomic_path(path) as temporary:
        temporary.touch(mode=0o600)
        temporary.write_bytes(shim)
