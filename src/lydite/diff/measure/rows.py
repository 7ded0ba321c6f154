"""Every pair measured and judged, in the reference's order of execution."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.data_flow import DataFlow
from lydite.diff.measure.aligned import AlignedPair, Layouts, align_values, measure_pair
from lydite.diff.measure.distance import Distance, distance, wide
from lydite.diff.measure.rounding import (
    EXPLAINED,
    FINE,
    UNIT,
    Limit,
    coarser,
    estimated_rounding,
    fixed_rounding,
    is_sinusoid,
    limit_for,
    local_rounding,
    measured_rounding,
)
from lydite.diff.pairing.paired_events import Pair
from lydite.diff.result import Row, scope_of
from lydite.trace.events import Event, EventId
from lydite.trace.reader import Trace

WINDOW = 16  # values of the component before a value that show how much error it already has
NEIGHBOURS = 4  # values of any component before it: a sampler takes what a network returns
BELIEVED = 0.1  # a float32 reference that rounds by more is broken
MODULE_DEPTH = {"f32": 16, "f64": 16}  # operations inside one module, on injected values
PIXEL = 3e-4  # of an 8-bit image: one pixel in seven hundred rounds to the other side
SINUSOID_RMS = 0.5**0.5  # of sines and cosines of the same angles
SINUSOID_PERIOD = 10_000.0  # between the fastest and the slowest, in most models
MAX_SINUSOID = 2**20  # values of an embedding of timesteps
GATED = ("ids", "schedule", "input")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Comparison:
    """The traces compared, and how; `floor` is the reference in another precision."""

    reference: Trace
    port: Trace
    floor: Trace | None = None
    tolerance: float | None = None  # the user's limit instead of the measured one
    isolated: bool = False  # the port ran on the reference's values: errors do not add up
    least: Mapping[EventId, float] = field(default_factory=dict)  # limits at least

    @property
    def is_estimated(self) -> bool:
        """Whether the limits are estimates, not measured and not the user's."""
        return self.floor is None and self.tolerance is None

    @cached_property
    def flow(self) -> DataFlow:
        """What each value of the reference was computed from."""
        return DataFlow(self.reference)


def measure_rows(
    traces: Comparison, pairs: Sequence[Pair], layouts: Layouts, progress: Progress | None = None
) -> list[Row]:
    """One row per pair; only the values of one pair are in memory at a time."""
    chosen = [pair for pair in pairs if pair.event.kind not in GATED]
    second = {event.id: event for event in traces.floor.events} if traces.floor else {}
    errors = _KnownErrors(traces.flow)
    depths = _depths(traces.reference)
    sinusoids = _sinusoids_not_compared(traces.reference, chosen)
    rows: list[Row] = []
    for number, pair in enumerate(chosen):
        while sinusoids and sinusoids[0].i < pair.event.i:
            sinusoid, dtype = sinusoids.popleft(), run_dtype(traces.port, pair.port_event)
            angles = _rounding_of_angles(traces.reference, sinusoid, dtype)
            error = max(fixed_rounding(dtype), angles)
            errors.add((sinusoid,), Error(error, 0.0, error))
        values = align_values(pair, traces.reference, traces.port, layouts)
        rows.append(_measure_row(traces, pair, values, second, errors, depths[pair.event.i]))
        if progress:
            progress(number + 1, len(chosen))
    return rows


@dataclass(frozen=True)
class Error:
    """Of values that agree: the largest error that no rounding explains, error ÷ rounding, and the
    largest rounding so far.
    """

    unexplained: float = 0.0
    ratio: float = 0.0
    rounding: float = 0.0

    @classmethod
    def largest(cls, errors: Iterable["Error"]) -> "Error":
        """The larger of each, none where there are no values."""
        errors = list(errors)
        return cls(
            max((error.unexplained for error in errors), default=0.0),
            max((error.ratio for error in errors), default=0.0),
            max((error.rounding for error in errors), default=0.0),
        )


