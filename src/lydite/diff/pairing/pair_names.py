"""Names of the port paired with sites of the reference, one method after the other."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import inf, log10, prod

import numpy as np

from lydite.diff.measure.axes import MAX_PARTS, part_of, possible_fits
from lydite.diff.name_map import Rename
from lydite.diff.pairing.alignment import PortEvents, ReferenceEvents, best_path, same_axes
from lydite.diff.pairing.blocks import (
    BlockMap,
    LastWords,
    ScopeRules,
    SiblingRules,
    Sites,
    numbered_variants,
)
from lydite.diff.pairing.mutual_similarity import Positions
from lydite.diff.pairing.name_matching import match_spelling, match_weights, module_renames
from lydite.diff.pairing.similarity import (
    EQUAL,
    Comparer,
    first_events,
    first_outputs,
    is_input,
    name_similarity,
    names_of,
    other_slots,
)
from lydite.trace.events import Event, Site
from lydite.trace.reader import Trace

FindFused = Callable[[Comparer, ReferenceEvents, PortEvents, BlockMap], Iterable[tuple[str, Sites]]]
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
SOON_TAKEN = 8  # paired values after one among which it is taken
MANY = 3  # inputs of one shape
SIMILAR = 0.45  # names of results: prompt_embeds and prompt_features
ALIKE = 0.3  # correlation from which one of several inputs is taken for the counterpart
MIN_RESULT = 16  # numbers of a last value that is paired because it is the last
MAX_DECADES = 0.7  # between the largest numbers of two tables that may be counterparts


@dataclass
class NamePairs:
    """Port name → reference sites, and how each pair was found."""

    reference: Trace
    port: Trace
    inputs: Mapping[str, str] = field(default_factory=dict)  # names that are inputs: whose
    found: dict[str, Rename] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)  # names of the port without a counterpart

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
        self.returned = {name for name in self.copies if self._only_returns(name)}

    def _names_of_copies(self) -> set[str]:
        """Names of the port whose value an earlier name has too.

        The earlier one has the counterpart by its value. A copy shows nothing: where an operation
        is missing in the port, it stands in the place of the operation's result.
        """
        copies: set[str] = set()
        seen: set[tuple[int, str]] = set()
        for name, event in self.port_events.items():
            content = self.comparer.port.content(event) if event.kind == "activation" else None
            if content is not None and (event.step, content) in seen:
                copies.add(name)
            elif content is not None:
                seen.add((event.step, content))
        return copies

    def _only_returns(self, name: str) -> bool:
        """Whether a name has the value of a part of it: then no operation of its own is missing."""
        event = self.port_events[name]
        content = self.comparer.port.content
        return any(
            other.startswith((f"{name}.", f"{name}/"))
            and self.port_events[other].step == event.step
            and content(self.port_events[other]) == content(event)
            for other in self.port_events
        )

    def add(self, pairs: Mapping[str, Site], how: str) -> None:
        """Pair these names; names that are paired already stay."""
        for name, site in pairs.items():
            is_copy = how == "position" and name in self.copies
            self.found.setdefault(name, Rename((site,), how="copy" if is_copy else how))

    def add_fused(self, find: FindFused) -> None:
        """Pair values that are several of the reference's concatenated."""
        port = self.left_events(copies=False)
        fused = find(self.comparer, self.free_events(), port, BlockMap(self.refs()))
        for name, parts in fused:
            if set(parts) <= set(self.free()):
                self.found[name] = Rename(parts, how="parts")

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
        hashes, numbers = {event.hash for event in paired} - {None}, set(map(self._numbers, paired))
        return {
            site: event
            for site, event in free.items()
            if event.hash not in hashes and not (is_input(site) and self._numbers(event) in numbers)
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

    def pair_spelling(self) -> None:
        """Names that are equal, or differ in spelling or leading scopes only."""
        by_name = {s.name if s.slot == "out" else f"{s.name}.{s.slot}": s for s in self.free()}
        matched = match_spelling(self.left(), by_name)
        self.add({a: by_name[b] for a, b in matched.items() if a == b}, "name")
        self.add({a: by_name[b] for a, b in matched.items() if a != b}, "spelling")

    def pair_weights(self) -> None:
        """Modules that have the same parameters."""
        weights, reference_weights = self.port.weights(), self.reference.weights()
        if not weights or not reference_weights:
            return
        modules = module_renames(match_weights(weights, reference_weights))
        by_path = _by_path(site.name for site in self.free() if site.slot == "out")
        for name in self.left():
            for module in (name, name.rpartition("/")[2]):
                target = by_path.get(modules.get(module, ""))
                if target and self._is_possible(name, (Site(target),)):
                    self.found[name] = Rename((Site(target),), how="weights")

    def pair_siblings(self) -> None:
        """Drop pairs that their siblings contradict, and pair by the siblings' rule."""
        pairs = self.refs()
        strong = {name: refs for name, refs in pairs.items() if self.found[name].how not in WEAK}
        blocks = BlockMap(pairs)
        if len(strong) == len(pairs):
            certain = predicted = self._by_siblings(pairs, blocks)
        else:
            certain = self._by_siblings(strong, BlockMap(strong))
            predicted = self._by_siblings(pairs, blocks) | certain
        for name, rename in list(self.found.items()):
            outside = not all(blocks.allows(name, ref.name) for ref in rename.ref)
            expected = (certain if rename.how == "equal" else predicted).get(name, rename.ref)
            if rename.how in GUESSED and (outside or expected != rename.ref):
                del self.found[name]
        self._add_possible(predicted, "siblings")

    def pair_ends(self) -> None:
        """Pair the last values of both sides where each is recorded once more, or has no other.

        A port that returns another layer's value records a value that the reference has too, but
        not at its end. A last value without any counterpart is the wrong result.
        """
        ends = [
            max(
                (e for e in events.values() if e.slot[:3] == "out"), key=lambda e: e.i, default=None
            )
            for events in (self.port_events, self.reference_events)
        ]
        port, reference = ends
        if port is None or reference is None or not compatible(port, [reference]):
            return
        used = self.found.get(port.name)
        if used is not None and used.how not in GUESSED:
            return
        copies = port.alias_of is not None and reference.alias_of is not None
        if copies and port.shape == reference.shape:
            if self.comparer.are_equal([reference], [port]) is False:
                self.found[port.name] = Rename((reference.site,), how="end")
        elif used is None and reference.site in self.free() and prod(port.shape) >= MIN_RESULT:
            self.found[port.name] = Rename((reference.site,), how="position")

    def pair_results(self) -> None:
        """Values recorded by hand after the last module, by shape and similar names.

        Equal ones are paired by now: these differ, as another layer's features do.
        """
        modules = {event.name for event in self.reference.events if is_input(event.site)}
        inside = tuple(f"{name}{mark}" for name in modules for mark in "./")
        parts = [e for e in self.reference.events if e.name in modules or e.name.startswith(inside)]
        last = max((event.i for event in parts), default=inf)
        paired = {ref.name for refs in self.refs().values() for ref in refs}
        for site, event in self.free_events(inputs=False).items():
            if event.i < last or site.name in paired or event.kind != "activation":
                continue
            alike = {
                name: name_similarity(name.rpartition("/")[2], site.name.rpartition("/")[2])
                for name, other in self.left_events().items()
                if other.shape == event.shape and prod(event.shape) >= MIN_RESULT
            }
            best = max(alike, key=lambda name: alike[name], default="")
            if best and alike[best] > SIMILAR:
                self.found[best] = Rename((site,), how="end")

    def pair_inputs(self) -> None:
        """Inputs of a name with those of the reference's modules that return its counterpart."""
        first: dict[Site, Event] = {}
        modules: dict[tuple[str, int], list[str]] = defaultdict(list)  # by what they return
        for event in self.reference.events if self.inputs else ():
            first.setdefault(event.site, event)
            if event.slot[:3] == "out":
                modules[self._numbers(event), event.step].append(event.name)
        slots: dict[str, list[Site]] = defaultdict(list)
        for site in first:
            if is_input(site):
                slots[site.name].append(site)
        holders = {site: name for name, rename in self.found.items() for site in rename.ref}
        for name in self.left():
            owner = self.found.get(self.inputs.get(name, ""))
            owner = None if owner and owner.how in WEAK[1:] else owner
            result = first.get(owner.ref[0]) if owner and len(owner.ref) == 1 else None
            event = self.port_events.get(name)
            if result is None or event is None:
                continue
            same = modules[self._numbers(result), result.step]
            around = dict.fromkeys((result.name, *same))
            around = self._innermost(around, self.inputs[name])
            sites = {
                self.comparer.reference.content(first[site]): site
                for module in around
                for site in slots[module]
                if possible_fits(event.shape, first[site].shape)
                and not self._is_copy(name, holders.get(site))
            }
            likely = {s: self.comparer.correlation(first[s], event) for s in sites.values()}
            best = max(likely, key=lambda site: likely[site], default=None)
            if best is not None and (len(likely) == 1 or likely[best] > ALIKE):
                self.found[name] = Rename((best,), how="input")

    def _innermost(self, modules: Iterable[str], owner: str) -> list[str]:
        """The modules around the counterparts of a name's parts, the innermost; else all."""
        parts = [
            ref.name
            for name, rename in self.found.items()
            if name.startswith((f"{owner}.", f"{owner}/"))
            for ref in rename.ref
        ]
        modules = list(modules)
        around = [m for m in modules if all(n.startswith((f"{m}.", f"{m}/")) for n in parts)]
        return [max(around, key=len)] if parts and around else modules

    def _is_copy(self, name: str, other: str | None) -> bool:
        """Whether two names of the port have the same value."""
        if other is None or other not in self.port_events:
            return False
        content = self.comparer.port.content
        return content(self.port_events[name]) == content(self.port_events[other])

    def _by_siblings(self, pairs: Mapping[str, Sites], blocks: BlockMap) -> dict[str, Sites]:
        """The counterparts of names that have none, or a guess, by their siblings among `pairs`."""
        rules = SiblingRules(pairs)

        def from_other_blocks(name: str) -> Sites | None:
            # An equal value is that of another name only if earlier blocks show it: the first
            # block is computed before the bug.
            is_equal = name in self.found and self.found[name].how == "equal"
            at = self.port_events[name].i if is_equal else inf
            return blocks.from_other_blocks(
                name, pairs, lambda other: other in self.port_events and self.port_events[other].i < at
            )

        predicted = (
            (name, rules.predict(name) or from_other_blocks(name))
            for name in self.port_events
            if name not in self.found or self.found[name].how in GUESSED
        )
        return {
            name: refs
            for name, refs in predicted
            if refs and all(ref in self.reference_events for ref in refs)
        }

    def pair_scopes(self) -> None:
        """Names that differ from the reference's in their beginning only, as others do."""
        rules = ScopeRules(self.refs())
        predicted = ((name, rules.predict(name)) for name in self.left())
        wanted = {n: (site,) for n, site in predicted if site and site in self.reference_events}
        self._add_possible(wanted, "spelling")

    def pair_last_words(self) -> None:
        """Names that end as others do, with the reference's that end as their counterparts, in order.

        A bug spoils all that follows, but `gn1` is `norm1` in the blocks before it.
        """
        words = LastWords(
            {name: r.ref for name, r in self.found.items() if r.ref and r.how not in WEAK}
        )
        known = self.refs()
        blocks = BlockMap(known)
        positions = Positions(self.reference_events, self.port_events, known)
        free, left = self.free_events(), self.left_events(copies=False)
        places = {name: words.counterparts(name, free) for name in left}
        columns = list(dict.fromkeys(place for found in places.values() for place in found))
        columns.sort(key=lambda place: free[place[0]].i)
        at = {place: column for column, place in enumerate(columns)}
        scores = np.zeros((len(left), len(columns)))
        for row, (name, event) in enumerate(left.items()):
            for place in places[name]:
                others = [free[site] for site in place]
                if (
                    compatible(event, others)
                    and (len(others) > 1 or same_axes(event, others[0]))
                    and blocks.allows(name, place[0].name)
                    and positions.permit(event, others[0])
                ):
                    scores[row, at[place]] = 1 + self._correlation(others, event)
        names = list(left)
        for row, column in best_path(scores):
            self.found[names[row]] = Rename(columns[column], how="siblings")

    def _correlation(self, reference: Sequence[Event], port: Event) -> float:
        """The correlation of a value with one of the reference's; 0 where it is negative."""
        one = len(reference) == 1
        return max(0.0, self.comparer.correlation(reference[0], port)) if one else 0.0

    def pair_sequences(self) -> None:
        """Values of one shape without counterparts, in order, where both sides have as many."""
        sides = (self.left_events(copies=False), self.free_events(copies=False))
        first = {self._numbers(event): site for site, event in reversed(sides[1].items())}
        free = {site: sides[1][site] for site in sides[1] if first[self._numbers(sides[1][site])] == site}
        positions = Positions(self.reference_events, self.port_events, self.refs())
        blocks = BlockMap(self.refs())
        shapes: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, event in sides[0].items():
            if name not in self.inputs and event.kind == "activation" and prod(event.shape) >= MIN_RESULT:
                shapes[tuple(sorted(n for n in event.shape if n != 1))].append(name)
        for names in shapes.values():
            event = sides[0][names[0]]
            sites = [site for site, other in free.items() if same_axes(other, event)]
            outputs = [site for site in sites if not is_input(site)]
            for chosen in (sites, outputs):
                pairs = [*zip(names, chosen, strict=False)]
                if len(names) == len(chosen) > 1 and all(
                    positions.permit(sides[0][name], free[site])
                    and blocks.allows(name, site.name)
                    and self.comparer.both_normed(free[site], sides[0][name])
                    for name, site in pairs
                ):
                    self.add(dict(pairs), "position")
                    break

    def pair_joined(self) -> None:
        """Wrong values with the tokens of two of the reference's: what a block returns, or takes.

        A block that returns two values has one with all tokens at its end in the port. A value
        before the modules that take its parts is what these take.
        """
        blocks = BlockMap(self.refs())
        modules: dict[str, list[Site]] = defaultdict(list)
        free = self.free_events()
        for site in free:
            modules[site.name] += [] if is_input(site) else [site]
        left = self.left_events(copies=False)
        for name, event in reversed(left.items()):
            if len(event.shape) != 3 or not blocks.knows(name):
                continue
            whole = [
                tuple(sites)
                for module, sites in modules.items()
                if blocks.same_block(name, module)
                and _joins(event, [self.reference_events[site] for site in sites])
            ]
            if len(whole) == 1:
                self.found[name] = Rename(whole[0], how="siblings")
                modules = {module: s for module, s in modules.items() if tuple(s) != whole[0]}
            elif not whole and (parts := self._taken_after(name, free)):
                self.found[name] = Rename(parts, how="siblings")
                free = {site: other for site, other in free.items() if site not in parts}

    def _taken_after(self, name: str, free: Mapping[Site, Event]) -> Sites:
        """The inputs of the next paired modules that have the tokens of a value together."""
        event = self.port_events[name]
        after = [n for n, e in self.port_events.items() if e.i > event.i and n in self.found]
        takes = [
            Site(site.name, "in.0")
            for other in after[:SOON_TAKEN]
            for site in self.found[other].ref[:1]
            if Site(site.name, "in.0") in free
        ]
        for first, second in combinations(takes, 2):
            for parts in ((first, second), (second, first)):
                if _joins(event, [free[site] for site in parts]):
                    return self._in_usual_order(parts)
        return ()

    def _in_usual_order(self, parts: Sites) -> Sites:
        """Two parts in the order in which other values of the port have theirs: by their sizes."""
        shapes = [
            tuple(self.reference_events[site].shape[1] for site in rename.ref)
            for rename in self.found.values()
            if len(rename.ref) == 2 and all(site in self.reference_events for site in rename.ref)
            and all(len(self.reference_events[site].shape) == 3 for site in rename.ref)
        ]
        own = tuple(self.reference_events[site].shape[1] for site in parts)
        return parts[::-1] if own[::-1] in shapes and own not in shapes else parts

    def pair_shapes(self) -> None:
        """Values that are the only ones of their shape in a block, on both sides."""
        blocks = BlockMap(self.refs())
        left, free = self.left_events(copies=False), self.free_events(copies=False)
        for name, event in left.items():
            sites = {
                self._numbers(other): site
                for site, other in reversed(free.items())
                if same_axes(other, event) and blocks.same_block(name, site.name)
            }
            if name not in self.inputs:  # what a module returns, rather than what one takes
                returned = {key: site for key, site in sites.items() if not is_input(site)}
                sites = returned or sites
            rivals = [other for other in left.values() if same_axes(other, event)]
            if len(sites) == len(rivals) == 1 and prod(event.shape) >= MIN_RESULT:
                self.found[name] = Rename((*sites.values(),), how="position")

    def _numbers(self, event: Event) -> str:
        """What tells the numbers of two values apart, in whatever order: their statistics."""
        stats = self.comparer.reference.stats(event)
        if stats is None or stats.rms is None:
            return str(event.i)
        return f"{stats.count} {stats.rms:.5g} {stats.min:.5g} {stats.max:.5g}"

    def pair_kinds(self) -> None:
        """Noise, token ids and tables: there is mostly one of a kind and shape."""

        def same_table(reference: Event, port: Event) -> bool:
            return reference.kind == port.kind == "schedule" and reference.shape == port.shape

        def same_in_both(reference: Event, port: Event) -> bool:
            return same_table(reference, port) and self._same_kind(reference, port)

        for is_counterpart in (same_in_both, same_table, self._same_kind):
            left, free = self.left_events(), self.free_events()
            for name, event in left.items():
                sites = [site for site, other in free.items() if is_counterpart(other, event)]
                if len(sites) != 1:
                    continue
                rivals = [other for other in left.values() if is_counterpart(free[sites[0]], other)]
                if len(rivals) == 1:
                    self.found[name] = Rename((sites[0],), how="kind")

    def _same_kind(self, reference: Event, port: Event) -> bool:
        if reference.kind != port.kind:
            return False
        if reference.kind in ("ids", "input"):
            return bool(possible_fits(port.shape, reference.shape))
        if reference.kind != "schedule" or len(reference.shape) != len(port.shape):
            return False
        a, b = self.comparer.port.stats(port), self.comparer.reference.stats(reference)
        if a is None or b is None or not a.max or not b.max or a.max * b.max <= 0:
            return False
        return abs(log10(a.max / b.max)) < MAX_DECADES

    def pair_other_parts(self) -> None:
        """Values that are another part of a reference value of which one part is paired."""
        remaining = self._unpaired_sizes()
        for name, event in self.left_events(copies=False).items():
            size = prod(event.shape)
            for site in [site for site, count in remaining.items() if count >= size]:
                if self.comparer.score(self.reference_events[site], event)[1] < EQUAL:
                    self.found[name] = Rename((site,), how="equal")
                    remaining[site] -= size
                    break

    def _unpaired_sizes(self) -> dict[Site, int]:
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

    def _add_possible(self, wanted: Mapping[str, Sites], how: str) -> None:
        """Pair names as wanted where the sites are free and the shapes permit it."""
        free, remaining = set(self.free()), self._unpaired_sizes()
        for name in self.left():
            refs = wanted.get(name, ())
            if not refs or not self._is_possible(name, refs):
                continue
            size = prod(self.port_events[name].shape) if name in self.port_events else 0
            is_part = len(refs) == 1 and 0 < size <= remaining.get(refs[0], 0)
            if free.issuperset(refs) or is_part:
                self.found[name] = Rename(refs, how=how)
                free -= set(refs)
                remaining = self._unpaired_sizes()

    def _is_possible(self, name: str, refs: Sites) -> bool:
        """Whether shapes permit it; unknown for a name without an output."""
        event = self.port_events.get(name)
        others = [self.reference_events[ref] for ref in refs if ref in self.reference_events]
        return event is None or not others or compatible(event, others)


def _by_path(names: Iterable[str]) -> dict[str, str]:
    """Names by themselves, and by what follows the component where only one has it."""
    names = list(names)
    counts = Counter(name.rpartition("/")[2] for name in names)
    unique = {path: name for name in names if counts[path := name.rpartition("/")[2]] == 1}
    return unique | {name: name for name in names}


def _joins(whole: Event, parts: Sequence[Event]) -> bool:
    """Whether values of (batch, tokens, width) have together the tokens of another."""
    shapes = [part.shape for part in parts]
    if len(parts) != 2 or any(len(shape) != 3 for shape in (*shapes, whole.shape)):
        return False
    ends = {(shape[0], shape[2]) for shape in (*shapes, whole.shape)}
    return len(ends) == 1 and sum(shape[1] for shape in shapes) == whole.shape[1]


def compatible(port: Event, reference: Sequence[Event]) -> bool:
    """Whether one value of the port can be those of the reference, or a part of their batch."""
    size, expected = prod(port.shape), sum(prod(event.shape) for event in reference)
    if port.kind != reference[0].kind or not size or not expected:
        return False
    if size == expected:
        return len(reference) > 1 or bool(possible_fits(port.shape, reference[0].shape))
    large, small = max(size, expected), min(size, expected)
    return large % small == 0 and large // small <= MAX_PARTS and len(reference) == 1
