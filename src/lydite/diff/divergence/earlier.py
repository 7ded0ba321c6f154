"""A wrong value of the port before the first one that has a counterpart.

After the first wrong value nothing is equal any more, and a value that nothing pairs is not
compared. But what the reference computes between its last agreeing values and the first wrong one
is known, and so is what the port computes there. A value of the port without a counterpart that
has the axes of one of the reference's on this way is its counterpart; it is wrong, because equal
values are paired by now. Only a comparison that found a wrong value asks for it, so that a correct
port is not concerned.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations, permutations, product
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.measure.aligned import Layouts
from lydite.diff.measure.axes import is_packed
from lydite.diff.measure.distance import wide
from lydite.diff.measure.rotations import MOST, ONE, rotations
from lydite.diff.measure.rows import Comparison, measure_rows
from lydite.diff.pairing.alignment import merges_axes, same_axes
from lydite.diff.pairing.blocks import last_word, numbered_variants
from lydite.diff.pairing.paired_events import BY_NAME, ROTATION, Pair, same_kind
from lydite.diff.pairing.similarity import Comparer
from lydite.diff.result import Row
from lydite.trace.events import Event

FEW, MUCH = 12, 1 / 3  # agreeing values of a step: a number, and a part of all that agree
SAME_ROWS = 1e-3  # of their root mean square: by how much products of two equal rows differ


class EarlierValues:
    """The values of both sides that no pair has, and the agreeing ones around them."""

    def __init__(
        self,
        traces: Comparison,
        pairs: Sequence[Pair],
        rows: Sequence[Row],
        unpaired: Collection[str],
        given: Sequence[Pair] = (),
        *,
        tables: Collection[str] = (),
    ) -> None:
        """`rows` are those of `pairs`; `given` are pairs of inputs that agree.

        `tables` are cosines and sines of the port that only their use may show to be wrong.
        """
        self.traces, self.flow = traces, traces.flow
        self.comparer = Comparer.of(traces.reference, traces.port)
        self.paired = {event.i for pair in pairs for event in pair.reference}
        self.paired_port = {event.i for pair in pairs for event in pair.port}
        agreeing = [pair for pair, row in zip(pairs, rows, strict=True) if row.agrees]
        counterparts: dict[str | int, dict[int, int]] = defaultdict(dict)  # by content and step
        for pair in (*given, *agreeing):
            at = max(other.i for other in pair.port)
            for event in pair.reference:
                counterparts[event.hash or event.i].setdefault(event.step, at)
        self.right = {e.hash: pair.event for pair in agreeing for e in pair.port if e.hash}
        self.compared = [(pair.event, min(other.i for other in pair.port)) for pair in agreeing]
        self.agreeing = {  # event of the reference: where the port has it
            event.i: steps.get(event.step, min(steps.values()))
            for event in traces.reference.events
            if (steps := counterparts.get(event.hash or event.i))
        }
        outputs = {(e.hash, e.name) for e in traces.reference.events if e.slot[:3] == "out"}
        self.names = Counter(content for content, _ in outputs)
        self.shapes = {_long_axes(event) for event in traces.port.events}
        self.reference_shapes = {_long_axes(event) for event in traces.reference.events}
        # Other names have no counterpart: tables in a layout of their own, and those of the map.
        # All that the same module has on both sides is paired by name.
        names = {*unpaired, *(event.name for pair in pairs for event in pair.port)}
        names -= {event.name for pair in pairs if pair.how in BY_NAME for event in pair.port}
        self.own = [
            event
            for event in traces.port.events
            if event.i not in self.paired_port
            and event.kind in ("activation", "input", "schedule")
            and event.name in names
        ]
        self.tables = [
            event
            for event in traces.port.events
            if event.i not in self.paired_port
            and event.name in tables
            and traces.port.has_values(event)
        ]

    def before(self, wrong: Pair) -> Iterator[Pair]:
        """Pairs of values of the port on the way to a wrong one, in the port's order."""
        passed = self.flow.upstream(wrong.event, self.agreeing).passed
        way = [event for event in passed if self._is_free(event)]
        sources = {e.i: self.flow.upstream(e, self.agreeing).nearest for e in way}
        starts = {at: self._start(at, nearest) for at, nearest in sources.items()}
        end = min(event.i for event in wrong.port)
        begin = min(starts.values(), default=-1)
        seen: set[tuple[str, str]] = set()
        step = wrong.port_event.step
        of_step = {(own.name, own.slot) for own in self.own if own.step == step}
        yield from self._with_two_tables(step, end, passed)
        tables = list(self._tables(way))
        for own in self.own:
            kinds = {(template, own.slot) for template, _ in numbered_variants(own.name)}
            kinds.add((own.name, own.slot))
            is_extra = bool(kinds & seen)  # in an earlier block it has no counterpart either
            if own.i <= begin or own.step < step:
                seen |= kinds
            if own.i >= end or (own.step != step and (own.name, own.slot) in of_step):
                continue
            yield from self._with_table(own, tables)
            # What a step is given may be recorded before all that is computed in it.
            is_given = own.kind != "activation" and own.step == step
            for event in sorted(way, key=lambda e: _long_axes(e) != _long_axes(own)):
                nearest = sources[event.i]
                fits = self._fits(event, own, nearest) and self._is_new(own, nearest)
                fits = fits and (not is_extra or self._agreed_before(event, own))
                fits = fits and not self._is_used_rightly(event, own)
                is_late = is_given and self._is_another_mask(event, own)
                fits = fits and (is_late or not self._is_long_past(event, own, end))
                is_copy = own.hash in self.right and not own.call
                if fits and (starts[event.i] < own.i or is_copy or is_given):
                    yield Pair((event,), (own,), "position")

    def _tables(self, way: Sequence[Event]) -> Iterator[tuple[tuple[Event, ...], NDArray[Any]]]:
        """The tables of rotations on a way: of one value, or cosines and sines, or two streams."""
        read = self.traces.reference.read
        first = {event.hash or event.i: event for event in reversed(way)}
        events = [event for event in first.values() if self._may_be_table(event)]
        single = [((e,), table) for e in events if (table := rotations([read(e)])) is not None]
        yield from single
        for (one, table), (other, rest) in permutations(single, 2):
            if table.shape[1] == rest.shape[1]:
                yield (*one, *other), np.concatenate((table, rest))
        for both in permutations(events, 2) if not single else ():
            if (table := rotations([read(event) for event in both])) is not None:
                yield both, table

    def _may_be_table(self, event: Event) -> bool:
        is_small = event.stats is None or (event.stats.max or inf) < 1 + ONE
        return is_small and prod(event.shape) <= MOST and self.traces.reference.has_values(event)

    def _with_table(
        self, own: Event, tables: Sequence[tuple[tuple[Event, ...], NDArray[Any]]]
    ) -> Iterator[Pair]:
        """A table of rotations of the port with the reference's of as many tokens and pairs."""
        if not tables or own.kind != "activation" or not self.traces.port.has_values(own):
            return
        table = rotations([self.traces.port.read(own)])
        alike = [] if table is None else [t for t in tables if t[1].shape == table.shape]
        if alike:
            events, _ = min(alike, key=lambda each: float(np.linalg.norm(each[1] - table)))
            yield Pair(events, (own,), ROTATION)

    def _with_two_tables(self, step: int, end: int, passed: Sequence[Event]) -> Iterator[Pair]:
        """Cosines and sines of the port with those of the reference that are most like them."""
        read = self.traces.port.read
        before = [own for own in self.tables if own.i < end and own.step == step]
        known = self._tables([e for e in passed if e.i not in self.paired]) if before else ()
        own = [
            (both, rotations([read(event) for event in both])) for both in combinations(before, 2)
        ]
        alike = [
            (float(np.linalg.norm(right - table)), Pair(events, both, ROTATION))
            for (events, right), (both, table) in product(known, own)
            if table is not None and table.shape == right.shape
        ]
        if alike:
            yield min(alike, key=lambda each: each[0])[1]

    def _fits(self, event: Event, own: Event, nearest: Sequence[Event]) -> bool:
        """Whether a value has the axes of one of the reference's, or is that in a wrong shape."""
        if not self._has_form(event, own, nearest):
            return False
        if own.kind != event.kind:  # what the port marks as given, the reference's network takes
            same = _long_axes(event) == _long_axes(own) or _is_part_of_batch(event, own)
            fits = event.slot.startswith("in") and same
        else:
            fits = same_axes(event, own) or merges_axes(event, own)
            fits = fits or (same_kind(event, own) and is_packed(own.shape, event.shape))
            fits = fits or _is_part_of_batch(event, own)
        if fits or _long_axes(event) in self.shapes:
            return fits
        if _has_other_length(event, own):
            return not self._has_all_rows(event, own)
        return _long_axes(own) not in self.reference_shapes and _has_other_heads(event, own)

    def _has_form(self, event: Event, own: Event, nearest: Sequence[Event]) -> bool:
        """Whether both values are normed, or none is, but for one that comes from a normed value.

        A wrong rotation does not keep the lengths of normed rows.
        """
        if self.comparer.same_form(event, own):
            return True
        is_normed = self.comparer.reference.is_normed
        sources = (e for e in nearest if prod(e.shape) == prod(event.shape))
        comes_from_norm = bool(is_normed(event)) and any(map(is_normed, sources))
        return comes_from_norm and not self.comparer.port.is_probability(own)

    def _has_all_rows(self, event: Event, own: Event) -> bool:
        """Whether the reference's value only repeats rows that calls of the port's have: padding.

        Rows are known by their products with one random vector.
        """
        calls = [e for e in self.own if (e.name, e.slot, e.step) == (own.name, own.slot, own.step)]
        sides = (self.traces.reference, (event,)), (self.traces.port, calls)
        if prod(own.shape[:-1]) < 2 or not all(
            trace.has_values(e) for trace, events in sides for e in events
        ):
            return False
        vector = np.random.default_rng(0).standard_normal(event.shape[-1])
        expected, known = (
            np.concatenate([wide(trace.read(e)).reshape(-1, len(vector)) @ vector for e in events])
            for trace, events in sides
        )
        known = np.sort(known)
        after = np.searchsorted(known, expected).clip(1, len(known) - 1)
        apart = np.minimum(np.abs(expected - known[after]), np.abs(expected - known[after - 1]))
        return bool(apart.max() < SAME_ROWS * np.sqrt(np.square(known).mean()))

    def _agreed_before(self, event: Event, own: Event) -> bool:
        """Whether two values were equal one step before, although nothing had paired them."""
        steps = (event.step - 1, own.step - 1)
        one = self.traces.reference.find(event.name, event.slot, steps[0], event.call)
        other = self.traces.port.find(own.name, own.slot, steps[1], own.call)
        if one is None or other is None:
            return False
        (row,) = measure_rows(self.traces, [Pair((one,), (other,), "position")], Layouts())
        return row.agrees and bool(self.traces.reference.read(one).any())  # zeros show nothing

    def _is_new(self, own: Event, sources: Sequence[Event]) -> bool:
        """Whether a value is not just one more name of a right one.

        It is where an operation on that one is missing, and in a call that the reference has not.
        """
        right = self.right.get(own.hash or "")
        if right is None or own.call:
            return True
        is_source = right.hash in {event.hash for event in sources}
        return own.slot[:3] == "out" and is_source and self.names[right.hash] == 1

    def _is_used_rightly(self, event: Event, own: Event) -> bool:
        """Whether both sides go on to an equal result of the module that has this value in it.

        Then the port has it in another form: with text beside it, or its parts in another order.
        """
        module = event.name.rpartition(".")[0]
        return any(
            other.i > event.i and at > own.i and f"{other.name}.".startswith(f"{module}.")
            for other, at in self.compared
            if other.step == event.step and other.slot.startswith("out")
        )

    def _is_another_mask(self, event: Event, own: Event) -> bool:
        """Whether two masks hide other tokens. What is used late in a step may be wrong after all.

        The port may have one and zero the other way round, or other numbers for them.
        """
        sides = (self.traces.reference, event), (self.traces.port, own)
        if event.shape != own.shape or not all(t.has_values(e) for t, e in sides):
            return False
        right, mask = (trace.read(e).reshape(-1).astype(np.float64) for trace, e in sides)
        kinds = {*zip(right.tolist(), mask.tolist(), strict=True)}
        return len({*right.tolist()}) == len({*mask.tolist()}) == 2 < len(kinds)

    def _is_long_past(self, event: Event, own: Event, end: int) -> bool:
        """Whether much of a step agrees after this value on both sides: what uses it is right."""
        step = [(o, at) for o, at in self.compared if o.step == event.step]
        after = [at for o, at in step if o.i > event.i and own.i < at < end]
        return len(after) > max(FEW, MUCH * len(step))

    def _start(self, at: int, nearest: Sequence[Event]) -> int:
        """Where the port has what an event was computed from: of several calls, any of them.

        Of an event of unknown sources, where it has the last agreeing value before it.
        """
        calls: dict[str, list[int]] = defaultdict(list)
        for other in nearest:
            calls[other.name].append(self.agreeing[other.i])
        if calls:
            return max(map(min, calls.values()))
        before = ((other.i, own) for other, own in self.compared if other.i < at)
        return max(before, default=(-1, -1))[1]

    def _is_free(self, event: Event) -> bool:
        """Whether a value has no counterpart, and nothing shows that the port has it right."""
        results = (other for other in self.flow.results(event) if other.i in self.paired)
        after = next(results, None)
        return (
            event.kind == "activation"
            and event.i not in self.paired
            and (after is None or after.i not in self.agreeing)
        )


