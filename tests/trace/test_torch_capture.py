"""Watching torch models: everything recorded, no hook left behind."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import TraceError
from lydite.trace.function_capture import watch_function
from lydite.trace.reader import Trace
from lydite.trace.recorder import Injection, Recorder
from lydite.trace.selftest import VALUES, check_selftest
from support import tiny_sd3

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity


class Net(torch.nn.Module):
    """A layer called twice and reachable twice, and one that spoils its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True)])
        self.again = self.layers[0]

    def forward(self, x: Any, *, scale: Any = None, shape: str = "tensor") -> Any:
        for layer in self.layers:
            x = layer(x)
        x = self.again(x)
        x = x if scale is None else x * scale
        return {"tensor": x, "tuple": (x, None, x + 1), "dict": OrderedDict(a=x, b=x + 1)}[shape]

    def double(self, x: Any) -> Any:
        return self.layers[0](x) * 2


def hooks(model: Any) -> list[Any]:
    """Everything torch keeps about hooks, and the attributes of every module."""
    return [
        (path, {key: len(value) for key, value in vars(module).items() if "hooks" in key})
        for path, module in model.named_modules()
    ] + [sorted(vars(module)) for module in model.modules()]


def record(folder: Path, model: Any, call: Callable[[], Any], **options: Any) -> Trace:
    from lydite.trace.torch_capture import record_modules

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
    torch.manual_seed(0)
    return Net()


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def test_inputs_and_outputs_are_recorded_in_order_of_execution(tmp_path: Path, net: Net) -> None:
    before, plain = hooks(net), net(X, scale=torch.tensor(2.0))
    trace = record(tmp_path / "run", net, lambda: net(X, scale=torch.tensor(2.0)))
    assert places(trace) == [
        ("net", "in.0", 0),
        ("net", "in.scale", 0),
        ("net/layers.0", "in.0", 0),
        ("net/layers.0", "out", 0),
        ("net/layers.1", "in.0", 0),
        ("net/layers.1", "out", 0),
        ("net/layers.0", "in.0", 1),
        ("net/layers.0", "out", 1),
        ("net", "out", 0),
    ]
    event = trace.find("net")
    assert event is not None and trace.header.framework == f"torch {torch.__version__}"
    np.testing.assert_array_equal(trace.read(event), plain.detach().numpy())
    assert hooks(net) == before and torch.equal(net(X, scale=torch.tensor(2.0)), plain)


def test_an_input_that_is_changed_in_place_is_recorded_as_it_came(tmp_path: Path, net: Net) -> None:
    trace = record(tmp_path / "run", net, lambda: net(X))
    came, went = trace.find("net/layers.1", "in.0"), trace.find("net/layers.1")
    assert came is not None and went is not None
    assert trace.read(came).min() < 0 <= trace.read(went).min()
    made = trace.find("net/layers.0")
    assert made is not None
    np.testing.assert_array_equal(trace.read(made), trace.read(came))


