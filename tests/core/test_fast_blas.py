"""Each case is a process of its own: MLX takes a BLAS once, while it is imported."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

SITE = Path(sysconfig.get_path("platlib"))
CPU_WHEEL = (SITE / "mlx_cpu.libs").is_dir() and not any(SITE.glob("mlx_cuda*.libs"))
COMPILER = any(shutil.which(name) for name in ("cc", "gcc", "clang"))

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not CPU_WHEEL or not COMPILER,
    reason="needs MLX's Linux CPU wheel and a C compiler",
)
needs_torch = pytest.mark.skipif(not (SITE / "torch").is_dir(), reason="needs torch")

STEERING = ("LYDITE_BLAS", "CC", "LD_PRELOAD", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")

PRELOAD = """
from lydite.core.fast_blas import preload
from lydite.core.errors import ConfigError
try:
    blas = preload()
    out.update(kind=blas.kind, detail=blas.detail, says=blas.describe())
except ConfigError as error:
    out["error"] = str(error)
"""
NO_TORCH = "sys.modules['torch'] = None"
MAPPED = "out['mapped'] = any('shim-' in line for line in open('/proc/self/maps'))"

LIBRARY = "import ctypes; library = ctypes.CDLL(blas.detail.split(' through ')[0])"
THREADS = """
slot = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "lydite_set_threads")
signature = ctypes.CFUNCTYPE(None, ctypes.c_int)
real, numbers = signature(slot.value), out.setdefault("set", [])
recorded = signature(lambda number: (numbers.append(number), real(number))[1])
slot.value = ctypes.cast(recorded, ctypes.c_void_p).value
"""
COUNT = """
import ctypes
calls, kept = out.setdefault("calls", {}), []
def count(name, scalar):  # stands between the shim and OpenBLAS
    slot = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "lydite_" + name)
    i, p = ctypes.c_int, ctypes.c_void_p
    signature = ctypes.CFUNCTYPE(None, i, i, i, i, i, i, scalar, p, i, p, i, scalar, p, i)
    real, calls[name] = signature(slot.value), 0
    def counted(*arguments):
        calls[name] += 1
        real(*arguments)
    kept.append(signature(counted))
    slot.value = ctypes.cast(kept[-1], ctypes.c_void_p).value
count("sgemm", ctypes.c_float)
count("dgemm", ctypes.c_double)
count("cgemm", ctypes.c_void_p)
"""

MATMUL = """
import mlx.core as mx
import numpy as np
mx.set_default_device(mx.cpu)
a, b = np.random.default_rng(0).standard_normal((2, 150, 150))
def error(dtype):
    product = mx.array(a, dtype=dtype) @ mx.array(b, dtype=dtype)
    return float(np.abs(np.array(product) - a @ b).max())
out["errors"] = [error(dtype) for dtype in (mx.float32, mx.complex64, mx.float64)]
"""

BITS = """
import hashlib
def bits(*arrays):
    return [hashlib.sha256(np.asarray(array).tobytes()).hexdigest() for array in arrays]
"""

MLX_BITS = f"""
import mlx.core as mx
import numpy as np
{BITS}
mx.set_default_device(mx.cpu)
a, b = mx.random.normal((2, 512, 512), key=mx.random.key(0))
x, w = mx.random.normal((2, 64, 16, 16, 64), key=mx.random.key(1))
out["bits"] = bits(a @ b, mx.conv2d(x, w[:, :3, :3], padding=1), (a + 1j * b) @ (b + 1j * a))
"""

LAPACK = f"""
import mlx.core as mx
import numpy as np
{BITS}
mx.set_default_device(mx.cpu)
a = np.random.default_rng(0).standard_normal((96, 96)).astype(np.float32)
s = np.matmul(a, a.T) / 96 + np.eye(96, dtype=np.float32)
u, d, v = map(np.array, mx.linalg.svd(mx.array(a)))
q, r = map(np.array, mx.linalg.qr(mx.array(a)))
inverse, low = np.array(mx.linalg.inv(mx.array(a))), np.array(mx.linalg.cholesky(mx.array(s)))
w, e = map(np.array, mx.linalg.eigh(mx.array(s)))
pairs = [((u * d) @ v, a), (q @ r, a), (inverse @ a, np.eye(96))]
pairs += [(low @ low.T, s), ((e * w) @ e.T, s)]
out["errors"] = [float(np.abs(ours - right).max()) for ours, right in pairs]
out["bits"] = bits(u, d, v, q, r, inverse, low, w, e)
"""

TORCH_BITS = f"""
import numpy as np
import torch
{BITS}
torch.manual_seed(0)
results = []
for dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
    a, b = torch.randn(129, 200, dtype=dtype), torch.randn(200, 77, dtype=dtype)
    x, w = torch.randn(1, 8, 16, 16, dtype=dtype), torch.randn(12, 8, 3, 3, dtype=dtype)
    results += [a @ b, a @ b[:, 0], torch.bmm(a.expand(3, -1, -1), b.expand(3, -1, -1))]
    results += [torch.nn.functional.linear(a, b.T.contiguous()), torch.nn.functional.conv2d(x, w)]
    results += [torch.linalg.inv(a[:, :129]), *torch.linalg.qr(a)]
