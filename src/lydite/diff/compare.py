"""`compare`: two traces in, one verdict out."""

from collections.abc import Collection, Iterable, Mapping
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff import gates
from lydite.diff.arrays import relative_error, wide
from lydite.diff.axes import best_fit, possible_fits
from lydite.diff.findings import Evidence, find
from lydite.diff.floor import UNIT
from lydite.diff.health import examine
from lydite.diff.pairing import Pair, Pairing, pair
from lydite.diff.renames import Rename
from lydite.diff.result import Finding, Gate, Row, Verdict
from lydite.diff.rows import GATED, Progress, Sides, measure_rows
from lydite.diff.sentences import agreement, divergence
from lydite.diff.values import Layouts, see
from lydite.diff.walk import Walk, first_alone, walk
from lydite.trace.events import Event, dtype_name
from lydite.trace.selftest import check_selftest
from lydite.trace.store import Trace

NEAR = 60  # events around a place among which its value is looked for


def compare(
    reference: Trace,
    port: Trace,
    *,
    floor: Trace | None = None,
    renames: Mapping[str, Rename] | None = None,
    tolerance: float | None = None,
    isolated: bool = False,
    without: Collection[str] = (),
    progress: Progress | None = None,
) -> Verdict:
    """Hold a port's trace against the reference's: gates, pairs, floor, first divergence.

    `isolated` says that the port ran on the reference's values, so that no error spreads; names of
    the port in `without` are known to be no counterparts.
    """
    passed: list[Gate] = []
    for side, trace in (("reference", reference), ("port", port)):
        if problems := check_selftest(trace):
            detail = f"the {side}'s dump is wrong: {problems[0]}"
            return _cannot(detail, [Gate("dump", False, detail)])
    conditions, remarks = gates.check_conditions(reference, port)
    passed.append(conditions.gate)
    if not conditions.gate.passed:
        return _cannot(f"the runs differ: {conditions.gate.detail}", passed)
    pairing = pair(reference, port, {**(renames or {}), **{name: Rename(()) for name in without}})
    if not pairing.pairs:
        return _cannot("no value of the port belongs to any of the reference", passed, pairing)
    sides = Sides(reference, port, floor, tolerance, isolated)
    return _Comparison(sides, pairing, passed, [*remarks, *pairing.remarks]).verdict(progress)


