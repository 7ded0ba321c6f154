"""What all replayed operations share: recorded sources, candidates, and when a variant is told."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from math import inf, isfinite, prod

import numpy as np

from lydite.diff.findings.evidence import FEW, Array, Evidence, Recorded, comparable

SHARE = 0.02  # of the error that a variant may leave
LEAST = 1e-3  # of the value that it may leave in any case: other operations come as close as 4e-3
CLOSER = 3.0  # times the least: what other variants may leave that cannot be told apart from it
MAX_SOURCES = 300  # recorded values that an operation may have taken
MAX_VALUES = 2**22  # of a value that is computed again
GLANCE = 256  # values tried first
MARKS = 97  # numbers that show whether two values are one


@dataclass(frozen=True)
class Candidate:
    """A variant of an operation and what it gives."""

    name: str
    value: Array


@dataclass(frozen=True)
class Told:
    """Which variant the reference is, which one the port, and the error that this leaves."""

    right: str
    wrong: str
    leaves: str


@dataclass(frozen=True, eq=False)
class Source:
    """A recorded value in float64, and what the port has in its place."""

    name: str
    x: Array
    _port: Callable[[], Array | None]
    is_input: bool = False
    grid: tuple[int, ...] | None = None  # height and width of a picture that is read as tokens

    @property
    def is_known(self) -> bool:
        """Whether the port has recorded it."""
        return self._port() is not None

    @cached_property
    def own(self) -> Array:
        """The port's value; the reference's where the port has none of that shape."""
        value = self._port()
        if value is None or value.shape != self.x.shape:
            return self.x
        return comparable(value)[0].astype(np.float64)


@dataclass(frozen=True, eq=False)
class Replayed:
    """A layer computed again from its recorded input, at some rows or pixels of its output."""

    what: str
    source: Source
    output: Evidence
    apply: Callable[[Array], Array]
    variants: Callable[[Array], Iterator[Candidate]]


def is_replayable(e: Evidence, *, least: int = 32) -> bool:
    """Whether a value is a floating-point result of a size that can be computed many times."""
    size = e.port.size
    return e.same_shape and e.kind == "activation" and least <= size <= MAX_VALUES and e.variety > 5


def inputs_of(e: Evidence) -> Iterator[Source]:
    """The inputs of the module whose output is wrong, also those that the port does not have."""
    for slot, (right, own) in e.inputs.items():
        if right.size:
            yield _source(f"{e.name} [{slot}]", right, lambda own=own: own)
    for recorded in islice(e.before(), MAX_SOURCES):
        path, _, slot = recorded.name.partition(" [")
        if path == e.name and slot.startswith("in") and slot.rstrip("]") not in e.inputs:
            yield from _parts(recorded, _batches(recorded.value, e.port))


def sources(e: Evidence) -> Iterator[Source]:
    """Recorded values of the reference that the operation may have taken, each array once.

    Of a batch that the port runs in parts, each part. Tokens of a picture in the picture's axes,
    and the reverse.
    """
    seen: set[tuple[tuple[int, ...], bytes]] = set()
    inputs = (
        Recorded(f"{e.name} [{slot}]", right, lambda own=own: own)
        for slot, (right, own) in e.inputs.items()
    )
    for recorded in (*inputs, *islice(e.before(), MAX_SOURCES)):
        shape = recorded.value.shape
        recorded = _in_shape(recorded, e.port.shape)
        value = recorded.value
        grid = shape[2:] if len(shape) == 4 and value.ndim == 3 else None
        count = _batches(value, e.port) if value.shape[1:] == e.port.shape[1:] else 1
        for part in _parts(recorded, count, grid):
            if part.x.size and (part.x.shape, mark(part.x)) not in seen:
                seen.add((part.x.shape, mark(part.x)))
                yield part


def _batches(value: Array, port: Array) -> int:
    """How many batches of the port a value holds."""
    if value.ndim != port.ndim or not value.ndim:
        return 1
    count, rest = divmod(len(value), len(port))
    return count if count > 1 and not rest else 1


def _parts(recorded: Recorded, count: int, grid: tuple[int, ...] | None = None) -> Iterator[Source]:
    """A recorded value, or the parts of its batch."""
    value = recorded.value
    for row, part in enumerate(np.split(value, count) if count > 1 else [value]):
        number = "" if count == 1 else f" (part {row} of the batch)"
        own = recorded.own if count == 1 else _part_of(recorded.own, row, count)
        yield _source(recorded.name + number, part, own, recorded.is_input, grid)


def mark(value: Array) -> bytes:
    """Numbers from all over a value: two different ones may begin with the same padding."""
    flat = value.reshape(-1)
    return flat[:: max(1, flat.size // MARKS)].tobytes() + flat[-1:].tobytes()


def told_apart(
    e: Evidence,
    tried: Iterable[Candidate],
    own: Callable[[], Iterable[Candidate]] | None = None,
    *,
    reference_is: str | None = None,
    what: str = "",
) -> Told | None:
    """The variants that give the reference's value and the port's.

    `own` are the same variants computed from the port's inputs, which keep the rounding of
    earlier operations out of it. Where only the reference's variant is known, `what` is ruled out.
    """
    reference = e.values[0]
    tried = list(tried)
    if not tried:
        return None
    lefts = [(c.name, apart_of(reference, c.value)) for c in tried]
    right = reference_is if reference_is is not None else simplest(lefts)
    if dict(lefts)[right] > allowed(e):
        return None
    used = [(c.name, apart_of_port(e, c.value)) for c in (own() if own else tried)]
    if own:  # a port that starts from other numbers is nearer to one of the two
        lefts_of = {c.name: apart_of_port(e, c.value) for c in tried}
        used = [(name, min(left, lefts_of.get(name, inf))) for name, left in used]
    wrong = simplest(used, like=right)
    left = dict(used)[wrong]
    seen = e if e.layer is None else e.layer.output
    if left <= allowed(seen) and right != wrong:
        return Told(right, wrong, seen.leaves(left))
    if what and left > allowed(seen):
        e.ruled_out.append(f"{len(tried)} {what}")
    return None


def allowed(e: Evidence) -> float:
    """The norm that a variant may leave of the error."""
    if e.layer is not None:  # only the reference's value is known
        return e.noise()
    return max(min(SHARE * e.lost, LEAST * max(e.norms)), min(e.noise(), e.lost / 4))


def fit_tolerance(e: Evidence) -> float:
    """The relative error that a fitted form may leave."""
    return max(1e-4, FEW * e.rounding)


def apart_of(value: Array, other: Array) -> float:
    """‖value − other‖; infinite where the shapes differ or a value is not finite."""
    if value.shape != other.shape:
        return inf
    left = float(np.linalg.norm(value - other))
    return left if isfinite(left) else inf


def apart_of_port(e: Evidence, value: Array) -> float:
    """How far a variant is from the port's value, or from what the layer behind it gave there."""
    if e.layer is None:
        return apart_of(e.values[1], value)
    if value.shape != e.port.shape:
        return inf
    return apart_of(e.layer.output.values[1], e.layer.apply(value))


