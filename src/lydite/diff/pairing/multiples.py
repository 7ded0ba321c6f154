"""Values of the port that are a multiple of another one of it, where the reference has no such two.

A port may scale the queries, and the reference the scores. The scaled queries have no counterpart,
right or wrong: what a guess pairs them with is another value.
"""

from collections.abc import Callable, Iterable, Iterator
from math import prod

import numpy as np

from lydite.diff.measure.distance import relative_error, wide
from lydite.diff.pairing.pair_names import NamePairs
from lydite.diff.pairing.similarity import ValueReader
from lydite.trace.events import Event

FEWEST = 32  # numbers of a value that is no multiple of another one by chance
NEARBY = 16  # values before one among which it is searched what that is a multiple of
SIMILAR = 1e-2  # difference of the statistics of two values, in units of their size
SAME_SIZE = 1e-2  # difference of a factor from 1
ROUNDING = 6e-3  # relative error of a multiple in 16 bits

Test = Callable[[ValueReader, Event, Event], bool]


def by_multiples(names: NamePairs) -> None:
    """Leave out the multiples of earlier values, where the reference has none of their size."""
    port, reference = names.comparer.port, names.comparer.reference
    left = names.left_events(copies=False)
    own = _multiples(port, names.port_events.values(), _is_multiple)
    found = [event for event in own if event.name in left]
    sizes = {prod(event.shape) for event in found}
    others = (e for e in names.reference_events.values() if prod(e.shape) in sizes)
    known = {prod(event.shape) for event in _multiples(reference, others, _may_be_multiple)}
    names.ignored |= {event.name for event in found if prod(event.shape) not in known}


def _multiples(reader: ValueReader, events: Iterable[Event], test: Test) -> Iterator[Event]:
    """Values that are multiples of one that was computed a little before."""
    events = sorted(events, key=lambda event: event.i)
    for at, event in enumerate(events):
        if event.kind == "activation" and prod(event.shape) >= FEWEST:
            before = events[max(0, at - NEARBY) : at]
            same_size = (e for e in before if prod(e.shape) == prod(event.shape))
            if any(test(reader, e, event) for e in same_size if e.step == event.step):
                yield event


def _may_be_multiple(reader: ValueReader, one: Event, other: Event) -> bool:
    """Whether the statistics of two values permit it, in any layout."""
    sides = [
        (stats.rms, [x or 0.0 for x in (stats.min, stats.max, stats.mean)])
        for stats in map(reader.stats, (one, other))
        if stats is not None and stats.rms
    ]
    if len(sides) < 2:
        return False
    own, others = (np.divide(numbers, size) for size, numbers in sides)
    is_scaled = abs(sides[1][0] / sides[0][0] - 1) > SAME_SIZE
    return is_scaled and np.allclose(own, others, rtol=0, atol=SIMILAR)


def _is_multiple(reader: ValueReader, one: Event, other: Event) -> bool:
    if not _may_be_multiple(reader, one, other) or not all(map(reader.can_read, (one, other))):
        return False
    a, b = (wide(reader.read(event)).reshape(-1) for event in (one, other))
    factor = float(a @ b) / float(a @ a)
    return relative_error(b, factor * a) < ROUNDING
