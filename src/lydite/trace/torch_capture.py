"""Record every module of a torch model with hooks. The only file here with torch.

Compiled models (`torch.compile`) run their modules inside one graph: record the original.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lydite.trace.arrays import to_numpy
from lydite.trace.nested import map_inputs, map_outputs
from lydite.trace.recorder import Recorder, full_name
from lydite.trace.selftest import SPECIAL, Records, record_all


@contextmanager
def record_modules(
    recorder: Recorder,
    model: torch.nn.Module,
    *,
    scope: str,
    methods: Sequence[str] = (),
    weights: bool = False,
) -> Generator[Recorder]:
    """Record inputs and outputs of every module of `model` as `scope/path` while the block runs.

    A module reachable by several paths is recorded under the first, in order of definition.
    `methods` of the root other than its call are recorded as `scope/METHOD`. Inputs are recorded
    before the module runs: it may change them in place. `weights` adds names, hashes and
    statistics of its parameters and buffers to weights.json.
    """
    if weights:
        state = model.state_dict()
        recorder.writer.add_weights({full_name(scope, n): to_numpy(p) for n, p in state.items()})
    with ExitStack() as undo:
        for path, module in model.named_modules():  # each once, under its first path
            name = full_name(scope, path)
            before, after = _hooks(recorder, name)
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
            undo.callback(handle.remove)
            handle = module.register_forward_hook(after, with_kwargs=True)
            undo.callback(handle.remove)
            handle = module.register_forward_hook(_leave(recorder), always_call=True)
            undo.callback(handle.remove)
        for method in methods:
            own = vars(model).get(method)  # offloading libraries put a wrapper here
            undo.callback(_restore, vars(model), method, own)
            vars(model)[method] = _wrapped(recorder, getattr(model, method), f"{scope}/{method}")
        yield recorder


def _hooks(recorder: Recorder, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def record(slot: str, x: Any) -> Any:
        return recorder.record(name, x, slot=slot)

    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder.inside.append(name)
        return map_inputs(args, kwargs, record)

    def after(_: torch.nn.Module, __: Any, ___: Any, output: Any) -> Any:
        return map_outputs(output, record)

    return before, after


def _leave(recorder: Recorder) -> Callable[..., None]:
    def leave(*_: Any) -> None:
        if recorder.inside:
            recorder.inside.pop()

    return leave


def _wrapped(recorder: Recorder, method: Callable[..., Any], name: str) -> Callable[..., Any]:
    before, after = _hooks(recorder, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before(None, args, kwargs)
        try:
            return after(None, args, kwargs, method(*args, **kwargs))
        finally:
            recorder.inside.pop()

    return call


def _restore(attributes: dict[str, Any], name: str, own: Any) -> None:
    attributes.pop(name, None)
    if own is not None:
        attributes[name] = own


def write_selftest(recorder: Records, dtypes: Sequence[str] = ("f32",)) -> None:
    """The format's self-test values, made with torch's own views."""
    a = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    values = {
        "contiguous": a,
        "transposed": a.permute(2, 0, 1),
        "sliced": a[:, ::2, 1::2],
        "broadcast": a[0, 0].expand(3, 4),
        "special": torch.tensor(SPECIAL, dtype=torch.float32),
    }
    record_all(recorder, values | {name: torch.arange(8).to(_DTYPES[name]) for name in dtypes})


_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f8_e4m3": torch.float8_e4m3fn,
    "f8_e5m2": torch.float8_e5m2,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u64": torch.uint64,
    "u32": torch.uint32,
    "u16": torch.uint16,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
}
