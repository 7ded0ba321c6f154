"""Environment variables that torch and MLX read at their start, and one model for all tests."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import lydite  # noqa: F401  loads the BLAS of the program, whichever test imports MLX first
from lydite.core.device import GPU_BRANCHES

os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"  # torch bf16 dies on some CPUs without it
os.environ["OMP_NUM_THREADS"] = "1"  # tiny matrices: threads would mostly wait for each other
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# Programs that tests start import what pytest's `pythonpath` gives to the tests themselves.
ROOT = Path(__file__).parents[1]
PATHS = [str(ROOT / "tests"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in PATHS if path)
# On a CPU MLX keeps compiled kernels in one folder below TMPDIR, and reads what another process
# still writes: a segmentation fault. Each worker of pytest has a folder of its own.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    own = Path(tempfile.gettempdir(), f"lydite-tests-{os.getuid()}", worker)
    own.mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = str(own)
# A job in the background is started to ignore Ctrl-C; programs that tests run and stop are not.
signal.signal(signal.SIGINT, signal.default_int_handler)
# No test depends on how fast or busy the machine is.
settings.register_profile(
    "lydite", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("lydite")

gc.disable()  # until all tests are imported: modules are not garbage, and half of the time is saved


def pytest_collection_finish() -> None:
    """Pipelines run in float32 unless a test names a dtype; on a GPU they would in bfloat16."""
    gc.freeze()  # what was imported is not searched again in every collection
    gc.set_threshold(10_000)  # new objects between two collections; 700 by default
    gc.enable()
    if module := sys.modules.get("lydite.pipelines.pipeline"):
        setattr(module, "default_dtype", lambda: "float32")  # noqa: B010


@pytest.fixture(scope="session", autouse=True)
def without_fsync() -> Iterator[None]:
    """The files of tests need not survive a power cut; processes that tests start do flush."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights, made without the reference."""
    from untrained_sd3 import make_untrained  # imports MLX

    return make_untrained(tmp_path_factory.mktemp("models") / "untrained")


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests of what is arranged for the CPU, where a GPU or its branches are the default."""
    import mlx.core as mx

    monkeypatch.delenv(GPU_BRANCHES, raising=False)
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)
