"""On a CPU a step is divided among streams, and nothing else changes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.device import GPU_BRANCHES
from lydite.core.request import Request
from lydite.models import cpu
from lydite.models.mmdit import MMDiT
from lydite.pipelines import steps
from lydite.pipelines.pipeline import SILENT, Pipeline
from lydite.pipelines.recording import record
from lydite.trace.reader import Trace

pytestmark = pytest.mark.usefixtures("on_the_cpu")

REQUEST = Request("a red fox", steps=2, width=32, height=32, text_length=4, guidance=4.0)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of the batch of each call of the network."""
    sizes: list[int] = []
    original = MMDiT.__call__

    def call(self: MMDiT, latent: mx.array, *arguments: Any) -> mx.array:
        sizes.append(latent.shape[0])
        return original(self, latent, *arguments)

    monkeypatch.setattr(MMDiT, "__call__", call)
    return sizes


def test_pictures_do_not_depend_on_the_number_of_cores(
    untrained: Path, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline.open(untrained)
    monkeypatch.setattr(cpu, "_BLOCK", 1 << 10)
    drawn: list[np.ndarray] = []
    for threads, expected in (("1", [4]), ("2", [2, 2]), ("3", [1, 1, 2])):
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", threads)
        del batches[:]
        drawn.append(np.stack([p.pixels for p in pipeline.generate(REQUEST, [1, 2], batch=2)]))
        assert batches == 2 * expected
    assert np.array_equal(drawn[0], drawn[1]) and np.array_equal(drawn[0], drawn[2])


def test_who_records_sees_whole_batches(
    untrained: Path, tmp_path: Path, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    pipeline = Pipeline.open(untrained)
    (alone,) = pipeline.generate(REQUEST, [7])
    assert batches == [1, 1, 1, 1]
    recorded = record(pipeline, pipeline.plan(REQUEST), 7, tmp_path / "run")
    assert batches == [1, 1, 1, 1, 2, 2]
    assert np.abs(alone.pixels.astype(int) - recorded.pixels.astype(int)).max() <= 1
    event = Trace.open(tmp_path / "run").find("transformer", "in.hidden_states", 0)
    assert event is not None and event.shape[0] == 2


COMPILED = """
import mlx.core as mx, numpy as np
from lydite.models.layers import QuantizedLinear, at_timestep
from lydite.pipelines import steps

mx.set_default_device(mx.cpu)
layer = QuantizedLinear(64, 8)
layer["input_range"] = mx.array([[2.0, 8, 15], [0.5, 8, 15], [0.1, 8, 15]])
layer["input_times"] = mx.array([600.0, 300, 0])
x = mx.random.normal((2, 40, 64), key=mx.random.key(0))
calls, original = [], QuantizedLinear.__call__

def call(self, x):
    calls.append(None)
    return original(self, x)

QuantizedLinear.__call__ = call
network, found = steps.compiled(layer), []
for timestep in (900.0, 450.0, 450.0, 0.0, 600.0):
    with at_timestep(timestep):
        found.append(np.array(network(x)))
        np.testing.assert_allclose(found[-1], np.array(original(layer, x)), rtol=1e-5)
assert len(calls) == 1  # it was compiled
assert np.array_equal(found[1], found[2]) and np.array_equal(found[0], found[4])
assert not np.allclose(found[0], found[1]) and not np.allclose(found[1], found[3])
"""


def test_a_compiled_network_rounds_inputs_by_the_range_of_each_step() -> None:
    """In a process of its own: a crash of MLX, which compiles for the CPU here, ends it alone."""
    environment = {**os.environ, GPU_BRANCHES: "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_arrays_without_the_batch_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    shared = mx.arange(3.0)[None]

    def network(x: mx.array, tables: dict[str, mx.array], positions: mx.array) -> mx.array:
        assert positions is shared
        return x * tables["gate"] + positions

    x, tables = mx.arange(6.0).reshape(2, 3), {"gate": mx.array([[2.0], [3.0]])}
    y = steps.for_device(network)(x, tables, shared)  # pyright: ignore[reportArgumentType]
    assert mx.array_equal(y, network(x, tables, shared))


class _Halved:
    """Instead of a mask: the latents of the image are 0, half of them is kept."""

    channels = None

    def blend(self, x: mx.array, sigma: float) -> mx.array:
        return x / 2


def test_the_masked_part_is_replaced_at_every_call_but_the_first_of_a_batch(
    untrained: Path,
) -> None:
    pipeline = Pipeline.open(untrained)
    run = pipeline.plan(REQUEST)
    seen: list[float] = []

    def network(x: mx.array, timestep: float, prompts: int) -> mx.array:
        seen.append(float(x.mean()))
        return mx.concatenate([0.1 * x, 0.2 * x][:prompts])

    halved: Any = _Halved()
    denoise = steps.Denoiser(network, run, pipeline.family.guide, SILENT)
    x = mx.ones((1, 4, 4, 16))
    plain = [*denoise.pair(x, 0.7), denoise(x, 0.7)]
    assert seen == [1, 1] and mx.allclose(plain[0], plain[2])
    for _ in range(2):  # two batches
        del seen[:]
        denoise.begin(inpainting=halved)
        first, second, both = denoise(x, 0.7), denoise(x, 0.7), denoise.pair(x, 0.7)
        assert seen == [1, 0.5, 0.5]
        assert mx.allclose(first, plain[0])
        # what the network makes of the blended half, and what blending took away
        for found, whole in ((second, plain[0]), (both[0], plain[0]), (both[1], plain[1])):
            assert mx.allclose(found, whole / 2 + 0.5, atol=1e-6)
    denoise.begin(3)
    denoise(x, 0.7)
    assert (
        denoise.step == 3
        and seen[-1] == 1
        and float(denoise(x, 0.7).mean()) == float(plain[0].mean())
    )
