"""Names of the port and their sites in the reference, as found so far."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, prod

from lydite.diff.data_flow import DataFlow
from lydite.diff.measure.axes import has_parts_of, part_of, possible_fits
from lydite.diff.measure.distance import relative_error, wide
from lydite.diff.name_map import Rename
from lydite.diff.pairing.alignment import PortEvents, ReferenceEvents
from lydite.diff.pairing.blocks import (
    BlockMap,
    Sites,
    numbered_variants,
)
from lydite.diff.pairing.name_matching import close_stats
from lydite.diff.pairing.paired_events import same_kind
from lydite.diff.pairing.similarity import (
    FINE,
    Comparer,
    first_events,
    first_outputs,
    is_input,
    names_of,
    other_slots,
)
from lydite.trace.events import Event, Site
from lydite.trace.reader import Trace

FindFused = Callable[[Comparer, ReferenceEvents, PortEvents, BlockMap], Iterable[tuple[str, Sites]]]
MANY = 3  # inputs of one shape
GUESSED = (
    "parts",
    "equal",
    "order",
    "siblings",
    "position",
    "copy",
    "similarity",
)  # siblings correct these
WEAK = ("order", "position", "copy", "similarity")  # of these none corrects an equal value
NEAR_COPY = 1e-5  # relative error between a float32 value and the same one, normed again
MIN_RESULT = 16  # numbers of a last value that is paired because it is the last


@dataclass
class NamePairs:
    """Port name → reference sites, and how each pair was found."""

    reference: Trace
    port: Trace
    inputs: Mapping[str, str] = field(default_factory=dict)  # names that are inputs: whose
    found: dict[str, Rename] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)  # names of the port without a counterpart
    tables: set[str] = field(default_factory=set)  # of these, right tables in a layout of their own

    def __post_init__(self) -> None:
        sites = [*map(Site, names_of(self.reference)), *other_slots(self.reference)]
        self.reference_events = first_events(self.reference, sites)
        order = {site: event.i for site, event in self.reference_events.items()}
        self.sites = sorted(sites, key=lambda site: order.get(site, inf))
        inputs = {(e.name, e.slot, e.shape) for e in self.reference.events if is_input(e.site)}
        self.inputs_by_shape = Counter((name, shape) for name, _, shape in inputs)
        self.port_names = names_of(self.port)
        self.port_events = first_outputs(self.port, self.port_names)
        self.comparer = Comparer.of(self.reference, self.port)
        self.copies = self._names_of_copies()

    @cached_property
    def flow(self) -> DataFlow:
        """What each value of the reference was computed from."""
        return DataFlow(self.reference)

    def _names_of_copies(self) -> set[str]:
        """Names of the port whose value an earlier name has too.

        The earlier one has the counterpart by its value. A copy shows nothing: where an operation
        is missing in the port, it stands in the place of the operation's result.
        """
        copies: set[str] = set()
        seen: set[tuple[int, str]] = set()
        by_size: dict[tuple[int, tuple[int, ...]], list[Event]] = defaultdict(list)
        for name, event in self.port_events.items():
            content = self.comparer.port.content(event) if event.kind == "activation" else None
            if content is None:
                continue
            alike = by_size[event.step, event.shape]
            if (event.step, content) in seen or self._is_near_copy(event, alike):
                copies.add(name)
            else:
                seen.add((event.step, content))
                alike.append(event)
        return copies

    def _is_near_copy(self, event: Event, others: Sequence[Event]) -> bool:
        """Whether a value is an earlier one up to rounding: a norm changes no normed value."""
        reader = self.comparer.port
        stats = reader.stats(event)
        if event.dtype not in FINE or prod(event.shape) < MIN_RESULT or not reader.can_read(event):
            return False
        return any(
            stats is not None
            and (other_stats := reader.stats(other)) is not None
            and close_stats(stats, other_stats, NEAR_COPY)
            and relative_error(wide(reader.read(event)), wide(reader.read(other))) < NEAR_COPY
            for other in others
        )

    def only_returns(self, name: str) -> bool:
        """Whether a name has the value of a part of it, as the reference has that under two names.

        Where the reference has it once, an operation is missing in the port: a residual.
        """
        event, content = self.port_events[name], self.comparer.port.content
        for part, rename in self.found.items():
            other = self.port_events.get(part)
            if not _is_inside(part, name) or other is None or not rename.ref:
                continue
            if other.step == event.step and content(other) == content(event):
                right = self.reference_events.get(rename.ref[0])
                outputs = [e for s, e in self.reference_events.items() if s.slot[:3] == "out"]
                return right is not None and sum(e.hash == right.hash for e in outputs) > 1
        return False

    def add(self, pairs: Mapping[str, Site], how: str) -> None:
        """Pair these names; names that are paired already stay."""
        if how in WEAK:
            pairs = {n: site for n, site in pairs.items() if not self._has_other_parts(n, site)}
        for name, site in pairs.items():
            is_copy = how == "position" and name in self.copies
            self.found.setdefault(name, Rename((site,), how="copy" if is_copy else how))

    def _has_other_parts(self, name: str, site: Site) -> bool:
        """Whether a name and a module both have parts with counterparts, none in the other."""
        pairs = [(n, ref.name) for n, refs in self.refs().items() for ref in refs]
        own = [(_is_inside(n, name), _is_inside(other, site.name)) for n, other in pairs]
        inside = [any(sides[at] for sides in own) for at in (0, 1)]
        return not is_input(site) and all(inside) and (True, True) not in own

    def add_fused(self, find: FindFused, how: str = "parts") -> None:
        """Pair values that are several of the reference's concatenated."""
        port = self.left_events(copies=False)
        fused = find(self.comparer, self.free_events(), port, BlockMap(self.refs()))
        for name, parts in fused:
            if set(parts) <= set(self.free()):
                self.found[name] = Rename(parts, how=how)

    def drop(self, strays: Collection[str], unseen: Collection[str]) -> None:
        """Remove these pairs, and their siblings in other blocks that were paired `unseen` too."""
        templates = {template for name in strays for template, _ in numbered_variants(name)}
        for name, rename in list(self.found.items()):
            is_sibling = any(template in templates for template, _ in numbered_variants(name))
            if name in strays or (rename.how in unseen and is_sibling):
                del self.found[name]

    def refs(self) -> dict[str, Sites]:
        """Port name → reference sites, as found so far."""
        return {name: rename.ref for name, rename in self.found.items() if rename.ref}

    def left(self) -> list[str]:
        """Port names without a counterpart yet, in order of execution."""
        return [n for n in self.port_names if n not in self.found and n not in self.ignored]

    def left_events(self, *, copies: bool = True) -> dict[str, Event]:
        """Port names without a counterpart yet, with their first output; with copies or without."""
        return {
            name: self.port_events[name]
            for name in self.left()
            if name in self.port_events and (copies or name not in self.copies)
        }

    def free(self) -> list[Site]:
        """Reference sites without a counterpart yet, in order of execution."""
        taken = {site for rename in self.found.values() for site in rename.ref}
        return [site for site in self.sites if site not in taken]

    def free_events(self, *, inputs: bool = True, copies: bool = True) -> dict[Site, Event]:
        """Reference sites without a counterpart yet, with their first event.

        Without `copies`, sites with the value of one that has a counterpart are left out, and
        inputs with its numbers in another order: q with its heads apart is what to_q returned.
        """
        events = self.reference_events
        free = {s: events[s] for s in self.free() if s in events and (inputs or not is_input(s))}
        if copies:
            return free
        paired = [events[s] for refs in self.refs().values() for s in refs if s in events]
        hashes, numbers = {event.hash for event in paired} - {None}, set(map(self.numbers, paired))
        return {
            site: event
            for site, event in free.items()
            if event.hash not in hashes and not (is_input(site) and self.numbers(event) in numbers)
        }

    def is_one_of_many(self, site: Site) -> bool:
        """Whether a site is an input beside two more of its shape: a guess cannot tell q, k, v."""
        if not is_input(site):
            return False
        shape = self.reference_events[site].shape
        return self.inputs_by_shape[site.name, shape] >= MANY

    def renames(self) -> dict[str, Rename]:
        """Port name → rename; an output that is another slot in the reference says so."""
        return {
            name: replace(rename, slots={"out": rename.ref[0].slot})
            if len(rename.ref) == 1 and rename.ref[0].slot != "out"
            else rename
            for name, rename in self.found.items()
        }

    def numbers(self, event: Event) -> str:
        """What tells the numbers of two values apart, in whatever order: their statistics."""
        stats = self.comparer.reference.stats(event)
        if stats is None or stats.rms is None:
            return str(event.i)
        return f"{stats.count} {stats.rms:.5g} {stats.min:.5g} {stats.max:.5g}"

    def unpaired_sizes(self) -> dict[Site, int]:
        """Reference sites of which only parts are paired, and how many values are left."""
        sizes: dict[Site, int] = {}
        for name, rename in self.found.items():
            event = self.port_events.get(name)
            if len(rename.ref) != 1 or event is None:
                continue
            site = rename.ref[0]
            if site in self.reference_events:
                shape = self.reference_events[site].shape
                if part_of(event.shape, shape, -1):
                    sizes[site] = sizes.get(site, prod(shape)) - prod(event.shape)
        return {site: count for site, count in sizes.items() if count > 0}

    def add_possible(self, wanted: Mapping[str, Sites], how: str) -> None:
        """Pair names as wanted where the sites are free and the shapes permit it."""
        free, remaining = set(self.free()), self.unpaired_sizes()
        for name in self.left():
            refs = wanted.get(name, ())
            if not refs or not self.is_possible(name, refs):
                continue
            size = prod(self.port_events[name].shape) if name in self.port_events else 0
            is_part = len(refs) == 1 and 0 < size <= remaining.get(refs[0], 0)
            if free.issuperset(refs) or is_part:
                self.found[name] = Rename(refs, how=how)
                free -= set(refs)
                remaining = self.unpaired_sizes()

    def is_possible(self, name: str, refs: Sites) -> bool:
        """Whether shapes permit it; unknown for a name without an output."""
        event = self.port_events.get(name)
        others = [self.reference_events[ref] for ref in refs if ref in self.reference_events]
        return event is None or not others or compatible(event, others)


def compatible(port: Event, reference: Sequence[Event]) -> bool:
    """Whether one value of the port can be those of the reference, or a part of their batch."""
    size, expected = prod(port.shape), sum(prod(event.shape) for event in reference)
    if not same_kind(port, reference[0]) or not size or not expected:
        return False
    if size == expected:
        return len(reference) > 1 or bool(possible_fits(port.shape, reference[0].shape))
    return len(reference) == 1 and has_parts_of(port.shape, reference[0].shape)


def _is_inside(name: str, outer: str) -> bool:
    """Whether a name is that of a part of another."""
    return name.startswith((f"{outer}.", f"{outer}/"))
