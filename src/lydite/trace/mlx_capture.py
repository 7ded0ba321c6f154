"""Record every module of an MLX model without changing the model.

`mlx.nn` has no hooks, and Python looks `__call__` up on the type, so each module's class is swapped
for a recording subclass until the recording ends. Values are evaluated where they are computed,
which is impossible inside `mx.grad`, `mx.vmap` or a compiled function, so compilation is off
meanwhile. A fused kernel may differ from its unfused form in the last bit.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from lydite.trace.arrays import to_numpy
from lydite.trace.mlx_compilation import not_compiled
from lydite.trace.nested import map_inputs, map_outputs
from lydite.trace.recorder import Recorder, full_name
from lydite.trace.selftest import SPECIAL, Records, record_all


class ValueSink(Protocol):
    """A Recorder, or anything else that receives the inputs and outputs of modules."""

    def record(self, name: str, value: Any, *, slot: str) -> Any:
        """Receive a value, and return the one that the run continues with."""
        ...


T = TypeVar("T", bound=ValueSink)


@contextmanager
def record_modules(
    recorder: T,
    model: nn.Module,
    *,
    scope: str,
    methods: Sequence[str] = (),
    weights: bool = False,
) -> Generator[T]:
    """Record inputs and outputs of every module of `model` as `scope/path` while the block runs.

    A module reachable by several paths is recorded under the first, in order of definition.
    `methods` of the root other than its call are recorded as `scope/METHOD`. `weights` adds names,
    hashes and statistics of its parameters to weights.json.
    """
    if weights and isinstance(recorder, Recorder):
        values = tree_flatten(model.parameters())
        recorder.writer.add_weights({full_name(scope, n): to_numpy(p) for n, p in values})
    modules = list(walk(model))
    names = {id(module): full_name(scope, path) for path, module in modules}
    recorded: dict[type[nn.Module], type[nn.Module]] = {}
    swapped: list[tuple[nn.Module, type[nn.Module]]] = []
    with not_compiled():
        try:
            for _, module in modules:
                kind = type(module)
                if module is model:
                    subclass = _recording(kind, recorder, names, methods)
                else:
                    subclass = recorded.get(kind) or _recording(kind, recorder, names)
                    recorded[kind] = subclass
                swapped.append((module, kind))
                _set_class(module, subclass)
            yield recorder
        finally:
            for module, kind in reversed(swapped):
                _set_class(module, kind)


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, under its first path: root first, in order of definition."""
    yield from _walk("", model, set())


def _walk(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, dict):  # a module is one
        items: Any = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield path, value
    for key, child in items:
        yield from _walk(f"{path}.{key}" if path else str(key), child, seen)


def _recording(
    kind: type[nn.Module], recorder: ValueSink, names: dict[int, str], methods: Sequence[str] = ()
) -> type[nn.Module]:
    """A subclass that looks like `kind` and records its calls."""

    def wrapped(attribute: str, suffix: str) -> Callable[..., Any]:
        original = getattr(kind, attribute)

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = names.get(id(self))
            if path is None:  # a copy that was made while recording
                return original(self, *args, **kwargs)
            name = full_name(path, suffix)

            def record(slot: str, x: Any) -> Any:
                return recorder.record(name, x, slot=slot)

            args, kwargs = map_inputs(args, kwargs, record)
            inside = recorder.inside if isinstance(recorder, Recorder) else []
            inside.append(name)
            try:
                output = original(self, *args, **kwargs)
            finally:
                inside.pop()
            return map_outputs(output, record)

        return call

    body: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    body |= {"__doc__": kind.__doc__, "__call__": wrapped("__call__", "")}
    body |= {method: wrapped(method, method) for method in methods}
    return type(kind.__name__, (kind,), body)


def _set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    # Not `module.__class__ = kind`: a module's own __setattr__ may do something else with it.
    object.__setattr__(module, "__class__", kind)


def write_selftest(recorder: Records, dtypes: Sequence[str] = ("f32",)) -> None:
    """The format's self-test values, made with MLX's own views."""
    a = mx.arange(24, dtype=mx.float32).reshape(2, 3, 4)
    values = {
        "contiguous": a,
        "transposed": a.transpose(2, 0, 1),
        "sliced": a[:, ::2, 1::2],
        "broadcast": mx.broadcast_to(a[0, 0], (3, 4)),
        "special": mx.array(np.array(SPECIAL, np.float32)),
    }
    record_all(recorder, values | {name: mx.arange(8).astype(_DTYPES[name]) for name in dtypes})


_DTYPES = {
    "f64": mx.float64,
    "f32": mx.float32,
    "bf16": mx.bfloat16,
    "f16": mx.float16,
    "i64": mx.int64,
    "i32": mx.int32,
    "i16": mx.int16,
    "i8": mx.int8,
    "u64": mx.uint64,
    "u32": mx.uint32,
    "u16": mx.uint16,
    "u8": mx.uint8,
    "bool": mx.bool_,
    "c64": mx.complex64,
}
