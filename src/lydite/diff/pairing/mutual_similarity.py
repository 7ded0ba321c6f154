"""Pair values by how similar they are over all blocks, right or wrong.

After a bug nothing is equal any more, but the result of a weight is still similar to it: a query of
a wrong input correlates more with the right query than with any other value of its shape. A role is
one name over all its numbers, `layers.{i}.q`. Two roles are counterparts when, over all blocks,
each is most similar to the other.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log10, prod
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from lydite.diff.measure.axes import fits_of
from lydite.diff.pairing.alignment import PortEvents, ReferenceEvents, best_path
from lydite.diff.pairing.blocks import NUMBER, BlockMap, Sites, numbered_variants
from lydite.diff.pairing.paired_events import same_kind
from lydite.diff.pairing.similarity import Comparer, name_similarity
from lydite.trace.events import Event, Site

MIN_CORRELATION = 0.25  # that supports a pair
MIN_CORRELATION_OF_PARTS = 0.5  # where values would be parts of the other's
MIN_CORRELATION_OF_PART = 0.9  # the same where there is one value only
MIN_LEAD = 0.03  # over the next best, for either side
NAME_WEIGHT = 0.3  # of an equal name beside content
SIZE_WEIGHT = 0.3  # of values ten times larger or smaller than each other
ORDER_BONUS = 0.2  # for pairs on the best path through both traces in order
NEIGHBOURS = 2  # pairs before and after a value that show its position
MAX_BLOCKS = 6  # compared for one pair of roles
MIN_VALUES = 32  # fewer correlate by chance

Known = tuple[int, int, tuple[int, ...]]  # a pair: its numbers on both sides, the leading axes


@dataclass(frozen=True)
class Role:
    """One site over all its numbers; a name without a number is a role of its own."""

    template: Site
    members: Mapping[int, Event]

    @property
    def sites(self) -> set[Site]:
        return {event.site for event in self.members.values()}

    @property
    def size(self) -> int:
        return sum(prod(event.shape) for event in self.members.values())


def pair_roles(
    comparer: Comparer,
    reference: ReferenceEvents,
    port: PortEvents,
    names: tuple[Iterable[str], Iterable[str]],
    positions: "Positions",
    blocks: BlockMap,
) -> dict[str, Site]:
    """Port name → reference site for roles that are most similar to each other.

    `names` are all names of the reference and of the port: they show which numbers repeat.
    """
    roles = _roles(reference.values(), names[0])
    port_roles = _roles(port.values(), names[1])
    judge = _RoleComparer(comparer, blocks, positions)
    scores = np.zeros((len(port_roles), len(roles)))
    pairs: dict[tuple[int, int], dict[str, Site]] = {}
    for row, port_role in enumerate(port_roles):
        for column, role in enumerate(roles):
            scores[row, column], pairs[row, column] = judge.score(port_role, role)
    for row, column in best_path(scores):
        scores[row, column] += ORDER_BONUS
    found: dict[str, Site] = {}
    for row, column in _mutual_best(scores):
        found |= pairs[row, column]
    left = [role for role in port_roles if not found.keys() & {s.name for s in role.sites}]
    free = [role for role in roles if not set(found.values()) & role.sites]
    return found | _only_possible(left, free, judge)


def _only_possible(
    port_roles: Sequence[Role], roles: Sequence[Role], judge: "_RoleComparer"
) -> dict[str, Site]:
    """Roles for which shapes, blocks and order leave no other choice."""
    pairs = {
        (row, column): matched
        for row, port_role in enumerate(port_roles)
        for column, role in enumerate(roles)
        if len(port_role.members) == len(role.members)
        and (len(role.members) > 1 or port_role.size == role.size)
        and (matched := judge.by_shape(port_role, role))
    }
    rows, columns = Counter(row for row, _ in pairs), Counter(column for _, column in pairs)
    found: dict[str, Site] = {}
    for (row, column), matched in pairs.items():
        if rows[row] == columns[column] == 1:
            found |= matched
    return found


@dataclass(frozen=True)
class _RoleComparer:
    comparer: Comparer
    blocks: BlockMap
    positions: "Positions"

    def score(self, port_role: Role, role: Role) -> tuple[float, dict[str, Site]]:
        """How much supports that two roles are counterparts, and the names it would pair."""
        best: tuple[float, dict[str, Site]] = (0.0, {})
        for pairs in _matchings(port_role, role):
            if not all(self._is_possible(value, other) for value, other in pairs):
                continue
            correlation = fmean(
                self.comparer.correlation(other, value) for value, other in pairs[:MAX_BLOCKS]
            )
            least = MIN_CORRELATION
            if any(prod(a.shape) != prod(b.shape) for a, b in pairs):
                least = MIN_CORRELATION_OF_PARTS if len(pairs) > 1 else MIN_CORRELATION_OF_PART
            if correlation < least:
                continue
            value, other = pairs[0]
            score = correlation + NAME_WEIGHT * name_similarity(other.name, value.name)
            score -= SIZE_WEIGHT * fmean(self._decades(a, b) for a, b in pairs[:MAX_BLOCKS])
            if score > best[0]:
                best = score, {value.name: other.site for value, other in pairs}
        return best

    def by_shape(self, port_role: Role, role: Role) -> dict[str, Site] | None:
        """The names that two roles would pair, if shapes, blocks and order permit it."""
        for pairs in _matchings(port_role, role):
            complete = len(pairs) == len(port_role.members)
            if complete and all(self._is_possible(a, b) and _same_axes(a, b) for a, b in pairs):
                return {value.name: other.site for value, other in pairs}
        return None

    def _decades(self, port: Event, reference: Event) -> float:
        """How far apart the sizes of two values are; a norm returns its input in another size."""
        a, b = self.comparer.port.stats(port), self.comparer.reference.stats(reference)
        if a is None or b is None or not a.rms or not b.rms:
            return 0.0
        return abs(log10(a.rms / b.rms))

    def _is_possible(self, port: Event, reference: Event) -> bool:
        return (
            same_kind(port, reference)
            and prod(port.shape) >= MIN_VALUES
            and bool(fits_of(port.shape, reference.shape)[0])
            and self.blocks.allows(port.name, reference.name)
            and self.positions.permit(port, reference)
            and self.comparer.same_form(reference, port)
        )


def _same_axes(port: Event, reference: Event) -> bool:
    """Whether two values have the same axes, in any order; the port may leave the batch out."""
    sizes, expected = (sorted(n for n in event.shape if n != 1) for event in (port, reference))
    return sizes == expected or sizes == sorted(n for n in reference.shape[1:] if n != 1)


class Positions:
    """Where in the reference a value of the port lies, by the pairs around it."""

    def __init__(
        self, reference: ReferenceEvents, port: PortEvents, known: Mapping[str, Sites]
    ) -> None:
        self.known = [
            (event.i, reference[refs[0]].i, event.shape[:-1])
            for name, event in port.items()
            if (refs := known.get(name)) and refs[0] in reference
        ]

    def permit(self, port: Event, reference: Event, number: int = NEIGHBOURS) -> bool:
        """Whether the reference's value lies between the counterparts of the port's neighbours.

        Neighbours of the other stream do not count where its own has enough: either side may run
        one stream to its end first. Of `number` neighbours on each side one has to permit it.
        """
        before, after = self._neighbours(port, number)
        low = min((position for _, position, _ in before), default=-1)
        high = max((position for _, position, _ in after), default=None)
        return low < reference.i and (high is None or reference.i < high)

    def _neighbours(self, port: Event, number: int) -> tuple[list[Known], list[Known]]:
        """The known pairs nearest to a value, before and after it."""
        sides: list[list[Known]] = []
        index = bisect_left(self.known, (port.i,))
        for known in (self.known[:index][::-1], self.known[index:]):
            own = [pair for pair in known if pair[2] == port.shape[:-1]]
            sides.append((own if len(own) >= number else known)[:number])
        return sides[0], sides[1]


def _roles(events: Iterable[Event], names: Iterable[str]) -> list[Role]:
    """Sites that differ in one number only are one role: the first number that repeats."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        for template, number in numbered_variants(name):
            numbers[template].add(number)
    members: dict[Site, dict[int, Event]] = defaultdict(dict)
    for event in events:
        repeated = (v for v in numbered_variants(event.name) if len(numbers[v[0]]) > 1)
        template, number = next(repeated, (event.name, 0))
        members[Site(template, event.slot)][number] = event
    roles = [Role(template, dict(sorted(group.items()))) for template, group in members.items()]
    return sorted(roles, key=lambda role: min(event.i for event in role.members.values()))