@pytest.mark.parametrize(
    ("shape", "ports"), [("tuple", ["out", "out.2"]), ("dict", ["out.a", "out.b"])]
)
def test_outputs_of_any_shape_have_their_ports(
    tmp_path: Path, net: Net, shape: str, ports: list[str]
) -> None:
    trace = record(tmp_path / "run", net, lambda: net(X, shape=shape))
    assert [p for name, p, _ in places(trace) if name == "net" and "out" in p] == ports


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_inside_the_model_removes_every_hook(
    tmp_path: Path, net: Net, error: type[BaseException]
) -> None:
    class Broken(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            raise error

    net.layers[1] = Broken()
    before = hooks(net)
    with pytest.raises(error):
        record(tmp_path / "run", net, lambda: net(X), methods=("double",))
    assert hooks(net) == before


def test_names_are_right_after_an_exception_that_the_model_catches(tmp_path: Path) -> None:
    from lydite.trace.torch_capture import record_modules

    class Failing(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            raise ValueError

    class Careful(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Failing(), torch.nn.Linear(4, 4)])

        def forward(self, x: Any) -> Any:
            with contextlib.suppress(ValueError):
                self.layers[0](x)
            return torch.relu(self.layers[1](x))

    model = Careful()
    with (
        Recorder.start(tmp_path / "run") as recorder,
        watch_function(recorder, torch, "relu"),
        record_modules(recorder, model, scope="net"),
    ):
        model(X)
    names = {event.name for event in Trace.open(tmp_path / "run").events}
    assert names == {"net", "net/layers.0", "net/layers.1", "net.relu"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_narrow_values_are_exact(tmp_path: Path, dtype: str) -> None:
    layer = torch.nn.Linear(4, 4).to(getattr(torch, dtype))
    x = X.to(layer.weight.dtype)
    trace = record(tmp_path / "run", layer, lambda: layer(x))
    event = trace.find("net")
    assert event is not None
    expected = layer(x).detach().to(torch.float64).numpy()
    np.testing.assert_array_equal(trace.read(event).astype(np.float64), expected)


def test_outputs_and_inputs_are_injected(tmp_path: Path, net: Net) -> None:
    from lydite.trace.torch_capture import record_modules

    reference = record(tmp_path / "reference", net, lambda: net(X, shape="dict"))
    right = net(X, shape="dict")
    for number, at in enumerate(("net", "net/layers.0:out")):
        other = Net()
        inject = Injection(reference, (at,))
        recorder = Recorder.start(tmp_path / str(number), inject=inject)
        with recorder, record_modules(recorder, other, scope="net"):
            found = other(X, shape="dict")
        assert type(found) is OrderedDict
        assert torch.equal(found["a"], right["a"]) and torch.equal(found["b"], right["b"])
    with (
        Recorder.start(tmp_path / "wrong", inject=Injection(reference, ("net:in.0",))) as recorder,
        record_modules(recorder, net, scope="net"),
        pytest.raises(TraceError, match=r"net \[in\.0\]"),
    ):
        net(torch.zeros(3, 4))


def test_methods_of_the_root_are_recorded_when_asked_for(tmp_path: Path, net: Net) -> None:
    before = hooks(net)
    trace = record(tmp_path / "run", net, lambda: net.double(X), methods=("double",))
    assert places(trace)[0] == ("net/double", "in.0", 0)
    assert places(trace)[-1] == ("net/double", "out", 0)
    assert hooks(net) == before and "double" not in vars(net)
    wrapper = lambda x: x  # noqa: E731
    setattr(net, "double", wrapper)  # noqa: B010  as offloading libraries do
    record(tmp_path / "wrapped", net, lambda: net.double(X), methods=("double",))
    assert vars(net)["double"] is wrapper


def test_a_real_transformer_of_diffusers(tmp_path: Path) -> None:
    model = tiny_sd3.make_transformer("sd3.5-medium")
    draw = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(0))  # noqa: E731
    inputs = {
        "hidden_states": draw(1, 16, 8, 8),
        "encoder_hidden_states": draw(1, 11, 64),
        "pooled_projections": draw(1, 40),
        "timestep": torch.tensor([500.0]),
    }
    before = hooks(model)
    with torch.no_grad():
        plain = model(**inputs).sample
        trace = record(tmp_path / "run", model, lambda: model(**inputs))
        assert torch.equal(model(**inputs).sample, plain)
    assert hooks(model) == before
    event = trace.find("net", "out.sample")
    assert event is not None
    np.testing.assert_array_equal(trace.read(event), plain.numpy())
    names = {event.name for event in trace.events}
    assert "net/transformer_blocks.0.attn.to_q" in names
    assert trace.find("net", "in.hidden_states") is not None


def test_its_self_test_is_made_of_torch_s_views(tmp_path: Path) -> None:
    from lydite.trace import torch_capture

    with Recorder.start(tmp_path / "run") as recorder:
        torch_capture.write_selftest(recorder, tuple(torch_capture._DTYPES))
    trace = Trace.open(tmp_path / "run")
    assert check_selftest(trace) == ()
    assert {f"selftest/{value}" for value in VALUES} < {event.name for event in trace.events}
