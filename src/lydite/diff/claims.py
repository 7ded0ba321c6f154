"""Which name of the port is which of the reference: claimed one after the other, and how."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log10, prod

from lydite.diff.axes import possible_fits
from lydite.diff.look import (
    EQUAL,
    MOST_PARTS,
    PORT,
    Look,
    Values,
    first_events,
    is_input,
    names_of,
    other_ports,
    part_of,
    place_of,
)
from lydite.diff.names import match_weights, module_renames
from lydite.diff.renames import Rename
from lydite.diff.templates import Blocks, Scopes, Templates, spots
from lydite.trace.events import Event
from lydite.trace.store import Trace

Refs = tuple[str, ...]
Joiner = Callable[[Trace, Trace, Sequence[str], Sequence[str], Blocks], Iterable[tuple[str, Refs]]]
GUESSED = ("parts", "equal", "order", "siblings", "place", "likeness")  # siblings correct these
WEAK = ("order", "place", "likeness")  # but none of these an equal one
NEAR = 0.7  # decades between the largest numbers of two tables that may be one


@dataclass
class Claims:
    """Port name -> reference names, and how each was found."""

    reference: Trace
    port: Trace
    found: dict[str, tuple[Rename, str]] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        names = [*names_of(self.reference), *other_ports(self.reference)]
        self.theirs = first_events(self.reference, names)
        at = {name: event.i for name, event in self.theirs.items()}
        self.names = sorted(names, key=lambda name: at.get(name, inf))
        self.ours = first_events(self.port, names_of(self.port))
        self.look = Look(Values(self.reference), Values(self.port))

    def add(self, names: Mapping[str, str], how: str) -> None:
        """Claim one name for each; what is claimed already stays."""
        for ours, theirs in names.items():
            self.found.setdefault(ours, (Rename((theirs,)), how))

    def join(self, find: Joiner) -> None:
        """Add what is several values of the reference side by side."""
        blocks = Blocks(self.refs())
        outputs = [name for name in self.free() if PORT not in name]
        for ours, parts in find(self.reference, self.port, outputs, self.left(), blocks):
            if set(parts) <= set(self.free()):
                self.found[ours] = (Rename(parts), "parts")

    def drop(self, strays: set[str], unseen: Collection[str]) -> None:
        """Take back these, and their siblings in other blocks that were paired `unseen` too."""
        keys = {key for name in strays for key, _ in spots(name)}
        for name, (_, how) in list(self.found.items()):
            sibling = how in unseen and any(key in keys for key, _ in spots(name))
            if name in strays or sibling:
                del self.found[name]

    def refs(self) -> dict[str, Refs]:
        """Port name -> reference names, as found so far."""
        return {name: rename.ref for name, (rename, _) in self.found.items() if rename.ref}

    def left(self) -> list[str]:
        """Port names without a counterpart yet, in order of execution."""
        return [n for n in names_of(self.port) if n not in self.found and n not in self.ignored]

    def outputs(self) -> list[str]:
        """Reference names nobody has claimed yet, without what is handed to a module."""
        return [name for name in self.free() if not is_input(name)]

    def free(self) -> list[str]:
        """Reference names nobody has claimed yet, in order of execution."""
        taken = {name for rename, _ in self.found.values() for name in rename.ref}
        return [name for name in self.names if name not in taken]

    def events(self) -> Iterator[tuple[str, Rename, str]]:
        """Port name, what it is and how that was found, in the words of events."""
        for name, (rename, how) in self.found.items():
            if len(rename.ref) == 1 and PORT in rename.ref[0]:
                module, port = place_of(rename.ref[0])
                rename = replace(rename, ref=(module,), ports={"out": port})
            yield name, rename, how

    def follow_weights(self) -> None:
        """Modules that hold the same parameters, under their full event names."""
        ours, theirs = self.port.weights(), self.reference.weights()
        if not ours or not theirs:
            return
        modules = module_renames(match_weights(ours, theirs))
        whole = _by_path(self.free())
        for name in self.left():
            for ours_module in (name, name.rpartition("/")[2]):
                target = whole.get(modules.get(ours_module, ""))
                if target and self._may_be(name, (target,)):
                    self.found[name] = (Rename((target,)), "weights")

    def follow_siblings(self) -> None:
        """Pairs that their siblings contradict are dropped, and what siblings say is paired."""
        pairs = self.refs()
        strong = {name: refs for name, refs in pairs.items() if self.found[name][1] not in WEAK}
        blocks, sure = Blocks(pairs), self._told(strong)
        wanted = self._told(pairs) | sure
        for name, (rename, how) in list(self.found.items()):
            strayed = not all(blocks.allow(name, ref) for ref in rename.ref)
            said = (sure if how == "equal" else wanted).get(name, rename.ref)
            if how in GUESSED and (strayed or said != rename.ref):
                del self.found[name]
        self._claim(wanted, "siblings")

    def _told(self, pairs: Mapping[str, Refs]) -> dict[str, Refs]:
        """What names are by their siblings among these pairs."""
        rules, blocks = Templates(pairs), Blocks(pairs)
        said = ((name, rules.predict(name) or blocks.carry(name, pairs)) for name in self.ours)
        return {n: refs for n, refs in said if refs and all(r in self.theirs for r in refs)}

    def follow_scopes(self) -> None:
        """Names that differ from the reference's in their beginning alone, as others do."""
        rules = Scopes(self.refs())
        said = ((name, rules.predict(name)) for name in self.left())
        self._claim({name: (ref,) for name, ref in said if ref in self.theirs}, "spelling")

    def follow_kinds(self) -> None:
        """Noise, token ids and tables: there is mostly one of a kind and shape."""
        ours, theirs = self.ours, self.theirs
        left, free = [n for n in self.left() if n in ours], [n for n in self.free() if n in theirs]
        for name in left:
            there = [ref for ref in free if self._is_one_kind(theirs[ref], ours[name])]
            back = [n for n in left if there and self._is_one_kind(theirs[there[0]], ours[n])]
            if len(there) == len(back) == 1:
                self.found[name] = (Rename((there[0],)), "kind")

    def _is_one_kind(self, theirs: Event, ours: Event) -> bool:
        if theirs.kind != ours.kind:
            return False
        if theirs.kind in ("ids", "input"):
            return bool(possible_fits(ours.shape, theirs.shape))
        if theirs.kind != "schedule" or len(theirs.shape) != len(ours.shape):
            return False
        a, b = self.look.port.stats(ours), self.look.reference.stats(theirs)
        if a is None or b is None or not a.max or not b.max or a.max * b.max <= 0:
            return False
        return abs(log10(a.max / b.max)) < NEAR

    def share(self) -> None:
        """Values that are another part of what one is a part of: two projections of one."""
        room = self._room()
        for name in self.left():
            if (mine := self.ours.get(name)) is None:
                continue
            for ref in [ref for ref, left in room.items() if left >= prod(mine.shape)]:
                if self.look.score(self.theirs[ref], mine)[1] < EQUAL:
                    self.found[name] = (Rename((ref,)), "equal")
                    room[ref] -= prod(mine.shape)
                    break

    def _room(self) -> dict[str, int]:
        """Reference names of which only parts are claimed, and how many values are left."""
        room: dict[str, int] = {}
        for name, (rename, _) in self.found.items():
            mine, (ref, *more) = self.ours.get(name), (*rename.ref, "")
            if more == [""] and mine and ref in self.theirs:
                whole = prod(self.theirs[ref].shape)
                if part_of(mine.shape, self.theirs[ref].shape, -1):
                    room[ref] = room.get(ref, whole) - prod(mine.shape)
        return {ref: left for ref, left in room.items() if left > 0}

    def _claim(self, wanted: Mapping[str, Refs], how: str) -> None:
        """What is free and may be it."""
        free, room = set(self.free()), self._room()
        for name in self.left():
            refs = wanted.get(name, ())
            if not refs or not self._may_be(name, refs):
                continue
            mine = prod(self.ours[name].shape) if name in self.ours else 0
            if free.issuperset(refs) or (len(refs) == 1 and 0 < mine <= room.get(refs[0], 0)):
                self.found[name] = (Rename(refs), how)
                free -= set(refs)
                room = self._room()

    def _may_be(self, name: str, refs: Refs) -> bool:
        """Whether shapes do not deny it; a name without an output is not asked."""
        mine, others = self.ours.get(name), [self.theirs[r] for r in refs if r in self.theirs]
        return mine is None or not others or compatible(mine, others)


def _by_path(names: Iterable[str]) -> dict[str, str]:
    """Names by themselves, and by what follows the component where only one has it."""
    names = list(names)
    paths = Counter(name.rpartition("/")[2] for name in names)
    alone = {path: name for name in names if paths[path := name.rpartition("/")[2]] == 1}
    return alone | {name: name for name in names}


def compatible(ours: Event, theirs: Sequence[Event]) -> bool:
    """Whether one value of the port can be those of the reference, or a part of their batch."""
    mine, wanted = prod(ours.shape), sum(prod(event.shape) for event in theirs)
    if ours.kind != theirs[0].kind or not mine or not wanted:
        return False
    if mine == wanted:
        return len(theirs) > 1 or bool(possible_fits(ours.shape, theirs[0].shape))
    large, small = max(mine, wanted), min(mine, wanted)
    return large % small == 0 and large // small <= MOST_PARTS and len(theirs) == 1
