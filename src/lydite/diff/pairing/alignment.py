"""Pair names that share nothing, by order of execution, shape and content."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.measure.axes import MAX_PARTS, Shape, best_fit, possible_fits
from lydite.diff.measure.distance import correlation, relative_error, wide
from lydite.diff.measure.rounding import FINE
from lydite.diff.pairing.blocks import BlockMap, Sites
from lydite.diff.pairing.name_matching import tokens
from lydite.diff.pairing.paired_events import same_kind
from lydite.diff.pairing.similarity import CLOSE, EQUAL, Comparer, is_input
from lydite.trace.events import Event, Site
from lydite.trace.reader import Trace

CLEARLY = 3.0  # times closer: the counterpart, although it is an input
MIN_SCORE = 1.2  # from which two names are taken for counterparts
SOON = 3  # pairs after some values that show whether an error passes through these

ReferenceEvents = Mapping[Site, Event]  # in order of execution
PortEvents = Mapping[str, Event]


def align(
    comparer: Comparer, reference: ReferenceEvents, port: PortEvents, known: Mapping[str, Sites]
) -> tuple[dict[str, Site], dict[str, Site]]:
    """Port name → reference site, in order of execution: equal values, and similar ones.

    Equal values come first, in as many passes as they need: two streams may run in either order.
    Then values that are only close, or names that are similar, in the gaps.
    """
    sites, names = list(reference), list(port)
    scores, equal_mask = _scores(comparer, reference, port, BlockMap(known))
    equal: dict[str, Site] = {}
    while path := best_path(np.where(equal_mask, scores, 0.0)):
        for row, column in path:
            scores[row], scores[:, column] = 0.0, 0.0
            equal[names[row]] = sites[column]
    blocks = BlockMap({**known, **{name: (site,) for name, site in equal.items()}})
    for row, column in np.argwhere(scores > 0):
        if not blocks.allows(names[row], sites[column].name):
            scores[row, column] = 0.0
    return equal, {names[row]: sites[column] for row, column in best_path(scores)}


def _scores(
    comparer: Comparer, reference: ReferenceEvents, port: PortEvents, blocks: BlockMap
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The score of every port value with every reference value, and where they are equal."""
    scores = np.zeros((len(port), len(reference)))
    sites = list(reference)
    equal = np.zeros(scores.shape, bool)
    by_size: dict[int, list[tuple[int, Site]]] = defaultdict(list)
    for column, (site, event) in enumerate(reference.items()):
        by_size[prod(event.shape)].append((column, site))
    for row, (name, event) in enumerate(port.items()):
        sizes = [prod(event.shape) * count for count in range(1, MAX_PARTS + 1)]
        errors: dict[int, float] = {}
        for column, site in (entry for size in sizes for entry in by_size.get(size, ())):
            if blocks.allows(name, site.name):
                score, errors[column] = comparer.score(reference[site], event)
                equal[row, column] = errors[column] < EQUAL
                scores[row, column] = score if score >= MIN_SCORE else 0.0
        inputs = {column for column in errors if is_input(sites[column])}
        _keep_closest(scores[row], errors, inputs, is_coarse=comparer.port.trace.dtype not in FINE)
    return scores, equal


def _keep_closest(
    scores: NDArray[Any], errors: Mapping[int, float], inputs: Collection[int], *, is_coarse: bool
) -> None:
    """Leave out inputs that are only close, or the outputs where in 16 bits one is far closer.

    A capture of modules sees what a port computes between two layers as the input of the second.
    """
    outputs = min((e for c, e in errors.items() if c not in inputs and scores[c]), default=inf)
    closest = min((errors[c] for c in inputs), default=inf)
    is_nearer = is_coarse and closest < CLOSE and CLEARLY * closest < outputs
    for column, error in errors.items():
        if column not in inputs:
            scores[column] *= not is_nearer or error < CLEARLY * closest
        elif error >= EQUAL and not (is_nearer and error == closest):
            scores[column] = 0.0


