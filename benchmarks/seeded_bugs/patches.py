"""Ways to change a live pipeline from outside and put everything back.

A place is `component/module.path`, the name the module has in a trace. Python looks `__call__` up
on the type, so one instance is changed by giving it a subclass of its own.
"""

import re
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from lydite.pipelines.noise import RunNoise
from lydite.pipelines.pipeline import Pipeline
from seeded_bugs.cases import Apply

Forward = Callable[..., Any]  # (self, original, *args): what the module does instead


def module_at(pipeline: Pipeline, place: str) -> Any:
    """The module at `component/path`."""
    component, _, path = place.partition("/")
    found: Any = pipeline.model.network(component)
    for part in path.split(".") if path else ():
        found = found[int(part)] if isinstance(found, list) else found[part]
    return found


def weight(place: str, change: Callable[[mx.array], mx.array], *, keep_dtype: bool = True) -> Apply:
    """The parameter at `place` changed."""

    @contextmanager
    def apply(pipeline: Pipeline) -> Generator[None]:
        owner, _, name = place.rpartition(".")
        module = module_at(pipeline, owner)
        before = module[name]
        new = change(before)
        module[name] = new.astype(before.dtype) if keep_dtype else new
        try:
            yield
        finally:
            module[name] = before

    return apply


def swapped(one: str, other: str) -> Apply:
    """The parameters of two modules exchanged."""

    @contextmanager
    def apply(pipeline: Pipeline) -> Generator[None]:
        first, second = module_at(pipeline, one), module_at(pipeline, other)
        names = [name for name, value in first.items() if isinstance(value, mx.array)]
        for name in names:
            first[name], second[name] = second[name], first[name]
        try:
            yield
        finally:
            for name in names:
                first[name], second[name] = second[name], first[name]

    return apply


def copied(source: str, target: str) -> Apply:
    """All parameters below `target` taken from `source`."""

    @contextmanager
    def apply(pipeline: Pipeline) -> Generator[None]:
        module = module_at(pipeline, target)
        before = module.parameters()
        module.update(module_at(pipeline, source).parameters())
        try:
            yield
        finally:
            module.update(before)

    return apply


def forward(place: str, new: Forward) -> Apply:
    """The module at `place` computes `new(module, original, *args)`."""
    return lambda pipeline: _forwards([module_at(pipeline, place)], new)


def forwards(component: str, paths: str, new: Forward) -> Apply:
    """Every module of a component whose path matches computes `new(module, original, *args)`."""

    def apply(pipeline: Pipeline) -> Any:
        named = pipeline.model.network(component).named_modules()
        found = [module for path, module in named if re.fullmatch(paths, path)]
        assert found, f"{component} has no module at {paths}"
        return _forwards(found, new)

    return apply


def attribute(owner: Any, name: str, change: Callable[[Any], Any]) -> Apply:
    """An attribute of a Python module or class replaced by `change(original)`."""

    @contextmanager
    def apply(_: Pipeline) -> Generator[None]:
        before = vars(owner)[name]
        setattr(owner, name, change(before))
        try:
            yield
        finally:
            setattr(owner, name, before)

    return apply


def setting(place: str, name: str, change: Callable[[Any], Any]) -> Apply:
    """A plain attribute (no parameter) of the module at `place` replaced."""

    @contextmanager
    def apply(pipeline: Pipeline) -> Generator[None]:
        module = module_at(pipeline, place)
        before = getattr(module, name)
        object.__setattr__(module, name, change(before))
        try:
            yield
        finally:
            object.__setattr__(module, name, before)

    return apply


def method(place: str, name: str, new: Callable[..., Any]) -> Apply:
    """A method of the module at `place` replaced by `new(module, *args)`."""

    @contextmanager
    def apply(pipeline: Pipeline) -> Generator[None]:
        module = module_at(pipeline, place)
        vars(module)[name] = partial(new, module)
        try:
            yield
        finally:
            del vars(module)[name]

    return apply


def entry(table: dict[str, Any], key: str, change: Callable[[Any], Any]) -> Apply:
    """An entry of a dict replaced by `change(original)`."""

    @contextmanager
    def apply(_: Pipeline) -> Generator[None]:
        before = table[key]
        table[key] = change(before)
        try:
            yield
        finally:
            table[key] = before

    return apply


def together(*parts: Apply) -> Apply:
    """Several changes at once."""

    @contextmanager
    def apply(pipeline: Pipeline) -> Generator[None]:
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(part(pipeline))
            yield

    return apply


@contextmanager
def _forwards(modules: list[nn.Module], new: Forward) -> Generator[None]:
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        for module in modules:
            kind = type(module)
            changed.append((module, kind))
            object.__setattr__(module, "__class__", _subclass(kind, new))
        yield
    finally:
        for module, kind in reversed(changed):
            object.__setattr__(module, "__class__", kind)


def _subclass(kind: type[nn.Module], new: Forward) -> type[nn.Module]:
    original = kind.__call__  # taken now: whoever records later must not see one call twice

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return new(self, lambda *a, **k: original(self, *a, **k), *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


@dataclass(frozen=True)
class ChangedNoise:
    """Noise with something done to it."""

    noise: RunNoise
    change: Callable[[mx.array], mx.array]

    def first(self) -> mx.array:
        return self.change(self.noise.first())

    def __call__(self, sigma: float, sigma_next: float) -> mx.array:
        return self.change(self.noise(sigma, sigma_next))