def _long_axes(event: Event) -> tuple[int, ...]:
    """A shape without axes of length 1: a port may leave out the batch."""
    return tuple(length for length in event.shape if length != 1)


def _is_part_of_batch(event: Event, own: Event) -> bool:
    """Whether a value has fewer rows than the batch of the reference: those of the prompt alone."""
    whole, part = event.shape, own.shape
    fits = bool(whole) and len(whole) == len(part) and whole[1:] == part[1:]
    return fits and 0 < part[0] < whole[0] and whole[0] % part[0] == 0


def _has_other_length(event: Event, own: Event) -> bool:
    """Whether a value is longer or shorter along one axis, which is not the last."""
    shape, own_shape = _long_axes(event), _long_axes(own)
    if len(shape) != len(own_shape) or not shape:
        return False
    other = [a != b for a, b in zip(shape, own_shape, strict=True)]
    return sum(other) == 1 and not other[-1] and own.slot[:3] == "out"


def _has_other_heads(event: Event, own: Event) -> bool:
    """Whether a value has as many numbers, and heads of another width."""
    shape, own_shape = _long_axes(event), _long_axes(own)
    if len(shape) != len(own_shape) or len(shape) < 3 or prod(shape) != prod(own_shape):
        return False
    return sum(a != b for a, b in zip(shape, own_shape, strict=True)) == 2


def same_role(wrong: Pair, others: Sequence[Pair]) -> list[Pair]:
    """Pairs that have in earlier blocks the names of a wrong one.

    Queries and keys that are rotated too far have the right products in a block by itself.
    """
    role, at = _role(wrong), wrong.event.i
    return [other for other in others if role and _role(other) == role and other.event.i < at]


def _role(pair: Pair) -> tuple[str, str, str] | None:
    """What the names of a pair have in every block; None without a number."""
    words = [last_word(event.name) for event in (pair.event, pair.port_event)]
    is_numbered = words[1] != pair.port_event.name and all(words)
    return (words[0], words[1], pair.port_event.slot) if is_numbered else None
