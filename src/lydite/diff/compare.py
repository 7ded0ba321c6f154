"""`compare`: two traces in, one verdict out."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from lydite.core.files import open_regular
from lydite.diff import preconditions
from lydite.diff.divergence.first import Divergence, coverage, unpaired_between
from lydite.diff.divergence.injected_verdict import wrong_sites
from lydite.diff.divergence.search import DivergenceSearch
from lydite.diff.findings import Evidence, find, in_another_order, is_another_form, replayed
from lydite.diff.measure.aligned import Layouts
from lydite.diff.measure.distance import relative_error, wide
from lydite.diff.measure.rounding import UNIT
from lydite.diff.measure.rows import GATED, Comparison, Progress, measure_rows
from lydite.diff.name_map import Rename, check_name_map
from lydite.diff.pairing.alignment import same_axes
from lydite.diff.pairing.name_matching import module_of
from lydite.diff.pairing.pair_traces import GUESSES, pair_traces
from lydite.diff.pairing.paired_events import Pair, Pairing
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

    def verdict(self, progress: Progress | None) -> Verdict:
        self._check_gates()
        self.layouts.learn(self.pairing.pairs, self.traces.reference, self.traces.port)
        rows = measure_rows(self.traces, self.pairing.pairs, self.layouts, progress)
        wrong = [pair for row, pair in zip(rows, self.pairs, strict=True) if row.wrong]
        if wrong and self.layouts.learn_joined(wrong, self.traces.reference, self.traces.port):
            rows = measure_rows(self.traces, self.pairing.pairs, self.layouts, progress)
        self.search = DivergenceSearch(
            self.traces, self.pairing, self.pairs, rows, self.reader, self.layouts
        )
        self.search.turned = {module_of(name) for name, _ in self.turned}
        divergence = self.search.run()
        self.remarks += self.search.remarks
        self._accept_other_times(rows)
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

    def _accept_other_times(self, rows: Sequence[Row]) -> None:
        """Pass a schedule in another form, where what the network makes of its times is right."""
        compared = {
            event.i: (row, pair)
            for row, pair in zip(rows, self.pairs, strict=True)
            for event in pair.reference
        }

        def is_right(event: Event) -> bool:
            found = compared.get(event.i)
            return found is not None and (found[0].agrees or self._has_right_numbers(*found))

        pairs = list(self.pairing.pairs)
        for failed in [failed for failed in self.failed if failed.gate.name == "schedule"]:
            result = failed
            while result.pair is not None:
                form = preconditions.other_form_of_times(result.pair, self.traces, is_right)
                if form is None:
                    break
                self.remarks.append(
                    f"{result.pair.port_event.name} is {form}; what the network computes from its "
                    "times agrees: another form, not a bug"
                )
                pairs.remove(result.pair)
                result = preconditions.check_schedule(
                    pairs, self.traces.reference, self.traces.port
                )
            self.gates[self.gates.index(failed.gate)] = result.gate
            at = self.failed.index(failed)
            self.failed[at : at + 1] = [] if result.gate.passed else [result]

    def _has_right_numbers(self, row: Row, pair: Pair) -> bool:
        """Whether a wrong value has the right numbers in another order."""
        values = self.reader.values(pair)
        if values.reference is None or values.port is None or row.limit is None:
            return False
        right, own = (np.sort(wide(x), axis=None) for x in (values.reference, values.port))
        return relative_error(own, right) <= row.limit

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
        evidence = self.reader.evidence(pair, row.floor or 0.0)
        turned = self._turned_weight(row)
        found = find(evidence) or (in_another_order(evidence) if turned else ())
        found = found or self._of_the_same_call(rows, divergence.first)
        found = found or self._of_other_order(rows, divergence.instead_of)
        if turned and evidence.parameters():  # then the layer was computed again
            worth: Confidence = "certain" if _is_of_weight(found) else "observed"
            turned = (*found, replace(turned[0], confidence=worth))
            found = ()
        findings = (*more, *turned, *found)
        if not findings:
            row, evidence, findings = self._other_counterpart(pair, row, evidence)
        ruled_out = () if findings else tuple(dict.fromkeys(evidence.ruled_out))
        if row.error is None:
            findings = (*findings, _shape_finding(pair))
        if self.reproduce is not None and row.error is not None:
            self.reproduce(self._reproduction(rows, divergence.first, evidence, findings))
        last, unpaired, start = None, (), -1
        upstream = self.search.upstream(divergence.first)
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
            sentence = undecided_text(rows, row, estimated=self.traces.is_estimated)
        else:
            answer = "diverge"
            sentence = divergence_text(
                rows,
                row,
                last,
                findings,
                unpaired,
                self._own_step(pair),
                follows_inputs=follows_inputs,
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
            port_step=self._own_step(pair),
            error=row.error,
            floor=row.floor,
            limit=row.limit,
            last_agreement=last.site if last else None,
        )

    def _own_step(self, pair: Pair) -> int | None:
        """The port's number of a step, where it has other steps than the reference.

        A port may count from 1, or have two calls of the network in a step.
        """
        steps = {(each.event.step, each.port_event.step) for each in self.pairs}
        return pair.port_event.step if any(a != b for a, b in steps) else None

    def _of_the_same_call(self, rows: Sequence[Row], first: int) -> tuple[Finding, ...]:
        """What explains another output of the same call, as an attention's result."""
        row = rows[first]
        if row.slot.startswith("in") and self.parameters.of_module(row.site):
            return ()  # a layer does not compute what it takes
        for at, other in enumerate(rows):
            same = (other.site, other.step, other.call) == (row.site, row.step, row.call)
            if at != first and same and other.wrong and other.slot.startswith("out"):
                found = find(self.reader.evidence(self.pairs[at], other.floor or 0.0))
                if found:
                    return found
        return ()

    def _of_other_order(self, rows: Sequence[Row], other: int | None) -> tuple[Finding, ...]:
        """What explains the reference's first wrong value, where the port computes it later."""
        if other is None:
            return ()
        found = replayed(self.reader.evidence(self.pairs[other], rows[other].floor or 0.0))
        return tuple(finding for finding in found if finding.confidence == "certain")

    def _other_counterpart(
        self, pair: Pair, row: Row, evidence: Evidence
    ) -> tuple[Row, Evidence, tuple[Finding, ...]]:
        """A value beside the counterpart of which the port's is a known variant.

        A name that both sides have may be that of a norm here and of the modulated norm there: then
        it is what is computed from the counterpart.
        """
        is_guess = pair.how in (*GUESSES, "order", "siblings")
        self.reader.forget(pair)  # nor is the port's value computed from itself
        pairs = (each for each in self.pairing.pairs if each is not pair)
        paired = {event.hash or event.i for each in pairs for event in each.reference}
        for other in self.traces.reference.events:
            near = 0 < abs(other.i - pair.event.i) <= BESIDE and other.step == pair.event.step
            near = near and (is_guess or other.i > pair.event.i)
            content = other.hash or other.i
            if not near or content in paired:
                continue
            if other.name == pair.event.name or not same_axes(other, pair.event):
                continue  # the port's value is its input
            paired.add(content)
            beside = self.reader.evidence(replace(pair, reference=(other,)), row.floor or 0.0)
            findings = tuple(f for f in replayed(beside) if f.cause != "weights-differ")
            if findings:
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
                for event in self.search.upstream(index).nearest[:MAX_INPUTS]
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
        for nearest in self.search.upstream(index).nearest:
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
            ignored_rows=self.search.ignored_rows,
            remarks=tuple(self.remarks),
            unpaired_reference=self.pairing.unpaired_reference,
            unpaired_port=self.pairing.unpaired_port,
            floor_source=_rounding_source(self.traces),
            health=tuple(health),
            **fields,
        )


def _is_of_weight(findings: Sequence[Finding]) -> bool:
    """Whether what a layer gives shows that its weight is in another order."""
    return any(f.cause in ("weight-transposed", "weight-reordered") for f in findings)


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
