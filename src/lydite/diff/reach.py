"""How far a comparison reaches: what lies after the last compared value can still be wrong.

A wrong value spoils what is computed from it, so values without a counterpart do no harm while
something after them is compared. At the end nothing is: an agreement has to reach the port's last
value or the reference's.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lydite.diff.calls import Pair
from lydite.diff.result import Row
from lydite.trace.events import Event
from lydite.trace.store import Trace


@dataclass(frozen=True)
class Reach:
    """The last compared value, and what the port computes after it that was not compared."""

    last: Row | None
    after: tuple[Event, ...]  # of the port
    unlike: int  # of these: paired, but of another shape or stage, or nothing was kept
    at_end: bool  # the port's last value was compared, or the reference's

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what was not compared, in order."""
        return tuple(dict.fromkeys(event.name for event in self.after))


def reach(
    reference: Trace,
    port: Trace,
    pairs: Sequence[Pair],
    rows: Sequence[Row],
    ignored: Collection[str],
) -> Reach:
    """`rows` are those of `pairs`; names of the port in `ignored` are known to be alone."""
    both = zip(pairs, rows, strict=True)
    compared = [(each, row) for each, row in both if row.error is not None and not row.wrong]
    last = max(compared, key=lambda found: _end(found[0].port), default=None)
    start = _end(last[0].port) if last else -1
    seen = {event.hash for each, _ in compared for event in each.port if event.hash}
    owners = {event.i for each, _ in compared for event in each.port}
    # A module around the last one gives what that gave: the same array under another name.
    after = tuple(
        event
        for event in _results(port, ignored)
        if event.i > start and event.hash not in seen and event.alias_of not in owners
    )
    paired = {event.i for each in pairs for event in each.port}
    final = max((event.i for event in _results(reference, ())), default=None)
    finished = any(event.i == final for each, _ in compared for event in each.reference)
    unlike = sum(event.i in paired for event in after)
    return Reach(last[1] if last else None, after, unlike, not after or finished)


def count_between(
    port: Trace, before: Pair, here: Pair, pairs: Sequence[Pair], ignored: Collection[str]
) -> int:
    """How many values the port computes between two others that have no counterpart."""
    paired = {event.i for each in pairs for event in each.port}
    start, end = _end(before.port), min(event.i for event in here.port)
    return sum(start < e.i < end and e.i not in paired for e in _results(port, ignored))


def _results(trace: Trace, ignored: Collection[str]) -> list[Event]:
    """What the run computed: no inputs, no tables, no self-tests."""
    return [
        event
        for event in trace.events
        if event.kind == "activation" and event.slot.startswith("out") and event.name not in ignored
    ]


def _end(events: Sequence[Event]) -> int:
    return max(event.i for event in events)