def simplest(lefts: list[tuple[str, float]], like: str = "") -> str:
    """Of the variants that leave about the least, the one most like another, else the first.

    Many variants differ only where the value does not show it: eps in a row of large variance.
    """
    least = min(left for _, left in lefts)
    near = [name for name, left in lefts if left <= CLOSER * least]
    words = like.split(" with ")
    return max(near, key=lambda name: (name == like, _common(name.split(" with "), words)))


def nearest(value: Array, named: dict[str, Array], tolerance: float = 3e-3) -> str | None:
    """The name of the array that this one is, up to rounding of a fit; None if two could be it."""
    size = max(float(np.linalg.norm(value)), 1e-300)
    ranked = sorted(
        (float(np.linalg.norm(value - other)) / size, at) for at, other in enumerate(named.values())
    )
    if not ranked or not ranked[0][0] < tolerance:
        return None
    if len(ranked) > 1 and tolerance > 3e-3 and ranked[1][0] < CLOSER * ranked[0][0]:
        return None
    return list(named)[ranked[0][1]]


def nearest_first(found: Iterable[tuple[str, Array]], name: str) -> list[tuple[str, Array]]:
    """Parameters, those first that share the most modules with the value of this name."""
    around = set(accumulate(re.split(r"(?<=[./])", name)))
    return sorted(found, key=lambda entry: -sum(entry[0].startswith(each) for each in around))


def _common(parts: list[str], others: list[str]) -> int:
    return sum(part in others for part in parts)


def _source(
    name: str,
    value: Array,
    own: Callable[[], Array | None],
    is_input: bool = False,
    grid: tuple[int, ...] | None = None,
) -> Source:
    (array,) = comparable(value)
    return Source(name, array.astype(np.float64), own, is_input, grid)


def _in_shape(recorded: Recorded, shape: tuple[int, ...]) -> Recorded:
    """Tokens (batch, height × width, channels) with the axes (batch, channels, height, width).

    And the reverse; and without or with axes of one entry.
    """
    old = recorded.value.shape
    if old == shape:
        return recorded
    words, change = "", lambda x: x
    if len(shape) == 4 and old == (shape[0], shape[2] * shape[3], shape[1]):
        words, change = " as a picture", lambda x: x.swapaxes(1, 2).reshape(shape)
    elif len(shape) == 3 and len(old) > 3 and _tokens_of(old) == shape:
        words, change = " as tokens", lambda x: x.reshape(*old[:2], -1).swapaxes(1, 2)
    elif len(shape) == len(old) == 3 and old == (shape[0], shape[2], shape[1]):
        words, change = " as tokens", lambda x: x.swapaxes(1, 2)
    elif len(old) > 3 and shape == (old[0], *old[2:], old[1]):
        words, change = " with channels last", lambda x: np.moveaxis(x, 1, -1)
    elif len(old) > 3 and shape == (old[0], old[-1], *old[1:-1]):
        words, change = " with channels first", lambda x: np.moveaxis(x, -1, 1)
    elif [n for n in old if n != 1] == [n for n in shape if n != 1]:
        change = lambda x: x.reshape(shape)  # noqa: E731
    else:
        return recorded

    def own() -> Array | None:
        value = recorded.own()
        return None if value is None or value.shape != old else change(value)

    value = change(recorded.value)
    return Recorded(f"{recorded.name}{words}", value, own, recorded.is_input)


def _tokens_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[0], prod(shape[2:]), shape[1]


def _part_of(own: Callable[[], Array | None], row: int, count: int) -> Callable[[], Array | None]:
    def part() -> Array | None:
        value = own()
        return np.split(value, count)[row] if value is not None and not len(value) % count else None

    return part