def _matchings(port_role: Role, role: Role) -> Iterator[list[tuple[Event, Event]]]:
    """The members of two roles side by side: by number, from the first, from the last."""
    if (NUMBER in port_role.template.name) != (NUMBER in role.template.name):
        return
    values, expected = port_role.members, role.members
    shift = min(expected) - min(values)
    same = [(event, expected[n]) for n, event in values.items() if n in expected]
    shifted = [(event, expected[n + shift]) for n, event in values.items() if n + shift in expected]
    yield from (pairs for pairs in (same, shifted) if pairs)
    if len(values) == len(expected) > 1:
        yield list(zip(values.values(), reversed(list(expected.values())), strict=True))


def _mutual_best(scores: NDArray[np.float64]) -> Iterator[tuple[int, int]]:
    """Pairs that are clearly each other's best, the best first; what is paired is taken out."""
    scores = scores.copy()
    while scores.size and scores.max() > 0:
        row, column = np.unravel_index(int(scores.argmax()), scores.shape)
        best = scores[row, column]
        rivals = np.concatenate([np.delete(scores[row], column), np.delete(scores[:, column], row)])
        if rivals.size == 0 or best - rivals.max() >= MIN_LEAD:
            yield int(row), int(column)
            scores[row], scores[:, column] = 0.0, 0.0
        else:
            scores[row, column] = 0.0  # undecided: no pair