class _KnownErrors:
    """The errors of the values measured so far that agree."""

    def __init__(self, flow: DataFlow) -> None:
        self.flow = flow
        self.by_event: dict[int, Error] = {}
        self.by_scope: dict[str, deque[Error]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self.latest: deque[Error] = deque(maxlen=NEIGHBOURS)

    def add(self, events: Sequence[Event], error: Error) -> None:
        self.by_event |= {event.i: error for event in events}
        for recent in (self.by_scope[scope_of(events[0].name)], self.latest):
            recent.append(error)

    def before(self, events: Sequence[Event]) -> Error:
        """What comes in with the values from which these are computed.

        Where the trace does not show all of them, with the values recorded before these.
        """
        upstream = [self.flow.upstream(event, self.by_event) for event in events]
        if any(way.is_open for way in upstream):
            return Error.largest((*self.by_scope[scope_of(events[0].name)], *self.latest))
        return Error.largest(self.by_event[e.i] for way in upstream for e in way.nearest)


def _depths(reference: Trace) -> dict[int, int]:
    """How many operations come before each value: those recorded, paired or not.

    Where fewer modules were recorded than there are parameters, each parameter is an operation of
    every step.
    """
    events = [event for event in reference.events if event.kind not in (*GATED, "selftest")]
    parameters = len(reference.weights() or ())
    hidden = parameters if 2 * len({event.name for event in events}) < parameters else 0
    return {event.i: before + hidden * (event.step + 1) for before, event in enumerate(events)}


def _sinusoids_not_compared(reference: Trace, pairs: Sequence[Pair]) -> deque[Event]:
    """Embeddings of timesteps that the port does not record.

    Sines of large angles lose digits; the error is first seen in the value computed from them.
    """
    compared = {event.hash or event.i for pair in pairs for event in pair.reference}
    returned = {event.hash for event in reference.events if event.slot.startswith("out")}
    return deque(
        event
        for event in reference.events
        if (event.hash or event.i) not in compared
        and (event.slot.startswith("out") or event.hash not in returned)
        and event.stats is not None
        and event.stats.rms is not None
        and abs(event.stats.rms - SINUSOID_RMS) < 0.02
        and event.stats.count <= MAX_SINUSOID
        and reference.has_values(event)
        and is_sinusoid(reference.read(event))
    )


def run_dtype(trace: Trace, event: Event) -> str:
    """The precision a value was computed in: the run's, or its own where that is coarser."""
    return coarser(trace.dtype, event.dtype) if trace.dtype in UNIT else event.dtype


def _measure_row(
    traces: Comparison,
    pair: Pair,
    values: AlignedPair,
    second: Mapping[EventId, Event],
    errors: _KnownErrors,
    depth: int,
) -> Row:
    event = pair.event
    dtype = coarser(run_dtype(traces.port, pair.port_event), event.dtype)
    # Until it is measured it has another shape. An input may be passed in another form.
    wrong = values.reference is not None and not event.slot.startswith("in")
    row = replace(Row.of(event, pair.port_event), dtype=dtype, wrong=wrong, note=values.note)
    measured, rounding = measure_pair(pair, values), None
    if traces.floor is not None:
        others = [second.get(part.id) for part in pair.reference]
        other = _joined(traces.floor, others, pair.axis)
        units = tuple(
            UNIT.get(run_dtype(trace, part), inf) if part else inf
            for trace, part in ((traces.reference, event), (traces.floor, others[0]))
        )
        measured, rounding = _against_second(other, units, values, measured, dtype)
    if measured is None:
        reason = "other shape" if values.reference is not None else "only statistics were kept"
        return row if wrong else replace(row, note=f"not compared: {reason}")
    depth = MODULE_DEPTH.get(dtype, 0) if traces.isolated else depth
    estimate = _estimate(event.dtype, values, dtype, depth)
    if estimate and values.reference is not None and is_sinusoid(values.reference):
        estimate = max(estimate, _rounding_of_angles(traces.reference, event, dtype))
    before = Error() if traces.isolated else errors.before(pair.reference)
    limit = _limit(traces, dtype, rounding, before, estimate, measured.count)
    limit = replace(limit, limit=max(limit.limit, traces.least.get(event.id, 0.0)))
    wrong = not measured.error <= limit.limit
    if not wrong and limit.rounding and not traces.isolated:
        explained = rounding is not None and measured.error <= EXPLAINED * rounding
        unexplained = 0.0 if explained else measured.error
        ratio, largest = measured.error / limit.rounding, max(limit.rounding, before.rounding)
        errors.add(pair.reference, Error(unexplained, ratio, largest))
    return replace(
        row,
        error=measured.error,
        floor=limit.rounding,
        limit=limit.limit,
        wrong=wrong,
        peak=measured.peak,
    )


def _joined(floor: Trace, parts: Sequence[Event | None], axis: int) -> NDArray[Any] | None:
    """The value of one event, or those of several that the port has as one."""
    events = [event for event in parts if event is not None and floor.has_values(event)]
    if len(events) < len(parts):
        return None
    arrays = [floor.read(event) for event in events]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)