def fused_values(
    comparer: Comparer, reference: ReferenceEvents, port: PortEvents, blocks: BlockMap
) -> Iterator[tuple[str, Sites]]:
    """Port names whose value is two to four of the reference's concatenated: fused qkv."""
    taken: set[Site] = set()
    reference_trace, port_trace = comparer.reference.trace, comparer.port.trace
    groups = _groups(reference, reference_trace)
    modules = {event.name for event in reference_trace.events if is_input(event.site)}
    for name, event in port.items():
        for parts in _runs(groups, reference, event, taken):
            if not all(blocks.allows(name, part.name) for part in parts):
                continue
            readable = all(reference_trace.has_values(reference[part]) for part in parts)
            if not (port_trace.has_values(event) and readable):
                continue
            arrays = [reference_trace.read(reference[part]) for part in parts]
            joined = np.concatenate(arrays, axis=-1)
            fits = possible_fits(event.shape, joined.shape)
            value = port_trace.read(event)
            orders = (joined, *comparer.other_orders(joined))
            # What is recorded by hand is no projections that a port may compute at once.
            limit = CLOSE if not modules or any(part.name in modules for part in parts) else EQUAL
            if any(best_fit(fits, value, other)[1] < limit for other in orders):
                taken.update(parts)
                yield name, parts
                break


def fused_by_shape(
    comparer: Comparer, reference: ReferenceEvents, port: PortEvents, blocks: BlockMap
) -> Iterator[tuple[str, Sites]]:
    """Wrong fused values: the only to_q, to_k, to_v of their block that make up the shape.

    They differ in a letter, or are all in the block that take one value.
    """
    shapes = {event.shape for event in reference.values()}
    groups = _groups(reference, comparer.reference.trace)
    for name, event in port.items():
        if event.shape in shapes or not blocks.knows(name):
            continue
        own = [[site for site in g if blocks.same_block(name, site.name)] for g in groups]
        whole = {frozenset(group) for group in own}
        candidates = {
            parts: _joined_correlation(comparer, [reference[part] for part in parts], event)
            for parts in _runs(own, reference, event, set())
            if reference[parts[0]].shape[:-1] == event.shape[:-1]
            and (_differ_in_one_letter([part.name for part in parts]) or {*parts} in whole)
        }
        if len({frozenset(parts) for parts in candidates}) == 1:
            yield name, max(candidates, key=lambda parts: candidates[parts])


def _joined_correlation(comparer: Comparer, parts: Sequence[Event], port: Event) -> float:
    """The correlation of the values of some parts, side by side, with a value of the port."""
    if not all(map(comparer.reference.can_read, parts)) or not comparer.port.can_read(port):
        return 0.0
    joined = np.concatenate([comparer.reference.read(part) for part in parts], axis=-1)
    return correlation(wide(comparer.port.read(port)), wide(joined))


def joined_tokens(
    comparer: Comparer, reference: ReferenceEvents, port: PortEvents, blocks: BlockMap
) -> Iterator[tuple[str, Sites]]:
    """Port names whose value has the tokens of two of the reference's: text and image."""
    by_shape: dict[Shape, list[Site]] = defaultdict(list)
    for site, event in reference.items():
        if len(event.shape) == 3 and comparer.reference.can_read(event):
            by_shape[event.shape].append(site)

    def equal(name: str, tokens: NDArray[Any]) -> Site | None:
        """Where the reference has these tokens."""
        for site in by_shape.get(tokens.shape, ()):
            value = wide(comparer.reference.read(reference[site]))
            if blocks.allows(name, site.name) and relative_error(wide(tokens), value) < EQUAL:
                return site
        return None

    for name, event in port.items():
        if len(event.shape) != 3 or not comparer.port.can_read(event):
            continue
        rows, count, width = event.shape
        for first in sorted({shape[1] for shape in by_shape}):
            if (rows, first, width) in by_shape and (rows, count - first, width) in by_shape:
                value = comparer.port.read(event)
                start = equal(name, value[:, :first])
                end = equal(name, value[:, first:]) if start else None
                if start and end:
                    yield name, (start, end)
                    break


def _differ_in_one_letter(names: Sequence[str]) -> bool:
    """Whether names are equal up to one letter, as to_q, to_k and to_v are."""
    if len({len(name) for name in names}) != 1:
        return False
    return sum(len(set(letters)) > 1 for letters in zip(*names, strict=True)) == 1


def _groups(reference: ReferenceEvents, trace: Trace) -> list[list[Site]]:
    """Reference values that a port may compute at once: of sibling modules, or of one input."""
    siblings: dict[tuple[str, ...], list[Site]] = defaultdict(list)
    takers: dict[str, list[Site]] = defaultdict(list)
    inputs: dict[str, set[str]] = defaultdict(set)
    steps: dict[str, int] = {}  # the first one of each module
    for event in trace.events:
        if is_input(event.site) and event.hash and event.call == 0:
            steps.setdefault(event.name, event.step)
            if event.step == steps[event.name]:
                inputs[event.name].add(event.hash)
    for site, other in reference.items():
        if site.slot == "out" and other.shape:
            siblings[tokens(site.name)[:-1]].append(site)
            if len(inputs[site.name]) == 1:
                takers[next(iter(inputs[site.name]))].append(site)
    return [*siblings.values(), *(group for group in takers.values() if len(group) > 1)]


