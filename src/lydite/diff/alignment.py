"""Names that share nothing: paired by order, shape and content."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.axes import best_fit, possible_fits
from lydite.diff.look import CLOSE, EQUAL, MOST_PARTS, Look, Values, first_events, is_input
from lydite.diff.names import tokens
from lydite.diff.templates import Blocks
from lydite.trace.events import Event
from lydite.trace.store import Trace

ENOUGH = 1.2  # score from which two names are taken for one place


def align(
    reference: Trace,
    port: Trace,
    free: Sequence[str],
    left: Sequence[str],
    known: Mapping[str, tuple[str, ...]],
) -> tuple[dict[str, str], dict[str, str]]:
    """Port name -> reference name, in order of execution: values that are equal, and the rest.

    Equal values come first, and in as many orders as they need: two streams may run either way
    round. Then values that are merely close, or names alike, in what room is left.
    """
    theirs, ours = first_events(reference, free), first_events(port, left)
    free, left = list(theirs), list(ours)
    scores, equal = _scores(reference, port, theirs, ours, Blocks(known))
    found: dict[str, str] = {}
    while path := best_path(np.where(equal, scores, 0.0)):
        for row, column in path:
            scores[row], scores[:, column] = 0.0, 0.0
            found[left[row]] = free[column]
    blocks = Blocks({**known, **{name: (ref,) for name, ref in found.items()}})
    for row, column in np.argwhere(scores > 0):
        if not blocks.allow(left[row], free[column]):
            scores[row, column] = 0.0
    return found, {left[row]: free[column] for row, column in best_path(scores)}


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
    look, names = Look(Values(reference), Values(port)), list(theirs)
    for row, event in enumerate(ours.values()):
        sizes = [prod(event.shape) * count for count in range(1, MOST_PARTS + 1)]
        for column, other in (each for size in sizes for each in by_size.get(size, ())):
            if blocks.allow(event.name, other.name):
                score, error = look.score(other, event)
                equal[row, column] = error < EQUAL
                enough = score >= ENOUGH and (error < EQUAL or not is_input(names[column]))
                scores[row, column] = score if enough else 0.0
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
    theirs: Mapping[str, Event],
    ours: Mapping[str, Event],
    pairs: Mapping[str, tuple[str, ...]],
    blocks: Blocks,
    repeated: Collection[str],
) -> dict[str, str]:
    """What stands alone of its shape between two pairs, on both sides.

    At the end nothing comes after it that would show a mistake of ours; there only names that are
    `repeated`, step by step, are paired.
    """
    taken = {name for refs in pairs.values() for name in refs}
    found: dict[str, str] = {}
    for gap, low, last in _gaps(ours, theirs, pairs):
        after = [theirs[ref] for ref in pairs.get(last or "", ()) if ref in theirs]
        high = min((event.i for event in after), default=None)
        room = [
            other
            for other, event in theirs.items()
            if other not in taken and low < event.i and (high is None or event.i < high)
        ]
        for name in gap:
            alike = [other for other in gap if _alike(ours[other], ours[name])]
            there = [other for other in room if _alike(theirs[other], ours[name])]
            there = _apart(there, theirs)
            if len(alike) != 1 or len(there) != 1 or not blocks.same(name, there[0]):
                continue
            if high is not None or {name, there[0]} <= set(repeated):
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


def _apart(names: Sequence[str], events: Mapping[str, Event]) -> list[str]:
    """Names without those that hold what one before them does."""
    first = {events[name].hash or name: name for name in reversed(names)}
    return list(reversed(first.values()))


def _alike(a: Event, b: Event) -> bool:
    sizes = (sorted(n for n in event.shape if n != 1) for event in (a, b))
    return a.kind == b.kind and next(sizes) == next(sizes)


def repeated_names(trace: Trace) -> set[str]:
    seen = Counter(event.name for event in trace.events if event.slot == "out")
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


def best_path(scores: np.ndarray) -> list[tuple[int, int]]:
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
