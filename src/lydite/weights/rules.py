"""Weight maps as tables: rename, convert, split, join, fill, drop with a reason.

A name of the file that no rule mentions keeps its name; one that two rules claim is a mistake in
the table. `resolve` turns a table and the names of a file into one recipe per parameter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lydite.core.names import Slots, fill, match
from lydite.weights.layout import Array, Layout, Shape


@dataclass(frozen=True)
class Rename:
    """The tensor is stored under another name."""

    source: str
    target: str


@dataclass(frozen=True)
class Split:
    """One stored tensor holds several parameters, stacked along its first axis."""

    source: str
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Join:
    """Several stored tensors are one parameter, stacked along the first axis."""

    sources: tuple[str, ...]
    target: str


@dataclass(frozen=True)
class Convert:
    """The parameter is stored in another layout. Names the target, after any renaming."""

    target: str
    layout: Layout


@dataclass(frozen=True)
class Fill:
    """A parameter that may be absent from the file because its value is known."""

    target: str
    make: Callable[[Shape], Array]
    because: str


@dataclass(frozen=True)
class Drop:
    """A stored tensor the model does not use."""

    source: str
    because: str


Rule = Rename | Split | Join | Convert | Fill | Drop


@dataclass(frozen=True)
class Recipe:
    """How one parameter is made from tensors of the file."""

    target: str
    sources: tuple[str, ...]
    part: tuple[int, int] = (0, 1)  # which of how many equal parts along the first axis
    layout: Layout | None = None

    def shape(self, stored: Sequence[Shape]) -> Shape:
        """The parameter's shape, from the stored shapes alone; ValueError when they do not fit."""
        shape = stored[0]
        if len(stored) > 1:
            if any(not other or other[1:] != shape[1:] for other in stored):
                raise ValueError(f"cannot be stacked: {list(stored)}")
            shape = (sum(other[0] for other in stored), *shape[1:])
        count = self.part[1]
        if count > 1:
            if not shape or shape[0] % count:
                raise ValueError(f"expected rows divisible by {count}, found {shape}")
            shape = (shape[0] // count, *shape[1:])
        return self.layout.shape(shape) if self.layout else shape

    def build(self, stored: Sequence[Array]) -> Array:
        """The parameter's value."""
        array = stored[0] if len(stored) == 1 else np.concatenate(list(stored))
        index, count = self.part
        if count > 1:
            rows = array.shape[0] // count
            array = array[index * rows : (index + 1) * rows]
        return self.layout.forward(array) if self.layout else array


@dataclass(frozen=True)
class Resolution:
    """Every name of a file: part of a recipe, dropped, or claimed by a target already taken."""

    recipes: Mapping[str, Recipe]
    dropped: Mapping[str, str]  # source -> reason
    surplus: Mapping[str, str]  # source -> why it has no place


def resolve(names: Iterable[str], rules: Sequence[Rule]) -> Resolution:
    """Apply a table to the names of a file."""
    recipes: dict[str, Recipe] = {}
    dropped: dict[str, str] = {}
    surplus: dict[str, str] = {}
    for name in sorted(names):
        rule, slots = _claim(name, rules)
        if isinstance(rule, Drop):
            dropped[name] = rule.because
            continue
        for recipe in _recipes(name, rule, slots):
            taken = recipes.get(recipe.target)
            if taken is None:
                recipes[recipe.target] = replace(recipe, layout=_layout(recipe.target, rules))
            elif taken.sources != recipe.sources:  # equal when a Join meets its second source
                surplus[name] = f"{recipe.target} is already stored as {taken.sources[0]}"
    return Resolution(recipes, dropped, surplus)


def stored_names(target: str, rules: Sequence[Rule]) -> tuple[str, ...]:
    """Where the table expects a parameter in the file: what to call it when it is missing."""
    for rule in rules:
        if isinstance(rule, Rename) and (slots := match(rule.target, target)) is not None:
            return (fill(rule.source, slots),)
        if isinstance(rule, Join) and (slots := match(rule.target, target)) is not None:
            return tuple(fill(source, slots) for source in rule.sources)
        if isinstance(rule, Split):
            for pattern in rule.targets:
                if (slots := match(pattern, target)) is not None:
                    return (fill(rule.source, slots),)
    return (target,)


def filling(target: str, rules: Sequence[Rule]) -> Fill | None:
    """The rule that supplies a parameter the file leaves out, if there is one."""
    for rule in rules:
        if isinstance(rule, Fill) and match(rule.target, target) is not None:
            return rule
    return None


def _claim(name: str, rules: Sequence[Rule]) -> tuple[Rule | None, Slots]:
    claims: list[tuple[Rule, Slots]] = []
    for rule in rules:
        sources: tuple[str, ...]
        if isinstance(rule, Rename | Split | Drop):
            sources = (rule.source,)
        elif isinstance(rule, Join):
            sources = rule.sources
        else:
            continue
        for source in sources:
            if (slots := match(source, name)) is not None:
                claims.append((rule, slots))
                break
    if len(claims) > 1:
        raise ValueError(f"{name} is claimed by two rules: {claims[0][0]} and {claims[1][0]}")
    return claims[0] if claims else (None, {})


def _recipes(name: str, rule: Rule | None, slots: Slots) -> list[Recipe]:
    if isinstance(rule, Split):
        count = len(rule.targets)
        return [
            Recipe(fill(target, slots), (name,), (index, count))
            for index, target in enumerate(rule.targets)
        ]
    if isinstance(rule, Join):
        sources = tuple(fill(source, slots) for source in rule.sources)
        return [Recipe(fill(rule.target, slots), sources)]
    return [Recipe(fill(rule.target, slots) if isinstance(rule, Rename) else name, (name,))]


def _layout(target: str, rules: Sequence[Rule]) -> Layout | None:
    for rule in rules:
        if isinstance(rule, Convert) and match(rule.target, target) is not None:
            return rule.layout
    return None