class _Comparison:
    """What the parts of one comparison share."""

    def __init__(
        self, sides: Sides, pairing: Pairing, passed: list[Gate], remarks: list[str]
    ) -> None:
        self.sides, self.pairing = sides, pairing
        self.passed, self.remarks = passed, remarks
        self.layouts = Layouts()
        self.aside: tuple[Row, ...] = ()
        self.pairs = [pair for pair in pairing.pairs if pair.site.kind not in GATED]

    def verdict(self, progress: Progress | None) -> Verdict:
        failed = self._gates()
        self.layouts.look_ahead(self.pairs, self.sides.reference, self.sides.port)
        rows = measure_rows(self.sides, self.pairing.pairs, self.layouts, progress)
        if self.sides.isolated:
            found = first_alone(rows)
        else:
            found = walk(rows, lambda index: self._is_elsewhere(rows, index))
        self._note_aside(rows, found)
        self.aside = tuple(rows[index] for index in found.aside)
        decided = failed is not None and failed.gate.name in ("ids", "schedule")
        if failed is not None and (decided or found.first is not None or not rows):
            return self._at_weights(failed, rows, found) or self._at_gate(failed, rows)
        if failed is not None:
            self.remarks.append(f"{failed.gate.name}: {failed.gate.detail}; no value shows it")
        if found.first is not None:
            return self._at_row(rows, found)
        return self._finish("agree", agreement(rows, self.sides, self.pairing), rows, findings=())

    def _gates(self) -> gates.GateResult | None:
        reference, port, pairs = self.sides.reference, self.sides.port, self.pairing.pairs
        weights, remarks = gates.check_weights(reference, port)
        self.remarks += remarks
        results = [
            gates.check_ids(pairs, reference, port),
            gates.check_schedule(pairs, reference, port),
            weights,
            gates.check_inputs(pairs, reference, port),
        ]
        self.passed += [result.gate for result in results]
        return next((result for result in results if not result.gate.passed), None)

    def _at_gate(self, failed: gates.GateResult, rows: list[Row]) -> Verdict:
        findings: tuple[Finding, ...] = ()
        site = failed.parameters[0] if failed.parameters else (failed.gate.name, failed.gate.name)
        if failed.pair is not None:
            site = (failed.pair.site.name, failed.pair.port_site.name)
            findings = find(self._evidence(failed.pair, 0.0))
        findings = findings or (_from_gate(failed),)
        verb = "differs" if failed.gate.name == "schedule" else "differ"
        sentence = f"The {failed.gate.name} {verb}, before any activation: {failed.gate.detail}."
        return self._finish(
            "diverge", sentence, rows, findings=findings, site=site[0], port_site=site[1],
            place=failed.pair.site.port if failed.pair else None,
            step=failed.pair.site.step if failed.pair else 0,
        )  # fmt: skip

    def _at_weights(self, failed: gates.GateResult, rows: list[Row], found: Walk) -> Verdict | None:
        """The first wrong value, when it is the output of a module whose weights are wrong."""
        modules = {name.rpartition(".")[0] for name, _ in failed.parameters}
        if found.first is None or rows[found.first].site not in modules:
            return None
        return self._at_row(rows, found, _from_gate(failed))

    def _at_row(self, rows: list[Row], found: Walk, *more: Finding) -> Verdict:
        assert found.first is not None
        row, pair_ = rows[found.first], self.pairs[found.first]
        findings = (*more, *find(self._evidence(pair_, row.floor or 0.0)))
        if row.error is None:
            findings = (_other_shape(pair_), *findings)
        last = None if found.last_agreement is None else rows[found.last_agreement]
        sentence = divergence(rows, found.first, last, findings)
        return self._finish(
            "diverge", sentence, rows, findings=findings, site=row.site, port_site=row.port_site,
            place=row.place, step=row.step, error=row.error, floor=row.floor, limit=row.limit,
            last_agreement=last.site if last else None,
        )  # fmt: skip

    def _finish(self, verdict: Any, sentence: str, rows: list[Row], **rest: Any) -> Verdict:
        health = [
            f"{side}: {remark.sentence}"
            for side, trace in (("reference", self.sides.reference), ("port", self.sides.port))
            for remark in examine(trace)
        ]
        assumed = {row.note: row.name for row in reversed(rows) if row.note}
        self.remarks += [f"{name}: {note}" for note, name in assumed.items()][:8]
        for side, trace in (("reference", self.sides.reference), ("port", self.sides.port)):
            if trace.lost:
                self.remarks.append(
                    f"the {side} was cut off: its last {trace.lost} values are lost"
                )
        return Verdict(
            verdict,
            sentence,
            gates=tuple(self.passed),
            rows=tuple(rows),
            sources=tuple(row for row in rows if row.wrong) if self.sides.isolated else (),
            aside=self.aside,
            remarks=tuple(self.remarks),
            unpaired_reference=self.pairing.unpaired_reference,
            unpaired_port=self.pairing.unpaired_port,
            floor_source=_floor_source(self.sides),
            health=tuple(health),
            **rest,
        )

    def _evidence(self, pair_: Pair, floor: float) -> Evidence:
        seen = see(pair_, self.sides.reference, self.sides.port, self.layouts)
        empty = np.zeros(0, np.float32)
        event = pair_.site
        return Evidence(
            reference=wide(seen.reference) if seen.reference is not None else empty,
            port=wide(seen.port) if seen.port is not None else empty,
            floor=floor,
            name=event.name,
            place=event.port,
            dtype=pair_.port_site.dtype,
            kind=event.kind,
            dims=pair_.ref_dims or event.dims,
            inputs=self._inputs(pair_),
            others=lambda: self._others(pair_),
        )

    def _inputs(self, pair_: Pair) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
        here = pair_.site
        result: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
        for other in self.pairing.pairs:
            event = other.site
            same = (event.name, event.step, event.call) == (here.name, here.step, here.call)
            if same and event.port.startswith("in") and not here.port.startswith("in"):
                seen = see(other, self.sides.reference, self.sides.port, self.layouts)
                if seen.reference is not None and seen.port is not None:
                    result[event.port] = (wide(seen.reference), wide(seen.port))
        return result

    def _others(self, pair_: Pair) -> Iterable[tuple[str, NDArray[Any]]]:
        return _around(self.sides.reference, pair_.site)

    def _is_elsewhere(self, rows: list[Row], index: int) -> bool:
        """Whether one side's value is another of the other side's, near it: two stages compared."""
        pair_, row = self.pairs[index], rows[index]
        if len(pair_.port) > 1 or len(pair_.reference) > 1:
            return False
        limit = max(row.limit or 0.0, 1e-3 if row.dtype in ("bf16", "f16") else 1e-5)
        reference, port = self.sides.reference, self.sides.port
        if self._is_moved(pair_, row, limit):
            return True
        for mine, event, other_side, other, said in (
            (port, pair_.port_site, reference, pair_.site, "the reference has"),
            (reference, pair_.site, port, pair_.port_site, "the port has"),
        ):
            if not mine.has_values(event):
                continue
            value = wide(mine.read(event))
            for name, candidate in _around(other_side, other, inside=False):
                fits = possible_fits(value.shape, candidate.shape)
                fit, error = best_fit(fits, value, candidate)
                if fit is None or error > limit:
                    continue
                if relative_error(fit.apply(value), candidate) <= limit:
                    self.remarks.append(
                        f"{row.name} holds what {said} at {name}: recorded at another stage, "
                        "not a bug"
                    )
                    return True
        return False

    def _is_moved(self, pair_: Pair, row: Row, limit: float) -> bool:
        """Whether the two are one value in two axis orders that its shape does not tell apart."""
        reference, port = self.sides.reference, self.sides.port
        if not (reference.has_values(pair_.site) and port.has_values(pair_.port_site)):
            return False
        theirs, ours = wide(reference.read(pair_.site)), wide(port.read(pair_.port_site))
        fit, error = best_fit(possible_fits(ours.shape, theirs.shape), ours, theirs)
        if fit is None or error > limit or relative_error(fit.apply(ours), theirs) > limit:
            return False
        self.remarks.append(f"{row.name} holds the same values in another axis order, not a bug")
        return True

    def _note_aside(self, rows: list[Row], found: Walk) -> None:
        said = " ".join(self.remarks)
        for index in found.aside:
            if f"{rows[index].name} holds" not in said:
                how = "has another shape" if rows[index].error is None else "differs"
                self.remarks.append(
                    f"{rows[index].name} {how}, and nothing after it does: recorded at another "
                    "stage, or not used"
                )


