"""The events of two paired names, brought together by slot, step and call."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod

from lydite.diff.measure.axes import possible_fits
from lydite.diff.name_map import Rename
from lydite.diff.result import scope_of
from lydite.trace.events import Event
from lydite.trace.reader import Trace

BY_NAME = ("map", "name", "spelling")
SAME_MODULE = (*BY_NAME, "weights")  # methods of pairing that hold for inputs too
ROTATION = "rotation"  # a pair of tables of rotations, in any form
COMPLEX = ("c64", "c128")
CLOSE = 0.3  # relative error below which two outputs of one size are counterparts

Distance = Callable[[Event, Event], float]  # of a value of the reference and one of the port


@dataclass(frozen=True)
class Pair:
    """A value and its counterpart; several events on one side are parts, joined along `axis`."""

    reference: tuple[Event, ...]
    port: tuple[Event, ...]
    how: str  # "name", "map", "spelling", "weights", "parts", "order", "siblings", "kind", …
    axis: int = 0
    dims: str | None = None  # from the map; overrides the traces
    ref_dims: str | None = None

    @property
    def event(self) -> Event:
        """The reference's event, or the first of its parts."""
        return self.reference[0]

    @property
    def port_event(self) -> Event:
        """The port's event, or the first of its parts."""
        return self.port[0]

    @property
    def scope(self) -> str:
        """The component of the reference it belongs to."""
        return scope_of(self.event.name)


@dataclass(frozen=True)
class Pairing:
    """All pairs in the reference's order of execution, and the names without a counterpart."""

    pairs: tuple[Pair, ...]
    unpaired_reference: tuple[str, ...]
    unpaired_port: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    set_aside: tuple[Pair, ...] = ()  # that differ while the values after them agree
    tables: tuple[str, ...] = ()  # of the port, with the angles of the reference's


def pair_events(
    reference: Trace,
    port: Trace,
    names: Mapping[str, Rename],
    ignored: Collection[str],
    distance: Distance = lambda _, __: inf,
) -> Pairing:
    """Pair the events of names that were paired; `ignored` names of the port have none.

    The `distance` of two values tells outputs of one size apart.
    """
    reference_events, port_events = _by_name(reference.events), _by_name(port.events)
    offset, remarks = _step_offset(reference, port)
    pairs: list[Pair] = []
    for name, rename in names.items():
        if name not in port_events:
            continue
        first, *more = rename.ref
        if more:
            pairs += _fused(reference_events, port_events[name], rename, offset)
        elif first.name in reference_events:
            events = reference_events[first.name]
            slots = _match_slots(events, port_events[name], rename, distance)
            pairs += _one_to_one(events, port_events[name], rename, slots, offset)
    made = _made(reference)
    pairs.sort(key=lambda pair: (made[pair.event.i], pair.event.i))
    return Pairing(
        tuple(pairs),
        unpaired(reference, {event.i for pair in pairs for event in pair.reference}, ()),
        unpaired(port, {event.i for pair in pairs for event in pair.port}, ignored),
        remarks,
    )


def _made(reference: Trace) -> dict[int, int]:
    """When each value was computed: that of a module which only returns a part's, with the part."""
    names = {event.i: event.name for event in reference.events}
    return {
        event.i: twin
        if (twin := event.alias_of) is not None
        and names[twin].startswith((f"{event.name}.", f"{event.name}/"))
        else event.i
        for event in reference.events
    }


def _one_to_one(
    reference: Sequence[Event],
    port: Sequence[Event],
    rename: Rename,
    slots: Mapping[str, str],
    offset: int,
) -> Iterable[Pair]:
    """Events of one name by slot, step and call; a batch run as several calls is joined."""
    if rename.how not in SAME_MODULE:  # two modules may return one value and take different ones
        slots = {slot: other for slot, other in slots.items() if not slot.startswith("in")}
    extra = {"how": rename.how, "dims": rename.dims, "ref_dims": rename.ref_dims}
    for slot, reference_slot in slots.items():
        values = [event for event in port if event.slot == slot]
        expected = [event for event in reference if event.slot == reference_slot]
        if len(values) == len(expected):  # also when one side does not record the step
            # what is computed for all steps at once is not recorded in the order of the calls
            values.sort(key=lambda event: (event.step, event.call))
            for event, other in zip(expected, values, strict=True):
                yield Pair((event,), (other,), **extra)
            continue
        for step in dict.fromkeys(event.step for event in expected):
            group = [event for event in expected if event.step == step]
            calls = [event for event in values if event.step - offset == step]
            if calls and 1 in (len(group), len(calls)) and _are_one_batch(calls, group):
                yield Pair(tuple(group), tuple(calls), **extra)
                continue
            by_call = {event.call: event for event in calls}
            for event in group:
                if event.call in by_call:
                    yield Pair((event,), (by_call[event.call],), **extra)


def _fused(
    reference: Mapping[str, Sequence[Event]], port: Sequence[Event], rename: Rename, offset: int
) -> Iterable[Pair]:
    """One value of the port that is several of the reference, concatenated along an axis."""
    values = [event for event in port if event.slot == "out"]
    expected = [
        [part for part in reference.get(ref.name, ()) if part.slot == ref.slot]
        for ref in rename.ref
    ]
    in_order = {len(parts) for parts in expected} == {len(values)}  # steps may begin at 1
    for number, event in enumerate(sorted(values, key=lambda event: (event.step, event.call))):
        call = (event.step - offset, event.call)
        parts = [
            part
            for group in expected
            for part in (group[number : number + 1] if in_order else group)
            if in_order or (part.step, part.call) == call
        ]
        if len(parts) == len(rename.ref):
            axis = rename.axis if rename.how == "map" else joined_axis(event, parts)
            yield Pair(tuple(parts), (event,), rename.how, axis, rename.dims, rename.ref_dims)