out["bits"] = bits(*results)
"""


def run(*code: str, **env: str) -> dict[str, Any]:
    """What `code` left in `out`, run in a fresh interpreter."""
    script = "\n".join(["import json, sys", "out = {}", *code, "print(json.dumps(out))"])
    clean = {name: value for name, value in os.environ.items() if name not in STEERING}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where shims are kept; not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lydite" / "blas"


def test_mlx_calls_the_shim():
    out = run("import lydite.models.mmdit", PRELOAD, COUNT, MATMUL)
    assert out["kind"] == "openblas"
    assert out["calls"] == {"sgemm": 1, "dgemm": 1, "cgemm": 1}
    assert max(out["errors"][:2]) < 1e-4  # sums of 150 float32 products
    assert out["errors"][2] < 1e-12


def test_only_an_import_of_mlx_loads_a_blas():
    before = (
        "import lydite.diff.compare, lydite.weights.audit; out['mlx'] = 'mlx.core' in sys.modules"
    )
    assert run(before, MAPPED) == {"mlx": False, "mapped": False}
    assert run("import lydite, mlx.core", MAPPED) == {"mapped": True}


def test_off_loads_nothing(cache: Path):
    out = run(PRELOAD, MAPPED, MATMUL, LYDITE_BLAS="off")
    assert out["kind"] == "off" and not out["mapped"] and not cache.exists()


def test_after_mlx_it_is_too_late(cache: Path):
    out = run("import mlx.core", PRELOAD, MAPPED)
    assert out["kind"] == "none" and "mlx.core was imported before" in out["says"]
    assert not out["mapped"] and not cache.exists()


def test_an_unknown_or_missing_choice_is_one_clear_error():
    expected = "LYDITE_BLAS=mkl: expected one of auto, torch, openblas, system, off."
    assert run(PRELOAD, LYDITE_BLAS="mkl") == {"error": expected}
    out = run(NO_TORCH, PRELOAD, LYDITE_BLAS="torch")
    assert out == {"error": "LYDITE_BLAS=torch: no torch, torch is not installed."}


@pytest.mark.parametrize("env", [{"PATH": ""}, {"CC": "false -v"}, {"CC": "'unbalanced"}])
def test_without_a_compiler_the_wheels_own_blas_is_used(cache: Path, env: dict[str, str]):
    out = run(NO_TORCH, PRELOAD, MATMUL, **env)
    assert out["kind"] == "none" and "no openblas, " in out["detail"]
    assert max(out["errors"]) < 1e-4 and not cache.exists()


CACHE = """
import os
from lydite.core import fast_blas
from pathlib import Path
def load():  # which shim is loaded, in a child: a library is loaded once in a process
    read, write = os.pipe()
    if not os.fork():
        os.write(write, fast_blas._load_shim()[1].encode())
        os._exit(0)
    os.close(write)
    return os.fdopen(read).read()
