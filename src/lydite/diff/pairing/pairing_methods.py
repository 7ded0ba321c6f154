"""The methods of pairing names, in the order in which they are tried.

Each takes what is paired so far and adds to it; `by_siblings` also corrects what others guessed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from math import inf, log10, prod

import numpy as np

from lydite.diff.measure.axes import possible_fits
from lydite.diff.name_map import Rename
from lydite.diff.pairing.alignment import (
    PairsByPosition,
    align,
    best_path,
    fused_by_shape,
    fused_values,
    joined_tokens,
    repeated_names,
    same_axes,
)
from lydite.diff.pairing.blocks import (
    BlockMap,
    LastWords,
    ScopeRules,
    SiblingRules,
    Sites,
    numbered_variants,
)
from lydite.diff.pairing.exchanged_names import (
    by_exchanged_names,
    by_names_of_others,
    by_words_of_earlier_blocks,
)
from lydite.diff.pairing.module_names import by_containers, by_parameters, by_spelling
from lydite.diff.pairing.multiples import by_multiples
from lydite.diff.pairing.mutual_similarity import Positions, pair_roles
from lydite.diff.pairing.pair_names import GUESSED, MIN_RESULT, WEAK, NamePairs, compatible
from lydite.diff.pairing.paired_events import same_kind
from lydite.diff.pairing.results import by_ends_of_steps, by_last_values, by_results, ends_of_steps
from lydite.diff.pairing.same_rows import with_same_rows
from lydite.diff.pairing.similarity import EQUAL, is_input, names_of
from lydite.diff.pairing.tables import by_tables
from lydite.trace.events import Event, Site

Method = Callable[[NamePairs], None]

SOON_TAKEN = 8  # paired values after one among which it is taken
ALIKE = 0.3  # correlation from which one of several inputs is taken for the counterpart
MORE_ALIKE = 0.5  # correlation by which a value is more like another one than like its own
MAX_DECADES = 0.7  # between the largest numbers of two tables that may be counterparts


def by_fused_values(names: NamePairs) -> None:
    """Values that are two to four of the reference's side by side: fused projections."""
    names.add_fused(fused_values)


def by_joined_tokens(names: NamePairs) -> None:
    """Values that have the tokens of two of the reference's: text and image."""
    names.add_fused(joined_tokens)


def by_values(names: NamePairs) -> None:
    """Equal values; then values that are close, or similar names, in order between these."""
    port = names.left_events(copies=False)
    equal, close = align(names.comparer, names.free_events(), port, names.refs())
    names.add(equal, "equal")
    names.add(with_same_rows(names), "rows")
    free = names.free_events()
    positions = Positions(names.reference_events, names.port_events, names.refs())
    ends = ends_of_steps(names)  # the picture of a step may be closer to the next latents
    in_order = {
        name: site
        for name, site in close.items()
        if site in free
        and (ends is None or site != ends[1] or name == ends[0].name)
        and positions.permit(names.port_events[name], names.reference_events[site])
        and not _has_whole_result(names.port_events[name], names.reference_events[site], free)
    }
    names.add(in_order, "order")


def _has_whole_result(port: Event, reference: Event, free: Mapping[Site, Event]) -> bool:
    """Whether a value is close to a part of the reference's, right before one of its own size.

    A wrong guidance is close to one of the two predictions.
    """
    later = [e for e in free.values() if e.i > reference.i and e.step == reference.step]
    following = min(later, key=lambda e: e.i, default=None)
    is_part = prod(port.shape) < prod(reference.shape)
    return is_part and following is not None and same_axes(following, port)


def by_fused_shapes(names: NamePairs) -> None:
    """Wrong fused values: the only values of a block that make up the shape."""
    names.add_fused(fused_by_shape, "position")


def by_copies(names: NamePairs) -> None:
    """Further names of a value with further names of the reference's."""
    equal, _ = align(names.comparer, names.free_events(), names.left_events(), names.refs())
    names.add(equal, "equal")


