"""What is taken from recorded values: a token, a chunk, parts put together, a picture resized."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from math import isqrt, prod

import numpy as np

from lydite.diff.findings.evidence import ROUNDING, Array, Evidence
from lydite.diff.findings.replay.norm_forms import affine_left, norms
from lydite.diff.findings.replay.norms_and_activations import extra_norm, other_activation
from lydite.diff.findings.replay.relations import with_relation
from lydite.diff.findings.replay.variants import (
    GLANCE,
    Candidate,
    Source,
    allowed,
    apart_of,
    apart_of_port,
    fit_tolerance,
    is_replayable,
    sources,
    told_apart,
)
from lydite.diff.result import Finding

MAX_TILES = 16  # values that one is put together from
CHANGED: dict[str, Callable[[Array], Array]] = {  # of a part that is taken
    "": lambda x: x,
    "exp of ": np.exp,
    "exp of half of ": lambda x: np.exp(x / 2),
}
MAX_OFFSETS = 4096  # places at which a part of a value is looked for


@dataclass(frozen=True)
class Tile:
    """A recorded value as a part of another one."""

    name: str
    box: tuple[slice, ...]

    @property
    def place(self) -> str:
        """The part for people."""
        return "[" + ", ".join(f"{s.start}:{s.stop}" for s in self.box) + "]"


def other_token(e: Evidence) -> Finding | None:
    """One token of each row of a recorded value, but another token, or of another value."""
    if e.kind != "activation" or not e.same_shape or e.port.ndim != 2 or e.port.shape[1] < 8:
        return None
    values = [
        source
        for source in sources(e)
        if source.x.ndim == 3 and source.x.shape[::2] == e.port.shape and source.x.shape[1] > 1
    ]
    limit = fit_tolerance(e)
    for source in values:
        pooled = _pooled(source.own, e.values[1], limit)
        if pooled and _pooled(source.x, e.values[0], limit) != pooled:
            return Finding(
                "other-pooling",
                f"The port is the {pooled} over all tokens of {source.name}, unlike the reference.",
                "Take from the tokens what the reference takes: one of them, or an attention.",
            )
    for source in values:
        right = _tokens(source.x, e.values[0], limit)
        if right is None:
            continue
        for other in (source, *(value for value in values if value is not source)):
            wrong = _tokens(other.own, e.values[1], limit)
            if wrong is None or (wrong == right and other is source):
                continue
            cause = "another-token" if other is source else "another-value"
            found = Finding(
                cause,
                f"The port takes token {_listed(wrong)} of {other.name}, the reference token "
                f"{_listed(right)} of {source.name}{_between(other, source)}.",
                f"Take the reference's token: {_rule(right, source.x.shape[1])}."
                if other is source
                else f"Take it from {source.name}.",
            )
            return with_relation(e, found, other.name, source.name)
    return None


def _between(value: Source, other: Source) -> str:
    """That one value is a norm of the other, in words."""
    size = float(np.linalg.norm(other.x))
    for norm in norms(value.x, -1) if value is not other else ():
        if affine_left(norm.value, other.x, -1)[0] <= 1e-4 * size:
            return f", which is a {norm.name.partition(' with ')[0]} of that: the norm is missing"
    return ""


def _pooled(x: Array, value: Array, limit: float) -> str:
    """How the value is made of all tokens; empty where it is not."""
    for name, pooled in (("mean", x.mean(1)), ("maximum", x.max(1)), ("sum", x.sum(1))):
        if apart_of(value, pooled) <= limit * float(np.linalg.norm(pooled)):
            return name
    return ""


def other_chunk(e: Evidence) -> Finding | None:
    """A part of a recorded value, but another part: the mean and the variance, an offset."""
    if not is_replayable(e, least=16):
        return None
    limit = fit_tolerance(e)
    for source in sources(e):
        axis = _cut_axis(source.x.shape, e.port.shape)
        if axis is None:
            continue
        right = _offset(source.x, e.values[0], axis, limit)
        if right is None:
            continue
        width = e.port.shape[axis]
        theirs = f"the reference {right} to {right + width - 1}"
        for words, function in CHANGED.items():
            wrong = _offset(function(source.own), e.values[1], axis, limit)
            if wrong is None or (wrong == right and not words):
                continue
            return Finding(
                "another-chunk",
                f"The port takes {words}entries {wrong} to {wrong + width - 1} of axis {axis} of "
                f"{source.name}, {theirs}{_cut_off(right, wrong, width, source.x.shape[axis])}.",
                f"Take the entries from {right} on.",
            )
        for first in range(2) if source.x.shape[axis] == 2 * width else ():
            every = source.own.take(np.arange(first, 2 * width, 2), axis)
            if apart_of(e.values[1], every) <= limit * float(np.linalg.norm(every)):
                return Finding(
                    "another-chunk",
                    f"The port takes every second entry of axis {axis} of {source.name} from "
                    f"{first} on (even and odd channels, interleaved), {theirs}.",
                    f"Take the entries from {right} on, one after the other.",
                )
        for other in sources(e):
            if other.name == source.name or other.x.shape != source.x.shape:
                continue
            wrong = _offset(other.own, e.values[1], axis, limit)
            if wrong is not None:
                found = Finding(
                    "another-value",
                    f"The port takes entries {wrong} to {wrong + width - 1} of axis {axis} of "
                    f"{other.name}, {theirs} of {source.name}.",
                    f"Take them from {source.name}: an operation between the two is missing.",
                )
                return with_relation(e, found, other.name, source.name)
    return None


def _cut_off(right: int, wrong: int, width: int, size: int) -> str:
    """That the port leaves out the other end, in words."""
    if {right, wrong} != {0, size - width}:
        return ""
    ends = ("at the end", "at the beginning")
    first, other = ends if wrong == 0 else ends[::-1]
    return f": it drops {size - width} {first}, not {other}"


def other_patches(e: Evidence) -> Finding | None:
    """Tokens made of patches of a picture, or a picture of tokens, in another order."""
    if not is_replayable(e) or e.port.ndim not in (3, 4, 5):
        return None
    for source in sources(e):
        ranks = {source.x.ndim, e.port.ndim}
        if source.x.size != e.port.size or ranks not in ({3, 4}, {3, 5}):
            continue
        told = told_apart(
            e,
            patch_orders(source.x, e.port.shape),
            lambda source=source: patch_orders(source.own, e.port.shape),
            what=f"orders of patches of {source.name}",
        )
        if told is not None:
            return Finding(
                "patch-order",
                f"The port reads the patches of {source.name} as {told.wrong}, the reference as "
                f"{told.right}; {told.leaves}.",
                f"Read them as {told.right}.",
            )
    return None


def other_assembly(e: Evidence) -> Finding | None:
    """Recorded values put together, padded with zeros: in another order, or with another one."""
    if not is_replayable(e) or e.port.ndim < 2:
        return None
    values = [s for s in sources(e) if s.x.ndim == e.port.ndim and s.x.size < e.port.size]
    limit = fit_tolerance(e)
    right = tiles(e.values[0], [(s.name, s.x) for s in values], limit)
    if right is None or len(right) < 2:
        return None
    wrong = tiles(e.values[1], [(s.name, s.own) for s in values], limit)
    if wrong is None:
        return _wrong_tile(e, right)
    changed = [tile for tile in wrong if tile not in right]
    if not changed:
        return None
    if sorted(tile.name for tile in wrong) == sorted(tile.name for tile in right):
        names, order = (list(dict.fromkeys(tile.name for tile in side)) for side in (wrong, right))
        if names == order:
            first = changed[0]
            place = next(tile.place for tile in right if tile.name == first.name)
            return Finding(
                "other-padding",
                f"The port has {first.name} at {first.place}, the reference at {place}.",
                "Check on which side the zeros are added.",
            )
        order = ", ".join(order)
        return Finding(
            "parts-reordered",
            f"The port is put together from the reference's values in another order: at "
            f"{changed[0].place} it has {changed[0].name}.",
            f"Put them together in the order {order}.",
        )
    there = next((tile.name for tile in right if tile.box == changed[0].box), "another value")
    known = {source.name: source.x for source in values}
    words = _multiple(known.get(changed[0].name), known.get(there), limit)
    found = Finding(
        "another-value",
        f"At {changed[0].place} the port has {changed[0].name}, the reference {there}{words}.",
        f"Take {there} there.",
    )
    return with_relation(e, found, changed[0].name, there)


def _multiple(value: Array | None, other: Array | None, limit: float) -> str:
    """That a value is another one times a number, in words."""
    if value is None or other is None or value.shape != other.shape or not other.any():
        return ""
    factor = float((value * other).sum() / (other * other).sum())
    near = apart_of(value, factor * other) <= limit * float(np.linalg.norm(value))
    return f", which is the port's over {factor:.6g}: it is not scaled" if near else ""


def other_resize(e: Evidence) -> Finding | None:
    """A picture enlarged or reduced in another way."""
    if not is_replayable(e) or e.port.ndim != 4:
        return None
    for source in sources(e):
        for axes in ((2, 3), (1, 2)):
            factor = _factor(source.x.shape, e.port.shape, axes)
            if factor is None:
                continue
            told = told_apart(
                e,
                _resized(source.x, axes, factor),
                lambda source=source, axes=axes, factor=factor: _resized(source.own, axes, factor),
                what=f"ways to resize {source.name}",
            )
            if told is not None:
                return Finding(
                    "other-resize",
                    f"The port is {source.name} resized by {told.wrong}, the reference by "
                    f"{told.right}; {told.leaves}.",
                    f"Resize by {told.right}.",
                )
            for other in sources(e) if _is_resized(e, source, axes, factor) else ():
                if other.x.shape != source.x.shape or other.name == source.name:
                    continue
                tried = (next(_resized(x, axes, factor)).value for x in (other.own, other.x))
                seen = e if e.layer is None else e.layer.output
                if min(apart_of_port(e, x) for x in tried) <= allowed(seen):
                    found = Finding(
                        "another-input",
                        f"The port resizes {other.name}, the reference {source.name}.",
                        f"Resize {source.name}: what lies between the two is missing (left out).",
                    )
                    return with_relation(e, found, other.name, source.name)
    return None


def _is_resized(e: Evidence, source: Source, axes: tuple[int, int], factor: int) -> bool:
    """Whether the reference repeats each pixel of a value."""
    return apart_of(e.values[0], next(_resized(source.x, axes, factor)).value) <= allowed(e)


def dropout(e: Evidence) -> Finding | None:
    """Some values are zero and the others larger by one factor: dropout as in training."""
    if not is_replayable(e):
        return None
    for source in (None, *(s for s in sources(e) if s.x.shape == e.port.shape)):
        base = np.zeros_like(e.values[0]) if source is None else source.x
        own = base if source is None else source.own
        right, wrong = e.values[0] - base, e.values[1] - own
        size = float(np.linalg.norm(right))
        if size <= fit_tolerance(e) * float(np.linalg.norm(e.values[0])):
            continue
        # A number that is dropped is exactly zero, or leaves what it is added to as it is.
        gone = np.abs(wrong) <= ROUNDING.get(e.dtype, 0.0) * np.abs(own)
        share = float(gone.mean())
        if not 0.02 < share < 0.95 or float(np.linalg.norm(right[gone])) < 0.1 * size * share:
            continue
        kept = ~gone
        factor = float((wrong[kept] * right[kept]).sum() / (right[kept] ** 2).sum())
        left = float(np.linalg.norm(wrong[kept] - factor * right[kept]))
        if (
            left <= min(e.noise(), 0.2 * e.lost)
            and factor > 1.01
            and abs(factor * (1 - share) - 1) < 0.1
        ):
            where = "the port" if source is None else f"what the port adds to {source.name}"
            return Finding(
                "dropout",
                f"In {where}, {share:.0%} of the numbers are zero, and the others are "
                f"{factor:.4g} × the reference's: dropout as in training.",
                "Switch the model to evaluation: model.eval().",
            )
    return None


def patch_orders(x: Array, shape: tuple[int, ...]) -> Iterator[Candidate]:
    """A picture (b, c, h, w) as tokens (b, n, numbers of a patch) or the reverse, in any order.

    Or the pictures of a video (b, c, frames, h, w).
    """
    to_tokens = x.ndim > 3
    picture, tokens = (x.shape, shape) if to_tokens else (shape, x.shape)
    if picture[0] != tokens[0]:
        return
    frames, (height, width) = picture[2:-2], picture[-2:]
    p = isqrt(prod(picture[2:]) // tokens[1])
    if p < 2 or height % p or width % p or tokens[2] != picture[1] * p * p:
        return
    grid = [*("frame" for _ in frames), "patch row", "patch column"]
    # of the picture after the batch
    axes = ["channel", *grid[:-1], "row", "patch column", "column"]
    whole = (*picture[:2], *frames, height // p, p, width // p, p)
    for outer, inner in product(permutations(grid), permutations(("row", "column", "channel"))):
        words = f"({', '.join(outer)}) of ({', '.join(inner)})"
        order = (0, *(1 + axes.index(name) for name in (*outer, *inner)))
        if to_tokens:
            yield Candidate(words, x.reshape(whole).transpose(order).reshape(shape))
        else:
            split = x.reshape([whole[axis] for axis in order])
            yield Candidate(words, split.transpose(np.argsort(order)).reshape(shape))


def _tokens(x: Array, value: Array, limit: float) -> tuple[int, ...] | None:
    """For each row of the batch the token that the value is."""
    chosen: list[int] = []
    for rows, row in zip(x, value, strict=True):
        apart = np.linalg.norm(rows - row, axis=-1)
        best = int(apart.argmin())
        if apart[best] > limit * float(np.linalg.norm(row)):
            return None
        chosen.append(best)
    return tuple(chosen)


def _rule(tokens: tuple[int, ...], length: int) -> str:
    if set(tokens) == {0}:
        return "the first one"
    if set(tokens) == {length - 1}:
        return "the last one"
    return "that of the end token of each prompt" if len(set(tokens)) > 1 else f"{tokens[0]}"


def _listed(tokens: tuple[int, ...]) -> str:
    return " and ".join(map(str, dict.fromkeys(tokens)))


def _cut_axis(shape: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    """The only axis along which a value is longer than a part of it."""
    if len(shape) != len(part):
        return None
    axes = [axis for axis in range(len(shape)) if shape[axis] != part[axis]]
    return axes[0] if len(axes) == 1 and shape[axes[0]] > part[axes[0]] else None


def _offset(x: Array, value: Array, axis: int, limit: float) -> int | None:
    """Where a part begins; None unless it is a part of x. Padding of it may be zero."""
    shown = np.asarray(value.any(-1, keepdims=True))
    width = value.shape[axis]
    count = min(x.shape[axis] - width + 1, MAX_OFFSETS)
    at = np.unravel_index(
        np.random.default_rng(0).integers(value.size, size=min(GLANCE, value.size)), value.shape
    )
    expected, kept = value[at], shown[(*at[:-1], 0)]
    size = float(np.linalg.norm(expected))
    for offset in range(count):
        moved = tuple(index + offset if a == axis else index for a, index in enumerate(at))
        if float(np.linalg.norm(x[moved] * kept - expected)) > 2 * limit * size:
            continue
        part = x.take(np.arange(offset, offset + width), axis) * shown
        if float(np.linalg.norm(part - value)) <= limit * float(np.linalg.norm(value)):
            return offset
    return None


def tiles(
    value: Array, named: Sequence[tuple[str, Array]], limit: float
) -> tuple[Tile, ...] | None:
    """The recorded values that a value consists of; None where a part of it is none of them."""
    taken = value == 0
    tiles: list[Tile] = []
    while not taken.all():
        if len(tiles) == MAX_TILES:
            return None
        start = np.unravel_index(int(taken.reshape(-1).argmin()), value.shape)
        tile = _tile(value, tuple(map(int, start)), named, limit)
        if tile is None:
            return None
        taken[tile.box] = True
        tiles.append(tile)
    return tuple(tiles)


def _tile(
    value: Array, start: tuple[int, ...], named: Sequence[tuple[str, Array]], limit: float
) -> Tile | None:
    """The largest recorded value that begins here."""
    best, size = None, 0
    for name, x in named:
        if x.size <= size or any(
            a + n > m for a, n, m in zip(start, x.shape, value.shape, strict=True)
        ):
            continue
        box = tuple(slice(a, a + n) for a, n in zip(start, x.shape, strict=True))
        if float(np.linalg.norm(value[box] - x)) <= limit * float(np.linalg.norm(x)):
            best, size = Tile(name, box), x.size
    return best


def _wrong_tile(e: Evidence, right: tuple[Tile, ...]) -> Finding | None:
    """What the cause of the only wrong part is."""
    for tile in right:
        reference, port = (value[tile.box] for value in e.values)
        wrong = float(np.linalg.norm(port - reference))
        if wrong <= fit_tolerance(e) * float(np.linalg.norm(reference)):
            continue
        part = replace(e, reference=reference, port=port, inputs={}, ruled_out=[])
        for hypothesis in (extra_norm, other_activation):
            if (found := hypothesis(part)) is not None:
                return Finding(found.cause, f"At {tile.place}: {found.evidence}", found.fix)
    return None


def _factor(shape: tuple[int, ...], new: tuple[int, ...], axes: tuple[int, int]) -> int | None:
    """By how much both sides of a picture grow."""
    if len(shape) != 4 or any(shape[a] != new[a] for a in range(4) if a not in axes):
        return None
    ratios = {new[a] / shape[a] for a in axes}
    ratio = ratios.pop() if len(ratios) == 1 else 0.0
    return int(ratio) if ratio in (2.0, 3.0, 4.0, 8.0) else None


def _resized(x: Array, axes: tuple[int, int], factor: int) -> Iterator[Candidate]:
    yield Candidate("repeating each pixel", x.repeat(factor, axes[0]).repeat(factor, axes[1]))
    tiles = [factor if axis in axes else 1 for axis in range(x.ndim)]
    yield Candidate("tiling the picture", np.tile(x, tiles))
    spread = np.zeros([n * tile for n, tile in zip(x.shape, tiles, strict=True)])
    spread[tuple(slice(None, None, tile) for tile in tiles)] = x
    yield Candidate("putting zeros between the pixels", spread)
    lines = [list(_interpolations(x.shape[axis], x.shape[axis] * factor)) for axis in axes]
    for (name, rows), (_, columns) in zip(*lines, strict=True):
        y = np.moveaxis(np.tensordot(x, rows, ([axes[0]], [1])), -1, axes[0])
        yield Candidate(name, np.moveaxis(np.tensordot(y, columns, ([axes[1]], [1])), -1, axes[1]))


def _interpolations(size: int, new: int) -> Iterator[tuple[str, Array]]:
    """Matrices (new, size) that interpolate a line of pixels."""
    half = (np.arange(new) + 0.5) * size / new - 0.5
    corners = np.arange(new) * (size - 1) / max(new - 1, 1)
    plain = np.arange(new) * size / new
    for kind, kernel in (("linear", _linear), ("cubic", _cubic)):
        for words, at in (
            ("pixel centres aligned", half),
            ("corners aligned", corners),
            ("the first pixels aligned", plain),
        ):
            yield f"bi{kind} interpolation with {words}", kernel(at, size)
    for words, at in (("pixel centres", half), ("corners", corners)):
        nearest = np.clip(np.floor(at + 0.5).astype(int), 0, size - 1)
        yield f"the nearest pixel with {words} aligned", np.eye(size)[nearest]


def _linear(at: Array, size: int) -> Array:
    return _kernel(at, size, 1, lambda d: np.maximum(1 - np.abs(d), 0))


def _cubic(at: Array, size: int, a: float = -0.75) -> Array:
    def weight(d: Array) -> Array:
        d = np.abs(d)
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return np.where(d <= 1, near, np.where(d < 2, far, 0))

    return _kernel(at, size, 2, weight)


def _kernel(at: Array, size: int, reach: int, weight: Callable[[Array], Array]) -> Array:
    matrix = np.zeros((len(at), size))
    for tap in range(1 - reach, reach + 1):
        source = np.floor(at).astype(int) + tap
        np.add.at(matrix, (np.arange(len(at)), np.clip(source, 0, size - 1)), weight(at - source))
    return matrix
