"""Record functions: attention, RoPE, activations, whatever is no module of its own."""

import functools
import inspect
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from lydite.core.errors import InputError
from lydite.trace.nested import map_inputs, map_outputs
from lydite.trace.recorder import Recorder, full_name


@contextmanager
def watch_function(
    recorder: Recorder, owner: Any, name: str, *, as_name: str | None = None
) -> Generator[Recorder]:
    """Record inputs and output of `owner.name`, a function of a module or class, while running.

    Inputs have the names of the function's parameters: `in.query`. Inside a recorded module the
    value is `MODULE.name`, elsewhere `name`. A module that did `from owner import name` holds its
    own reference: give that module as the owner. A function that is never called is a warning.
    """
    original = getattr(owner, name, None)
    if not callable(original):
        where = getattr(owner, "__name__", type(owner).__name__)
        raise InputError(f"watch_function: {where} has no function {name!r}.")
    had_own = name in vars(owner) if hasattr(owner, "__dict__") else False
    stored = inspect.getattr_static(owner, name)
    calls: list[None] = []

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        around = recorder.inside[-1] if recorder.inside else ""
        path = f"{around}.{as_name or name}" if around else full_name("", as_name or name)

        def record(slot: str, x: Any) -> Any:
            return recorder.record(path, x, slot=slot)

        args, kwargs = _recorded_inputs(original, args, kwargs, record)
        return map_outputs(original(*args, **kwargs), record)

    static = isinstance(stored, staticmethod)
    setattr(owner, name, staticmethod(call) if static else call)
    try:
        yield recorder
    finally:
        if had_own:
            setattr(owner, name, stored)
        else:
            delattr(owner, name)
    if not calls:
        warnings.warn(
            f"{name} was never called while it was watched. A module that imported it by name has "
            "its own reference: give that module to watch_function.",
            stacklevel=3,
        )


def _recorded_inputs(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    record: Callable[[str, Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, recorded under the names of the function's parameters where it has them."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):  # a compiled function without a signature, or a wrong call
        return map_inputs(args, kwargs, record)
    given = {name: value for name, value in bound.arguments.items() if name != "self"}
    _, named = map_inputs((), given, record)
    bound.arguments.update(named)
    return bound.args, bound.kwargs
