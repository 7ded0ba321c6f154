"""Weight maps as tables: rename, alias, convert, split, join, fill, drop with a reason.

A name of the file that no rule mentions keeps its name. `resolve` turns a table and the names of a
file into one recipe per parameter; a name that fills no parameter, or two, is surplus.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np

from lydite.core.names import Slots, compiled, fill, match
from lydite.weights.layout import Array, Layout, Shape


@dataclass(frozen=True)
class Rename:
    """The tensor is stored under another name, and never under its own."""

    source: str
    target: str


@dataclass(frozen=True)
class Alias:
    """Another name of the tensor: in place of its own or, as a second copy, beside it."""

    source: str
    target: str


@dataclass(frozen=True)
class Split:
    """One stored tensor holds several parameters, stacked along its first axis.

    Equal parts, or `shares`: how many of the equal parts each target takes.
    """

    source: str
    targets: tuple[str, ...]
    shares: tuple[int, ...] = ()


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


Rule = Rename | Alias | Split | Join | Convert | Fill | Drop


@dataclass(frozen=True)
class Recipe:
    """How one parameter is made from tensors of the file."""

    target: str
    sources: tuple[str, ...]
    part: tuple[int, int, int] = (0, 1, 1)  # of equal parts along the first axis: from, to, count
    layout: Layout | None = None

    def shape(self, stored: Sequence[Shape]) -> Shape:
        """The parameter's shape, from the stored shapes alone; ValueError when they do not fit."""
        shape = stored[0]
        if len(stored) > 1:
            if any(not other or other[1:] != shape[1:] for other in stored):
                raise ValueError(f"cannot be stacked: {list(stored)}")
            shape = (sum(other[0] for other in stored), *shape[1:])
        start, end, count = self.part
        if count > 1:
            if not shape or shape[0] % count:
                raise ValueError(f"expected rows divisible by {count}, found {shape}")
            shape = ((end - start) * (shape[0] // count), *shape[1:])
        return self.layout.shape(shape) if self.layout else shape

    def build(self, stored: Sequence[Array]) -> Array:
        """The parameter's value."""
        array = stored[0] if len(stored) == 1 else np.concatenate(list(stored))
        start, end, count = self.part
        if count > 1:
            rows = array.shape[0] // count
            array = array[start * rows : end * rows]
        return self.layout.forward(array) if self.layout else array


@dataclass(frozen=True)
class Resolution:
    """The result of applying a table to the names of a file."""

    recipes: Mapping[str, Recipe]  # by target
    dropped: Mapping[str, str]  # source -> reason
    copies: Mapping[str, str]  # source -> the source it repeats
    surplus: Mapping[str, str]  # source -> why it fills no parameter
    aliases: frozenset[Alias]  # those that the file uses


def resolve(names: Iterable[str], rules: Sequence[Rule]) -> Resolution:
    """Apply a table to the names of a file."""
    return _resolve(tuple(sorted(names)), tuple(rules))


def stored_names(
    target: str, rules: Sequence[Rule], aliases: frozenset[Alias] = frozenset()
) -> tuple[str, ...]:
    """The names under which a file that uses these aliases stores a parameter."""
    for rule in rules:
        if isinstance(rule, Convert | Fill | Drop) or (
            isinstance(rule, Alias) and rule not in aliases
        ):
            continue
        targets = rule.targets if isinstance(rule, Split) else (rule.target,)
        sources = rule.sources if isinstance(rule, Join) else (rule.source,)
        for pattern in targets:
            if (slots := match(pattern, target)) is not None:
                return tuple(fill(source, slots) for source in sources)
    return (target,)


def filling(target: str, rules: Sequence[Rule]) -> Fill | None:
    """The rule that supplies a parameter the file leaves out, if there is one."""
    for rule in rules:
        if isinstance(rule, Fill) and match(rule.target, target) is not None:
            return rule
    return None


def layout_of(target: str, rules: Sequence[Rule]) -> Layout | None:
    """How the parameter is stored, when it is not stored as it is."""
    for rule in rules:
        if isinstance(rule, Convert) and match(rule.target, target) is not None:
            return rule.layout
    return None


@lru_cache(maxsize=4)  # one load calls it several times
def _resolve(names: tuple[str, ...], rules: tuple[Rule, ...]) -> Resolution:
    recipes: dict[str, Recipe] = {}
    dropped: dict[str, str] = {}
    copies: dict[str, str] = {}
    surplus: dict[str, str] = {}
    aliases: dict[str, tuple[Alias, str]] = {}
    matchers = [
        (rule, compiled(source).fullmatch)
        for rule in rules
        if not isinstance(rule, Convert | Fill)
        for source in (rule.sources if isinstance(rule, Join) else (rule.source,))
    ]
    for name in names:
        matches = [
            (rule, found.groupdict()) for rule, fit in matchers if (found := fit(name)) is not None
        ]
        rule, slots = matches[0] if matches else (None, {})
        if len(matches) > 1:
            surplus[name] = "two rules of the table match it"
        elif isinstance(rule, Drop):
            dropped[name] = rule.because
        elif isinstance(rule, Alias):
            aliases[name] = rule, fill(rule.target, slots)
        elif rule is None and (stored := stored_names(name, rules)) != (name,):
            surplus[name] = f"in this layout it is stored as {', '.join(stored)}"
        else:
            for recipe in _recipes(name, rule, slots):
                taken = recipes.setdefault(recipe.target, recipe)
                if taken.sources != recipe.sources:
                    surplus[name] = f"{recipe.target} is already stored as {taken.sources[0]}"
    for name, (_, target) in aliases.items():  # last, when it is known which targets are taken
        original = recipes.setdefault(target, Recipe(target, (name,))).sources[0]
        if original != name:
            copies[name] = original
    converts = [rule for rule in rules if isinstance(rule, Convert)]
    recipes = {
        target: replace(recipe, layout=layout_of(target, converts))
        for target, recipe in recipes.items()
    }
    used = frozenset(alias for alias, _ in aliases.values())
    return Resolution(recipes, dropped, copies, surplus, used)


def _recipes(name: str, rule: Rule | None, slots: Slots) -> list[Recipe]:
    if isinstance(rule, Split):
        ends = list(accumulate(rule.shares or (1,) * len(rule.targets)))
        return [
            Recipe(fill(target, slots), (name,), (start, end, ends[-1]))
            for target, start, end in zip(rule.targets, [0, *ends], ends, strict=False)
        ]
    if isinstance(rule, Join):
        sources = tuple(fill(source, slots) for source in rule.sources)
        return [Recipe(fill(rule.target, slots), sources)]
    return [Recipe(fill(rule.target, slots) if isinstance(rule, Rename) else name, (name,))]
