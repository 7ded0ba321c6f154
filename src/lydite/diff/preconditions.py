"""What has to be equal before activations are worth comparing."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.measure.aligned import Layouts, align_values, measure_pair
from lydite.diff.measure.rounding import UNIT, coarser
from lydite.diff.measure.rows import Comparison, run_dtype
from lydite.diff.name_map import Rename
from lydite.diff.pairing.name_matching import close_stats, same_values
from lydite.diff.pairing.pair_parameters import pair_parameters
from lydite.diff.pairing.paired_events import Pair
from lydite.diff.result import Gate, with_port_name
from lydite.trace.events import Event, WeightInfo
from lydite.trace.reader import Trace

MUST_MATCH = ("prompt", "negative", "width", "height", "steps", "guidance", "strength")
REPORTED = ("model", "checkpoint", "seed", "noise", "sampler", "schedule")
INPUT_ROUNDINGS = 16  # between two copies of one input
MAX_TIMES = 64  # rows of a batch, each with the time of the step
TABLE_TOLERANCE = 1e-5  # of a sigma or timestep table: float32 arithmetic in another order


@dataclass(frozen=True)
class GateResult:
    """A gate, and the pair or parameters it failed at."""

    gate: Gate
    pair: Pair | None = None
    parameters: tuple[tuple[str, str], ...] = ()  # names in the reference and in the port
    turned: tuple[tuple[str, str], ...] = ()  # the same, of another axis order than the rest


def check_conditions(reference: Trace, port: Trace) -> tuple[GateResult, tuple[str, ...]]:
    """Whether both ran the same request; other differences are remarks."""
    expected, conditions = reference.header.conditions, port.header.conditions
    common = [key for key in (*MUST_MATCH, *REPORTED) if key in expected and key in conditions]
    different = [key for key in common if not _same(expected[key], conditions[key])]
    remarks = tuple(
        f"{key}: reference {expected[key]!r}, port {conditions[key]!r}"
        for key in different
        if key in REPORTED
    )
    for key in different:
        if key in MUST_MATCH:
            detail = f"{key} is {expected[key]!r} in the reference, {conditions[key]!r} in the port"
            return GateResult(Gate("conditions", False, detail)), remarks
    equal = [key for key in common if key in MUST_MATCH]
    detail = f"{', '.join(equal)} equal" if equal else "none recorded on both sides"
    return GateResult(Gate("conditions", True, detail, bool(equal))), remarks


def check_ids(pairs: Sequence[Pair], reference: Trace, port: Trace) -> GateResult:
    """Token ids, all of them."""
    chosen = [pair for pair in pairs if _kind(pair) == "ids"]
    compared = 0
    for pair in chosen:
        if (tables := _tables(pair, reference, port)) is None:
            continue
        compared += 1
        expected, ids = tables
        if ids.size and expected.size > ids.size and expected.size % ids.size == 0:
            parts = expected.reshape(-1, ids.size)  # a port that runs the prompt alone
            expected = parts[int((parts == ids).sum(axis=1).argmax())]
        if expected.shape != ids.shape:
            detail = f"{expected.size} ids in the reference, {ids.size} in the port"
            return _failed("ids", pair, detail)
        wrong = np.flatnonzero(expected.astype(np.int64) != ids.astype(np.int64))
        if wrong.size:
            first = int(wrong[0])
            detail = (
                f"{wrong.size} of {expected.size} ids differ, first at position {first}: "
                f"{int(expected[first])} in the reference, {int(ids[first])} in the port"
            )
            return _failed("ids", pair, detail)
    return _passed("ids", compared, chosen, "table")


def check_schedule(pairs: Sequence[Pair], reference: Trace, port: Trace) -> GateResult:
    """Sigma and timestep tables."""
    chosen = [pair for pair in pairs if _kind(pair) == "schedule"]
    compared = 0
    for pair in chosen:
        if (tables := _tables(pair, reference, port)) is None:
            continue
        compared += 1
        expected, table = _of_one_length(*(table.astype(np.float64) for table in tables))
        if expected.shape != table.shape:
            detail = f"{expected.size} entries in the reference, {table.size} in the port"
            return _failed("schedule", pair, detail)
        off = np.abs(expected - table)
        scale = float(np.abs(expected).max(initial=0.0)) or 1.0
        unit = UNIT.get(pair.port_event.dtype, 0.0)
        if not np.all(off <= max(TABLE_TOLERANCE, 2 * unit) * scale):
            at = int(np.nanargmax(np.where(np.isnan(off), np.inf, off)))
            detail = (
                f"entry {at} is {expected[at]:.6g} in the reference, {table[at]:.6g} in the port"
            )
            return _failed("schedule", pair, detail)
    return _passed("schedule", compared, chosen, "table")


def other_form_of_times(
    pair: Pair, traces: Comparison, is_right: Callable[[Event], bool]
) -> str | None:
    """How a table of times follows from the reference's, where the network's use shows it is right.

    A port may list its times from 1 to 0 and multiply them by 1000 where it embeds them, or count
    them from noise to picture. Then what the reference computes from a time alone `is_right` in the
    port at each step: its numbers, in any order.
    """
    tables = _tables(pair, traces.reference, traces.port)
    if tables is None:
        return None
    expected, table = _of_one_length(*(each.astype(np.float64) for each in tables))
    if expected.shape != table.shape or not expected.any() or not np.isfinite(table).all():
        return None
    form = next(filter(None, (_affine(expected, each) for each in (table, table[::-1]))), None)
    if form is None:
        return None
    times = np.unique([*expected, *table])
    right: dict[str, list[bool]] = defaultdict(list)
    known: dict[str, set[float]] = defaultdict(set)
    for event in traces.reference.events:
        if (time := _given_time(event, traces.reference, times[times != 0])) is not None:
            for output in traces.flow.outputs(event):
                right[output.name].append(is_right(output))
                known[output.name].add(time)
    steps = {event.step for event in traces.reference.events}
    is_used = any(all(right[name]) and len(known[name]) >= min(2, len(steps)) for name in right)
    return form if is_used else None


def _affine(expected: NDArray[Any], table: NDArray[Any]) -> str | None:
    """The factor and the number by which a table follows from another; of two entries no number."""
    factor, offset = float(table @ expected / (expected @ expected)), 0.0
    if len(expected) > 2 and not np.allclose(table, factor * expected, rtol=TABLE_TOLERANCE):
        factor, offset = (float(number) for number in np.polyfit(expected, table, 1))
    size = TABLE_TOLERANCE * float(np.abs(table).max())
    if not factor or not np.allclose(table, factor * expected + offset, rtol=0, atol=size):
        return None
    return f"{factor:g} × the reference's" + (f" + {offset:g}" if offset else "")


def _given_time(event: Event, reference: Trace, times: NDArray[Any]) -> float | None:
    """The one of these times that a module was given, and nothing else."""
    if not event.slot.startswith("in") or prod(event.shape) > MAX_TIMES:
        return None
    if not reference.has_values(event):
        return None
    values = reference.read(event).reshape(-1).astype(np.float64)
    found = (t for t in times if values.size and np.allclose(values, t, rtol=TABLE_TOLERANCE))
    return next(found, None)


def check_inputs(pairs: Sequence[Pair], reference: Trace, port: Trace) -> GateResult:
    """Noise and other inputs that both runs should share."""
    chosen = [pair for pair in pairs if _kind(pair) == "input"]
    layouts = Layouts()
    compared = 0
    for pair in chosen:
        measured = measure_pair(pair, align_values(pair, reference, port, layouts))
        compared += measured is not None
        limit = INPUT_ROUNDINGS * UNIT[coarser(run_dtype(port, pair.port_event), "f32")]
        if measured is not None and measured.error > limit:
            detail = f"error {measured.error:.2g}; both runs must start from the same values"
            return _failed("inputs", pair, detail)
    return _passed("inputs", compared, chosen, "value")


def check_weights(
    reference: Trace, port: Trace, renames: Mapping[str, Rename] | None = None
) -> tuple[GateResult, tuple[str, ...]]:
    """Parameters that belong together: the same values, in any layout."""
    expected, weights = reference.weights(), port.weights()
    if not expected or not weights:
        return _weights_unknown("not recorded on both sides"), ()
    found = pair_parameters(weights, expected, renames or {})
    names = found.pairs
    known = {
        a: names[a]
        for a in weights
        if a in names and _is_comparable(weights[a], expected[names[a]])
    }
    wrong = [(a, b) for a, b in known.items() if not _are_equal(weights[a], expected[b])]
    right = {a: b for a, b in known.items() if (a, b) not in wrong}
    turned = _turned_otherwise(right, weights, expected)
    remarks = (
        (f"{len(turned)} parameters have another axis order than the rest, such as {turned[0][0]}",)
        if turned
        else ()
    )
    if wrong:
        name, other = wrong[0]
        detail = f"{with_port_name(other, name)}: "
        detail += _difference(weights[name], expected[other])
        if len(wrong) > 1:
            detail += f"; {len(wrong) - 1} more parameters differ"
        swapped = [b for b, info in expected.items() if same_values(weights[name], info)]
        if swapped:
            detail += f"; it equals the reference's {swapped[0]}"
        parameters = tuple((b, a) for a, b in wrong)
        return GateResult(Gate("weights", False, detail), None, parameters, turned), remarks
    if not names and not found.fused:
        return _weights_unknown("no parameter has a counterpart"), remarks
    if not known and not found.fused:
        return _weights_unknown("no hashes or statistics on both sides"), remarks
    detail = f"{len(known)} parameters equal"
    if found.fused:
        detail += f", {found.fused} fused or split"
    if left := len(weights) - len(names) - found.fused:
        detail += f", {left} of the port without a counterpart"
    return GateResult(Gate("weights", True, detail), turned=turned), remarks


def _turned_otherwise(
    pairs: Mapping[str, str],
    weights: Mapping[str, WeightInfo],
    expected: Mapping[str, WeightInfo],
) -> tuple[tuple[str, str], ...]:
    """Parameters of which only their axis order differs, against the custom of the other ones.

    Names in the reference and in the port. A port may keep all its matrices transposed; of a square
    one only the hash shows it.
    """
    unusual: list[tuple[str, str]] = []
    by_rank: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for name, other in pairs.items():
        a, b = weights[name], expected[other]
        if len(a.shape) >= 2 and a.hash and b.hash and a.dtype == b.dtype:
            by_rank[len(a.shape)].append((name, other))
    for names in by_rank.values():  # matrices have a custom, kernels may have another
        same: list[tuple[str, str]] = []
        moved: list[tuple[str, str]] = []
        reshaped = 0
        for name, other in names:
            a, b = weights[name], expected[other]
            reshaped += a.shape != b.shape
            a_kind, b_kind = ((info.hash or "").split(":")[0] for info in (a, b))
            if a.shape == b.shape and a_kind == b_kind:
                (same if a.hash == b.hash else moved).append((other, name))
        customary = reshaped + len(moved) > len(same)  # to transpose
        # A table of embeddings is never transposed. Only a square matrix can be forgotten.
        square = [(b, a) for b, a in same if len({*expected[b].shape}) < len(expected[b].shape)]
        rare = square if customary else moved
        usual = reshaped + len(moved) if customary else len(same)
        unusual += rare if 2 * len(rare) <= usual else []
    return tuple(unusual)


def _weights_unknown(detail: str) -> GateResult:
    return GateResult(Gate("weights", True, detail, compared=False))


def _is_comparable(a: WeightInfo, b: WeightInfo) -> bool:
    return (a.stats is not None and b.stats is not None) or bool(a.hash and a.hash == b.hash)


def _are_equal(a: WeightInfo, b: WeightInfo) -> bool:
    if a.hash and a.hash == b.hash:
        return True
    if a.stats is None or b.stats is None:
        return False
    return close_stats(a.stats, b.stats, 1e-5 if a.dtype == b.dtype else 2e-2)


def _difference(port: WeightInfo, reference: WeightInfo) -> str:
    a, b = port.stats, reference.stats
    if port.shape != reference.shape and (a is None or b is None or a.count != b.count):
        return f"shape {list(reference.shape)} in the reference, {list(port.shape)} in the port"
    if a is None or b is None:
        return "other values"
    if a.std == 0.0:
        return f"every value is {a.mean:g} in the port, as in a layer that was never loaded"
    for key in ("count", "rms", "mean", "min", "max"):
        value, expected = getattr(a, key), getattr(b, key)
        if value is None or expected is None:
            continue
        if not isclose(value, expected, rel_tol=1e-4, abs_tol=1e-9):
            return f"{key} {expected:.4g} in the reference, {value:.4g} in the port"
    return "other values"


def _tables(pair: Pair, reference: Trace, port: Trace) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Both tables as flat arrays; None where one was not kept."""
    values = align_values(pair, reference, port, Layouts())
    if values.reference is None or values.port is None:
        return None
    return values.reference.reshape(-1), values.port.reshape(-1)


