"""The events of two names brought together: by port, step and call."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from lydite.diff.claims import Claims
from lydite.diff.renames import Rename
from lydite.trace.events import Event
from lydite.trace.store import Trace

NAMED = ("map", "name", "spelling")  # ways to pair that speak for inputs too


@dataclass(frozen=True)
class Pair:
    """A value and its counterpart; several events on one side are parts, joined along `axis`."""

    reference: tuple[Event, ...]
    port: tuple[Event, ...]
    how: str  # "name", "map", "spelling", "weights", "parts", "order", "siblings", "kind", …
    axis: int = 0
    dims: str | None = None  # what the map says, over what the traces say
    ref_dims: str | None = None

    @property
    def site(self) -> Event:
        """The reference's event, or the first of its parts."""
        return self.reference[0]

    @property
    def scope(self) -> str:
        """The component of the reference it belongs to."""
        return self.site.name.split("/")[0]

    @property
    def port_site(self) -> Event:
        """The port's event, or the first of its parts."""
        return self.port[0]


@dataclass(frozen=True)
class Pairing:
    """All pairs in the reference's order of execution, and what is left over."""

    pairs: tuple[Pair, ...]
    unpaired_reference: tuple[str, ...]
    unpaired_port: tuple[str, ...]
    remarks: tuple[str, ...] = ()


def pair_events(reference: Trace, port: Trace, names: Claims) -> Pairing:
    theirs = _by_name(reference.events)
    ours = _by_name(port.events)
    offset, remarks = _step_offset(reference, port)
    pairs: list[Pair] = []
    for name, rename, how in names.events():
        if name not in ours:
            continue
        first, *more = rename.ref
        if more:
            pairs += _joined(theirs, ours[name], rename, how, offset)
        elif first in theirs:
            pairs += _one_to_one(theirs[first], ours[name], rename, how, offset)
    pairs.sort(key=lambda found: found.site.i)
    done_ref = {event.i for each in pairs for event in each.reference}
    done_port = {event.i for each in pairs for event in each.port}
    return Pairing(
        tuple(pairs),
        _alone(reference, done_ref, set()),
        _alone(port, done_port, names.ignored),
        remarks,
    )


def _one_to_one(
    theirs: Sequence[Event], ours: Sequence[Event], rename: Rename, how: str, offset: int
) -> Iterable[Pair]:
    """Events of one name: by port, step and call; a batch run as several calls is joined."""
    ports = _match_ports(theirs, ours, rename)
    if how not in NAMED:  # two modules may give one value and take others: a container, a dropout
        ports = {mine: port for mine, port in ports.items() if not mine.startswith("in")}
    extra = {"how": how, "dims": rename.dims, "ref_dims": rename.ref_dims}
    for port, ref_port in ports.items():
        mine = [event for event in ours if event.slot == port]
        wanted = [event for event in theirs if event.slot == ref_port]
        if len(mine) == len(wanted):  # also when one side does not say which step it is
            for event, other in zip(wanted, mine, strict=True):
                yield Pair((event,), (other,), **extra)
            continue
        for step in dict.fromkeys(event.step for event in wanted):
            group = [event for event in wanted if event.step == step]
            calls = [event for event in mine if event.step - offset == step]
            if calls and 1 in (len(group), len(calls)) and _size(calls) == _size(group):
                yield Pair(tuple(group), tuple(calls), **extra)
                continue
            by_call = {event.call: event for event in calls}
            for event in group:
                if event.call in by_call:
                    yield Pair((event,), (by_call[event.call],), **extra)


def _joined(
    theirs: Mapping[str, Sequence[Event]],
    ours: Sequence[Event],
    rename: Rename,
    how: str,
    offset: int,
) -> Iterable[Pair]:
    """One value of the port that is several of the reference, joined along an axis."""
    for event in ours:
        if event.slot != "out":
            continue
        want = (event.step - offset, event.call)
        parts = [
            next(
                (e for e in theirs.get(name, ()) if e.slot == "out" and (e.step, e.call) == want),
                None,
            )
            for name in rename.ref
        ]
        found = tuple(part for part in parts if part is not None)
        if len(found) == len(parts):
            yield Pair(found, (event,), how, rename.axis, rename.dims, rename.ref_dims)


def _match_ports(theirs: Sequence[Event], ours: Sequence[Event], rename: Rename) -> dict[str, str]:
    """Port's port -> reference's; inputs may be positional on one side and named on the other."""
    mine = list(dict.fromkeys(event.slot for event in ours))
    wanted = list(dict.fromkeys(event.slot for event in theirs))
    if rename.ports:
        return {name: rename.ports.get(name, name) for name in mine}
    result = {name: name for name in mine if name in wanted}
    left = [name for name in mine if name not in result and name.startswith("in")]
    free = [name for name in wanted if name not in result and name.startswith("in")]
    sizes = {event.slot: prod(event.shape) for event in [*theirs, *ours]}
    if len(left) == len(free):
        result |= {a: b for a, b in zip(left, free, strict=True) if sizes[a] == sizes[b]}
    return result


def _step_offset(reference: Trace, port: Trace) -> tuple[int, tuple[str, ...]]:
    """Some count steps from 1; that is a way of counting, not a bug."""
    theirs = sorted({event.step for event in reference.events})
    ours = sorted({event.step for event in port.events if event.kind != "selftest"})
    if len(theirs) > 1 and ours and ours[0] == 1 and theirs[0] == 0 and ours[-1] == theirs[-1] + 1:
        return 1, ("the port counts steps from 1",)
    return 0, ()


def _by_name(events: Iterable[Event]) -> dict[str, list[Event]]:
    result: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind != "selftest":
            result[event.name].append(event)
    return result


def _alone(trace: Trace, paired: set[int], ignored: set[str]) -> tuple[str, ...]:
    """Names of which no event was paired, and single ports of names that were."""
    names: dict[str, bool] = {}
    for event in trace.events:
        if event.kind != "selftest" and event.name not in ignored:
            names[event.name] = names.get(event.name, False) or event.i in paired
    return tuple(name for name, met in names.items() if not met)


def _size(events: Iterable[Event]) -> int:
    return sum(prod(event.shape) for event in events)
