"""Functions, taps and weights beside modules; the recorder that is copied into a port's folder."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as mlx_nn
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lydite.core.errors import InputError
from lydite.diff.compare import compare
from lydite.trace import mlx_capture, torch_capture
from lydite.trace.function_capture import watch_function
from lydite.trace.reader import Trace
from lydite.trace.recorder import Recorder
from lydite.trace.taps import tap

COPY = Path(__file__).parents[2] / "examples/lydite_trace.py"


class Block(nn.Module):
    """A linear layer, an activation function and a tap."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tap("seen", F.gelu(self.linear(x), approximate="tanh"))


def test_functions_and_taps_are_recorded_beside_modules(tmp_path: Path) -> None:
    block, x = Block(), torch.randn(2, 4)
    gelu = F.gelu
    with (
        Recorder.start(tmp_path / "run") as recorder,
        torch_capture.record_modules(recorder, block, scope="net", weights=True),
        watch_function(recorder, F, "gelu"),
        torch.no_grad(),
    ):
        block(x)
    assert F.gelu is gelu and not recorder.inside
    assert tap("later", x) is x
    with Trace.open(tmp_path / "run") as trace:
        slots = {(event.name, event.slot) for event in trace.events}
        assert {("net.gelu", "out"), ("seen", "out"), ("net/linear", "out")} <= slots
        assert set(trace.weights() or ()) == {"net/linear.weight", "net/linear.bias"}
        found = trace.find("net.gelu", "out", 0, 0)
        expected = gelu(block.linear(x), approximate="tanh").detach().numpy()
        assert found is not None and np.array_equal(trace.read(found), expected)


def test_inputs_have_the_names_of_the_parameters(tmp_path: Path) -> None:
    class Functions:
        @staticmethod
        def attend(query: Any, key: Any, scale: float = 1.0) -> Any:
            return query @ key.T * scale

    class Inherits(Functions):
        pass

    before = dict(vars(Functions))
    with (
        Recorder.start(tmp_path / "run") as recorder,
        watch_function(recorder, Functions, "attend", as_name="attention"),
    ):
        Functions.attend(np.eye(3), key=np.ones((2, 3)), scale=0.5)
    assert dict(vars(Functions)) == before
    with Recorder.start(tmp_path / "other") as recorder:
        with watch_function(recorder, Inherits, "attend"):
            Inherits().attend(np.eye(3), np.eye(3))
        assert "attend" not in vars(Inherits) and Inherits.attend is Functions.attend
    with Trace.open(tmp_path / "run") as trace:
        slots = [(event.name, event.slot) for event in trace.events]
    assert slots == [("attention", slot) for slot in ("in.query", "in.key", "out")]


def test_a_function_of_mlx_inside_a_module(tmp_path: Path) -> None:
    class Layer(mlx_nn.Module):
        def __call__(self, x: mx.array) -> mx.array:
            return mx.fast.scaled_dot_product_attention(x, x, x, scale=0.5)

    with (
        Recorder.start(tmp_path / "run") as recorder,
        mlx_capture.record_modules(recorder, Layer(), scope="net", weights=True) as _,
    ):
        layer = Layer()
        with (
            mlx_capture.record_modules(recorder, layer, scope="other"),
            watch_function(recorder, mx.fast, "scaled_dot_product_attention", as_name="sdpa"),
        ):
            x = mx.ones((1, 2, 3, 4))
            layer(x)
            mx.fast.scaled_dot_product_attention(x, x, x, scale=0.5)  # outside of every module
    with Trace.open(tmp_path / "run") as trace:
        outputs = [event.name for event in trace.events if event.slot == "out"]
    assert outputs == ["other.sdpa", "other", "sdpa"]


def test_a_function_that_is_not_there_or_never_called(tmp_path: Path) -> None:
    with Recorder.start(tmp_path / "run") as recorder:
        with pytest.raises(InputError, match="no function"), watch_function(recorder, F, "gulu"):
            pass
        with (
            pytest.warns(UserWarning, match="never called"),
            watch_function(recorder, math, "sqrt"),
        ):
            pass


PORT = """
import numpy as np, lydite_trace as t
rng = np.random.default_rng(0)
x = rng.normal(size=(16, 8)).astype("f4")
w = rng.normal(size=(8, 8)).astype("f4")
t.weights({"net/layer.weight": w})
for step in range(2):
    t.set_step(step)
    x = t.tap("net/layer", t.tap("net/layer", x, slot="in.0") @ w.T)
    x = t.tap("net/act", np.tanh(x) if BUG else np.maximum(x, 0), dims="b c")
try:
    import torch
    t.tap("net/half", torch.arange(4).to(torch.bfloat16))
except ImportError:
    pass
"""


def run_copy(folder: Path, out: str, bug: bool, **more: str) -> Path:
    (folder / "lydite_trace.py").write_text(COPY.read_text())
    (folder / f"{out}.py").write_text(PORT.replace("BUG", str(bug)))
    environment = {**os.environ, "LYDITE_TRACE": str(folder / out), **more}
    subprocess.run([sys.executable, f"{out}.py"], cwd=folder, env=environment, check=True)
    return folder / out


def test_the_copied_recorder_writes_what_our_reader_reads(tmp_path: Path) -> None:
    ref, port = run_copy(tmp_path, "ref", False), run_copy(tmp_path, "port", True)
    with Trace.open(ref) as reference, Trace.open(port) as other:
        assert reference.header.complete and reference.weights()
        half = reference.find("net/half", "out", 1, 0)
        assert half is not None and half.dtype == "bf16"
        assert reference.read(half).astype(float).tolist() == [0, 1, 2, 3]
        verdict = compare(reference, other)
    assert (verdict.site, verdict.step) == ("net/act", 0)
    assert verdict.findings[0].cause == "other-activation"


def test_the_copied_recorder_injects(tmp_path: Path) -> None:
    ref = run_copy(tmp_path, "ref", False)
    values = {"LYDITE_INJECT": str(ref), "LYDITE_INJECT_AT": "net/act"}
    port = run_copy(tmp_path, "port", True, **values)
    with Trace.open(ref) as reference, Trace.open(port) as other:
        a, b = (trace.find("net/layer", "in.0", 1, 0) for trace in (reference, other))
        assert a is not None and b is not None
        assert np.array_equal(reference.read(a), other.read(b))


def test_the_copied_recorder_leaves_a_trace_that_is_there_alone(tmp_path: Path) -> None:
    ref = run_copy(tmp_path, "ref", False)
    before = {path.name: path.read_bytes() for path in ref.iterdir()}
    with pytest.raises(subprocess.CalledProcessError):
        run_copy(tmp_path, "ref", True)
    assert {path.name: path.read_bytes() for path in ref.iterdir()} == before


def test_the_copied_recorder_writes_several_traces_in_one_process(tmp_path: Path) -> None:
    program = """
import os, numpy as np, lydite_trace as t
for name in ("a", "b", "c"):
    os.environ["LYDITE_TRACE"] = name
    t.set_step(2)
    t.tap(name, np.ones(2))
    t.weights({f"{name}.weight": np.ones(3)})
    if name == "b":
        t.finish()
"""
    (tmp_path / "lydite_trace.py").write_text(COPY.read_text())
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    for name in ("a", "b", "c"):
        with Trace.open(tmp_path / name) as trace:
            assert trace.header.complete and set(trace.weights() or ()) == {f"{name}.weight"}
            assert [(event.name, event.step) for event in trace.events] == [(name, 2)]