def _of_one_length(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Two tables without what one of them may leave out: the final 0, and repeated entries.

    A sampler with two calls in a step may list their sigma twice.
    """
    if len(a) == len(b) + 1 and a[-1] == 0:
        return a[:-1], b
    if len(b) == len(a) + 1 and b[-1] == 0:
        return a, b[:-1]
    if len(a) == len(b):
        return a, b
    once_a, once_b = (table[np.diff(table, prepend=np.nan) != 0] for table in (a, b))
    zeros = tuple(len(table) and table[-1] == 0 for table in (once_a, once_b))
    if zeros[0] != zeros[1]:
        once_a, once_b = once_a[: len(once_a) - zeros[0]], once_b[: len(once_b) - zeros[1]]
    return (once_a, once_b) if len(once_a) == len(once_b) else (a, b)


def _kind(pair: Pair) -> str:
    """The kind of a value; hand-written dumps may not mark ids as ids."""
    event = pair.event
    whole = event.dtype in ("i64", "i32", "u64", "u32") and event.slot == "out"
    named = "ids" in event.name.lower() or "token" in event.name.lower()
    return "ids" if event.kind == "activation" and whole and named else event.kind


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return isclose(a, b, rel_tol=1e-6)
    return (a or "") == (b or "")


def _failed(name: str, pair: Pair, detail: str) -> GateResult:
    site = with_port_name(pair.event.name, pair.port_event.name)
    return GateResult(Gate(name, False, f"{site}: {detail}"), pair)


def _passed(name: str, compared: int, chosen: Sequence[Pair], noun: str) -> GateResult:
    """A gate that nothing failed at, and how much was compared."""
    if not chosen:
        return GateResult(Gate(name, True, "none recorded on both sides", compared=False))
    if not compared:
        return GateResult(Gate(name, True, "other shapes, or values not kept", compared=False))
    detail = f"{compared} {noun}{'s' if compared > 1 else ''} equal"
    if left := len(chosen) - compared:
        detail += f", {left} not compared"
    return GateResult(Gate(name, True, detail))
