"""Watching MLX models: everything recorded, nothing left behind."""

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from lydite.core.errors import TraceError
from lydite.core.request import Request
from lydite.pipelines.observer import FinishedStep, StepReporter
from lydite.pipelines.pipeline import Pipeline
from lydite.trace.arrays import to_numpy
from lydite.trace.mlx_capture import record_modules, walk
from lydite.trace.mlx_compilation import compiles
from lydite.trace.reader import Trace
from lydite.trace.recorder import Injection, Recorder
from lydite.trace.writer import Capture
from support.same_pixels import assert_same

REQUEST = Request("a red fox", steps=2, width=32, height=32, text_length=4)


class Pair(NamedTuple):
    left: mx.array
    right: mx.array


@dataclass(frozen=True)
class Result:
    first: mx.array
    nothing: None
    rest: tuple[mx.array, ...]


class Net(nn.Module):
    """Two layers, one of them called twice and reachable twice, and every kind of output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4), nn.Linear(4, 4, bias=False)]
        self.again = self.layers[0]
        self.extra: dict[str, nn.Module] = {"norm": nn.LayerNorm(4)}

    def __call__(self, x: mx.array, *, scale: mx.array, shape: str = "array") -> Any:
        for layer in self.layers:
            x = layer(x)
        x = self.extra["norm"](self.again(x)) * scale
        return {
            "array": x,
            "tuple": (x, x + 1),
            "pair": Pair(x, x + 1),
            "dict": {"a": x, "b": [x, None]},
            "result": Result(x, None, (x + 1, x + 2)),
            "none": None,
        }[shape]

    def double(self, x: mx.array) -> mx.array:
        return self.layers[0](x) * 2


def state(model: nn.Module) -> tuple[Any, ...]:
    """Classes, attributes and every parameter's bits."""
    digest = hashlib.sha256()
    for name, value in tree_flatten(model.parameters()):
        digest.update(name.encode() + to_numpy(value).tobytes())
    modules = list(walk(model))
    classes = [(path, type(module), sorted(vars(module))) for path, module in modules]
    keys = [(path, list(module)) for path, module in modules]
    return classes, keys, str(model.children()), digest.hexdigest(), compiles()


def record(folder: Path, model: Any, call: Callable[[], Any], **options: Any) -> Trace:
    with (
        Recorder.start(folder) as recorder,
        record_modules(recorder, model, scope="net", **options),
    ):
        call()
    return Trace.open(folder)


def places(trace: Trace) -> list[tuple[str, str, int]]:
    return [(event.name, event.slot, event.call) for event in trace.events]


@pytest.fixture
def net() -> Net:
    mx.random.seed(0)
    return Net()


X, SCALE = mx.arange(8).reshape(2, 4) / 8, mx.array(3.0)


def test_inputs_and_outputs_are_recorded_in_order_of_execution(tmp_path: Path, net: Net) -> None:
    trace = record(tmp_path / "run", net, lambda: net(X, scale=SCALE))
    assert places(trace) == [
        ("net", "in.0", 0),
        ("net", "in.scale", 0),
        ("net/layers.0", "in.0", 0),
        ("net/layers.0", "out", 0),
        ("net/layers.1", "in.0", 0),
        ("net/layers.1", "out", 0),
        ("net/layers.0", "in.0", 1),  # `again` is the same module: its first path, its second call
        ("net/layers.0", "out", 1),
        ("net/extra.norm", "in.0", 0),
        ("net/extra.norm", "out", 0),
        ("net", "out", 0),
    ]
    event = trace.find("net")
    assert event is not None
    np.testing.assert_array_equal(trace.read(event), to_numpy(net(X, scale=SCALE)))


@pytest.mark.parametrize(
    ("shape", "ports"),
    [
        ("array", ["out"]),
        ("tuple", ["out", "out.1"]),
        ("pair", ["out.left", "out.right"]),
        ("dict", ["out.a", "out.b.0"]),
        ("result", ["out.first", "out.rest.0", "out.rest.1"]),
        ("none", []),
    ],
)
def test_outputs_of_any_shape_have_their_ports(
    tmp_path: Path, net: Net, shape: str, ports: list[str]
) -> None:
    trace = record(tmp_path / "run", net, lambda: net(X, scale=SCALE, shape=shape))
    found = [port for name, port, _ in places(trace) if name == "net" and port.startswith("out")]
    assert found == ports


