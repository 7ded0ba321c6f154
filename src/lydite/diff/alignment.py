"""Names that share nothing: paired by order, shape and content."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from math import inf, log10, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.axes import best_fit, possible_fits
from lydite.diff.names import close_stats, tokens
from lydite.diff.templates import Blocks
from lydite.trace.events import Event, Stats
from lydite.trace.statistics import measure
from lydite.trace.store import Trace

CLOSE = 0.3  # relative error below which content speaks for a pair
ENOUGH = 1.2  # score from which two names are taken for one place
EQUAL = 1e-2  # relative error below which two values are one, in whatever order they come
MOST_VALUES = 2**22  # larger values are judged by their statistics alone
KEPT = 32  # values held while they are compared with others


def align(
    reference: Trace,
    port: Trace,
    free: Sequence[str],
    left: Sequence[str],
    known: Mapping[str, tuple[str, ...]],
) -> dict[str, str]:
    """Port name -> reference name, both in order of execution, by the best total score.

    Equal values come first, and in as many orders as they need: two streams may run either way
    round. Then values that are merely close, or names alike, in what room is left.
    """
    theirs, ours = first_events(reference, free), first_events(port, left)
    free, left = list(theirs), list(ours)
    scores, equal = _scores(reference, port, theirs, ours, Blocks(known))
    found: dict[str, str] = {}
    while path := _best_path(np.where(equal, scores, 0.0)):
        for row, column in path:
            scores[row], scores[:, column] = 0.0, 0.0
            found[left[row]] = free[column]
    blocks = Blocks({**known, **{name: (ref,) for name, ref in found.items()}})
    for row, column in np.argwhere(scores > 0):
        if not blocks.allow(left[row], free[column]):
            scores[row, column] = 0.0
    return found | {left[row]: free[column] for row, column in _best_path(scores)}


def _scores(
    reference: Trace,
    port: Trace,
    theirs: Mapping[str, Event],
    ours: Mapping[str, Event],
    blocks: Blocks,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The score of every port value with every reference value, and where they are equal."""
    scores = np.zeros((len(ours), len(theirs)))
    equal = np.zeros(scores.shape, bool)
    by_size: dict[int, list[tuple[int, Event]]] = defaultdict(list)
    for column, event in enumerate(theirs.values()):
        by_size[prod(event.shape)].append((column, event))
    look = Look(Values(reference), Values(port))
    for row, event in enumerate(ours.values()):
        for column, other in by_size[prod(event.shape)]:
            if blocks.allow(event.name, other.name):
                score, error = look.score(other, event)
                scores[row, column] = score if score >= ENOUGH else 0.0
                equal[row, column] = error < EQUAL
    return scores, equal


