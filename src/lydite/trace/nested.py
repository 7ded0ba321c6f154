"""The arrays inside a module's inputs and outputs, each under its slot."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lydite.trace.arrays import is_array

Leaf = Callable[[str, Any], Any]  # slot and array to the array that replaces it


def map_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], leaf: Leaf
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments as in.0, in.1 …, the others as in.NAME."""
    return (
        tuple(_mapped(f"in.{index}", value, leaf) for index, value in enumerate(args)),
        {name: _mapped(f"in.{name}", value, leaf) for name, value in kwargs.items()},
    )


def map_outputs(value: Any, leaf: Leaf) -> Any:
    """One output as out; of several the first as out, then out.1 …, or out.NAME where named."""

    def first_is_out(slot: str, array: Any) -> Any:
        return leaf("out" if slot == "out.0" else slot, array)

    return _mapped("out", value, first_is_out)


def _mapped(slot: str, value: Any, leaf: Leaf) -> Any:
    """The value with every array replaced; the same object when none is."""
    if is_array(value):
        return leaf(slot, value)
    items = dict(_items(value))
    changed: dict[Any, Any] = {}
    for key, item in items.items():
        new = _mapped(f"{slot}.{key}", item, leaf)
        if new is not item:
            changed[key] = new
    return _rebuilt(value, items, changed) if changed else value


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if callable(value):
        return  # a module passed as an argument: MLX modules are dicts of their weights
    if isinstance(value, Mapping):
        yield from value.items()
    elif names := _fields(value):
        yield from zip(names, value, strict=True)
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name)


def _fields(value: Any) -> tuple[str, ...]:
    """The names of a NamedTuple's items."""
    return getattr(value, "_fields", ()) if isinstance(value, tuple) else ()


def _rebuilt(value: Any, items: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    merged = {**items, **changed}
    if _fields(value):
        return type(value)(*merged.values())
    if isinstance(value, list | tuple):
        return type(value)(merged.values())
    new = copy.copy(value)
    for key, item in changed.items():
        if isinstance(value, Mapping):
            new[key] = item  # pyright: ignore[reportIndexIssue]
        else:
            object.__setattr__(new, key, item)  # the dataclass may be frozen
    return new
