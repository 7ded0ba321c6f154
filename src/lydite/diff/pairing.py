"""Which value of the port belongs to which value of the reference.

Names first: the porter's map, equal names, equal names but for spelling, modules whose parameters
are equal; then order, shape and content. What pairs in some blocks pairs in all of them, equal or
not, and what stands alone between two pairs is taken for one. The rest is reported.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from lydite.diff.alignment import (
    Look,
    Values,
    align,
    between,
    first_events,
    joined_parts,
    names_of,
    only_parts,
)
from lydite.diff.axes import possible_fits
from lydite.diff.names import match_spelling, match_weights, module_renames
from lydite.diff.renames import Rename
from lydite.diff.templates import Blocks, Templates
from lydite.trace.events import Event
from lydite.trace.store import Trace

Joiner = Callable[
    [Trace, Trace, Sequence[str], Sequence[str], Blocks], Iterable[tuple[str, tuple[str, ...]]]
]
GUESSED = ("parts", "order", "siblings", "place")  # ways to pair that siblings may correct
UNSEEN = ("weights", "siblings", "place")  # ways to pair that no value speaks for
FOLLOWING = 8  # agreeing values after one that differs that prove it is not used as its name says
MOST_PARTS = 8  # of a batch that one side runs in several calls


@dataclass(frozen=True)
class Pair:
    """A value and its counterpart; several events on one side are parts, joined along `axis`."""

    reference: tuple[Event, ...]
    port: tuple[Event, ...]
    how: str  # "name", "map", "spelling", "weights", "parts", "order", "siblings", "place"
    axis: int = 0
    dims: str | None = None  # what the map says, over what the traces say
    ref_dims: str | None = None

    @property
    def site(self) -> Event:
        """The reference's event, or the first of its parts."""
        return self.reference[0]

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


@dataclass
class _Names:
    """Port name -> reference names, and how each was found."""

    found: dict[str, tuple[Rename, str]] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)

    def add(self, names: Mapping[str, str], how: str) -> None:
        for ours, theirs in names.items():
            self.found.setdefault(ours, (Rename((theirs,)), how))

    def join(self, find: Joiner, reference: Trace, port: Trace) -> None:
        """Add what is several values of the reference side by side."""
        blocks = Blocks(self.refs())
        for ours, parts in find(reference, port, self.free(reference), self.left(port), blocks):
            if set(parts) <= set(self.free(reference)):
                self.found[ours] = (Rename(parts), "parts")

    def refs(self) -> dict[str, tuple[str, ...]]:
        """Port name -> reference names, as found so far."""
        return {name: rename.ref for name, (rename, _) in self.found.items() if rename.ref}

    def left(self, trace: Trace) -> list[str]:
        """Port names without a counterpart yet, in order of execution."""
        return [n for n in names_of(trace) if n not in self.found and n not in self.ignored]

    def free(self, trace: Trace) -> list[str]:
        """Reference names nobody has claimed yet, in order of execution."""
        taken = {name for rename, _ in self.found.values() for name in rename.ref}
        return [name for name in names_of(trace) if name not in taken]


def pair(reference: Trace, port: Trace, renames: Mapping[str, Rename] | None = None) -> Pairing:
    """Pair two traces; `renames` is the porter's word and wins."""
    names = _Names()
    for ours, rename in (renames or {}).items():
        if rename.ref:
            names.found[ours] = (rename, "map")
        else:
            names.ignored.add(ours)
    spelled = match_spelling(names.left(port), names.free(reference))
    names.add({a: b for a, b in spelled.items() if a == b}, "name")
    names.add({a: b for a, b in spelled.items() if a != b}, "spelling")
    names.add(_from_weights(reference, port, names), "weights")
    names.join(joined_parts, reference, port)
    free, left = names.free(reference), names.left(port)
    names.add(align(reference, port, free, left, names.refs()), "order")
    _follow_siblings(reference, port, names)
    names.join(only_parts, reference, port)
    placed = between(reference, port, names.refs(), Blocks(names.refs()))
    names.add(placed, "place")
    _follow_siblings(reference, port, names)
    found = _pair_events(reference, port, names)
    if strays := _strays(reference, port, found):
        names.found = {name: each for name, each in names.found.items() if name not in strays}
        found = _pair_events(reference, port, names)
    return replace(found, remarks=(*found.remarks, *_assumed(found)))


def _follow_siblings(reference: Trace, port: Trace, names: _Names) -> None:
    """Pairs that their siblings contradict are dropped, and what siblings say is paired."""
    rules, blocks = Templates(names.refs()), Blocks(names.refs())
    theirs = first_events(reference, names_of(reference))
    ours = first_events(port, names_of(port))
    wanted = {
        name: refs
        for name in ours
        if (refs := rules.predict(name)) and all(ref in theirs for ref in refs)
    }
    for name, (rename, how) in list(names.found.items()):
        strayed = not all(blocks.allow(name, ref) for ref in rename.ref)
        if how in GUESSED and (strayed or wanted.get(name, rename.ref) != rename.ref):
            del names.found[name]
    free = set(names.free(reference))
    for name in names.left(port):
        refs = wanted.get(name, ())
        if refs and free.issuperset(refs) and _compatible(ours[name], [theirs[r] for r in refs]):
            names.found[name] = (Rename(refs), "siblings")
            free -= set(refs)