def joined_parts(
    reference: Trace, port: Trace, free: Sequence[str], left: Sequence[str], blocks: Blocks
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Port names whose value is two or three of the reference's side by side: fused qkv."""
    theirs, ours = first_events(reference, free), first_events(port, left)
    taken: set[str] = set()
    for name, event in ours.items():
        for parts in _neighbours(theirs, event, taken):
            if not all(blocks.allow(name, part) for part in parts):
                continue
            if not (port.has_values(event) and all(reference.has_values(theirs[p]) for p in parts)):
                continue
            joined = np.concatenate([reference.read(theirs[part]) for part in parts], axis=-1)
            _, error = best_fit(possible_fits(event.shape, joined.shape), port.read(event), joined)
            if error < CLOSE:
                taken.update(parts)
                yield name, parts
                break


def only_parts(
    reference: Trace, port: Trace, free: Sequence[str], left: Sequence[str], blocks: Blocks
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Fused values that are wrong: the only to_q, to_k, to_v of their block that make the shape."""
    theirs, ours = first_events(reference, free), first_events(port, left)
    whole = {event.shape for event in theirs.values()}
    for name, event in ours.items():
        if event.shape in whole or not blocks.place(name):
            continue
        found = [
            parts
            for parts in _neighbours(theirs, event, set())
            if all(blocks.same(name, part) for part in parts)
            and theirs[parts[0]].shape[:-1] == event.shape[:-1]
            and _differ_in_a_letter(parts)
        ]
        if len(found) == 1:
            yield name, found[0]


def _differ_in_a_letter(names: Sequence[str]) -> bool:
    """Whether names are one but for one letter, as to_q, to_k and to_v are."""
    if len({len(name) for name in names}) != 1:
        return False
    return sum(len(set(letters)) > 1 for letters in zip(*names, strict=True)) == 1


def between(
    reference: Trace, port: Trace, pairs: Mapping[str, tuple[str, ...]], blocks: Blocks
) -> dict[str, str]:
    """What stands alone of its shape between two pairs, on both sides, where the second is wrong.

    Before a pair that agrees there is nothing to find, only stages that one side left out.
    """
    theirs = first_events(reference, names_of(reference))
    ours = first_events(port, names_of(port))
    taken = {name for refs in pairs.values() for name in refs}
    repeated = _repeated(reference) | _repeated(port)
    found: dict[str, str] = {}
    look = Look(Values(reference), Values(port))
    for gap, low, last in _gaps(ours, theirs, pairs):
        after = [theirs[ref] for ref in pairs.get(last or "", ()) if ref in theirs]
        if last and look.agree(after, ours[last]):
            continue
        high = min((event.i for event in after), default=None)
        room = [
            other
            for other, event in theirs.items()
            if other not in taken and low < event.i and (high is None or event.i < high)
        ]
        for name in gap:
            alike = [other for other in gap if _alike(ours[other], ours[name])]
            there = [other for other in room if _alike(theirs[other], ours[name])]
            if len(alike) != 1 or len(there) != 1 or not blocks.same(name, there[0]):
                continue
            # At the end nothing comes after it that would show a mistake of ours.
            if high is not None or {name, there[0]} <= repeated:
                found[name] = there[0]
    return found


def _gaps(
    ours: Mapping[str, Event], theirs: Mapping[str, Event], pairs: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[list[str], int, str | None]]:
    """Port names between two pairs that are in order: with where the first is, and the second."""
    gap: list[str] = []
    low: int | None = None
    for name in ours:
        refs = [theirs[ref].i for ref in pairs.get(name, ()) if ref in theirs]
        if not refs:
            gap.append(name)
            continue
        if gap and low is not None and low < min(refs):
            yield gap, low, name
        gap, low = [], max(refs)
    if gap and low is not None:
        yield gap, low, None


def _alike(a: Event, b: Event) -> bool:
    sizes = (sorted(n for n in event.shape if n != 1) for event in (a, b))
    return a.kind == b.kind and next(sizes) == next(sizes)


def _repeated(trace: Trace) -> set[str]:
    seen = Counter(event.name for event in trace.events if event.port == "out")
    return {name for name, count in seen.items() if count > 1}


def _neighbours(
    theirs: dict[str, Event], event: Event, taken: set[str]
) -> Iterator[tuple[str, ...]]:
    """Runs of sibling reference values that together have the size of `event`."""
    siblings: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, other in theirs.items():
        if name not in taken and other.shape:
            siblings[tokens(name)[:-1]].append(name)
    for group in siblings.values():
        for count in (3, 2):
            for start in range(len(group) - count + 1):
                parts = tuple(group[start : start + count])
                shapes = {theirs[part].shape[:-1] for part in parts}
                if len(shapes) == 1 and sum(prod(theirs[p].shape) for p in parts) == prod(
                    event.shape
                ):
                    yield parts


class Values:
    """The values of a trace, some of them held, and what can be said of them without reading."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.held: dict[int, NDArray[Any]] = {}
        self.known: dict[int, Stats | None] = {}

    def has(self, event: Event) -> bool:
        return prod(event.shape) <= MOST_VALUES and self.trace.has_values(event)

    def read(self, event: Event) -> NDArray[Any]:
        if event.i not in self.held:
            if len(self.held) >= KEPT:
                del self.held[next(iter(self.held))]
            self.held[event.i] = self.trace.read(event)
        return self.held[event.i]

    def stats(self, event: Event) -> Stats | None:
        """The statistics of a value; a dump written by hand has none, and they are made."""
        if event.i not in self.known:
            made = event.stats
            if made is None and self.has(event):
                made = measure(self.read(event))
            self.known[event.i] = made
        return self.known[event.i]


@dataclass(frozen=True)
class Look:
    """Two traces side by side."""

    reference: Values
    port: Values

    def score(self, theirs: Event, ours: Event) -> tuple[float, float]:
        """How much speaks for two events being one place, 1.2 being enough; and their error."""
        fits = possible_fits(ours.shape, theirs.shape)
        if not fits or theirs.kind != ours.kind:
            return -inf, inf
        score = _similarity(theirs.name, ours.name) + _numbers(theirs.name, ours.name)
        a, b = self.port.stats(ours), self.reference.stats(theirs)
        same = a is not None and b is not None and close_stats(a, b, 0.05)
        if not same and score <= 0.5:
            return score, inf
        if self.reference.has(theirs) and self.port.has(ours):
            _, error = best_fit(fits, self.port.read(ours), self.reference.read(theirs))
            # A value that is equal outweighs any name; one that is merely close does not.
            near = 3 * (1 - error) + min(3.0, -log10(max(error, 1e-9)) / 2)
            return score + (near if error < CLOSE else 0.0), error
        return score + (1.0 if same else 0.0), inf

    def agree(self, theirs: Sequence[Event], ours: Event) -> bool | None:
        """Whether a value equals its counterpart or its parts side by side; None: not known."""
        if not all(self.reference.has(event) for event in theirs) or not self.port.has(ours):
            return None
        parts = [self.reference.read(event) for event in theirs]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        fits = possible_fits(ours.shape, whole.shape)
        return best_fit(fits, self.port.read(ours), whole)[1] < EQUAL if fits else None


def _best_path(scores: np.ndarray) -> list[tuple[int, int]]:
    """The pairs of rows and columns, in order on both sides, with the largest total."""
    rows, columns = scores.shape
    total = np.zeros((rows + 1, columns + 1))
    for row in range(rows):
        diagonal = total[row, :-1] + scores[row]
        best = np.maximum(total[row, 1:], np.where(scores[row] > 0, diagonal, 0.0))
        total[row + 1, 1:] = np.maximum.accumulate(best)
    path: list[tuple[int, int]] = []
    row, column = rows, columns
    while row and column:
        if total[row, column] == total[row - 1, column]:
            row -= 1
        elif total[row, column] == total[row, column - 1]:
            column -= 1
        else:
            row, column = row - 1, column - 1
            path.append((row, column))
    return path[::-1]


@lru_cache(maxsize=100_000)
def _similarity(a: str, b: str) -> float:
    """From 0 to 1: how alike two names are, with their last part counting most."""
    ours, theirs = tokens(a), tokens(b)
    whole = SequenceMatcher(None, " ".join(ours), " ".join(theirs), autojunk=False).ratio()
    last = SequenceMatcher(None, ours[-1], theirs[-1], autojunk=False).ratio()
    return (whole + last) / 2


def _numbers(a: str, b: str) -> float:
    """Block numbers that agree speak for a pair, others against it."""
    ours, theirs = re.findall(r"\d+", a), re.findall(r"\d+", b)
    if not ours or not theirs:
        return 0.0
    return 0.5 if ours == theirs else -0.5


def first_events(trace: Trace, names: Sequence[str]) -> dict[str, Event]:
    """The first output of each name."""
    wanted, found = set(names), {}
    for event in trace.events:
        if event.name in wanted and event.port == "out":
            found.setdefault(event.name, event)
    return {name: found[name] for name in names if name in found}


def names_of(trace: Trace) -> list[str]:
    """Every name of a trace once, in order of execution."""
    return list(dict.fromkeys(e.name for e in trace.events if e.kind != "selftest"))