def by_other_parts(names: NamePairs) -> None:
    """Values that are another part of a reference value of which one part is paired."""
    remaining = names.unpaired_sizes()
    for name, event in names.left_events(copies=False).items():
        size = prod(event.shape)
        for site in [site for site, count in remaining.items() if count >= size]:
            if names.comparer.score(names.reference_events[site], event)[1] < EQUAL:
                names.found[name] = Rename((site,), how="equal")
                remaining[site] -= size
                break


def by_siblings(names: NamePairs) -> None:
    """Drop pairs that their siblings contradict, and pair by the siblings' rule."""
    pairs = names.refs()
    strong = {name: refs for name, refs in pairs.items() if names.found[name].how not in WEAK}
    blocks = BlockMap(pairs)
    if len(strong) == len(pairs):
        certain = predicted = _predicted_by_siblings(names, pairs, blocks)
    else:
        certain = _predicted_by_siblings(names, strong, BlockMap(strong))
        predicted = _predicted_by_siblings(names, pairs, blocks) | certain
    for name, rename in list(names.found.items()):
        outside = not all(blocks.allows(name, ref.name) for ref in rename.ref)
        expected = (certain if rename.how == "equal" else predicted).get(name, rename.ref)
        if rename.how in GUESSED and (outside or expected != rename.ref):
            del names.found[name]
    in_order = {
        name: refs
        for name, refs in predicted.items()
        if name in certain or not _crosses_equal_value(names, name, refs[0])
    }
    names.add_possible(in_order, "siblings")


def _crosses_equal_value(names: NamePairs, name: str, site: Site) -> bool:
    """Whether an equal value of its shape comes after it in the port, before it in the reference.

    A query before its rotation is not the result of the attention.
    """
    event, at = names.port_events[name], names.reference_events[site].i
    return any(
        later.i > event.i and later.shape == event.shape and counterpart.i < at
        for other, rename in names.found.items()
        if rename.how == "equal"
        and (later := names.port_events.get(other)) is not None
        and (counterpart := names.reference_events.get(rename.ref[0])) is not None
    )


def _predicted_by_siblings(
    names: NamePairs, pairs: Mapping[str, Sites], blocks: BlockMap
) -> dict[str, Sites]:
    """The counterparts of names that have none, or a guess, by their siblings among `pairs`."""
    rules = SiblingRules(pairs)

    def from_other_blocks(name: str) -> Sites | None:
        # An equal value is that of another name only if earlier blocks show it: the first
        # block is computed before the bug.
        is_equal = name in names.found and names.found[name].how == "equal"
        at = names.port_events[name].i if is_equal else inf
        return blocks.from_other_blocks(
            name,
            pairs,
            lambda other: other in names.port_events and names.port_events[other].i < at,
        )

    predicted = (
        (name, rules.predict(name) or from_other_blocks(name))
        for name in names.port_events
        if name not in names.found or names.found[name].how in GUESSED
    )
    return {
        name: refs
        for name, refs in predicted
        if refs and all(ref in names.reference_events for ref in refs)
    }


def by_scopes(names: NamePairs) -> None:
    """Names that differ from the reference's in their beginning only, as others do."""
    rules = ScopeRules(names.refs())
    predicted = ((name, rules.predict(name)) for name in names.left())
    wanted = {n: (site,) for n, site in predicted if site and site in names.reference_events}
    names.add_possible(wanted, "spelling")


def by_last_words(names: NamePairs) -> None:
    """Names that end as others do, with the reference's that end as their counterparts, in order.

    A bug spoils all that follows, but `gn1` is `norm1` in the blocks before it.
    """
    words = LastWords(
        {name: r.ref for name, r in names.found.items() if r.ref and r.how not in WEAK}
    )
    known = names.refs()
    blocks = BlockMap(known)
    positions = Positions(names.reference_events, names.port_events, known)
    free, left = names.free_events(), names.left_events(copies=False)
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
                scores[row, at[place]] = 1 + _correlation(names, others, event)
    rows = list(left)
    for row, column in best_path(scores):
        names.found[rows[row]] = Rename(columns[column], how="siblings")


