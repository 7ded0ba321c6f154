"""The search for the wrong value that is the bug, in the traces of one comparison."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import groupby, pairwise
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.data_flow import Upstream
from lydite.diff.divergence.earlier import EarlierValues, same_role
from lydite.diff.divergence.first import (
    CLOSED_MARGIN,
    Divergence,
    RowTests,
    doubled_rows,
    first_divergence,
    first_isolated,
    has_own_channels,
    misplaced_value,
    over_limit,
)
from lydite.diff.divergence.injected_verdict import drop_propagated_errors
from lydite.diff.findings import replayed
from lydite.diff.findings.parts import parts_reordered
from lydite.diff.measure.aligned import Layouts
from lydite.diff.measure.axes import possible_fits
from lydite.diff.measure.channels import moves
from lydite.diff.measure.distance import relative_error, wide
from lydite.diff.measure.rotations import are_same_angles
from lydite.diff.measure.rows import GATED, Comparison, measure_rows
from lydite.diff.pairing.pair_traces import GUESSES
from lydite.diff.pairing.paired_events import BY_NAME, ROTATION, SAME_MODULE, Pair, Pairing
from lydite.diff.read_evidence import EvidenceReader
from lydite.diff.result import Finding, Row
from lydite.diff.verdict_text import ignored_text
from lydite.trace.events import Event

IN_ORDER = 0.8  # of neighbouring pairs that a port computes in the reference's order
OF_CHUNKS = ("scale-shift-exchanged", "other-chunks", "other-gate", "another-value")
SOON = 8  # values that agree after a wrong one, which may be computed from it
SAME_ERROR = 0.999  # cosine between the errors of two values


class DivergenceSearch:
    """Answers what `first_divergence` asks of each wrong row, and corrects its answer.

    `pairs` and `rows` belong together. A value that nothing had paired may be added to both.
    """

    def __init__(
        self,
        traces: Comparison,
        pairing: Pairing,
        pairs: list[Pair],
        rows: list[Row],
        reader: EvidenceReader,
        layouts: Layouts,
    ) -> None:
        self.traces, self.pairing, self.layouts = traces, pairing, layouts
        self.pairs, self.rows, self.reader = pairs, rows, reader
        self.remarks: list[str] = []
        self.ignored_rows: tuple[Row, ...] = ()
        self.turned: set[str] = set()  # modules of the reference with a parameter in another order

    def run(self) -> Divergence:
        """The first row that is the bug, and the wrong rows before it that are not."""
        rows = self.rows
        if self.traces.isolated:
            rows[:] = drop_propagated_errors(rows, self.pairs, self.traces, self.layouts)
            return first_isolated(rows)
        explained: set[int] = set()
        inputs, doubled = self._first_of_inputs(), doubled_rows(rows, self.pairs)

        def is_misplaced(index: int, taken: Collection[str] = (), *, inside: bool = False) -> bool:
            if self.pairs[index].how == "end":
                return False  # a result: another layer's value there is the bug
            pair, row = self.pairs[index], rows[index]
            remark = misplaced_value(self.traces, pair, row, taken, inside=inside)
            if remark is not None:
                self.remarks.append(remark)
                explained.add(index)
            return remark is not None

        of_event = {event.i: at for at, pair in enumerate(self.pairs) for event in pair.reference}

        def compared_results(index: int) -> list[int] | None:
            """The compared values that are computed from this one; None if no module takes it."""
            results = self.traces.flow.results(self.pairs[index].event)
            return [of_event[e.i] for e in results if e.i in of_event] if results else None

        def spoils(index: int) -> bool:
            """Whether the first compared value that is computed from this one is wrong."""
            compared = compared_results(index) or []
            return any(rows[at].wrong and at not in doubled for at in compared[:1])

        def is_used(index: int) -> bool:
            return compared_results(index) != []

        tests = RowTests(
            is_misplaced=lambda index: is_misplaced(
                index, inside=self.pairs[index].how not in BY_NAME
            ),
            is_guessed=lambda index: index in doubled or self._is_guess(index),
            is_mispaired=lambda index: (
                self._has_own_order(index) or is_misplaced(index, self._taken(self.pairs[index]))
            ),
            is_doubled=lambda index: index in doubled,
            is_impossible=lambda index: self._is_before_inputs(index, inputs),
            is_anchored=self._is_anchored,
            spoils=spoils,
            is_used=is_used,
            is_whole=lambda index: self._is_whole(self.pairs[index].event),
            is_reordered=self._is_reordered,
            leads_to_right=self._leads_to_right,
        )
        divergence = first_divergence(
            rows, tests, estimated=self.traces.is_estimated, port_order=self._port_order()
        )
        first = divergence.first
        if first is not None and (own := self._wrong_by_itself(first)) is not None:
            divergence = Divergence(own, (*divergence.ignored, first))
        if (passed_on := self._same_error_before(divergence)) is not None:
            ignored = tuple(index for index in divergence.ignored if index != passed_on)
            divergence = Divergence(passed_on, ignored)
        divergence = self._moved_to_earlier(divergence)
        self.ignored_rows = tuple(rows[index] for index in divergence.ignored)
        names = {rows[index].name for index in explained}
        for index in divergence.ignored:
            if rows[index].name not in names:
                self.remarks.append(ignored_text(rows[index], rows[index + 1 :]))
        return divergence

    def _leads_to_right(self, index: int) -> bool:
        """Whether one of the next values that agree is computed from this one.

        Then the port computes the right value too, and has another one under this name. The trace
        has to show all that it is computed from.
        """
        event = self.pairs[index].event
        if not np.isfinite(self.rows[index].error or inf) or not self.traces.flow.has_inputs:
            return False
        later = [at for at in range(index + 1, len(self.rows)) if self.rows[at].agrees][:SOON]
        known = {
            e.i
            for row, pair in zip(self.rows, self.pairs, strict=True)
            if row.agrees
            for e in pair.reference
        }
        for at in later:
            way = self.traces.flow.upstream(self.pairs[at].event, known)
            if not way.is_open and event.i in {e.i for e in way.passed}:
                return True
        return False

    def _is_guess(self, index: int) -> bool:
        """Whether a pair may be none: a guess, or values of different shapes with other names.

        Or what a layer gives whose weight the port has in an order of its own.
        """
        how, has_shape = self.pairs[index].how, self.rows[index].error is not None
        is_turned = self._is_turned(index) and self._has_own_order(index)
        is_moved = is_turned or self._is_moved_back(index)
        return how in GUESSES or is_moved or (not has_shape and how not in SAME_MODULE)

    def _has_own_order(self, index: int) -> bool:
        """Whether the port has the parts of a value in an order of its own.

        They are layers that it fuses, or the chunks of a layer whose weight it loads in that order.
        It takes them apart in that order: the next wrong value has another cause, or there is none.
        """
        pair = self.pairs[index]
        if self._is_moved_back(index):
            return True
        is_turned = self._is_turned(index)
        if self.rows[index].error is None or (len(pair.reference) < 2 and not is_turned):
            return False
        found = parts_reordered(self.reader.evidence(pair, self.rows[index].floor or 0.0))
        if found is None or (found.confidence != "certain" and not is_turned):
            return False
        if (after := self._next_wrong(index)) is None:
            return True
        causes = replayed(self.reader.evidence(self.pairs[after], self.rows[after].floor or 0.0))
        if len(pair.reference) < 2:
            return bool(causes) and causes[0].cause not in OF_CHUNKS
        return bool(causes) and not _is_exchange(causes[0], pair)

    def _is_moved_back(self, index: int) -> bool:
        """Whether a value has its channels in another order, and the port takes that into account.

        Then the next wrong value, where the reference only moves the numbers of this one, has them
        moved otherwise.
        """
        after = self._next_wrong(index)
        if after is None or not self._is_reordered(index):
            return False
        (right, own), (right_after, own_after) = map(self._both, (index, after))
        if right is None or own is None or right_after is None or own_after is None:
            return False
        at = moves(right, right_after)
        if at is None or not np.array_equal(np.sort(own, None), np.sort(own_after, None)):
            return False
        return not np.array_equal(own.reshape(-1)[at], own_after.reshape(-1))

    def _is_reordered(self, index: int) -> bool:
        """Whether a value has the reference's channels in another order."""
        row = self.rows[index]
        right, own = self._both(index)
        if right is None or own is None or row.error is None:
            return False
        return has_own_channels(own, right, row.limit or 0.0)

    def _both(self, index: int) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        """The values of a row, reference's and port's, in one axis order."""
        values = self.reader.values(self.pairs[index])
        right, own = (None if x is None else wide(x) for x in (values.reference, values.port))
        return right, own

    def _next_wrong(self, index: int) -> int | None:
        """The next wrong row, if there is one."""
        later = (at for at in range(index + 1, len(self.rows)) if self.rows[at].wrong)
        return next(later, None)

    def _is_turned(self, index: int) -> bool:
        """Whether the layer that gives a value has a parameter in another order in the port."""
        name = self.pairs[index].event.name
        return not self.turned.isdisjoint((name, name.partition("/")[2]))

    def _first_of_inputs(self) -> dict[tuple[str, int, int], int]:
        """Where the reference first has an input that agrees, for each call of the port."""
        first: dict[str | int, int] = {}
        for event in self.traces.reference.events:
            first.setdefault(event.hash or event.i, event.i)
        inputs: dict[tuple[str, int, int], int] = {}
        for row, pair in zip(self.rows, self.pairs, strict=True):
            if row.agrees:
                at = max(first[event.hash or event.i] for event in pair.reference)
                for event in pair.port:
                    if event.slot.startswith("in"):
                        call = event.name, event.step, event.call
                        inputs[call] = max(inputs.get(call, -1), at)
        return inputs

    def _is_before_inputs(self, index: int, inputs: Mapping[tuple[str, int, int], int]) -> bool:
        """Whether the reference has computed a counterpart before what the port's came from."""
        pair, event = self.pairs[index], self.pairs[index].port_event
        if pair.how in BY_NAME or not event.slot.startswith("out"):
            return False
        at = inputs.get((event.name, event.step, event.call), -1)
        return max(other.i for other in pair.reference) < at

    def _moved_to_earlier(self, divergence: Divergence) -> Divergence:
        """The divergence at the port's first wrong value, where nothing had paired that one."""
        if divergence.first is None or divergence.undecided:
            return divergence
        first, pair = divergence.first, self.pairs[divergence.first]
        given = [pair for pair in self.pairing.pairs if pair.event.kind in GATED]
        earlier = EarlierValues(
            self.traces,
            self.pairs,
            self.rows,
            self.pairing.unpaired_port,
            given,
            tables=self.pairing.tables,
        )
        candidates = (
            *same_role(pair, self.pairing.set_aside),
            *earlier.before(pair),
            *self._before_next(first, earlier),
        )
        for _, others in groupby(candidates, lambda other: other.port):
            measured = [(o, measure_rows(self.traces, [o], self.layouts)[0]) for o in others]
            if any(row.agrees for _, row in measured):
                continue  # it is the right one of these
            for other, row in measured:
                # A layer may take its input in a form of its own, but not with other numbers.
                has_shape = possible_fits(other.port_event.shape, other.event.shape)
                if row.error is None and not has_shape:
                    row = replace(row, wrong=True)
                is_wrong = row.wrong and (row.error or inf) > (self.rows[first].limit or 0.0)
                # A value that equals one without a counterpart is that one.
                if is_wrong and other.how == ROTATION:
                    is_wrong = self._is_rotated_wrongly(pair, first, other)
                if is_wrong and not misplaced_value(self.traces, other, row, self._taken(other)):
                    self.pairs.insert(first, other)
                    self.rows.insert(first, row)
                    ignored = (index + (index >= first) for index in divergence.ignored)
                    return Divergence(first, tuple(ignored))
        return divergence

    def _is_rotated_wrongly(self, pair: Pair, first: int, table: Pair) -> bool:
        """Whether a table of rotations is wrong, and not only in an order of its own.

        A port may rotate by transposed matrices, or pairs in another order: that it is wrong, the
        first wrong value shows.
        """
        values = self.reader.values(table)
        if values.reference is None or values.port is None:
            return False
        right, own = (x[:, 0::2] + 1j * x[:, 1::2] for x in (values.reference, values.port))
        if not are_same_angles(right, own):
            return True
        found = replayed(self.reader.evidence(pair, self.rows[first].floor or 0.0))
        return bool(found) and found[0].cause.startswith(("rotation-", "sines-"))

    def _before_next(self, first: int, earlier: EarlierValues) -> Iterator[Pair]:
        """Values before a first wrong one that is a guess, on the way to the next wrong one."""
        pair = self.pairs[first]
        after = self._next_wrong(first)
        if pair.how in GUESSES and after is not None:
            for other in earlier.before(self.pairs[after]):
                if max(event.i for event in other.port) < min(event.i for event in pair.port):
                    yield other

    def _is_whole(self, event: Event) -> bool:
        """Whether all that a call of a module returns is compared."""
        compared = {e.hash or e.i for pair in self.pairs for e in pair.reference}
        call = (event.name, event.step, event.call)
        return all(
            (other.hash or other.i) in compared
            for other in self.traces.reference.events
            if (other.name, other.step, other.call) == call and other.slot.startswith("out")
        )

    def _port_order(self) -> list[int] | None:
        """The number of each pair's event in the port; None where most are in another order."""
        order = [min(event.i for event in pair.port) for pair in self.pairs]
        rising = sum(a < b for a, b in pairwise(order))
        return order if rising >= IN_ORDER * (len(order) - 1) else None

    def _wrong_by_itself(self, first: int) -> int | None:
        """The value after a guessed copy, where it is another form of what the reference has.

        Then the copy is only one more name of a right value.
        """
        if self.pairs[first].how != "copy":
            return None
        certain = (
            at
            for at in range(first + 1, len(self.rows))
            if self.pairs[at].how not in GUESSES and not self.rows[at].slot.startswith("in")
        )
        after = next((at for at in certain if self.rows[at].wrong), None)
        if after is None:
            return None
        evidence = self.reader.evidence(self.pairs[after], self.rows[after].floor or 0.0)
        found = replayed(evidence, of_input=False)
        return after if found and found[0].cause != "another-input" else None

    def _taken(self, pair: Pair) -> set[str]:
        """Hashes of the reference's values that other values of the port have as counterparts."""
        others = (each for each in self.pairs if each.port_event.name != pair.port_event.name)
        return {event.hash for other in others for event in other.reference if event.hash}

    def _same_error_before(self, divergence: Divergence) -> int | None:
        """A value that feeds the first wrong one and has its error, or is a multiple.

        A norm takes a factor or a constant out again, so that the values after it agree; a residual
        passes it on.
        """
        if divergence.first is None:
            return None
        agreeing = {
            event.i
            for row, pair in zip(self.rows, self.pairs, strict=True)
            if row.agrees
            for event in pair.reference
        }
        ignored = {self.pairs[index].event.i for index in divergence.ignored}
        first = self.pairs[divergence.first]
        upstream = self.traces.flow.upstream(first.event, agreeing | ignored)
        feeding = {event.hash or event.i for event in upstream.nearest}
        for index in divergence.ignored:
            pair = self.pairs[index]
            feeds = (pair.event.hash or pair.event.i) in feeding
            if index > divergence.first or not feeds:
                continue
            if self._is_multiple(pair) or self._has_error_of(first, pair):
                return index
        return None

    def _has_error_of(self, pair: Pair, other: Pair) -> bool:
        """Whether the errors of two values are multiples of each other."""
        errors: list[NDArray[Any]] = []
        for values in map(self.reader.values, (pair, other)):
            if values.reference is None or values.port is None:
                return False
            if values.reference.shape != values.port.shape:
                return False
            errors.append((wide(values.port) - wide(values.reference)).reshape(-1))
        a, b = errors
        sizes = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
        return a.size == b.size and sizes > 0 and abs(float(a @ b)) > SAME_ERROR * sizes

    def _is_multiple(self, pair: Pair) -> bool:
        """Whether the port's value is a multiple of the reference's."""
        values = self.reader.values(pair)
        if values.reference is None or values.port is None:
            return False
        reference, port = wide(values.reference), wide(values.port)
        if reference.shape != port.shape or not reference.any():
            return False
        factor = float(np.vdot(reference, port)) / float(np.vdot(reference, reference))
        return abs(factor - 1) > 1e-2 and relative_error(port, factor * reference) < 1e-3

    def _is_anchored(self, index: int) -> bool:
        """Whether the values before this one show that its error is no rounding."""
        upstream = self.upstream(index)
        is_far = over_limit(self.rows[index]) > CLOSED_MARGIN
        return upstream.is_anchored or (upstream.is_closed and is_far)

    def upstream(self, index: int) -> Upstream:
        """The agreeing values from which this one was computed."""
        agreeing = {
            event.i
            for row, pair in zip(self.rows, self.pairs, strict=True)
            if row.agrees
            for event in pair.reference
        }
        return self.traces.flow.upstream(self.pairs[index].event, agreeing)


def _is_exchange(found: Finding, pair: Pair) -> bool:
    """Whether a finding says that a part of a fused value is used in the place of another."""
    is_part = any(part.name in found.evidence for part in pair.reference)
    return found.cause == "qkv-exchanged" or (found.cause == "another-input" and is_part)
