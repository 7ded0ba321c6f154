"""Weight maps as tables: rename, alias, convert, split, join, fill, drop with a reason.

In the names of a table `{i}` and `{j}` stand for a number, any other `{word}` for one or more
characters, `*` for anything. A name of the file that no rule mentions keeps its name. `resolve`
turns a table and the names of a file into one recipe per parameter; a name that fills no parameter,
or two, is surplus.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

Slots = dict[str, str]
_TOKEN = re.compile(r"\{(\w+)\}|\*")


def match(pattern: str, name: str) -> Slots | None:
    """What the placeholders of `pattern` stand for in `name`, or None when it does not fit."""
    matched = compiled(pattern).fullmatch(name)
    return matched.groupdict() if matched else None


def fill(pattern: str, slots: Mapping[str, str]) -> str:
    """`pattern` with its placeholders replaced."""
    return _TOKEN.sub(lambda token: slots[token.group(1)] if token.group(1) else "*", pattern)


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern as a regular expression, for callers that match it often."""
    parts: list[str] = []
    position = 0
    for token in _TOKEN.finditer(pattern):
        parts.append(re.escape(pattern[position : token.start()]))
        word = token.group(1)
        if word is None:
            parts.append(".*")
        else:
            parts.append(f"(?P<{word}>{'[0-9]+' if word in {'i', 'j'} else '.+'})")
        position = token.end()
    parts.append(re.escape(pattern[position:]))
    return re.compile("".join(parts), re.DOTALL)