def test_nothing_is_left_behind(tmp_path: Path, net: Net) -> None:
    before, plain = state(net), to_numpy(net(X, scale=SCALE)).tobytes()
    with Recorder.start(tmp_path / "run") as recorder, record_modules(recorder, net, scope="net"):
        assert isinstance(net, Net) and type(net).__name__ == "Net"
        assert type(net).__module__ == Net.__module__ and type(net) is not Net
        assert repr(net) == repr(Net())
        assert state(net)[2:4] == before[2:4] and not compiles()
        assert to_numpy(net(X, scale=SCALE)).tobytes() == plain
    assert state(net) == before
    assert to_numpy(net(X, scale=SCALE)).tobytes() == plain
    again = net(X, scale=SCALE)
    assert len(Trace.open(tmp_path / "run").events) == 11 and again.shape == (2, 4)


def test_a_copy_that_is_made_while_recording_is_not_recorded(tmp_path: Path, net: Net) -> None:
    trace = record(tmp_path / "run", net, lambda: copy.deepcopy(net)(X, scale=SCALE))
    assert trace.events == ()


def test_weights_are_named_when_asked_for(tmp_path: Path, net: Net) -> None:
    assert record(tmp_path / "1", net, lambda: None).weights() is None
    named = record(tmp_path / "2", net, lambda: None, weights=True).weights()
    assert named and set(named) == {f"net/{name}" for name, _ in tree_flatten(net.parameters())}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_inside_the_model_restores_everything(
    tmp_path: Path, net: Net, error: type[BaseException]
) -> None:
    class Broken(nn.Module):
        def __call__(self, x: mx.array) -> mx.array:
            raise error

    net.extra["norm"] = Broken()
    before = state(net)
    with pytest.raises(error):
        record(tmp_path / "run", net, lambda: net(X, scale=SCALE))
    assert state(net) == before
    trace = Trace.open(tmp_path / "run")
    assert not trace.header.complete
    assert places(trace)[-1] == ("net/extra.norm", "in.0", 0)  # how far it came


@pytest.mark.parametrize("on", [True, False])
def test_compilation_is_off_meanwhile_and_then_as_it_was(
    tmp_path: Path, net: Net, on: bool
) -> None:
    compiled = mx.compile(lambda x: net(x, scale=SCALE))
    plain = compiled(X)
    try:
        if not on:
            mx.disable_compile()
        trace = record(tmp_path / "run", net, lambda: compiled(X))
        assert compiles() is on
    finally:
        mx.enable_compile()
    assert len(trace.events) == 11
    event = trace.find("net")
    assert event is not None
    np.testing.assert_allclose(trace.read(event), to_numpy(plain), rtol=1e-6)


def test_outputs_and_inputs_are_injected(tmp_path: Path, net: Net) -> None:
    record(tmp_path / "reference", net, lambda: net(X, scale=SCALE))
    reference = Trace.open(tmp_path / "reference")
    right = to_numpy(net(X, scale=SCALE))
    for number, at in enumerate(("net/extra.norm", "net/extra.norm:in.0", "net/layers.*:out")):
        other = Net()  # other weights, so other values
        other.extra = net.extra
        inject = Injection(reference, (at,))
        with (
            Recorder.start(tmp_path / str(number), inject=inject) as recorder,
            record_modules(recorder, other, scope="net"),
        ):
            found = other(X, scale=SCALE)
        assert recorder.injected
        np.testing.assert_array_equal(to_numpy(found), right)
        own = Trace.open(tmp_path / str(number))
        first = own.find("net/layers.0")
        assert first is not None and not np.array_equal(
            own.read(first), reference.read(reference.events[3])
        )


@pytest.mark.parametrize("shape", ["tuple", "pair", "dict", "result"])
def test_one_of_several_outputs_is_injected_into_the_same_structure(
    tmp_path: Path, net: Net, shape: str
) -> None:
    record(tmp_path / "reference", net, lambda: net(X, scale=SCALE, shape=shape))
    inject = Injection(Trace.open(tmp_path / "reference"), ("net",))
    with (
        Recorder.start(tmp_path / "run", inject=inject) as recorder,
        record_modules(recorder, net, scope="net"),
    ):
        found = net(X, scale=SCALE * 2, shape=shape)
    expected = net(X, scale=SCALE, shape=shape)
    assert type(found) is type(expected)
    assert values(found) == values(expected)


def values(tree: Any) -> list[Any]:
    """Every array of a tree, as lists."""
    tree = list(vars(tree).values()) if isinstance(tree, Result) else tree
    return [to_numpy(x).tolist() for _, x in tree_flatten(tree) if x is not None]


