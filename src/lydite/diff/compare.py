"""`compare`: two traces in, one verdict out."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.core.files import open_regular
from lydite.diff import preconditions
from lydite.diff.data_flow import Upstream
from lydite.diff.divergence.earlier import EarlierValues, same_role
from lydite.diff.divergence.first import (
    CLOSED_MARGIN,
    ESTIMATE_MARGIN,
    Divergence,
    coverage,
    doubled_rows,
    first_divergence,
    first_isolated,
    misplaced_value,
    over_limit,
    unpaired_between,
)
from lydite.diff.divergence.injected_verdict import drop_propagated_errors, wrong_sites
from lydite.diff.findings import Evidence, find, is_another_form, replayed
from lydite.diff.findings.parts import parts_reordered
from lydite.diff.measure.aligned import Layouts
from lydite.diff.measure.axes import possible_fits
from lydite.diff.measure.distance import relative_error, wide
from lydite.diff.measure.rounding import UNIT
from lydite.diff.measure.rows import GATED, Comparison, Progress, measure_rows
from lydite.diff.name_map import Rename, check_name_map
from lydite.diff.pairing.name_matching import module_of
from lydite.diff.pairing.pair_traces import GUESSES, pair_traces
from lydite.diff.pairing.paired_events import BY_NAME, SAME_MODULE, Pair, Pairing
from lydite.diff.prompt_order import views
from lydite.diff.read_evidence import EvidenceReader
from lydite.diff.reference_parameters import ParameterValues
from lydite.diff.repro import Reproduction
from lydite.diff.result import Confidence, Finding, Gate, Row, Verdict
from lydite.diff.trace_health import examine
from lydite.diff.trace_view import TraceView
from lydite.diff.verdict_text import (
    agreement_text,
    divergence_text,
    narrowing_text,
    uncovered_text,
    undecided_text,
)
from lydite.trace.events import Event, EventId
from lydite.trace.reader import Trace
from lydite.trace.selftest import check_selftest

BESIDE = 8  # events around a guessed counterpart among which the right one is searched
MAX_INPUTS = 6  # values of a reproduction, where the inputs themselves are not recorded
MAX_NOTES = 8  # assumptions listed as remarks
IN_ORDER = 0.8  # of neighbouring pairs that a port computes in the reference's order
SAME_ERROR = 0.999  # cosine between the errors of two values


def compare(
    reference: Trace,
    port: Trace,
    *,
    floor: Trace | None = None,
    renames: Mapping[str, Rename] | None = None,
    tolerance: float | None = None,
    isolated: bool = False,
    without: Collection[str] = (),
    least: Mapping[EventId, float] | None = None,
    checkpoint: Path | None = None,
    reproduce: Callable[[Reproduction], None] | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Compare a port's trace with the reference's: gates, pairs, rounding, first divergence.

    With `isolated` the port ran on the reference's values, so errors do not propagate. Names of the
    port in `without` have no counterpart. No limit is below that in `least`. A map without any
    entry that fits both traces is an InputError. The reference's parameters are read from
    `checkpoint`, or from its trace, to compute linear layers and convolutions again. `reproduce`
    gets the first wrong operation alone.
    """
    remarks: tuple[str, ...] = ()
    names = dict(renames or {})
    if not isolated:
        names, remarks = check_name_map(names, reference, port)
    with ParameterValues(reference, checkpoint) as parameters:
        verdict = _compare(
            Comparison(reference, port, floor, tolerance, isolated, least or {}),
            {**names, **{name: Rename(()) for name in without}},
            parameters,
            reproduce,
            progress,
        )
        if parameters.is_unused:
            remarks += (
                "--checkpoint is not used: no parameter in it has the name of a recorded module; "
                'record with the component\'s name as scope, such as scope="vae"',
            )
    sides = (("reference", reference), ("port", port))
    incomplete = tuple(side for side, trace in sides if _is_incomplete(trace))
    return replace(verdict, incomplete=incomplete, remarks=(*remarks, *verdict.remarks))