Array = NDArray[Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How a tensor of the file becomes a parameter of the model, and back."""

    name: str
    forward: Callable[[Array], Array]
    inverse: Callable[[Array], Array]
    shape: Callable[[Shape], Shape]  # raises ValueError when the rank or size does not fit
    rows: bool = False  # moves whole rows only, so that it works on quantized arrays too


def _permutation(name: str, axes: tuple[int, ...]) -> Layout:
    back = tuple(int(axis) for axis in np.argsort(axes))

    def shape(stored: Shape) -> Shape:
        if len(stored) != len(axes):
            raise ValueError(f"expected {len(axes)} dimensions, found {stored}")
        return tuple(stored[axis] for axis in axes)

    return Layout(name, lambda x: x.transpose(axes), lambda x: x.transpose(back), shape)


def _swap(x: Array) -> Array:
    half = x.shape[0] // 2
    return np.concatenate([x[half:], x[:half]])


def _even_rows(stored: Shape) -> Shape:
    if not stored or stored[0] % 2:
        raise ValueError(f"expected an even number of rows, found {stored}")
    return stored


def _one_by_one(stored: Shape) -> Shape:
    if len(stored) != 4 or stored[2:] != (1, 1):
        raise ValueError(f"expected (O, I, 1, 1), found {stored}")
    return stored[:2]


# A 2-d convolution's weight: torch's channels-first to MLX's channels-last.
OIHW_TO_OHWI = _permutation("oihw_to_ohwi", (0, 2, 3, 1))


def _conv_or_linear(found: Shape) -> Shape:
    return OIHW_TO_OHWI.shape(found) if len(found) == 4 else found


# A projection that is a 1×1 convolution in some models and a linear in others.
CONV_OR_LINEAR = Layout(
    "conv_or_linear",
    forward=lambda x: OIHW_TO_OHWI.forward(x) if x.ndim == 4 else x,
    inverse=lambda x: OIHW_TO_OHWI.inverse(x) if x.ndim == 4 else x,
    shape=_conv_or_linear,
)

# A matrix stored (in, out).
TRANSPOSE = _permutation("transpose", (1, 0))

# A 1×1 convolution that we run as a linear.
CONV1X1_TO_LINEAR = Layout(
    "conv1x1_to_linear",
    forward=lambda x: x.reshape(x.shape[:2]),
    inverse=lambda x: x.reshape((*x.shape, 1, 1)),
    shape=_one_by_one,
)


def _matrix(found: Shape) -> Shape:
    if len(found) != 2:
        raise ValueError(f"expected 2 dimensions, found {found}")
    return found


def _one_by_one_last(found: Shape) -> Shape:
    if len(found) != 4 or found[1:3] != (1, 1):
        raise ValueError(f"expected (O, 1, 1, I), found {found}")
    return found[0], found[3]


# The same in MLX's order of axes; and the other way round, a linear that we run as a convolution.
MLX_CONV1X1_TO_LINEAR = Layout(
    "mlx_conv1x1_to_linear",
    forward=lambda x: x.reshape(x.shape[0], x.shape[-1]),
    inverse=lambda x: x[:, None, None],
    shape=_one_by_one_last,
)
LINEAR_TO_CONV1X1 = Layout(
    "linear_to_conv1x1",
    forward=lambda x: x[:, None, None],
    inverse=lambda x: x.reshape(x.shape[0], x.shape[-1]),
    shape=lambda found: (_matrix(found)[0], 1, 1, found[1]),
)
# A table stored without the axis of the batch.
ADD_BATCH = Layout(
    "add_batch",
    forward=lambda x: x[None],
    inverse=lambda x: x[0],
    shape=lambda found: (1, *_matrix(found)),
)


def _present(x: Array) -> Array:
    return x[:, :, -1].transpose(0, 2, 3, 1)


def _with_past(x: Array) -> Array:
    present = x.transpose(0, 3, 1, 2)[:, :, None]
    past = np.zeros((*present.shape[:2], x.shape[1] - 1, *present.shape[3:]), x.dtype)
    return np.concatenate([past, present], axis=2)


def _cube(found: Shape) -> Shape:
    if len(found) != 5 or not 0 < found[2] == found[3] == found[4]:
        raise ValueError(f"expected (O, I, K, K, K), found {found}")
    return (found[0], found[3], found[4], found[1])


def _cube_last(found: Shape) -> Shape:
    if len(found) != 5 or not 0 < found[1] == found[2] == found[3]:
        raise ValueError(f"expected (O, K, K, K, I), found {found}")
    return (found[0], *found[2:])


def _per_channel(axes: int) -> Layout:
    ones = (1,) * axes

    def shape(found: Shape) -> Shape:
        if len(found) != axes + 1 or found[1:] != ones:
            raise ValueError(f"expected {('C', *ones)}, found {found}")
        return found[:1]

    return Layout(
        f"per_channel_{axes}", lambda x: x.reshape(-1), lambda x: x.reshape(-1, *ones), shape
    )


# A causal 3-d convolution that we run on single frames: of its kernel (O, I, frames, H, W) the
# slice for the present frame, channels last. Saved again, the slices for the past are zero.
PRESENT_FRAME = Layout("present_frame", forward=_present, inverse=_with_past, shape=_cube)

# The same in MLX's order of axes.
MLX_PRESENT_FRAME = Layout(
    "mlx_present_frame",
    forward=lambda x: x[:, -1],
    inverse=lambda x: _with_past(x).transpose(0, 2, 3, 4, 1),
    shape=_cube_last,
)

# One number per channel, stored with axes to broadcast over frames and positions.
PER_CHANNEL_2D = _per_channel(2)
PER_CHANNEL_3D = _per_channel(3)

# Rows stored (shift, scale) where the model reads (scale, shift); its own inverse.
SWAP_HALVES = Layout("swap_halves", forward=_swap, inverse=_swap, shape=_even_rows, rows=True)


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
    """Several stored tensors are one parameter, side by side along an axis."""

    sources: tuple[str, ...]
    target: str
    axis: int = 0


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
    axis: int = 0  # along which several tensors are joined

    def shape(self, stored: Sequence[Shape]) -> Shape:
        """The parameter's shape, from the stored shapes alone; ValueError when they do not fit."""
        shape = stored[0]
        if len(stored) > 1:
            before, after = slice(self.axis), slice(self.axis + 1, None)
            others = {(len(other), other[before], other[after]) for other in stored}
            if len(others) > 1 or len(shape) <= self.axis:
                raise ValueError(f"cannot be joined: {list(stored)}")
            total = sum(other[self.axis] for other in stored)
            shape = (*shape[before], total, *shape[after])
        start, end, count = self.part
        if count > 1:
            if not shape or shape[0] % count:
                raise ValueError(f"expected rows divisible by {count}, found {shape}")
            shape = ((end - start) * (shape[0] // count), *shape[1:])
        return self.layout.shape(shape) if self.layout else shape

    def build(self, stored: Sequence[Array]) -> Array:
        """The parameter's value."""
        array = stored[0] if len(stored) == 1 else np.concatenate(list(stored), axis=self.axis)
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
        return [Recipe(fill(rule.target, slots), sources, axis=rule.axis)]
    return [Recipe(fill(rule.target, slots) if isinstance(rule, Rename) else name, (name,))]