def _against_second(
    second: NDArray[Any] | None,
    units: tuple[float, ...],
    values: AlignedPair,
    measured: Distance | None,
    dtype: str,
) -> tuple[Distance | None, float | None]:
    """The distance from the more precise of two references, and the distance between the two.

    `units` are the precisions of the two runs: one in 16 bits may store a sinusoid in float32.
    Two references that are both more precise than the port do not show its rounding; one with NaN
    where the other has numbers shows nothing.
    """
    if second is None or values.reference is None:
        return measured, None
    other = values.like_reference(second)
    if other is None or values.port is None or values.port.shape != other.shape:
        return measured, None
    if not np.array_equal(np.isfinite(other), np.isfinite(values.reference)):
        return measured, None
    first_unit, second_unit = units
    fine, coarse = values.reference, other
    if second_unit < first_unit:
        fine, coarse = other, values.reference
        measured = distance(values.port, fine)
    if max(first_unit, second_unit) < UNIT.get(dtype, 0.0) / 2:
        return measured, None
    return measured, distance(coarse, fine).error


def _estimate(stored: str, values: AlignedPair, dtype: str, depth: int) -> float:
    """The rounding to expect: of the depth, of a sinusoid, of eight bits."""
    if stored in ("u8", "i8"):
        return PIXEL
    if stored[0] in "iu" or stored == "bool":
        return 0.0  # whole numbers are equal or wrong
    if values.reference is not None and is_sinusoid(values.reference):
        return fixed_rounding(dtype)
    return estimated_rounding(dtype, depth)


def _rounding_of_angles(reference: Trace, event: Event, dtype: str) -> float:
    """What rounding of times and frequencies does to a sinusoid; 0 where times are not recorded.

    In 16 bits a time of 3500 is off by up to 8, and its fastest sine is another number. In float32
    a frequency is off by what rounding changes in its exponent, and libraries round differently.
    """
    times = reference.find(event.name, "in.0", event.step, event.call)
    if times is None or not reference.has_values(times):
        return 0.0
    largest = float(np.abs(wide(reference.read(times))).max(initial=0.0))
    exponents = np.log(SINUSOID_PERIOD) * np.linspace(0, 1, max(event.shape[-1] // 2, 1))
    relative = UNIT.get(dtype, 0.0) + UNIT["f32"] * (1 + exponents)
    return float(np.sqrt(np.square(np.minimum(largest * np.exp(-exponents) * relative, 1)).mean()))


def _limit(
    traces: Comparison,
    dtype: str,
    rounding: float | None,
    before: Error,
    estimate: float,
    count: int,
) -> Limit:
    measured = rounding is not None and rounding < (BELIEVED if dtype in FINE else inf)
    expected = measured_rounding(rounding or 0.0, dtype) if measured else estimate
    if measured and traces.isolated:
        expected = local_rounding(rounding or 0.0, dtype, estimate)
    expected = max(expected, estimate) if estimate == PIXEL else expected
    if estimate == 0.0:
        return Limit(0.0, 0.0)
    if traces.tolerance is not None:
        return Limit(expected, traces.tolerance)
    return limit_for(
        expected,
        dtype,
        count,
        before=before.unexplained,
        ratio=before.ratio,
        measured=measured,
        carried=before.rounding,
    )