def _correlation(names: NamePairs, reference: Sequence[Event], port: Event) -> float:
    """The correlation of a value with one of the reference's; 0 where it is negative."""
    one = len(reference) == 1
    return max(0.0, names.comparer.correlation(reference[0], port)) if one else 0.0


def by_joined_shapes(names: NamePairs) -> None:
    """Wrong values with the tokens of two of the reference's: what a block returns, or takes.

    A block that returns two values has one with all tokens at its end in the port: not before a
    part of the block. A value before the modules that take its parts is what these take.
    """
    blocks = BlockMap(names.refs())
    modules: dict[str, list[Site]] = defaultdict(list)
    free = names.free_events()
    for site in free:
        modules[site.name] += [] if is_input(site) else [site]
    left = names.left_events(copies=False)
    for name, event in reversed(left.items()):
        if len(event.shape) != 3 or not blocks.knows(name):
            continue
        whole = [
            tuple(sites)
            for module, sites in modules.items()
            if blocks.same_block(name, module)
            and not _has_later_part(names, module, event)
            and _joins(event, [names.reference_events[site] for site in sites])
        ]
        if len(whole) == 1:
            names.found[name] = Rename(whole[0], how="siblings")
            modules = {module: s for module, s in modules.items() if tuple(s) != whole[0]}
        elif not whole and (parts := _taken_after(names, name, free)):
            names.found[name] = Rename(parts, how="position")
            free = {site: other for site, other in free.items() if site not in parts}


def _has_later_part(names: NamePairs, module: str, event: Event) -> bool:
    """Whether the port computes a part of a module after a value."""
    return any(
        ref.name.startswith((f"{module}.", f"{module}/")) and names.port_events[name].i > event.i
        for name, rename in names.found.items()
        for ref in rename.ref
        if name in names.port_events
    )


def _taken_after(names: NamePairs, name: str, free: Mapping[Site, Event]) -> Sites:
    """The inputs of the next paired modules that have the tokens of a value together."""
    event = names.port_events[name]
    after = [n for n, e in names.port_events.items() if e.i > event.i and n in names.found]
    takes = [
        Site(site.name, "in.0")
        for other in after[:SOON_TAKEN]
        for site in names.found[other].ref[:1]
        if Site(site.name, "in.0") in free
    ]
    for first, second in combinations(takes, 2):
        for parts in ((first, second), (second, first)):
            if _joins(event, [free[site] for site in parts]):
                return _in_usual_order(names, parts)
    return ()


def _in_usual_order(names: NamePairs, parts: Sites) -> Sites:
    """Two parts in the order in which other values of the port have theirs: by their sizes."""
    shapes = [
        tuple(names.reference_events[site].shape[1] for site in rename.ref)
        for rename in names.found.values()
        if len(rename.ref) == 2
        and all(site in names.reference_events for site in rename.ref)
        and all(len(names.reference_events[site].shape) == 3 for site in rename.ref)
    ]
    own = tuple(names.reference_events[site].shape[1] for site in parts)
    return parts[::-1] if own[::-1] in shapes and own not in shapes else parts