def _strays(reference: Trace, port: Trace, found: Pairing) -> set[str]:
    """Names that were paired unseen and differ, while what comes right after them agrees.

    A port may keep scale and shift the other way round: that its values differ from what its name
    says is no bug then, and the name no counterpart.
    """
    look = Look(Values(reference), Values(port))
    outs = [each for each in found.pairs if each.port_site.port == "out" and len(each.port) == 1]
    agreed: dict[int, bool | None] = {}

    def agree(each: Pair) -> bool | None:
        if each.site.i not in agreed:
            agreed[each.site.i] = look.agree(each.reference, each.port_site)
        return agreed[each.site.i]

    strays: set[str] = set()
    for at in reversed(range(len(outs))):
        here = outs[at].port_site.name
        if outs[at].how not in UNSEEN or here in strays or agree(outs[at]) is not False:
            continue
        after = [o for o in outs[at + 1 :] if o.port_site.name not in {here, *strays}][:FOLLOWING]
        if after and all(agree(other) is not False for other in after):
            strays.add(here)
    return strays


def _compatible(ours: Event, theirs: Sequence[Event]) -> bool:
    """Whether one value of the port can be those of the reference, or a part of their batch."""
    mine, wanted = prod(ours.shape), _size(theirs)
    if ours.kind != theirs[0].kind or not mine or not wanted:
        return False
    if mine == wanted:
        return len(theirs) > 1 or bool(possible_fits(ours.shape, theirs[0].shape))
    large, small = max(mine, wanted), min(mine, wanted)
    return large % small == 0 and large // small <= MOST_PARTS and len(theirs) == 1


def _assumed(found: Pairing) -> tuple[str, ...]:
    """What was paired by its place alone, said once."""
    placed = {each.port_site.name: each.site.name for each in found.pairs if each.how == "place"}
    if not placed:
        return ()
    ours, theirs = next(iter(placed.items()))
    more = f", and {len(placed) - 1} more" if len(placed) > 1 else ""
    return (f"paired by place alone: {ours} with the reference's {theirs}{more}",)


def _from_weights(reference: Trace, port: Trace, names: _Names) -> dict[str, str]:
    """Modules that hold the same parameters, under their full event names."""
    ours, theirs = port.weights(), reference.weights()
    if not ours or not theirs:
        return {}
    modules = module_renames(match_weights(ours, theirs))
    free = set(names.free(reference))
    theirs_out, ours_out = (first_events(t, names_of(t)) for t in (reference, port))
    result: dict[str, str] = {}
    for name in names.left(port):
        scope, slash, path = name.rpartition("/")
        for ours_module in (name, path):
            target = modules.get(ours_module)
            for candidate in (target, f"{scope}{slash}{target}" if target else None):
                if candidate not in free:
                    continue
                mine, other = ours_out.get(name), theirs_out.get(candidate)
                if mine is None or other is None or _compatible(mine, [other]):
                    result[name] = candidate
    return result


def _pair_events(reference: Trace, port: Trace, names: _Names) -> Pairing:
    theirs = _by_name(reference.events)
    ours = _by_name(port.events)
    offset, remarks = _step_offset(reference, port)
    pairs: list[Pair] = []
    for name, (rename, how) in names.found.items():
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
    extra = {"how": how, "dims": rename.dims, "ref_dims": rename.ref_dims}
    for port, ref_port in ports.items():
        mine = [event for event in ours if event.port == port]
        wanted = [event for event in theirs if event.port == ref_port]
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
        if event.port != "out":
            continue
        want = (event.step - offset, event.call)
        parts = [
            next(
                (e for e in theirs.get(name, ()) if e.port == "out" and (e.step, e.call) == want),
                None,
            )
            for name in rename.ref
        ]
        found = tuple(part for part in parts if part is not None)
        if len(found) == len(parts):
            yield Pair(found, (event,), how, rename.axis, rename.dims, rename.ref_dims)


def _match_ports(theirs: Sequence[Event], ours: Sequence[Event], rename: Rename) -> dict[str, str]:
    """Port's port -> reference's; inputs may be positional on one side and named on the other."""
    mine = list(dict.fromkeys(event.port for event in ours))
    wanted = list(dict.fromkeys(event.port for event in theirs))
    if rename.ports:
        return {name: rename.ports.get(name, name) for name in mine}
    result = {name: name for name in mine if name in wanted}
    left = [name for name in mine if name not in result and name.startswith("in")]
    free = [name for name in wanted if name not in result and name.startswith("in")]
    sizes = {event.port: prod(event.shape) for event in [*theirs, *ours]}
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
