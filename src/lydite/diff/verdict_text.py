"""The sentence of a verdict: what, where, how large."""

from collections.abc import Collection, Sequence
from statistics import median

from lydite.diff.divergence.first import ESTIMATE_MARGIN, RELATED, Coverage, over_limit
from lydite.diff.measure.rounding import FINE
from lydite.diff.pairing.paired_events import Pairing
from lydite.diff.result import Finding, Row
from lydite.trace.events import Event

MAX_NAMES = 3  # in a sentence


def divergence_text(
    rows: Sequence[Row],
    row: Row,
    last: Row | None,
    findings: Sequence[Finding],
    unpaired_between: Sequence[str] = (),
    port_step: int | None = None,
    *,
    follows_inputs: bool = False,
) -> str:
    """Where the first wrong value is, how wrong, what agrees before it, and the likely cause.

    It `follows_inputs` where no compared value lies between the run's inputs and it.
    """
    step = f" at step {row.step}" if len({other.step for other in rows}) > 1 else ""
    if step and port_step not in (None, row.step):
        step += f" (step {port_step} of the port)"
    if row.error is None:
        parts = [f"{row.full_name} is the first wrong value{step}: the shapes differ"]
    else:
        parts = [
            f"{row.full_name} is the first wrong value{step}: error {error_text(row.error)}",
            f"rounding alone would give about {row.floor:.1g}"
            if row.floor
            else "the two have to be equal",
        ]
    inputs = [
        other.error or 0.0
        for other in rows
        if (other.site, other.step, other.call) == (row.site, row.step, row.call)
        and other.slot.startswith("in")
        and other.agrees
    ]
    if inputs and not row.slot.startswith("in"):
        parts.append(f"its inputs agree (error {error_text(max(inputs))})")
    elif follows_inputs:
        parts.append("no compared value lies between the inputs of the run and it")
    elif last is not None:
        error = error_text(last.error or 0.0)
        parts.append(f"the last value before it that agrees is {last.name} (error {error})")
        if unpaired_between:
            count = len(unpaired_between)
            parts.append(
                f"between the two, {_unpaired(count)} ({_listed(unpaired_between)}: give "
                f"{'it' if count == 1 else 'them'} in a map.json)"
            )
    sentence = "; ".join(parts) + "."
    return f"{sentence} {findings[0].evidence.rstrip('.')}." if findings else sentence


def undecided_text(rows: Sequence[Row], row: Row, *, estimated: bool) -> str:
    """That an error may be rounding, or the pair wrong, and how to find out."""
    assert row.error is not None and row.limit is not None
    step = f" at step {row.step}" if len({other.step for other in rows}) > 1 else ""
    if row.error > RELATED:
        return (
            f"Not decided: {row.full_name}{step} has the error {error_text(row.error)}, and the "
            "pair is a guess: the value is wrong, or it is not the counterpart. Give its name in "
            "the reference, or null, in a map.json (--map); --floor shows how much is rounding."
        )
    text = (
        f"Not decided: {row.full_name}{step} has the error {error_text(row.error)}, "
        f"{row.error / row.limit:.2g} × its limit. That may be rounding: not all values from which "
        "it is computed were compared."
    )
    if not estimated:
        return f"{text} Record more values of the port before it."
    second = "float64" if row.dtype in FINE else {"bf16": "bfloat16"}.get(row.dtype, "float16")
    return (
        f"{text} The limit is an estimate: record the reference once more in {second} and give "
        "that folder with --floor, or record more values of the port before it."
    )