def by_sequences(names: NamePairs) -> None:
    """Values of one shape without counterparts, in order, where both sides have as many."""
    sides = (names.left_events(copies=False), names.free_events(copies=False))
    first = {names.numbers(event): site for site, event in reversed(sides[1].items())}
    free = {
        site: sides[1][site] for site in sides[1] if first[names.numbers(sides[1][site])] == site
    }
    positions = Positions(names.reference_events, names.port_events, names.refs())
    blocks = BlockMap(names.refs())
    shapes: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, event in sides[0].items():
        if (
            name not in names.inputs
            and event.kind == "activation"
            and prod(event.shape) >= MIN_RESULT
        ):
            shapes[tuple(sorted(n for n in event.shape if n != 1))].append(name)
    for group in shapes.values():
        event = sides[0][group[0]]
        sites = [site for site, other in free.items() if same_axes(other, event)]
        outputs = [site for site in sites if not is_input(site)]
        for chosen in (sites, outputs):
            pairs = [*zip(group, chosen, strict=False)]
            if (
                len(group) == len(chosen) > 1
                and all(
                    positions.permit(sides[0][name], free[site], 1)
                    and blocks.allows(name, site.name)
                    and names.comparer.same_form(free[site], sides[0][name])
                    and not _is_source_of_earlier(names, name, site)
                    for name, site in pairs
                )
                and not _is_in_another_order(names, pairs)
            ):
                names.add(dict(pairs), "position")
                break


def _is_source_of_earlier(names: NamePairs, name: str, site: Site) -> bool:
    """Whether the port has, right before a value, what the reference computes from this site."""
    event, source = names.port_events[name], names.reference_events[site]
    before = [n for n, e in names.port_events.items() if n in names.found and e.i < event.i]
    sites = (s for n in before[-SOON_TAKEN:] for s in names.found[n].ref)
    results = [names.reference_events[s] for s in sites if s in names.reference_events]
    known = {e.i for e in results}
    later = (e for e in results if e.i > source.i and e.step == source.step)
    return any(source in names.flow.upstream(e, known - {e.i}).passed for e in later)


def _is_in_another_order(names: NamePairs, pairs: Sequence[tuple[str, Site]]) -> bool:
    """Whether one of some values is far more like the counterpart of another than its own."""
    port, reference = names.port_events, names.reference_events
    return any(
        names.comparer.correlation(reference[other], port[name])
        > names.comparer.correlation(reference[site], port[name]) + MORE_ALIKE
        for name, site in pairs
        for _, other in pairs
        if other != site
    )


def by_kinds(names: NamePairs) -> None:
    """Noise, token ids and tables: there is mostly one of a kind and shape."""

    def same_table(reference: Event, port: Event) -> bool:
        is_table = reference.kind == "schedule" and same_kind(reference, port)
        return is_table and reference.shape == port.shape

    def same_in_both(reference: Event, port: Event) -> bool:
        return same_table(reference, port) and _same_kind(names, reference, port)

    for is_counterpart in (same_in_both, same_table, partial(_same_kind, names)):
        left, free = names.left_events(), names.free_events()
        for name, event in left.items():
            sites = [site for site, other in free.items() if is_counterpart(other, event)]
            if len(sites) != 1:
                continue
            rivals = [other for other in left.values() if is_counterpart(free[sites[0]], other)]
            if len(rivals) == 1:
                names.found[name] = Rename((sites[0],), how="kind")


def _same_kind(names: NamePairs, reference: Event, port: Event) -> bool:
    if not same_kind(reference, port):
        return False
    if reference.kind in ("ids", "input"):
        return bool(possible_fits(port.shape, reference.shape))
    if reference.kind != "schedule" or len(reference.shape) != len(port.shape):
        return False
    a, b = names.comparer.port.stats(port), names.comparer.reference.stats(reference)
    if a is None or b is None or not a.max or not b.max or a.max * b.max <= 0:
        return False
    return abs(log10(a.max / b.max)) < MAX_DECADES


def by_similarity(names: NamePairs) -> None:
    """Values that are most similar to each other over all blocks."""
    known = names.refs()
    free = names.free_events(copies=False)
    pairs = pair_roles(
        names.comparer,
        free,
        names.left_events(copies=False),
        (names_of(names.reference), names.port_names),
        Positions(names.reference_events, names.port_events, known),
        BlockMap(known),
    )
    late = {name for name, site in pairs.items() if not _is_in_order(names, name, site)}
    late |= _inputs_after_outputs(names, pairs)
    templates = {template for name in late for template, _ in numbered_variants(name)}
    # Further outputs of a module compete for a value, but a guess alone does not pair them.
    modules = {site for refs in known.values() for site in refs} | {*pairs.values()}
    chosen = {
        name: site
        for name, site in pairs.items()
        if (is_input(site) or Site(site.name) in modules)
        and name not in late
        and not templates & {template for template, _ in numbered_variants(name)}
    }
    names.add(chosen, "similarity")