def _around(
    trace: Trace, here: Event, *, inside: bool = True
) -> Iterable[tuple[str, NDArray[Any]]]:
    """Other values of a trace around one event, of its size.

    A module that gives what a part `inside` it gave has left something out: that is no other stage.
    """
    size = prod(here.shape)
    for event in trace.events:
        if not inside and event.name.startswith((f"{here.name}.", f"{here.name}/")):
            continue
        near = abs(event.i - here.i) <= NEAR and event.i != here.i and event.step == here.step
        alike = prod(event.shape) == size and event.kind == here.kind
        if near and alike and trace.has_values(event):
            yield str(event), wide(trace.read(event))


def _cannot(why: str, passed: list[Gate], pairing: Pairing | None = None) -> Verdict:
    return Verdict(
        "cannot-compare",
        f"Cannot compare: {why}.",
        gates=tuple(passed),
        unpaired_reference=pairing.unpaired_reference if pairing else (),
        unpaired_port=pairing.unpaired_port if pairing else (),
    )


def _from_gate(failed: gates.GateResult) -> Finding:
    fixes = {
        "ids": "Compare vocabulary, special tokens and padding of the two tokenizers.",
        "schedule": "Print both tables; the sampler is wrong before the network runs.",
        "weights": "Audit the loading: lydite audit CHECKPOINT.",
        "inputs": "Start both runs from one saved array; a seed means other noise elsewhere.",
    }
    return Finding(f"{failed.gate.name}-differ", failed.gate.detail, fixes[failed.gate.name])


def _other_shape(pair_: Pair) -> Finding:
    theirs = " + ".join("×".join(map(str, event.shape)) for event in pair_.reference)
    ours = " + ".join("×".join(map(str, event.shape)) for event in pair_.port)
    return Finding(
        "other-shape",
        f"{theirs} in the reference, {ours} in the port, and no axis order makes them one",
        "If the two are not the same value, say so in a map.json (null, or the right name).",
    )


def _floor_source(sides: Sides) -> str:
    if sides.tolerance is not None:
        return f"your tolerance, {sides.tolerance:g}"
    if sides.floor is None:
        return "estimated from dtype and depth; give --floor for a measured one"
    ours, theirs = sides.reference.header.dtype, sides.floor.header.dtype
    between = f"the reference in {ours or 'its precision'} against {theirs or 'another'}"
    port = UNIT.get(dtype_name(sides.port.header.dtype), 0.0)
    if max(UNIT.get(dtype_name(name), inf) for name in (ours, theirs)) < port / 2:
        return f"estimated: {between} says nothing about {sides.port.header.dtype}"
    return f"measured: {between}"
