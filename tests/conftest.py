"""Settings that have to be in the environment before torch and MLX start, and a model for all."""

import os
import signal
from pathlib import Path

import pytest

from lydite.core.blas import preload

os.environ["MLX_ENABLE_TF32"] = "0"  # parity in float32 means float32
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"  # torch bf16 dies on some CPUs without it
os.environ["OMP_NUM_THREADS"] = "1"  # tiny matrices: threads would mostly wait for each other
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# A job in the background is started to ignore Ctrl-C; programs that tests run and stop are not.
signal.signal(signal.SIGINT, signal.default_int_handler)
preload()  # tests multiply as the program does, whichever of them is first to import MLX


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that needs no reference: the random model of the demo."""
    from lydite.pipelines.untrained import make_untrained

    return make_untrained(tmp_path_factory.mktemp("models") / "untrained")