def _is_in_order(names: NamePairs, name: str, site: Site) -> bool:
    """Whether a guess comes after the last equal value of its shape on both sides."""
    event = names.port_events[name]
    before = [
        (earlier.i, names.reference_events[rename.ref[0]].i)
        for other, rename in names.found.items()
        if rename.how == "equal"
        and rename.ref[0] in names.reference_events
        and (earlier := names.port_events.get(other)) is not None
        and earlier.i < event.i
        and earlier.shape == event.shape
    ]
    return not before or names.reference_events[site].i > max(before)[1]


def _inputs_after_outputs(names: NamePairs, pairs: Mapping[str, Site]) -> set[str]:
    """Guesses by which a module's input would be computed after its output."""
    sites = {name: refs[0] for name, refs in names.refs().items()} | dict(pairs)
    at = {name: e.i for name, site in sites.items() if (e := names.reference_events.get(site))}
    return {
        name
        for taken, module in names.inputs.items()
        if taken in at and module in at and at[taken] > at[module]
        for name in (taken, module)
        if name in pairs
    }


def by_position(names: NamePairs) -> None:
    """Values of one shape between two pairs, in the order of both sides."""
    events = names.reference_events
    reference = {site: event for site, event in events.items() if not names.is_one_of_many(site)}
    # An input that is a value of another name has no place of its own.
    idle = names.ignored | (names.copies & names.inputs.keys())
    idle |= {name for name in names.copies if names.only_returns(name)}
    port = {name: e for name, e in names.port_events.items() if name not in idle}
    repeated = repeated_names(names.reference) | repeated_names(names.port)

    def differs(name: str) -> bool:
        sites = names.refs().get(name, ())
        events = [reference[site] for site in sites if site in reference]
        return bool(events) and names.comparer.are_equal(events, [port[name]]) is False

    positions = PairsByPosition(
        names.comparer, reference, port, repeated, names.copies, names.inputs, differs
    )
    found = positions.add_to(names.refs()).items()
    in_order = {n: site for n, site in found if not _crosses_equal_value(names, n, site)}
    names.add(in_order, "position")


def by_shapes(names: NamePairs) -> None:
    """Values that are the only ones of their shape in a block, on both sides."""
    known = names.refs()
    blocks = BlockMap(known)
    positions = Positions(names.reference_events, names.port_events, known)
    left, free = names.left_events(copies=False), names.free_events(copies=False)
    for name, event in left.items():
        sites = {
            names.numbers(other): site
            for site, other in reversed(free.items())
            if same_axes(other, event)
            and blocks.same_block(name, site.name)
            and positions.permit(event, other)
            and names.comparer.same_form(other, event)
        }
        if name not in names.inputs:  # what a module returns, rather than what one takes
            returned = {key: site for key, site in sites.items() if not is_input(site)}
            sites = returned or sites
        rivals = [other for other in left.values() if same_axes(other, event)]
        if len(sites) == len(rivals) == 1 and prod(event.shape) >= MIN_RESULT:
            (site,) = sites.values()
            is_late = _is_source_of_earlier(names, name, site)
            if not is_late and not _crosses_equal_value(names, name, site):
                names.found[name] = Rename((site,), how="position")