shim = Path(load())
whole, folder = shim.read_bytes(), shim.parent
out["modes"] = [folder.stat().st_mode & 0o777, shim.stat().st_mode & 0o777]
path, os.environ["PATH"] = os.environ["PATH"], ""
out["no compiler"] = load() == str(shim)
os.environ["PATH"] = path
for damaged in (b"", whole[: len(whole) // 3], bytes(len(whole))):
    shim.write_bytes(damaged)
    same = load() == str(shim) and len(shim.read_bytes()) == len(whole)
    out.setdefault("repaired", []).append(same)
shim.chmod(0o666)
out["others can write the file"] = load() == str(shim) and shim.stat().st_mode & 0o777 == 0o600
before = shim.stat().st_mtime_ns
private = []
for mode in (0o770, 0o702):
    folder.chmod(mode)
    private.append(load())
folder.chmod(0o700)
user = os.geteuid() + 1
os.geteuid = lambda: user
private.append(load())
out["private"] = ["a shim for this process only" in text for text in private]
out["kept"] = shim.stat().st_mtime_ns == before and list(folder.iterdir()) == [shim]
"""


def test_the_cached_shim_is_used_only_where_nobody_else_can_write(cache: Path):
    out = run(CACHE)
    assert out.pop("modes") == [0o700, 0o600]
    assert out.pop("repaired") == out.pop("private") == [True] * 3
    assert all(out.values()), out


@pytest.mark.parametrize("home", [{"XDG_CACHE_HOME": "/dev/null"}, {"XDG_CACHE_HOME": "a/b"}])
def test_home_that_cannot_be_written(home: dict[str, str]):
    out = run(PRELOAD, COUNT, MATMUL, HOME="/dev/null", **home)
    assert "a shim for this process only, /dev/null/" in out["says"]
    assert out["calls"]["sgemm"] == 1


def test_several_processes_at_once(cache: Path):
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda _: run(PRELOAD), range(4)))
    assert {out["kind"] for out in outs} == {"openblas"} and len(list(cache.iterdir())) == 1


def test_nothing_to_do_elsewhere(tmp_path: Path, cache: Path):
    assert run("sys.platform = 'darwin'", PRELOAD)["kind"] == "native"
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx_cuda_13.libs").mkdir()
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert run(PRELOAD, PYTHONPATH=path)["kind"] == "native"
    assert not cache.exists()


def test_a_blas_the_user_brought_stays(cache: Path):
    run(PRELOAD)
    (shim,) = cache.iterdir()
    out = run(PRELOAD, LD_PRELOAD=str(shim))
    assert out["kind"] == "native" and "already" in out["says"]


def test_system_library_serves_mlx_and_nobody_else():
    (library,) = (SITE / "mlx_cpu.libs").glob("libblas-*")  # any library with a cblas_sgemm will do
    installed = f"import ctypes.util; ctypes.util.find_library = lambda name: {str(library)!r}"
    leaked = "out['leaked'] = hasattr(ctypes.CDLL(None), 'sgemm_')"
    out = run(installed, PRELOAD, COUNT, leaked, MATMUL, LYDITE_BLAS="system")
    assert out["kind"] == "system" and str(library) in out["detail"]
    assert out["calls"] == {"sgemm": 1, "dgemm": 1, "cgemm": 1}
    assert not out["leaked"] and max(out["errors"]) < 1e-4


def test_small_products_take_one_thread_and_large_ones_all():
    matmul = "mx.eval(mx.ones((SIZE, SIZE)) @ mx.ones((SIZE, SIZE)))"
    sizes = [f"SIZE = {size}\n{matmul}" for size in (128, 1024, 64)]
    ask = "out['after'] = library.scipy_openblas_get_num_threads()"
    code = PRELOAD, "import mlx.core as mx", LIBRARY, THREADS, *sizes, ask
    out = run(*code, OPENBLAS_NUM_THREADS="2")
    count = min(2, cores())
    assert out["set"] == ([count, 1] if count > 1 else []) and out["after"] == 1


def test_products_of_several_streams_do_not_change_each_others_bits():
    code = """
import mlx.core as mx
streams = [mx.new_stream(mx.cpu) for _ in range(3)]
arrays = [mx.random.normal((size, 700), key=mx.random.key(size)) for size in (650, 90, 33)]
mx.eval(arrays)
def products(streams):
    found = []
    for stream, x in zip(streams, arrays):
        with mx.stream(stream):
            found += [x @ (x.T @ (x * (1 + n))) for n in range(10)]
    mx.eval(found)
    return found
alone = products([mx.default_stream(mx.cpu)] * 3)
out["equal"] = all(mx.array_equal(*pair).item() for pair in zip(alone, products(streams)))
"""
    assert run(PRELOAD, code, OPENBLAS_NUM_THREADS="2")["equal"]


def cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def test_one_thread_gives_the_same_bits_whatever_the_setting():
    ask = "out['threads'] = library.scipy_openblas_get_num_threads()"
    code = (
        "from lydite.core.fast_blas import use_one_thread; use_one_thread()",
        PRELOAD,
        LIBRARY,
        ask,
    )
    first, second = (run(*code, MLX_BITS, OPENBLAS_NUM_THREADS=count) for count in ("1", "2"))
    assert first["threads"] == 1 and first == second


def test_lapack_is_left_alone():
    off, on = run(PRELOAD, LAPACK, LYDITE_BLAS="off"), run(PRELOAD, LAPACK)
    assert (off["kind"], on["kind"]) == ("off", "openblas")
    assert on["bits"] == off["bits"]
    assert max(on["errors"]) < 1e-4


@needs_torch
@pytest.mark.parity
def test_torch_keeps_its_own_blas():
    without = run(TORCH_BITS, PRELOAD)
    assert without["kind"] == "openblas"  # whether torch is imported or not
    out = run(PRELOAD, COUNT, MATMUL, TORCH_BITS)
    assert out["calls"] == {"sgemm": 1, "dgemm": 1, "cgemm": 1}  # MLX's; none from torch
    assert out["bits"] == without["bits"]


@needs_torch
@pytest.mark.parity
def test_mlx_on_torchs_blas(tmp_path: Path):
    # glibc's own record of what the wheel's cblas_sgemm was bound to
    debug = {"LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(tmp_path / "ld")}
    out = run(PRELOAD, MATMUL, LAPACK, LYDITE_BLAS="torch", **debug)
    assert out["kind"] == "torch" and max(out["errors"]) < 1e-4
    log = "".join(path.read_text() for path in tmp_path.glob("ld.*"))
    bound = [line for line in log.splitlines() if "/libblas-" in line and "`sgemm_'" in line]
    assert bound and all("libtorch_cpu.so" in line for line in bound)


@pytest.mark.parametrize(
    "module",
    ["models.mmdit", "weights.load", "pipelines.pipeline", "pipelines.audits"],
)
def test_every_way_in_finds_the_fast_blas_before_mlx(module: str):
    assert run(f"import lydite.{module}", PRELOAD)["kind"] == run(PRELOAD)["kind"]