def _compare(
    traces: Comparison,
    renames: Mapping[str, Rename],
    parameters: ParameterValues,
    reproduce: Callable[[Reproduction], None] | None,
    progress: Progress | None,
) -> Verdict:
    reference, port = traces.reference, traces.port
    for side, trace in (("reference", reference), ("port", port)):
        if problems := check_selftest(trace):
            detail = f"the {side}'s trace fails its self-test: {problems[0]}"
            return _cannot_compare(detail, Gate("dump", False, detail))
    conditions, remarks = preconditions.check_conditions(reference, port)
    if not conditions.gate.passed:
        return _cannot_compare(f"the runs differ: {conditions.gate.detail}", conditions.gate)
    reference, port, order = views(reference, port)
    floor = traces.floor and TraceView.of(traces.floor)
    traces = replace(traces, reference=reference, port=port, floor=floor)
    pairing = pair_traces(reference, port, renames)
    if not pairing.pairs:
        reason = "no value of the port could be paired with one of the reference"
        return _cannot_compare(reason, conditions.gate, pairing)
    comparer = _Comparer(traces, pairing, renames, parameters, reproduce)
    comparer.gates.append(conditions.gate)
    comparer.remarks += [*remarks, *order, *pairing.remarks]
    return comparer.verdict(progress)


