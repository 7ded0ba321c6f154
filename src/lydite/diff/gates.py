"""What has to be equal before an activation is worth looking at."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

import numpy as np

from lydite.diff.calls import Pair
from lydite.diff.floor import UNIT, coarser
from lydite.diff.names import close_stats, match_spelling, same_values
from lydite.diff.result import Gate
from lydite.diff.values import Layouts, measure_pair, see
from lydite.trace.events import WeightInfo
from lydite.trace.store import Trace

DECIDE = ("prompt", "negative", "width", "height", "steps", "guidance", "strength")
TELL = ("model", "checkpoint", "seed", "noise", "sampler", "schedule")
SAME_INPUT = 16  # roundings between two copies of one input
TABLE_TOLERANCE = 1e-5  # of a sigma or timestep table: float32 arithmetic, done in another order


@dataclass(frozen=True)
class GateResult:
    """A gate, and the pair or parameter it failed at."""

    gate: Gate
    pair: Pair | None = None
    parameters: tuple[tuple[str, str], ...] = ()  # names in the reference and in the port


def check_conditions(reference: Trace, port: Trace) -> tuple[GateResult, tuple[str, ...]]:
    """Whether both ran the same request; what differs without deciding it is a remark."""
    theirs, ours = reference.header.conditions, port.header.conditions
    both = [key for key in DECIDE if _said(theirs, key) and _said(ours, key)]
    differing = [key for key in both if not _same(theirs[key], ours[key])]
    remarks = tuple(
        f"{key}: reference {theirs[key]!r}, port {ours[key]!r}"
        for key in TELL
        if _said(theirs, key) and _said(ours, key) and not _same(theirs[key], ours[key])
    )
    if differing:
        key = differing[0]
        detail = f"{key} is {theirs[key]!r} in the reference and {ours[key]!r} in the port"
        return GateResult(Gate("conditions", False, detail)), remarks
    detail = f"{', '.join(both)} equal" if both else "nothing is said on both sides"
    return GateResult(Gate("conditions", True, detail, bool(both))), remarks


def check_ids(pairs: Sequence[Pair], reference: Trace, port: Trace) -> GateResult:
    """Token ids, to the last one."""
    chosen = [pair for pair in pairs if _kind(pair) == "ids"]
    compared = 0
    for pair in chosen:
        seen = see(pair, reference, port, Layouts())
        if seen.reference is None or seen.port is None:
            continue
        compared += 1
        theirs, ours = seen.reference.reshape(-1), seen.port.reshape(-1)
        if ours.size and theirs.size > ours.size and theirs.size % ours.size == 0:
            parts = theirs.reshape(-1, ours.size)  # a port that runs the prompt alone
            theirs = parts[int((parts == ours).sum(axis=1).argmax())]
        if theirs.shape != ours.shape:
            detail = (
                f"{pair.site.name}: {theirs.size} ids in the reference, {ours.size} in the port"
            )
            return GateResult(Gate("ids", False, detail), pair)
        wrong = np.flatnonzero(theirs.astype(np.int64) != ours.astype(np.int64))
        if wrong.size:
            first = int(wrong[0])
            detail = (
                f"{pair.site.name}: {wrong.size} of {theirs.size} ids differ, first at position "
                f"{first}: {int(theirs[first])} in the reference, {int(ours[first])} in the port"
            )
            return GateResult(Gate("ids", False, detail), pair)
    return _equal("ids", compared, chosen, "table")


def check_schedule(pairs: Sequence[Pair], reference: Trace, port: Trace) -> GateResult:
    """Sigma and timestep tables."""
    chosen = [pair for pair in pairs if _kind(pair) == "schedule"]
    compared = 0
    for pair in chosen:
        seen = see(pair, reference, port, Layouts())
        if seen.reference is None or seen.port is None:
            continue
        compared += 1
        theirs = seen.reference.astype(np.float64).reshape(-1)
        ours = seen.port.astype(np.float64).reshape(-1)
        theirs, ours = _without_final_zero(theirs, ours)
        if theirs.shape != ours.shape:
            detail = (
                f"{pair.site.name}: {theirs.size} entries in the reference, {ours.size} in the port"
            )
            return GateResult(Gate("schedule", False, detail), pair)
        off = np.abs(theirs - ours)
        scale = float(np.abs(theirs).max(initial=0.0)) or 1.0
        unit = UNIT.get(pair.port_site.dtype, 0.0)
        if not np.all(off <= max(TABLE_TOLERANCE, 2 * unit) * scale):
            at = int(np.nanargmax(np.where(np.isnan(off), np.inf, off)))
            detail = (
                f"{pair.site.name}: entry {at} is {theirs[at]:.6g} in the reference, "
                f"{ours[at]:.6g} in the port"
            )
            return GateResult(Gate("schedule", False, detail), pair)
    return _equal("schedule", compared, chosen, "table")


def check_inputs(pairs: Sequence[Pair], reference: Trace, port: Trace) -> GateResult:
    """Noise and other inputs that both runs were meant to share."""
    chosen = [pair for pair in pairs if _kind(pair) == "input"]
    layouts = Layouts()
    compared = 0
    for pair in chosen:
        found = measure_pair(pair, see(pair, reference, port, layouts))
        compared += found is not None
        dtype = coarser(pair.port_site.dtype, "f32")
        limit = SAME_INPUT * UNIT[dtype]
        if found is not None and found.error > limit:
            detail = (
                f"{pair.site.name}: differs by {found.error:.2g}; both runs must start from the "
                "same values"
            )
            return GateResult(Gate("inputs", False, detail), pair)
    return _equal("inputs", compared, chosen, "value")


def check_weights(reference: Trace, port: Trace) -> tuple[GateResult, tuple[str, ...]]:
    """Parameters of one name: the same values, in whatever layout."""
    theirs, ours = reference.weights(), port.weights()
    if not theirs or not ours:
        return GateResult(Gate("weights", True, "not recorded on both sides", False)), ()
    names = match_spelling(ours, theirs)
    wrong = [
        (mine, other) for mine, other in names.items() if not _alike(ours[mine], theirs[other])
    ]
    moved = [
        other
        for mine, other in names.items()
        if (mine, other) not in wrong and _reordered(ours[mine], theirs[other])
    ]
    remarks = (
        (f"{len(moved)} parameters in another order but of the same values, such as {moved[0]}",)
        if moved
        else ()
    )
    if wrong:
        mine, other = wrong[0]
        detail = f"{other}: {_difference(ours[mine], theirs[other])}"
        if len(wrong) > 1:
            detail += f"; {len(wrong) - 1} more parameters differ"
        swapped = [name for name, info in theirs.items() if same_values(ours[mine], info)]
        if swapped:
            detail += f"; it holds the reference's {swapped[0]}"
        parameters = tuple((other, mine) for mine, other in wrong)
        return GateResult(Gate("weights", False, detail), parameters=parameters), remarks
    if not names:
        return GateResult(Gate("weights", True, "no parameter has a counterpart", False)), remarks
    return GateResult(Gate("weights", True, f"{len(names)} parameters equal")), remarks


def _alike(a: WeightInfo, b: WeightInfo) -> bool:
    if a.hash and a.hash == b.hash:
        return True
    if a.stats is None or b.stats is None:
        return True  # nothing is said
    return close_stats(a.stats, b.stats, 1e-5 if a.dtype == b.dtype else 2e-2)


def _reordered(a: WeightInfo, b: WeightInfo) -> bool:
    if not a.hash or not b.hash or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.hash != b.hash and a.hash.split(":")[0] == b.hash.split(":")[0]


def _difference(a: WeightInfo, b: WeightInfo) -> str:
    if a.stats is None or b.stats is None or a.stats.count != b.stats.count:
        return f"shape {list(b.shape)} in the reference, {list(a.shape)} in the port"
    if a.stats.std == 0.0:
        return f"every value is {a.stats.mean:g} in the port, as in a layer that was never loaded"
    parts = [
        f"{key} {getattr(b.stats, key):.4g} in the reference, "
        f"{getattr(a.stats, key):.4g} in the port"
        for key in ("rms", "mean", "min", "max")
        if getattr(a.stats, key) is not None
        and getattr(b.stats, key) is not None
        and not isclose(getattr(a.stats, key), getattr(b.stats, key), rel_tol=1e-4, abs_tol=1e-9)
    ]
    return parts[0] if parts else "other values"


def _without_final_zero(a: Any, b: Any) -> tuple[Any, Any]:
    """Some tables end in the final sigma of 0 and some leave it out."""
    if len(a) == len(b) + 1 and a[-1] == 0:
        return a[:-1], b
    if len(b) == len(a) + 1 and b[-1] == 0:
        return a, b[:-1]
    return a, b


def _kind(pair: Pair) -> str:
    """The kind of a value; dumps written by hand may not say that ids are ids."""
    event = pair.site
    whole = event.dtype in ("i64", "i32", "u64", "u32") and event.slot == "out"
    named = "ids" in event.name.lower() or "token" in event.name.lower()
    return "ids" if event.kind == "activation" and whole and named else event.kind


def _said(conditions: dict[str, Any], key: str) -> bool:
    return key in conditions


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return isclose(a, b, rel_tol=1e-6)
    return (a or "") == (b or "")


def _equal(name: str, compared: int, chosen: Sequence[Pair], noun: str) -> GateResult:
    """A gate that nothing failed at, and on how much it looked."""
    if not chosen:
        return GateResult(Gate(name, True, "none recorded on both sides", False))
    if not compared:
        return GateResult(Gate(name, True, "of other shapes, or their values were not kept", False))
    detail = f"{compared} {noun}{'s' if compared > 1 else ''} equal"
    if left := len(chosen) - compared:
        detail += f", {left} not compared"
    return GateResult(Gate(name, True, detail))