def by_inputs(names: NamePairs) -> None:
    """Inputs of a name with those of the reference's modules that return its counterpart."""
    first: dict[Site, Event] = {}
    modules: dict[tuple[str, int], list[str]] = defaultdict(list)  # by what they return
    for event in names.reference.events if names.inputs else ():
        first.setdefault(event.site, event)
        if event.slot[:3] == "out":
            modules[names.numbers(event), event.step].append(event.name)
    slots: dict[str, list[Site]] = defaultdict(list)
    for site in first:
        if is_input(site):
            slots[site.name].append(site)
    holders = {site: name for name, rename in names.found.items() for site in rename.ref}
    claims: dict[Site, list[tuple[float, str]]] = defaultdict(list)
    for name in names.left():
        owner = names.found.get(names.inputs.get(name, ""))
        owner = None if owner and owner.how in WEAK[1:] else owner
        result = first.get(owner.ref[0]) if owner and len(owner.ref) == 1 else None
        event = names.port_events.get(name)
        if result is None or event is None:
            continue
        same = modules[names.numbers(result), result.step]
        # What a module of the reference takes was computed outside of it.
        own = () if is_input(result.site) else (result.name,)
        around = dict.fromkeys((*own, *same))
        around = _innermost(names, around, names.inputs[name])
        returned = names.numbers(result)
        changes = not _is_copy(names, name, names.inputs[name])  # a dropout returns what it takes
        sites = {
            names.comparer.reference.content(first[site]): site
            for module in around
            for site in slots[module]
            if possible_fits(event.shape, first[site].shape)
            and same_kind(event, first[site])
            and not _is_copy(names, name, holders.get(site))
            and not (changes and names.numbers(first[site]) == returned)
        }
        likely = {s: names.comparer.correlation(first[s], event) for s in sites.values()}
        best = max(likely, key=lambda site: likely[site], default=None)
        is_only = len(likely) == 1 and not _holds_equal(names, holders.get(best) if best else None)
        if best is not None and (is_only or likely[best] > ALIKE):
            claims[best].append((likely[best], name))
    for site, claimants in claims.items():
        score, name = max(claimants)
        if len(claimants) == 1 or score > ALIKE:
            names.found[name] = Rename((site,), how="input")


def _holds_equal(names: NamePairs, name: str | None) -> bool:
    """Whether a name was paired because its value is the reference's."""
    return name is not None and names.found[name].how == "equal"


def _innermost(names: NamePairs, modules: Iterable[str], owner: str) -> list[str]:
    """The modules around the counterparts of a name's parts, the innermost; else all."""
    parts = [
        ref.name
        for name, rename in names.found.items()
        if name.startswith((f"{owner}.", f"{owner}/"))
        for ref in rename.ref
    ]
    modules = list(modules)
    around = [m for m in modules if all(n.startswith((f"{m}.", f"{m}/")) for n in parts)]
    return [max(around, key=len)] if parts and around else modules


def _is_copy(names: NamePairs, name: str, other: str | None) -> bool:
    """Whether two names of the port have the same value."""
    if other is None or other not in names.port_events:
        return False
    content = names.comparer.port.content
    return content(names.port_events[name]) == content(names.port_events[other])


def _joins(whole: Event, parts: Sequence[Event]) -> bool:
    """Whether values of (batch, tokens, width) have together the tokens of another."""
    shapes = [part.shape for part in parts]
    if len(parts) != 2 or any(len(shape) != 3 for shape in (*shapes, whole.shape)):
        return False
    ends = {(shape[0], shape[2]) for shape in (*shapes, whole.shape)}
    return len(ends) == 1 and sum(shape[1] for shape in shapes) == whole.shape[1]


MODULES: tuple[Method, ...] = (
    by_spelling,
    by_parameters,
    by_exchanged_names,
    by_names_of_others,
)
OTHER_NAMES: tuple[Method, ...] = (
    by_fused_values,
    by_joined_tokens,
    by_values,
    by_other_parts,
    by_tables,
    by_multiples,
    by_words_of_earlier_blocks,
    by_siblings,
    by_containers,
    by_scopes,
    by_last_words,
    by_fused_shapes,
    by_joined_shapes,
    by_sequences,
    by_kinds,
    by_ends_of_steps,
    by_similarity,
    by_position,
    by_shapes,
    by_siblings,
    by_scopes,
    by_results,
    by_last_values,
    by_inputs,
    by_copies,
)
