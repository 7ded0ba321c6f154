"""Every pair measured and judged, in the reference's order of execution."""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import inf

from lydite.diff.arrays import Distance, distance
from lydite.diff.calls import Pair
from lydite.diff.floor import (
    EXPLAINED,
    FINE,
    UNIT,
    Limit,
    coarser,
    estimated_floor,
    is_sinusoid,
    limit_for,
    local_floor,
    measured_floor,
    pinned_floor,
)
from lydite.diff.result import Row
from lydite.diff.values import Layouts, Seen, measure_pair, see
from lydite.trace.events import Event, dtype_name
from lydite.trace.store import Trace

WINDOW = 16  # values before a place that tell how much error already flows
NEIGHBOURS = 4  # values before it in whatever component: a sampler takes what a network gives
BELIEVED = 0.1  # a float32 reference that rounds by more is broken, and no floor
ALONE = {"f32": 16, "f64": 16}  # operations inside one module, of a run on injected values
PIXEL = 3e-4  # of an 8-bit image: one pixel in seven hundred falls to the other side
GATED = ("ids", "schedule", "input")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Sides:
    """The traces of a comparison; `floor` is the reference once more, in another precision."""

    reference: Trace
    port: Trace
    floor: Trace | None = None
    tolerance: float | None = None  # the user's own limit instead of ours
    isolated: bool = False  # the port ran on the reference's values: errors do not add up


def measure_rows(
    sides: Sides, pairs: Sequence[Pair], layouts: Layouts, progress: Progress | None = None
) -> list[Row]:
    """One row per pair; values are read, measured and let go."""
    chosen = [pair for pair in pairs if pair.site.kind not in GATED]
    second = {e.id: e for e in sides.floor.events} if sides.floor else {}
    flows: dict[str, _Flow] = defaultdict(_Flow)  # a component's error comes in by its inputs
    last = _Flow(NEIGHBOURS)
    depths = _depths(sides.reference, {pair.site.name.split("/")[0] for pair in chosen})
    rows: list[Row] = []
    for number, pair in enumerate(chosen):
        seen = see(pair, sides.reference, sides.port, layouts)
        flow = flows[pair.site.name.split("/")[0]]
        rows.append(_row(sides, pair, seen, second, (flow, last), depths[pair.site.i]))
        if progress:
            progress(number + 1, len(chosen))
    return rows


def run_dtype(trace: Trace, event: Event) -> str:
    """The precision a value was computed in: the run's, or its own where that is coarser."""
    whole = dtype_name(trace.header.dtype)
    return coarser(whole, event.dtype) if whole in UNIT else event.dtype


def _depths(reference: Trace, scopes: Collection[str]) -> dict[int, int]:
    """How many values of these components come before each, however few of them were paired."""
    depths: dict[int, int] = {}
    before = 0
    for event in reference.events:
        depths[event.i] = before
        counted = event.kind not in (*GATED, "selftest")
        before += counted and event.name.split("/")[0] in scopes
    return depths


@dataclass
class _Flow:
    """How much error the values so far carry, while they still agree."""

    recent: deque[tuple[float, float]]  # error no floor explains, and its ratio to the floor

    def __init__(self, length: int = WINDOW) -> None:
        self.recent = deque(maxlen=length)


def _row(
    sides: Sides,
    pair: Pair,
    seen: Seen,
    second: dict[tuple[str, str, int, int], Event],
    flows: tuple[_Flow, _Flow],  # of the component, and of what ran just before
    depth: int,
) -> Row:
    theirs, ours = pair.site, pair.port_site
    dtype = coarser(run_dtype(sides.port, ours), theirs.dtype)
    row = Row(
        theirs.name,
        ours.name,
        theirs.slot,
        theirs.step,
        theirs.call,
        theirs.kind,
        tuple(theirs.shape),
        dtype,
        None,
        None,
        None,
        # Until it is measured: of another shape. Functions may well take their inputs otherwise.
        wrong=seen.reference is not None and not theirs.slot.startswith("in"),
        note=seen.note,
    )
    found, rounding = measure_pair(pair, seen), None
    if sides.floor is not None and len(pair.reference) == 1:
        found, rounding = _against_second(sides.floor, second.get(theirs.id), seen, found, dtype)
    if found is None:
        why = "another shape" if seen.reference is not None else "nothing was kept to compare"
        return row if row.wrong else replace(row, note=f"not compared: {why}")
    depth = ALONE.get(dtype, 0) if sides.isolated else depth
    estimate = _loss(theirs.dtype, seen, dtype, depth)
    limit = _limit(sides, row, rounding, flows, estimate, found.count)
    wrong = not found.error <= limit.limit
    if not wrong and limit.floor and not sides.isolated:
        explained = rounding is not None and found.error <= EXPLAINED * rounding
        for flow in flows:
            flow.recent.append((0.0 if explained else found.error, found.error / limit.floor))
    return replace(
        row,
        error=found.error,
        floor=limit.floor,
        limit=limit.limit,
        wrong=wrong,
        peak=found.peak,
    )


def _against_second(
    floor: Trace, event: Event | None, seen: Seen, found: Distance | None, dtype: str
) -> tuple[Distance | None, float | None]:
    """The error against the more precise of two references, and what lies between the two.

    Two references that are both more precise than the port say nothing about its rounding.
    """
    if event is None or seen.reference is None or not floor.has_values(event):
        return found, None
    other = seen.like_reference(floor.read(event))
    if other is None or seen.port is None or seen.port.shape != other.shape:
        return found, None
    first, second = UNIT.get(dtype_name(str(seen.reference.dtype)), inf), UNIT.get(event.dtype, inf)
    truth, rough = (other, seen.reference) if second < first else (seen.reference, other)
    found = distance(seen.port, truth) if second < first else found
    if max(first, second) < UNIT.get(dtype, 0.0) / 2:
        return found, None
    return found, distance(rough, truth).error


def _loss(stored: str, seen: Seen, dtype: str, depth: int) -> float:
    """The rounding to expect here by estimate: of the depth, of a sinusoid, of eight bits."""
    if stored in ("u8", "i8"):
        return PIXEL
    if stored[0] in "iu" or stored == "bool":
        return 0.0  # whole numbers are equal or wrong
    if seen.reference is not None and is_sinusoid(seen.reference):
        return pinned_floor(dtype)
    return estimated_floor(dtype, depth)


def _limit(
    sides: Sides,
    row: Row,
    rounding: float | None,
    flows: tuple[_Flow, _Flow],
    estimate: float,
    count: int,
) -> Limit:
    dtype = row.dtype
    measured = rounding is not None and rounding < (BELIEVED if dtype in FINE else inf)
    floor = measured_floor(rounding or 0.0, dtype) if measured else estimate
    if measured and sides.isolated:
        floor = local_floor(rounding or 0.0, dtype, estimate)
    floor = max(floor, estimate) if estimate == PIXEL else floor
    if estimate == 0.0:
        return Limit(0.0, 0.0)
    if sides.tolerance is not None:
        return Limit(floor, sides.tolerance)
    recent = [each for flow in flows for each in flow.recent]
    before = max((error for error, _ in recent), default=0.0)
    ratio = max((ratio for _, ratio in recent), default=0.0)
    return limit_for(floor, dtype, count, before=before, ratio=ratio, measured=measured)


def scope(row: Row) -> str:
    """The component a row belongs to."""
    return row.site.split("/")[0]