def _runs(
    groups: Sequence[Sequence[Site]],
    reference: ReferenceEvents,
    event: Event,
    taken: Collection[Site],
) -> Iterator[Sites]:
    """Neighbours of one group that together have the size of `event`."""
    for group in groups:
        free = [site for site in group if site not in taken]
        for count in (4, 3, 2):
            for start in range(len(free) - count + 1):
                parts = tuple(free[start : start + count])
                same = len({reference[part].shape[:-1] for part in parts}) == 1
                size = sum(prod(reference[part].shape) for part in parts)
                if same and size == prod(event.shape):
                    yield from _orders(parts)


def _orders(parts: Sites) -> Iterator[Sites]:
    """The orders in which values may be joined: those of one module stay in theirs."""
    modules: dict[tuple[str, ...], list[Site]] = defaultdict(list)
    for part in parts:
        modules[tokens(part.name)[:-1]].append(part)
    for order in permutations(modules.values()):
        yield tuple(part for module in order for part in module)


@dataclass(frozen=True)
class PairsByPosition:
    """Values of one shape between two pairs, in the order of both sides.

    Their numbers are equal, or a pair soon after them `differs`: then the first ones are paired,
    because the error passes through one of them; of inputs of modules the last ones, which are next
    to these. The input of a pair that differs is the last value of the port before it that has the
    axes of the input. After the last pair nothing would show a mistake; there only names that are
    `repeated`, step by step, are paired. `copies` repeat an earlier value of the port,
    `inputs` are what a name takes: where there are some, they are paired with inputs only.
    """

    comparer: Comparer
    reference: ReferenceEvents
    port: PortEvents
    repeated: Collection[str]
    copies: Collection[str]
    inputs: Collection[str]
    differs: Callable[[str], bool]

    def add_to(self, pairs: Mapping[str, Sites]) -> dict[str, Site]:
        """The pairs to add. Of two streams, which may run in any order, each has neighbours."""
        streams: dict[Shape, dict[str, Event]] = defaultdict(dict)
        for name, event in self.port.items():
            streams[event.shape[:-1]][name] = event
        known = dict(pairs)
        several = (values for leading, values in streams.items() if leading)
        for values in (self.port, *several):
            found = self._between(values, known)
            known |= {name: (site,) for name, site in found.items()}
        return {name: sites[0] for name, sites in known.items() if name not in pairs}

    def _between(self, port: PortEvents, pairs: Mapping[str, Sites]) -> dict[str, Site]:
        reference = self.reference
        blocks = BlockMap(pairs)
        taken = {site for refs in pairs.values() for site in refs}
        chosen: dict[str, Site] = {}
        for gap, low, next_name in _gaps(reference, port, pairs):
            after = [reference[ref] for ref in pairs.get(next_name or "", ()) if ref in reference]
            high = min((event.i for event in after), default=None)
            # Outputs of one module come at once.
            tuples = {event.name for event in after if not is_input(event.site)}
            between = [
                site
                for site, event in reference.items()
                if site not in taken
                and low < event.i
                and (high is None or event.i < high or event.name in tuples)
            ]
            known = [name for name in port if name in pairs]
            soon = known[known.index(next_name) :][:SOON] if next_name else []
            is_wrong_soon = any(map(self.differs, soon))
            gap = [name for name in gap if is_wrong_soon or name not in self.copies]
            if next_name is not None and self.differs(next_name):
                inputs = [site for site in self._inputs(after) if site not in taken]
                inputs = without_copies(inputs, reference, taken)
                for site in inputs:
                    fed = [
                        name
                        for name in gap
                        if same_axes(port[name], reference[site])
                        and self.comparer.same_form(reference[site], port[name])
                    ]
                    if is_input(site):
                        fed = [name for name in fed if name in self.inputs] or fed
                    alike = [
                        other for other in inputs if same_axes(reference[other], reference[site])
                    ]
                    place = alike.index(site) - len(alike)  # q, k and v: the last three in order
                    name = fed[place] if len(fed) >= len(alike) else None
                    if name and name not in chosen and blocks.same_block(name, site.name):
                        chosen[name] = site
            used = set(chosen.values())
            gap = [name for name in gap if name not in chosen]
            between = [site for site in between if site not in used]
            for name in gap:
                alike = [other for other in gap if same_axes(port[other], port[name])]
                taken_in = [other for other in alike if other in self.inputs]
                rivals = [other for other in alike if (other in taken_in) == (name in taken_in)]
                possible = [s for s in between if same_axes(reference[s], port[name])]
                if not possible:  # heads may be apart on one side
                    possible = [s for s in between if merges_axes(reference[s], port[name])]
                candidates = [
                    site
                    for site in possible
                    if self.comparer.same_form(reference[site], port[name])
                    and (not taken_in or is_input(site) == (name in taken_in))
                ]
                candidates = without_copies(candidates, reference, taken)
                place = rivals.index(name)
                if all(map(is_input, candidates)):
                    place += len(candidates) - len(rivals)
                if not 0 <= place < len(candidates):
                    continue
                if len(rivals) != len(candidates) and not is_wrong_soon:
                    continue
                site = candidates[place]
                if not blocks.same_block(name, site.name):
                    continue
                if high is not None or (
                    len(rivals) == len(candidates) == 1 and {name, site.name} <= set(self.repeated)
                ):
                    chosen[name] = site
        return chosen

    def _inputs(self, modules: Sequence[Event]) -> list[Site]:
        """What these modules are computed from: the first site of each content of their inputs."""
        trace = self.comparer.reference.trace
        calls = {(event.name, event.step, event.call) for event in modules}
        taken = {
            event.hash
            for event in trace.events
            if is_input(event.site) and (event.name, event.step, event.call) in calls
        }
        return [
            site for site, event in self.reference.items() if event.hash and event.hash in taken
        ]