def narrowing_text(passed: Sequence[Event], paired: Collection[int]) -> str | None:
    """Which values to record in the port, of those between the last agreement and the bug."""
    names = dict.fromkeys(
        str(event.site)
        for event in passed
        if event.i not in paired and (event.slot.startswith("out") or event.alias_of is None)
    )
    if not names:
        return None
    chosen = list(names)[:: max(1, len(names) // MAX_NAMES)][:MAX_NAMES]
    return (
        f"to narrow it down, record in the port what the reference has as {' or '.join(chosen)}: "
        "it lies between the last agreement and the first wrong value"
    )


def agreement_text(rows: Sequence[Row], covered: Coverage, pairing: Pairing) -> str:
    """How many values agree, and how close they come to their limits."""
    compared = [row for row in rows if row.agrees]
    if not compared:
        return "The tables agree; no activation was recorded on both sides."
    worst = max(compared, key=lambda row: (row.error or 0.0) / (row.floor or 1.0))
    ratio = (worst.error or 0.0) / (worst.floor or 1.0)
    count = len(compared)
    agree = f"All {count} values agree" if count > 1 else "The one value on both sides agrees"
    allowed = f", limit {worst.limit / worst.floor:.2g} ×" if worst.limit and worst.floor else ""
    text = (
        f"{agree}: the largest error is {ratio:.1f} × rounding{allowed} "
        f"({error_text(worst.error or 0.0)} at {worst.name})."
    )
    coarse = {row.dtype for row in compared} & {"bf16", "f16", "f8_e4m3", "f8_e5m2"}
    if coarse:
        limits = [row.limit or 0.0 for row in compared]
        text += (
            f" In {' and '.join(sorted(coarse))} smaller errors than the limit cannot be told from "
            f"rounding: the limit is {median(limits):.2g} of a value in the median, "
            f"{max(limits):.2g} at most. To see smaller ones, compare in float32."
        )
    counts = len(pairing.unpaired_reference), len(pairing.unpaired_port)
    if any(counts):
        text += (
            f" {counts[0]} names of the reference and {counts[1]} of the port have no counterpart."
        )
    if covered.uncovered and covered.last is not None:
        count = len(covered.uncovered)
        verb = "was" if count == 1 else "were"
        text += (
            f" {_values(count)} of the port after {covered.last.name} {verb} not compared "
            f"({_listed(covered.names)})."
        )
    return text


def uncovered_text(rows: Sequence[Row], covered: Coverage) -> str:
    """That what was compared agrees, but the end of the run was not compared."""
    count = len(covered.uncovered)
    if covered.last is None:
        text = f"No value was compared: {_unpaired(count)}"
    else:
        step = f", step {covered.last.step}" if len({row.step for row in rows}) > 1 else ""
        text = (
            f"The end was not compared. All {sum(row.agrees for row in rows)} compared values "
            f"agree, but after {covered.last.name}{step} {_unpaired(count)}"
        )
    if covered.not_comparable:
        text += f" that can be compared ({covered.not_comparable} of another shape, or no values)"
    text += f": {_listed(covered.names)}."
    if covered.not_comparable < count:
        return f"{text} Give their names in the reference, or null, in a map.json (--map)."
    return f"{text} Record their values in the same shape on both sides."


def ignored_text(row: Row, later: Sequence[Row]) -> str:
    """Why a wrong value is not the bug."""
    if row.error and row.limit:
        times = f"{row.name} is {row.error / row.limit:.2g} × its limit"
        wrong = [other for other in later if other.wrong]
        if any(over_limit(other) > over_limit(row) for other in wrong):
            return f"{times}; that does not explain the larger error behind it"
        if wrong:
            return f"{times}; it may be another value than its counterpart"
        if row.error <= ESTIMATE_MARGIN * row.limit:
            return (
                f"{times}, and no later value is above its own; the limits are estimates here, "
                "--floor measures them"
            )
    problem = "has another shape" if row.error is None else "differs"
    return f"{row.name} {problem}, and no later value does: recorded at another point, or not used"


def error_text(error: float) -> str:
    """An error in two or three digits."""
    return f"{error:.1e}" if 0 < error < 1e-2 else f"{error:.3g}"


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    if len(names) <= MAX_NAMES + 1:
        return ", ".join(names)
    return f"{', '.join(names[:MAX_NAMES])} and {len(names) - MAX_NAMES} more"


def _values(count: int) -> str:
    return f"{count} value{'s' if count != 1 else ''}"


def _unpaired(count: int) -> str:
    return f"{_values(count)} of the port {'has' if count == 1 else 'have'} no counterpart"
