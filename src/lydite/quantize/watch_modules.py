"""What modules are called with, and what they return, seen from outside."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn

from lydite.trace.mlx_compilation import not_compiled

# Path, positional and named inputs, output; returns what the network goes on with.
OnCall = Callable[[str, tuple[Any, ...], dict[str, Any], Any], Any]


@contextmanager
def watch_calls(modules: Mapping[str, nn.Module], on_call: OnCall) -> Generator[None]:
    """Report each call of these modules. Meanwhile nothing is compiled."""
    paths = {id(module): path for path, module in modules.items()}
    swapped = [(module, type(module)) for module in modules.values()]
    kinds = {kind: _watched(kind, paths, on_call) for _, kind in swapped}
    with not_compiled():
        try:
            for module, kind in swapped:
                object.__setattr__(module, "__class__", kinds[kind])
            yield
        finally:
            for module, kind in swapped:
                object.__setattr__(module, "__class__", kind)


def _watched(kind: type[nn.Module], paths: Mapping[int, str], on_call: OnCall) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = kind.__call__(self, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return on_call(paths[id(self)], args, kwargs, output)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
