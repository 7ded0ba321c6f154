"""What a value does, told by how alike it is in all blocks, right or wrong.

After a bug nothing is equal any more, but what a weight made still looks like it: a query of a
wrong input is more like the right query than like any other value of its shape. A role is one name
over all its numbers, `layers.{i}.q`. Two roles are one when, over all blocks, each is most like
the other.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from lydite.diff.alignment import best_path
from lydite.diff.look import Look, Values, first_events, fits_of, names_of, similarity
from lydite.diff.templates import SPOT, Blocks, spots
from lydite.trace.events import Event
from lydite.trace.store import Trace

LIKE = 0.25  # correlation that speaks for a pair
VERY_LIKE = 0.9  # for one value that would be a part of the other's batch
AHEAD = 0.03  # of the next best, for either side
NAME = 0.3  # what an equal name is worth beside content
IN_ORDER = 0.2  # and what it is worth to lie on the best way through both in order
NEIGHBOURS = 2  # pairs before and after a value that tell where it lies
MOST_BLOCKS = 6  # looked at for one pair of roles
FEWEST_VALUES = 32  # below that likeness is chance


@dataclass(frozen=True)
class Role:
    """One name over all its numbers; a name without any is a role of its own."""

    key: str
    members: Mapping[int, Event]

    @property
    def names(self) -> set[str]:
        return {event.name for event in self.members.values()}


def pair_roles(
    reference: Trace,
    port: Trace,
    free: Sequence[str],
    left: Sequence[str],
    known: Mapping[str, tuple[str, ...]],
) -> dict[str, str]:
    """Port name -> reference name for roles that are most like each other."""
    theirs = _roles(first_events(reference, free), {*names_of(reference), *free})
    ours = _roles(first_events(port, left), names_of(port))
    look, order = Look(Values(reference), Values(port)), _Order(reference, port, known)
    judge = _Judge(look, Blocks(known), order)
    scores = np.zeros((len(ours), len(theirs)))
    ways: dict[tuple[int, int], dict[str, str]] = {}
    for row, mine in enumerate(ours):
        for column, other in enumerate(theirs):
            scores[row, column], ways[row, column] = judge.score(mine, other)
    for row, column in best_path(scores):
        scores[row, column] += IN_ORDER
    found: dict[str, str] = {}
    for row, column in _mutual_best(scores):
        found |= ways[row, column]
    left_over = [role for role in ours if not found.keys() & role.names]
    open_ = [role for role in theirs if not set(found.values()) & role.names]
    return found | _only_possible(left_over, open_, judge)


def _only_possible(ours: Sequence[Role], theirs: Sequence[Role], judge: "_Judge") -> dict[str, str]:
    """Roles for which shapes, blocks and order leave each other only."""
    ways = {
        (row, column): way
        for row, mine in enumerate(ours)
        for column, other in enumerate(theirs)
        if len(mine.members) == len(other.members)
        and (len(mine.members) > 1 or _size(mine) == _size(other))
        and (way := judge.first_way(mine, other))
    }
    rows, columns = Counter(row for row, _ in ways), Counter(column for _, column in ways)
    found: dict[str, str] = {}
    for (row, column), way in ways.items():
        if rows[row] == columns[column] == 1:
            found |= way
    return found


@dataclass(frozen=True)
class _Judge:
    look: Look
    blocks: Blocks
    order: "_Order"

    def score(self, mine: Role, other: Role) -> tuple[float, dict[str, str]]:
        """How much speaks for two roles being one, and which names that pairs."""
        best: tuple[float, dict[str, str]] = (0.0, {})
        for pairs in _ways(mine, other):
            if not all(self._possible(a, b) for a, b in pairs):
                continue
            likeness = fmean(self.look.likeness(b, a) for a, b in pairs[:MOST_BLOCKS])
            if likeness < (VERY_LIKE if len(pairs) == 1 and _size(mine) != _size(other) else LIKE):
                continue
            a, b = pairs[0]
            score = likeness + NAME * similarity(b.name, a.name)
            if score > best[0]:
                best = score, {a.name: b.name for a, b in pairs}
        return best

    def first_way(self, mine: Role, other: Role) -> dict[str, str] | None:
        """The names that two roles pair if nothing but their values denies it."""
        for pairs in _ways(mine, other):
            whole = len(pairs) == len(mine.members)
            if whole and all(self._possible(a, b) and _alike(a, b) for a, b in pairs):
                return {a.name: b.name for a, b in pairs}
        return None

    def _possible(self, mine: Event, other: Event) -> bool:
        return (
            mine.kind == other.kind
            and prod(mine.shape) >= FEWEST_VALUES
            and bool(fits_of(mine.shape, other.shape)[0])
            and self.blocks.allow(mine.name, other.name)
            and self.order.fits(mine, other)
        )


def _size(role: Role) -> int:
    return sum(prod(event.shape) for event in role.members.values())


def _alike(mine: Event, other: Event) -> bool:
    """Whether two values have the same axes, in whatever order; a batch may be left out."""
    ours, theirs = (sorted(n for n in event.shape if n != 1) for event in (mine, other))
    return ours == theirs or ours == sorted(n for n in other.shape[1:] if n != 1)


class _Order:
    """Where in the reference a value of the port lies, by the pairs around it."""

    def __init__(self, reference: Trace, port: Trace, known: Mapping[str, tuple[str, ...]]) -> None:
        theirs = first_events(reference, [refs[0] for refs in known.values()])
        self.at = [
            (event.i, theirs[refs[0]].i)
            for name, event in first_events(port, names_of(port)).items()
            if (refs := known.get(name)) and refs[0] in theirs
        ]

    def fits(self, mine: Event, other: Event) -> bool:
        """Whether the reference's value lies where the port's nearest neighbours say.

        Some neighbours may be of the other stream, which either side may run first.
        """
        at = bisect_left(self.at, (mine.i,))
        before, after = self.at[max(0, at - NEIGHBOURS) : at], self.at[at : at + NEIGHBOURS]
        low = min((theirs for _, theirs in before), default=-1)
        high = max((theirs for _, theirs in after), default=None)
        return low < other.i and (high is None or other.i < high)


def _roles(events: Mapping[str, Event], names: Iterable[str]) -> list[Role]:
    """Names that differ in one number only are one role: the first number that repeats."""
    shared: dict[str, set[int]] = defaultdict(set)
    for name in names:
        for key, number in spots(name):
            shared[key].add(number)
    found: dict[str, dict[int, Event]] = defaultdict(dict)
    for name, event in events.items():
        key, number = next(
            ((key, number) for key, number in spots(name) if len(shared[key]) > 1), (name, 0)
        )
        found[key][number] = event
    roles = [Role(key, dict(sorted(members.items()))) for key, members in found.items()]
    return sorted(roles, key=lambda role: min(event.i for event in role.members.values()))


def _ways(mine: Role, other: Role) -> Iterator[list[tuple[Event, Event]]]:
    """The members of two roles side by side: in order, and counted from the other end."""
    if (SPOT in mine.key) != (SPOT in other.key):
        return
    ours, theirs = mine.members, other.members
    low = min(theirs) - min(ours)
    same = [(event, theirs[n]) for n, event in ours.items() if n in theirs]
    moved = [(event, theirs[n + low]) for n, event in ours.items() if n + low in theirs]
    yield from (way for way in (same, moved) if way)
    if len(ours) == len(theirs) > 1:
        yield list(zip(ours.values(), reversed(list(theirs.values())), strict=True))


def _mutual_best(scores: NDArray[np.float64]) -> Iterator[tuple[int, int]]:
    """Pairs that are each other's best by far, the clearest first; what is taken is taken out."""
    scores = scores.copy()
    while scores.size and scores.max() > 0:
        row, column = np.unravel_index(int(scores.argmax()), scores.shape)
        best = scores[row, column]
        rivals = np.concatenate([np.delete(scores[row], column), np.delete(scores[:, column], row)])
        if rivals.size == 0 or best - rivals.max() >= AHEAD:
            yield int(row), int(column)
            scores[row], scores[:, column] = 0.0, 0.0
        else:
            scores[row, column] = 0.0  # it could be either: say nothing