def same_kind(a: Event, b: Event) -> bool:
    """Whether two values are of one kind, and both complex or both real.

    A port has cosines and sines where the reference has complex rotations. The time of one step is
    no table of times.
    """
    if a.kind != b.kind or (a.dtype in COMPLEX) != (b.dtype in COMPLEX):
        return False
    return a.kind != "schedule" or _is_one_number(a) == _is_one_number(b)


def _is_one_number(event: Event) -> bool:
    """Whether all entries of a value are one number, as far as its statistics show."""
    stats = event.stats
    equal = stats is not None and stats.min is not None and stats.min == stats.max
    return equal or prod(event.shape) == 1


def joined_axis(whole: Event, parts: Sequence[Event]) -> int:
    """The axis along which values are joined: the tokens where the width is theirs, else the last.

    (batch, tokens, width) has its tokens on axis 1.
    """
    shapes = {part.shape[-1:] for part in parts}
    return 1 if len(whole.shape) == 3 and shapes == {whole.shape[-1:]} else -1


def _match_slots(
    reference: Sequence[Event],
    port: Sequence[Event],
    rename: Rename,
    distance: Distance = lambda _, __: inf,
) -> dict[str, str]:
    """The port's slot → the reference's.

    Inputs may be positional in one and named in the other. An output may be alone in one and a
    field of a dataclass in the other, and outputs may have another order; their sizes tell, or
    their content.
    """
    if rename.slots:
        return {event.slot: rename.slots.get(event.slot, event.slot) for event in port}
    first, reference_first = _first_of_slots(port), _first_of_slots(reference)
    matched: dict[str, str] = {}
    for prefix in ("in", "out"):
        slots = [slot for slot in first if slot.startswith(prefix)]
        free = [slot for slot in reference_first if slot.startswith(prefix)]
        fits = {
            (slot, other)
            for slot in slots
            for other in free
            if prod(first[slot].shape) == prod(reference_first[other].shape)
        }
        same = [slot for slot in slots if (slot, slot) in fits]
        matched |= {slot: slot for slot in same}
        left = [slot for slot in slots if slot not in same]
        free = [slot for slot in free if slot not in same]
        if prefix == "in" and len(left) == len(free):
            matched |= {a: b for a, b in zip(left, free, strict=True) if (a, b) in fits}
        elif prefix == "out":
            possible = {(a, b) for a, b in fits if a in left and b in free}
            far = {(a, b): distance(reference_first[b], first[a]) for a, b in possible}
            matched |= _match_outputs(far)
        used = set(matched.values())
        of_other_size = [slot for slot in left if slot in free and slot not in used]
        matched |= {slot: slot for slot in of_other_size if slot not in matched}
    return matched


def _match_outputs(far: Mapping[tuple[str, str], float]) -> dict[str, str]:
    """The outputs of a module on both sides: `far` has those of one size and their distance.

    Those that are the only ones of their size, and those that are close, the closest first.
    """
    slots, others = ([pair[side] for pair in far] for side in (0, 1))
    matched = {a: b for a, b in far if slots.count(a) == others.count(b) == 1}
    close = sorted((distance, pair) for pair, distance in far.items() if distance < CLOSE)
    for _, (slot, other) in close:
        if slot not in matched and other not in matched.values():
            matched[slot] = other
    return matched


def _first_of_slots(events: Sequence[Event]) -> dict[str, Event]:
    """The first event of each slot."""
    first: dict[str, Event] = {}
    for event in events:
        first.setdefault(event.slot, event)
    return first


def _step_offset(reference: Trace, port: Trace) -> tuple[int, tuple[str, ...]]:
    """Whether the port counts steps from 1, which is not a bug."""
    expected = sorted({event.step for event in reference.events})
    steps = sorted({event.step for event in port.events if event.kind != "selftest"})
    from_one = steps and steps[0] == 1 and expected[0] == 0 and steps[-1] == expected[-1] + 1
    if len(expected) > 1 and from_one:
        return 1, ("the port counts steps from 1",)
    return 0, ()


def _by_name(events: Iterable[Event]) -> dict[str, list[Event]]:
    result: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind != "selftest":
            result[event.name].append(event)
    return result


def unpaired(trace: Trace, paired: Collection[int], ignored: Collection[str]) -> tuple[str, ...]:
    """Names of which no event was paired."""
    names: dict[str, bool] = {}
    for event in trace.events:
        if event.kind != "selftest" and event.name not in ignored:
            names[event.name] = names.get(event.name, False) or event.i in paired
    return tuple(name for name, has_pair in names.items() if not has_pair)


def _are_one_batch(calls: Sequence[Event], group: Sequence[Event]) -> bool:
    """Whether the calls of one side are the rows of a batch of the other's.

    What each call computes again, as a table of rotations, may have as many numbers by chance.
    """
    if _size(calls) != _size(group):
        return False
    if len(calls) == 1:
        return True
    rows, rest = divmod(group[0].shape[0] if group[0].shape else 0, len(calls))
    part = (rows, *group[0].shape[1:])
    return not rest and all(possible_fits(event.shape, part) for event in calls)


def _size(events: Iterable[Event]) -> int:
    return sum(prod(event.shape) for event in events)