class _Comparer:
    """What the steps of one comparison share."""

    def __init__(
        self,
        traces: Comparison,
        pairing: Pairing,
        renames: Mapping[str, Rename],
        parameters: ParameterValues,
        reproduce: Callable[[Reproduction], None] | None,
    ) -> None:
        self.traces, self.pairing, self.renames = traces, pairing, renames
        self.parameters, self.reproduce = parameters, reproduce
        self.without = {name for name, rename in renames.items() if not rename.ref}
        self.turned: tuple[tuple[str, str], ...] = ()  # parameters in an axis order of their own
        self.gates: list[Gate] = []
        self.failed: list[preconditions.GateResult] = []
        self.remarks: list[str] = []
        self.layouts = Layouts()
        self.reader = EvidenceReader(
            traces.reference, traces.port, pairing, self.layouts, parameters
        )
        self.pairs = [pair for pair in pairing.pairs if pair.event.kind not in GATED]
        self.ignored_rows: tuple[Row, ...] = ()

    @property
    def estimated(self) -> bool:
        """Whether the limits are estimates, not measured and not the user's."""
        return self.traces.floor is None and self.traces.tolerance is None

    def verdict(self, progress: Progress | None) -> Verdict:
        self._check_gates()
        self.layouts.learn(self.pairing.pairs, self.traces.reference, self.traces.port)
        rows = measure_rows(self.traces, self.pairing.pairs, self.layouts, progress)
        wrong = [pair for row, pair in zip(rows, self.pairs, strict=True) if row.wrong]
        if wrong and self.layouts.learn_joined(wrong, self.traces.reference, self.traces.port):
            rows = measure_rows(self.traces, self.pairing.pairs, self.layouts, progress)
        divergence = self._first_divergence(rows)
        for failed in self.failed:
            # Weights may be stored more coarsely, or not be used: they have to show in a value.
            if failed.gate.name != "weights" or divergence.first is not None or not rows:
                at_weights = self._at_weights(failed, rows, divergence)
                return at_weights or self._at_gate(failed, rows)
            self.remarks.append(f"weights: {failed.gate.detail}; no value is wrong because of it")
        if divergence.first is not None:
            return self._at_row(rows, divergence)
        covered = coverage(self.traces, self.pairs, rows, self.without)
        if not covered.complete and not self.traces.isolated:
            return self._finish("cannot-compare", uncovered_text(rows, covered), rows)
        self._remark_namesakes()
        return self._finish("agree", agreement_text(rows, covered, self.pairing), rows)

    def _remark_namesakes(self) -> None:
        """Say which values of one name on both sides were not compared."""
        words = [
            {name.rpartition("/")[2].rpartition(".")[2]: name for name in names}
            for names in (self.pairing.unpaired_reference, self.pairing.unpaired_port)
        ]
        for word in sorted(words[0].keys() & words[1].keys()):
            events = [
                next(
                    (e for e in trace.events if e.name == side[word] and e.slot[:3] == "out"), None
                )
                for trace, side in zip(
                    (self.traces.reference, self.traces.port), words, strict=True
                )
            ]
            if (reference := events[0]) is not None and (port := events[1]) is not None:
                shapes = ["×".join(map(str, event.shape)) for event in (reference, port)]
                self.remarks.append(
                    f"{port.name} ({shapes[1]}) was not compared; the reference has "
                    f"{reference.name} ({shapes[0]}), also without a counterpart"
                )

    def _check_gates(self) -> None:
        reference, port, pairs = self.traces.reference, self.traces.port, self.pairing.pairs
        weights, remarks = preconditions.check_weights(reference, port, self.renames)
        self.remarks += remarks
        self.turned = weights.turned
        results = [
            preconditions.check_ids(pairs, reference, port),
            preconditions.check_schedule(pairs, reference, port),
            weights,
            preconditions.check_inputs(pairs, reference, port),
        ]
        self.gates += [result.gate for result in results]
        self.failed = [result for result in results if not result.gate.passed]

    def _first_divergence(self, rows: list[Row]) -> Divergence:
        if self.traces.isolated:
            rows[:] = drop_propagated_errors(rows, self.pairs, self.traces, self.layouts)
            return first_isolated(rows)
        explained: set[int] = set()

        inputs, doubled = self._first_of_inputs(rows), doubled_rows(rows, self.pairs)

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

        def spoils(index: int) -> bool:
            """Whether the first compared value that is computed from this one is wrong."""
            results = self.traces.flow.results(self.pairs[index].event)
            compared = [of_event[event.i] for event in results if event.i in of_event]
            return any(rows[at].wrong and at not in doubled for at in compared[:1])

        divergence = first_divergence(
            rows,
            lambda index: is_misplaced(index, inside=self.pairs[index].how not in BY_NAME),
            estimated=self.estimated,
            is_guessed=lambda index: index in doubled or self._is_guess(rows, index),
            is_doubled=lambda index: index in doubled,
            is_impossible=lambda index: self._is_before_inputs(index, inputs),
            is_mispaired=lambda index: (
                self._has_own_order(rows, index)
                or is_misplaced(index, self._taken(self.pairs[index]))
            ),
            is_anchored=lambda index: self._is_anchored(rows, index),
            spoils=spoils,
            is_whole=lambda index: self._is_whole(self.pairs[index].event),
            port_order=self._port_order(),
        )
        first = divergence.first
        if first is not None and (own := self._wrong_by_itself(rows, first)) is not None:
            divergence = Divergence(own, (*divergence.ignored, first))
        if (passed_on := self._same_error_before(rows, divergence)) is not None:
            ignored = tuple(index for index in divergence.ignored if index != passed_on)
            divergence = Divergence(passed_on, ignored)
        divergence = self._moved_to_earlier(rows, divergence)
        self.ignored_rows = tuple(rows[index] for index in divergence.ignored)
        names = {rows[index].name for index in explained}
        for index in divergence.ignored:
            if rows[index].name not in names:
                self.remarks.append(_why_ignored(rows[index], rows[index + 1 :]))
        return divergence

    def _is_guess(self, rows: Sequence[Row], index: int) -> bool:
        """Whether a pair may be none: a guess, or values of different shapes with other names."""
        how = self.pairs[index].how
        return how in GUESSES or (rows[index].error is None and how not in SAME_MODULE)

    def _has_own_order(self, rows: Sequence[Row], index: int) -> bool:
        """Whether a port that fuses layers has their values side by side in an order of its own.

        It takes them apart in that order: the next wrong value has another cause, or there is none.
        """
        pair = self.pairs[index]
        if len(pair.reference) < 2 or rows[index].error is None:
            return False
        found = parts_reordered(self.reader.evidence(pair, rows[index].floor or 0.0))
        if found is None or found.confidence != "certain":
            return False
        later = (at for at in range(index + 1, len(rows)) if rows[at].wrong)
        if (after := next(later, None)) is None:
            return True
        causes = replayed(self.reader.evidence(self.pairs[after], rows[after].floor or 0.0))
        return bool(causes) and causes[0].cause != "qkv-exchanged"

    def _first_of_inputs(self, rows: Sequence[Row]) -> dict[tuple[str, int, int], int]:
        """Where the reference first has an input that agrees, for each call of the port."""
        first: dict[str | int, int] = {}
        for event in self.traces.reference.events:
            first.setdefault(event.hash or event.i, event.i)
        inputs: dict[tuple[str, int, int], int] = {}
        for row, pair in zip(rows, self.pairs, strict=True):
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

    def _moved_to_earlier(self, rows: list[Row], divergence: Divergence) -> Divergence:
        """The divergence at the port's first wrong value, where nothing had paired that one."""
        if divergence.first is None or divergence.undecided:
            return divergence
        first, pair = divergence.first, self.pairs[divergence.first]
        given = [pair for pair in self.pairing.pairs if pair.event.kind in GATED]
        earlier = EarlierValues(self.traces, self.pairs, rows, self.pairing.unpaired_port, given)
        for other in (*same_role(pair, self.pairing.set_aside), *earlier.before(pair)):
            (row,) = measure_rows(self.traces, [other], self.layouts)
            # A layer may take its input in a form of its own, but not with other numbers.
            if not possible_fits(other.port_event.shape, other.event.shape):
                row = replace(row, wrong=True)
            is_wrong = row.wrong and (row.error or inf) > (rows[first].limit or 0.0)
            # A value that equals one without a counterpart is that one.
            if is_wrong and not misplaced_value(self.traces, other, row, self._taken(other)):
                self.pairs.insert(first, other)
                rows.insert(first, row)
                ignored = (index + (index >= first) for index in divergence.ignored)
                return Divergence(first, tuple(ignored))
        return divergence

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

    def _wrong_by_itself(self, rows: Sequence[Row], first: int) -> int | None:
        """The value after a guessed copy, where it is another form of what the reference has.

        Then the copy is only one more name of a right value.
        """
        if self.pairs[first].how != "copy":
            return None
        certain = (
            at
            for at in range(first + 1, len(rows))
            if self.pairs[at].how not in GUESSES and not rows[at].slot.startswith("in")
        )
        after = next((at for at in certain if rows[at].wrong), None)
        if after is None:
            return None
        evidence = self.reader.evidence(self.pairs[after], rows[after].floor or 0.0)
        found = replayed(evidence, of_input=False)
        return after if found and found[0].cause != "another-input" else None

    def _taken(self, pair: Pair) -> set[str]:
        """Hashes of the reference's values that other values of the port have as counterparts."""
        others = (each for each in self.pairs if each.port_event.name != pair.port_event.name)
        return {event.hash for other in others for event in other.reference if event.hash}

    def _same_error_before(self, rows: Sequence[Row], divergence: Divergence) -> int | None:
        """A value that feeds the first wrong one and has its error, or is a multiple.

        A norm takes a factor or a constant out again, so that the values after it agree; a residual
        passes it on.
        """
        if divergence.first is None:
            return None
        agreeing = {
            event.i
            for row, pair in zip(rows, self.pairs, strict=True)
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

    def _is_anchored(self, rows: Sequence[Row], index: int) -> bool:
        """Whether the values before this one show that its error is no rounding."""
        upstream = self._upstream(rows, index)
        is_far = over_limit(rows[index]) > CLOSED_MARGIN
        return upstream.is_anchored or (upstream.is_closed and is_far)

    def _upstream(self, rows: Sequence[Row], index: int) -> Upstream:
        """The agreeing values from which this one was computed."""
        agreeing = {
            event.i
            for row, pair in zip(rows, self.pairs, strict=True)
            if row.agrees
            for event in pair.reference
        }
        return self.traces.flow.upstream(self.pairs[index].event, agreeing)

    def _at_gate(self, failed: preconditions.GateResult, rows: list[Row]) -> Verdict:
        findings: tuple[Finding, ...] = ()
        names = failed.parameters[0] if failed.parameters else (failed.gate.name, failed.gate.name)
        if failed.pair is not None:
            names = (failed.pair.event.name, failed.pair.port_event.name)
            findings = find(self.reader.evidence(failed.pair, 0.0))
        verb = "differs" if failed.gate.name == "schedule" else "differ"
        return self._finish(
            "diverge",
            f"The {failed.gate.name} {verb}, before any activation: {failed.gate.detail}.",
            rows,
            findings=findings or (_gate_finding(failed),),
            site=names[0],
            port_site=names[1],
            slot=failed.pair.event.slot if failed.pair else None,
            step=failed.pair.event.step if failed.pair else 0,
        )

    def _at_weights(
        self, failed: preconditions.GateResult, rows: list[Row], divergence: Divergence
    ) -> Verdict | None:
        """The first wrong value, when it is the output of a module whose weights are wrong."""
        modules = {name.rpartition(".")[0] for name, _ in failed.parameters}
        if divergence.first is None or rows[divergence.first].site not in modules:
            return None
        return self._at_row(rows, divergence, _gate_finding(failed))

    def _at_row(self, rows: list[Row], divergence: Divergence, *more: Finding) -> Verdict:
        assert divergence.first is not None
        pair, row = self.pairs[divergence.first], rows[divergence.first]
        row = replace(row, site=self._wrong_part(pair, row))
        findings = (*more, *self._turned_weight(row))
        evidence = self.reader.evidence(pair, row.floor or 0.0)
        findings += find(evidence) or self._of_the_same_call(rows, divergence.first)
        if not findings and pair.how in (*GUESSES, "order", "siblings"):
            row, evidence, findings = self._other_counterpart(pair, row, evidence)
        ruled_out = () if findings else tuple(dict.fromkeys(evidence.ruled_out))
        if row.error is None:
            findings = (_shape_finding(pair), *findings)
        if self.reproduce is not None and row.error is not None:
            self.reproduce(self._reproduction(rows, divergence.first, evidence, findings))
        last, unpaired, start = None, (), -1
        upstream = self._upstream(rows, divergence.first)
        follows_inputs = not upstream.nearest and not upstream.is_open
        before = None if follows_inputs else self._last_agreement(rows, divergence.first)
        if before is not None:
            last, start = rows[before], self.pairs[before].event.i
            unpaired = unpaired_between(
                self.traces.port, self.pairs[before], pair, self.pairing.pairs, self.without
            )
        paired = {event.i for pair in self.pairing.pairs for event in pair.reference}
        passed = [event for event in upstream.passed if event.i > start]
        if hint := narrowing_text(passed, paired):
            self.remarks.insert(0, hint)
        # Another form of the reference's value also shows that the two values are counterparts.
        if divergence.undecided and not is_another_form(evidence):
            answer = "cannot-compare"
            sentence = undecided_text(rows, row, estimated=self.estimated)
        else:
            answer = "diverge"
            sentence = divergence_text(
                rows, row, last, findings, unpaired, follows_inputs=follows_inputs
            )
            if ruled_out:
                sentence += f" No known variant explains it; ruled out: {', '.join(ruled_out)}."
        return self._finish(
            answer,
            sentence,
            rows,
            findings=findings,
            ruled_out=ruled_out,
            site=row.site,
            port_site=row.port_site,
            slot=row.slot,
            port_slot=row.port_slot,
            step=row.step,
            error=row.error,
            floor=row.floor,
            limit=row.limit,
            last_agreement=last.site if last else None,
        )

    def _of_the_same_call(self, rows: Sequence[Row], first: int) -> tuple[Finding, ...]:
        """What explains another output of the same call, as an attention's result."""
        row = rows[first]
        for at, other in enumerate(rows):
            same = (other.site, other.step, other.call) == (row.site, row.step, row.call)
            if at != first and same and other.wrong and other.slot.startswith("out"):
                found = find(self.reader.evidence(self.pairs[at], other.floor or 0.0))
                if found:
                    return found
        return ()

    def _other_counterpart(
        self, pair: Pair, row: Row, evidence: Evidence
    ) -> tuple[Row, Evidence, tuple[Finding, ...]]:
        """A value beside a guessed counterpart of which the port's is a known variant."""
        self.reader.forget(pair)
        pairs = (each for each in self.pairing.pairs if each is not pair)
        paired = {event.hash or event.i for each in pairs for event in each.reference}
        for other in self.traces.reference.events:
            near = 0 < abs(other.i - pair.event.i) <= BESIDE and other.step == pair.event.step
            near = near and (other.hash or other.i) not in paired
            if not near or other.shape != pair.event.shape or other.slot.startswith("in"):
                continue
            if other.name == pair.event.name:
                continue  # the port's value is its input
            beside = self.reader.evidence(replace(pair, reference=(other,)), row.floor or 0.0)
            if findings := replayed(beside):
                return replace(row, site=other.name, slot=other.slot), beside, findings
        return row, evidence, ()

    def _reproduction(
        self, rows: Sequence[Row], index: int, evidence: Evidence, findings: Sequence[Finding]
    ) -> Reproduction:
        """The wrong operation alone: with its inputs, or else the agreeing values before it."""
        inputs = {slot: right for slot, (right, _) in evidence.inputs.items()}
        if not inputs:
            reference = self.traces.reference
            inputs = {
                str(event): wide(reference.read(event))
                for event in self._upstream(rows, index).nearest[:MAX_INPUTS]
                if reference.has_values(event)
            }
        row = rows[index]
        inputs |= self.parameters.of_module(row.site) if row.slot.startswith("out") else {}
        return Reproduction(
            row.full_name,
            findings[0].evidence if findings else "",
            evidence.reference,
            evidence.port,
            row.floor or 0.0,
            inputs,
        )

    def _turned_weight(self, row: Row) -> tuple[Finding, ...]:
        """That a parameter of the wrong module has another axis order than the others."""
        for name, port_name in self.turned:
            module = module_of(name)
            if module and row.site in (module, f"{row.scope}/{module}"):
                return (
                    Finding(
                        "weight-reordered",
                        f"{port_name} holds the reference's numbers in another order, unlike most "
                        "other weights",
                        "Check how it is converted: transposed, or its rows in another order.",
                    ),
                )
        return ()

    def _last_agreement(self, rows: Sequence[Row], index: int) -> int | None:
        """The nearest agreeing value upstream; the last in time where the trace shows none."""
        event = self.pairs[index].event
        of_event = {event.i: at for at, pair in enumerate(self.pairs) for event in pair.reference}
        for nearest in self._upstream(rows, index).nearest:
            if nearest.i in of_event:
                return of_event[nearest.i]
        earlier = (at for at in reversed(range(index)) if self.pairs[at].event.i < event.i)
        return next((at for at in earlier if rows[at].agrees), None)

    def _wrong_part(self, pair: Pair, row: Row) -> str:
        """The part of a fused value that is wrong: to_k, where the port fuses q, k and v."""
        values = self.reader.values(pair)
        if len(pair.reference) < 2 or values.reference is None or values.port is None:
            return row.site
        if values.reference.shape != values.port.shape:
            return row.site
        ends = np.cumsum([event.shape[pair.axis] for event in pair.reference])[:-1]
        parts = (np.split(side, ends, pair.axis) for side in (values.port, values.reference))
        for event, value, expected in zip(pair.reference, *parts, strict=True):
            if relative_error(value, expected) > (row.limit or 0.0):
                return event.name
        return row.site

    def _finish(self, answer: Any, sentence: str, rows: list[Row], **fields: Any) -> Verdict:
        port_health = examine(self.traces.port)
        kinds = {remark.kind for remark in port_health} | {"not-finite"}
        health = [
            f"reference: {remark.sentence}"
            for remark in examine(self.traces.reference)
            if remark.kind in kinds
        ]
        health += [f"port: {remark.sentence}" for remark in port_health]
        notes = {row.note: row.name for row in reversed(rows) if row.note}
        self.remarks += [f"{name}: {note}" for note, name in notes.items()][:MAX_NOTES]
        if len(notes) > MAX_NOTES:
            self.remarks.append(f"{len(notes) - MAX_NOTES} more assumptions of this kind")
        for side, trace in (("reference", self.traces.reference), ("port", self.traces.port)):
            if trace.lost:
                self.remarks.append(f"the last {trace.lost} values of the {side} are lost")
        isolated = self.traces.isolated
        return Verdict(
            answer,
            sentence,
            gates=tuple(self.gates),
            rows=tuple(rows),
            sources=wrong_sites(rows, self.failed, self.traces) if isolated else (),
            ignored_rows=self.ignored_rows,
            remarks=tuple(self.remarks),
            unpaired_reference=self.pairing.unpaired_reference,
            unpaired_port=self.pairing.unpaired_port,
            floor_source=_rounding_source(self.traces),
            health=tuple(health),
            **fields,
        )


def _why_ignored(row: Row, later: Sequence[Row]) -> str:
    times = f"{row.error / row.limit:.2g} × its limit" if row.error and row.limit else ""
    if times and any(other.wrong for other in later):
        return f"{row.name} is {times}; that does not explain the much larger error behind it"
    if row.error is not None and row.limit and row.error <= ESTIMATE_MARGIN * row.limit:
        return (
            f"{row.name} is {row.error / row.limit:.2g} × its limit, and no later value is above "
            "its own; the limits are estimates here, --floor measures them"
        )
    problem = "has another shape" if row.error is None else "differs"
    return f"{row.name} {problem}, and no later value does: recorded at another point, or not used"


def _cannot_compare(reason: str, gate: Gate, pairing: Pairing | None = None) -> Verdict:
    return Verdict(
        "cannot-compare",
        f"Cannot compare: {reason.rstrip('.')}.",
        gates=(gate,),
        unpaired_reference=pairing.unpaired_reference if pairing else (),
        unpaired_port=pairing.unpaired_port if pairing else (),
    )


def _is_incomplete(trace: Trace) -> bool:
    """Whether the run did not end by itself, or the last line of its events is cut off."""
    if not trace.header.complete or trace.lost:
        return True
    with open_regular(trace.folder / "events.jsonl") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


def _gate_finding(failed: preconditions.GateResult) -> Finding:
    fixes = {
        "ids": "Compare vocabulary, special tokens and padding of the two tokenizers.",
        "schedule": "Print both tables; the sampler is wrong before the network runs.",
        "weights": "Check the loading: lydite audit CHECKPOINT.",
        "inputs": "Start both runs from one saved array; another library draws other noise from "
        "the same seed.",
    }
    name = failed.gate.name
    worth: Confidence = "observed" if name in ("inputs", "schedule") else "certain"
    return Finding(f"{name}-differ", failed.gate.detail, fixes[name], worth)


def _shape_finding(pair: Pair) -> Finding:
    expected = " + ".join("×".join(map(str, event.shape)) for event in pair.reference)
    shape = " + ".join("×".join(map(str, event.shape)) for event in pair.port)
    return Finding(
        "other-shape",
        f"{expected} in the reference, {shape} in the port; no axis order makes them equal",
        "If the two are not the same value, correct the pair in a map.json (null, or the right "
        "name).",
        "observed",
    )


def _rounding_source(traces: Comparison) -> str:
    if traces.tolerance is not None:
        return f"not used; your tolerance is {traces.tolerance:g}"
    if traces.floor is None:
        return "estimated from dtype and depth; --floor measures it"
    first, second = traces.reference.dtype, traces.floor.dtype
    runs = f"the reference in {first or 'its precision'} and in {second or 'another'}"
    port_unit = UNIT.get(traces.port.dtype, 0.0)
    if max(UNIT.get(name, inf) for name in (first, second)) < port_unit / 2:
        return f"estimated; {runs} do not show the rounding of {traces.port.dtype}"
    return f"measured: {runs}"