def test_a_wrong_shape_names_the_module(tmp_path: Path, net: Net) -> None:
    record(tmp_path / "reference", net, lambda: net(X, scale=SCALE))
    inject = Injection(Trace.open(tmp_path / "reference"), ("net/layers.1",))
    before = state(net)
    with (
        Recorder.start(tmp_path / "run", inject=inject) as recorder,
        pytest.raises(TraceError, match=r"net/layers\.1 \[out\].*\[2, 4\].*\[3, 4\]"),
        record_modules(recorder, net, scope="net"),
    ):
        net(mx.zeros((3, 4)), scale=SCALE)
    assert state(net) == before


def test_methods_of_the_root_are_recorded_when_asked_for(tmp_path: Path, net: Net) -> None:
    before = state(net)
    trace = record(tmp_path / "run", net, lambda: net.double(X), methods=("double",))
    assert places(trace) == [
        ("net/double", "in.0", 0),
        ("net/layers.0", "in.0", 0),
        ("net/layers.0", "out", 0),
        ("net/double", "out", 0),
    ]
    assert state(net) == before


def test_a_module_with_attributes_of_its_own_making_works(tmp_path: Path) -> None:
    class Magic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def __getattr__(self, key: str) -> Any:
            return 42 if key == "answer" else super().__getattr__(key)

        def __setattr__(self, key: str, value: Any) -> None:
            if key == "__class__":
                raise AttributeError("not this one")
            super().__setattr__(key, value)

        def __call__(self, x: mx.array) -> mx.array:
            return self.inner(x) * self.answer

    magic = Magic()
    trace = record(tmp_path / "run", magic, lambda: magic(X))
    assert len(trace.events) == 4 and type(magic) is Magic and magic.answer == 42


def test_a_module_that_is_an_argument_is_not_taken_for_its_weights(tmp_path: Path) -> None:
    class Apply(nn.Module):
        def __call__(self, layer: nn.Module, x: mx.array) -> mx.array:
            return layer(x)

    apply, layer = Apply(), nn.Linear(4, 4)
    trace = record(tmp_path / "run", apply, lambda: apply(layer, X))
    assert places(trace) == [("net", "in.1", 0), ("net", "out", 0)]


def test_watching_twice_records_twice_and_undoes_both(tmp_path: Path, net: Net) -> None:
    before = state(net)
    with (
        Recorder.start(tmp_path / "run") as recorder,
        record_modules(recorder, net, scope="outer"),
        record_modules(recorder, net, scope="inner"),
    ):
        net(X, scale=SCALE)
    assert state(net) == before
    names = [event.name for event in Trace.open(tmp_path / "run").events]
    assert names.count("outer") == names.count("inner") == 3


def test_values_that_cannot_be_evaluated_are_refused_with_their_name(
    tmp_path: Path, net: Net
) -> None:
    mapped = mx.vmap(lambda x: net(x, scale=SCALE))
    with pytest.raises(TraceError, match=r"net \[in\.0\]"):
        record(tmp_path / "run", net, lambda: mapped(mx.zeros((2, 3, 4))))


def test_the_parts_of_a_real_pipeline(tmp_path: Path, untrained: Path) -> None:
    pipeline = Pipeline.open(untrained)
    parts: dict[str, Any] = {
        name: pipeline.model.network(name) for name in ("transformer", "vae", "text_encoder")
    }
    before = {name: state(part) for name, part in parts.items()}
    plain = next(pipeline.generate(REQUEST, [3])).pixels
    recorder = Recorder.start(tmp_path / "run", capture=Capture("stats"))
    with (
        recorder,
        record_modules(recorder, parts["transformer"], scope="transformer"),
        record_modules(recorder, parts["vae"], scope="vae", methods=("decode",)),
        record_modules(recorder, parts["text_encoder"], scope="text_encoder"),
    ):

        def next_step(step: FinishedStep) -> None:
            recorder.step = step.index + 1

        observer = StepReporter(next_step)
        recorded = next(pipeline.generate(REQUEST, [3], observer=observer)).pixels
    assert_same(plain, recorded)
    np.testing.assert_array_equal(next(pipeline.generate(REQUEST, [3])).pixels, plain)
    assert {name: state(part) for name, part in parts.items()} == before
    events = Trace.open(tmp_path / "run").events
    names = {event.name for event in events}
    assert {"transformer", "vae/decode", "vae/decoder.conv_in", "text_encoder"} <= names
    assert "transformer/transformer_blocks.0.attn.to_q" in names
    calls = [event for event in events if event.name == "transformer" and event.slot == "out"]
    assert [(event.step, event.call) for event in calls] == [(0, 0), (1, 0)]
    slots = {event.slot for event in events if event.name == "text_encoder"}
    assert {"in.0", "out.last", "out.pooled", "out.hidden_states.0"} <= slots
