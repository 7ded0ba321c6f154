"""`compare`: two traces in, one verdict out."""

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff import alone, gates, stages
from lydite.diff.arrays import relative_error, wide
from lydite.diff.calls import Pair, Pairing
from lydite.diff.findings import Evidence, find
from lydite.diff.floor import UNIT
from lydite.diff.health import examine
from lydite.diff.pairing import pair
from lydite.diff.reach import Reach, count_between, reach
from lydite.diff.renames import Rename, check_renames
from lydite.diff.result import Finding, Gate, Row, Verdict
from lydite.diff.rows import GATED, Progress, Sides, measure_rows
from lydite.diff.sentences import agreement, divergence, unreached
from lydite.diff.values import Layouts, see
from lydite.diff.walk import MARGIN, Walk, first_alone, walk
from lydite.trace.events import dtype_name
from lydite.trace.selftest import check_selftest
from lydite.trace.store import Trace


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
    the port in `without` are known to be no counterparts. An entry of `renames` that names nothing
    in the traces is an InputError.
    """
    said = () if isolated else check_renames(renames or {}, reference, port)
    found = _compare(
        Sides(reference, port, floor, tolerance, isolated),
        {**(renames or {}), **{name: Rename(()) for name in without}},
        progress,
    )
    cut = [side for side, trace in (("reference", reference), ("port", port)) if _is_cut(trace)]
    return replace(found, incomplete=tuple(cut), remarks=(*said, *found.remarks))


def _compare(sides: Sides, names: Mapping[str, Rename], progress: Progress | None) -> Verdict:
    reference, port = sides.reference, sides.port
    passed: list[Gate] = []
    for side, trace in (("reference", reference), ("port", port)):
        if problems := check_selftest(trace):
            detail = f"the {side}'s dump is wrong: {problems[0]}"
            return _cannot(detail, [Gate("dump", False, detail)])
    conditions, remarks = gates.check_conditions(reference, port)
    passed.append(conditions.gate)
    if not conditions.gate.passed:
        return _cannot(f"the runs differ: {conditions.gate.detail}", passed)
    pairing = pair(reference, port, names)
    if not pairing.pairs:
        return _cannot("no value of the port belongs to any of the reference", passed, pairing)
    comparison = _Comparison(sides, pairing, passed, [*remarks, *pairing.remarks])
    comparison.ignored = {name for name, rename in names.items() if not rename.ref}
    return comparison.verdict(progress)


class _Comparison:
    """What the parts of one comparison share."""

    def __init__(
        self, sides: Sides, pairing: Pairing, passed: list[Gate], remarks: list[str]
    ) -> None:
        self.sides, self.pairing = sides, pairing
        self.passed, self.remarks = passed, remarks
        self.layouts = Layouts()
        self.ignored: set[str] = set()  # names of the port that are known to be alone
        self.aside: tuple[Row, ...] = ()
        self.failed: list[gates.GateResult] = []
        self.pairs = [pair for pair in pairing.pairs if pair.site.kind not in GATED]

    def verdict(self, progress: Progress | None) -> Verdict:
        self._gates()
        self.layouts.look_ahead(self.pairing.pairs, self.sides.reference, self.sides.port)
        rows = measure_rows(self.sides, self.pairing.pairs, self.layouts, progress)
        if self.sides.isolated:
            rows = alone.without_echoes(rows, self.pairs, self.sides, self.layouts)
            found = first_alone(rows)
        else:
            estimated = self.sides.floor is None and self.sides.tolerance is None
            found = walk(rows, lambda index: self._is_elsewhere(rows, index), estimated=estimated)
        self._note_aside(rows, found)
        self.aside = tuple(rows[index] for index in found.aside)
        for failed in self.failed:
            # Weights may be stored more coarsely, or not be used: they have to show in a value.
            if failed.gate.name != "weights" or found.first is not None or not rows:
                return self._at_weights(failed, rows, found) or self._at_gate(failed, rows)
            self.remarks.append(f"weights: {failed.gate.detail}; no value shows it")
        if found.first is not None:
            return self._at_row(rows, found)
        far = self._reach(rows)
        if not far.at_end and not self.sides.isolated:
            return self._finish("cannot-compare", unreached(rows, far), rows)
        return self._finish("agree", agreement(rows, far, self.pairing), rows, findings=())

    def _gates(self) -> None:
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
        self.failed = [result for result in results if not result.gate.passed]

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
            place=failed.pair.site.slot if failed.pair else None,
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
        row = replace(row, site=self._wrong_part(pair_, row))
        findings = (*more, *find(self._evidence(pair_, row.floor or 0.0)))
        if row.error is None:
            findings = (_other_shape(pair_), *findings)
        last = None if found.last_agreement is None else rows[found.last_agreement]
        between = 0
        if found.last_agreement is not None:
            before = self.pairs[found.last_agreement]
            between = count_between(
                self.sides.port, before, pair_, self.pairing.pairs, self.ignored
            )
        sentence = divergence(rows, found.first, last, findings, between)
        return self._finish(
            "diverge", sentence, rows, findings=findings, site=row.site, port_site=row.port_site,
            place=row.place, step=row.step, error=row.error, floor=row.floor, limit=row.limit,
            last_agreement=last.site if last else None,
        )  # fmt: skip

    def _wrong_part(self, pair_: Pair, row: Row) -> str:
        """The part of a joined value that is wrong: to_k, where q, k and v are one in the port."""
        seen = see(pair_, self.sides.reference, self.sides.port, self.layouts)
        if len(pair_.reference) < 2 or seen.reference is None or seen.port is None:
            return row.site
        if seen.reference.shape != seen.port.shape:
            return row.site
        ends = np.cumsum([event.shape[pair_.axis] for event in pair_.reference])[:-1]
        parts = (np.split(side, ends, pair_.axis) for side in (seen.port, seen.reference))
        for event, ours, theirs in zip(pair_.reference, *parts, strict=True):
            if relative_error(ours, theirs) > (row.limit or 0.0):
                return event.name
        return row.site

    def _finish(self, verdict: Any, sentence: str, rows: list[Row], **rest: Any) -> Verdict:
        ours = examine(self.sides.port)
        shared = {remark.kind for remark in ours} | {"not-finite"}
        theirs = [each for each in examine(self.sides.reference) if each.kind in shared]
        health = [f"reference: {each.sentence}" for each in theirs]
        health += [f"port: {each.sentence}" for each in ours]
        assumed = {row.note: row.name for row in reversed(rows) if row.note}
        self.remarks += [f"{name}: {note}" for note, name in assumed.items()][:8]
        for side, trace in (("reference", self.sides.reference), ("port", self.sides.port)):
            if trace.lost:
                self.remarks.append(f"the last {trace.lost} values of the {side} are lost")
        return Verdict(
            verdict,
            sentence,
            gates=tuple(self.passed),
            rows=tuple(rows),
            sources=alone.sources(rows, self.failed, self.sides) if self.sides.isolated else (),
            aside=self.aside,
            remarks=tuple(self.remarks),
            unpaired_reference=self.pairing.unpaired_reference,
            unpaired_port=self.pairing.unpaired_port,
            floor_source=_floor_source(self.sides),
            health=tuple(health),
            **rest,
        )

    def _reach(self, rows: list[Row]) -> Reach:
        return reach(self.sides.reference, self.sides.port, self.pairs, rows, self.ignored)

    def _evidence(self, pair_: Pair, floor: float) -> Evidence:
        seen = see(pair_, self.sides.reference, self.sides.port, self.layouts)
        empty = np.zeros(0, np.float32)
        event = pair_.site
        return Evidence(
            reference=wide(seen.reference) if seen.reference is not None else empty,
            port=wide(seen.port) if seen.port is not None else empty,
            floor=floor,
            name=event.name,
            place=event.slot,
            dtype=pair_.port_site.dtype,
            kind=event.kind,
            dims=pair_.ref_dims or event.dims,
            inputs=self._inputs(pair_),
            others=lambda: stages.around(self.sides.reference, pair_.site),
        )

    def _inputs(self, pair_: Pair) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
        here = pair_.site
        result: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
        for other in self.pairing.pairs:
            event = other.site
            same = (event.name, event.step, event.call) == (here.name, here.step, here.call)
            if same and event.slot.startswith("in") and not here.slot.startswith("in"):
                seen = see(other, self.sides.reference, self.sides.port, self.layouts)
                if seen.reference is not None and seen.port is not None:
                    result[event.slot] = (wide(seen.reference), wide(seen.port))
        return result

    def _is_elsewhere(self, rows: list[Row], index: int) -> bool:
        remark = stages.elsewhere(self.sides, self.pairs[index], rows[index])
        self.remarks += [remark] if remark else []
        return remark is not None

    def _note_aside(self, rows: list[Row], found: Walk) -> None:
        said = " ".join(self.remarks)
        for index in found.aside:
            if f"{rows[index].name} holds" not in said:
                self.remarks.append(_aside(rows[index]))


def _aside(row: Row) -> str:
    if row.error is not None and row.limit and row.error <= MARGIN * row.limit:
        return (
            f"{row.name} is {row.error / row.limit:.2g} × its limit, and nothing after it is above "
            "its own; the limits are estimated here, --floor measures them"
        )
    how = "has another shape" if row.error is None else "differs"
    return f"{row.name} {how}, and nothing after it does: recorded at another stage, or not used"


def _cannot(why: str, passed: list[Gate], pairing: Pairing | None = None) -> Verdict:
    return Verdict(
        "cannot-compare",
        f"Cannot compare: {why}.",
        gates=tuple(passed),
        unpaired_reference=pairing.unpaired_reference if pairing else (),
        unpaired_port=pairing.unpaired_port if pairing else (),
    )


def _is_cut(trace: Trace) -> bool:
    """Whether the run did not end by itself, or its lines end in the middle of one."""
    lines = trace.folder / "events.jsonl"
    if not trace.header.complete or trace.lost:
        return True
    with lines.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


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