def _gaps(
    reference: ReferenceEvents, port: PortEvents, pairs: Mapping[str, Sites]
) -> Iterator[tuple[list[str], int, str | None]]:
    """Unpaired port names between two pairs in order: with the first's event, the second's name."""
    gap: list[str] = []
    low: int | None = None
    for name in port:
        events = [reference[ref].i for ref in pairs.get(name, ()) if ref in reference]
        if not events:
            gap.append(name)
            continue
        if gap and low is not None and low < min(events):
            yield gap, low, name
        gap, low = [], max(events)
    if gap and low is not None:
        yield gap, low, None


def without_copies(
    sites: Sequence[Site], events: ReferenceEvents, taken: Collection[Site] = ()
) -> list[Site]:
    """Sites without those whose value an earlier one has too, or one that is taken."""
    first = {events[site].hash or site: site for site in reversed(sites)}
    gone = {events[site].hash for site in taken if site in events} - {None}
    return [site for value, site in reversed(first.items()) if value not in gone]


def same_axes(a: Event, b: Event) -> bool:
    """Whether two values are of one kind and have the same axes, in any order."""
    sizes, other_sizes = (sorted(n for n in event.shape if n != 1) for event in (a, b))
    return same_kind(a, b) and sizes == other_sizes


def merges_axes(a: Event, b: Event) -> bool:
    """Whether the last axes of one value are those of the other merged, as heads are."""
    long, short = sorted((a.shape, b.shape), key=len, reverse=True)
    end = len(short) - 1
    same = same_kind(a, b) and len(short) > 2 and len(long) == len(short) + 1
    return same and long[:end] == short[:end] and prod(long[end:]) == short[end]


def repeated_names(trace: Trace) -> set[str]:
    """Names with more than one output: they occur step by step."""
    counts = Counter(event.name for event in trace.events if event.slot == "out")
    return {name for name, count in counts.items() if count > 1}


def best_path(scores: NDArray[Any]) -> list[tuple[int, int]]:
    """The pairs of rows and columns, in order on both sides, with the largest total."""
    rows, columns = scores.shape
    total = np.zeros((rows + 1, columns + 1))
    for row in range(rows):
        diagonal = total[row, :-1] + scores[row]
        best = np.maximum(total[row, 1:], np.where(scores[row] > 0, diagonal, 0.0))
        total[row + 1, 1:] = np.maximum.accumulate(best)
    path: list[tuple[int, int]] = []
    row, column = rows, columns
    while row and column:
        if total[row, column] == total[row - 1, column]:
            row -= 1
        elif total[row, column] == total[row, column - 1]:
            column -= 1
        else:
            row, column = row - 1, column - 1
            path.append((row, column))
    return path[::-1]
