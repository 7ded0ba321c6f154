"""Pair two traces.

Names first: the user's map, equal names, equal up to spelling, modules whose parameters are equal.
Then order, shape and content. What is paired in some blocks is paired in all of them, equal or not.
Values that are most similar to each other over all blocks are paired, and values that are the only
ones of their shape between two pairs. The rest is reported as unpaired.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from lydite.diff.name_map import Rename
from lydite.diff.pairing.name_matching import (
    StepsFromNames,
    with_calls_in_names,
    with_inputs_in_names,
)
from lydite.diff.pairing.pair_names import NamePairs
from lydite.diff.pairing.paired_events import Pair, Pairing, pair_events, unpaired
from lydite.diff.pairing.pairing_methods import MODULES, OTHER_NAMES
from lydite.diff.pairing.same_rows import turned_guesses
from lydite.trace.events import Site
from lydite.trace.reader import Trace

UNSEEN = (
    "weights",
    "siblings",
    "position",
    "copy",
    "similarity",
    "input",
)  # methods that need no equal value
FOLLOWING = 8  # agreeing values after one that differs that prove it was paired wrongly
MULTIPLE = 0.99999  # correlation of a value with a multiple of it
GUESSES = {
    "position": "paired by position only (a guess)",
    "copy": "paired by position only, and equal to an earlier value of the port (a guess)",
    "similarity": "paired by similarity of values (a guess)",
}


def pair_traces(
    reference: Trace, port: Trace, renames: Mapping[str, Rename] | None = None
) -> Pairing:
    """Pair two traces; `renames` is the user's map and overrides everything else."""
    reference_steps, port_steps = StepsFromNames.of(reference), StepsFromNames.of(port)

    def without_step(site: Site) -> Site:
        return Site(reference_steps.without_step(site.name), site.slot)

    given = {
        port_steps.without_step(name): replace(rename, ref=tuple(map(without_step, rename.ref)))
        for name, rename in (renames or {}).items()
    }
    kept = {site.name for rename in given.values() for site in rename.ref}
    named = with_calls_in_names(reference_steps.trace, port_steps.trace, kept)
    names = _pairs_of_modules(NamePairs(named, port_steps.trace), given)
    trace, owners = with_inputs_in_names(port_steps.trace, {*names.found, *names.ignored})
    if owners:
        names = _pairs_of_modules(NamePairs(named, trace, owners), given)
    pairing = _pair(names, given)
    remarks = [
        f"the steps of the {side} are read from its names"
        for side, steps in (("reference", reference_steps), ("port", port_steps))
        if steps.original
    ]
    written = [{event.i: event for event in trace.events} for trace in (reference, port)]
    pairs, set_aside = (
        tuple(
            replace(
                pair,
                reference=tuple(written[0][event.i] for event in pair.reference),
                port=tuple(written[1][event.i] for event in pair.port),
            )
            for pair in chosen
        )
        for chosen in (pairing.pairs, pairing.set_aside)
    )
    return Pairing(
        pairs,
        unpaired(reference, {event.i for pair in pairs for event in pair.reference}, ()),
        port_steps.written_names(_with_own_names(pairing.unpaired_port, pairs, owners)),
        (*remarks, *pairing.remarks, *_guesses(pairs)),
        set_aside,
        port_steps.written_names(sorted(names.tables)),
    )


def _with_own_names(
    unpaired: Sequence[str], pairs: Sequence[Pair], owners: Mapping[str, str]
) -> tuple[str, ...]:
    """Names of which neither an output nor an input is paired."""
    paired = {event.name for pair in pairs for event in pair.port}
    return tuple(
        dict.fromkeys(n for name in unpaired if (n := owners.get(name, name)) not in paired)
    )


def _pairs_of_modules(names: NamePairs, renames: Mapping[str, Rename]) -> NamePairs:
    """The map's pairs, and names that are those of a module of the reference."""
    for name, rename in renames.items():
        if rename.ref:
            names.found[name] = rename
        else:
            names.ignored.add(name)
    for method in MODULES:
        method(names)
    return names


def _pair(names: NamePairs, renames: Mapping[str, Rename]) -> Pairing:
    for method in OTHER_NAMES if names.left() else ():
        method(names)
    names.drop(turned_guesses(names), UNSEEN)
    distance = names.comparer.distance
    pairing = pair_events(names.reference, names.port, names.renames(), names.ignored, distance)
    if strays := _wrong_guesses(names, pairing) - renames.keys():
        names.drop(strays, UNSEEN)
        kept = pair_events(names.reference, names.port, names.renames(), names.ignored, distance)
        aside = tuple(pair for pair in pairing.pairs if pair.port_event.name in strays)
        return replace(kept, set_aside=aside)
    return pairing


def _wrong_guesses(names: NamePairs, pairing: Pairing) -> set[str]:
    """Names that were paired without an equal value and differ, while the values after them agree.

    A port may compute scale and shift in the other order: then its value is not the counterpart of
    the reference's, and the difference is not a bug.
    """
    outputs = [pair for pair in pairing.pairs if pair.port_event.slot == "out"]
    known: dict[int, bool | None] = {}

    def is_equal(pair: Pair) -> bool | None:
        if pair.event.i not in known:
            known[pair.event.i] = names.comparer.are_equal(pair.reference, pair.port)
        return known[pair.event.i]

    def leads_to(pair: Pair, others: Sequence[Pair]) -> bool:
        """Whether one of these is computed from a value, as far as the trace shows it."""
        known = {e.i for each in outputs if each.how == "equal" for e in each.reference}
        known |= {e.i for each in others for e in each.reference}
        ways = (names.flow.upstream(event, known) for other in others for event in other.reference)
        return any(way.is_open or pair.event in way.passed for way in ways)

    by_event = {event.i: pair for pair in outputs for event in pair.reference}
    wrong: set[str] = set()
    for index in reversed(range(len(outputs))):
        pair = outputs[index]
        name = pair.port_event.name
        if pair.how not in UNSEEN or name in wrong or is_equal(pair) is not False:
            continue
        results = [by_event[e.i] for e in names.flow.results(pair.event) if e.i in by_event]
        if results and is_equal(results[0]) is False:
            continue  # what is computed from it differs too
        if abs(names.comparer.correlation(pair.event, pair.port_event)) > MULTIPLE:
            continue  # a norm may take the factor out of what follows
        later = [
            other
            for other in _rest_of_pass(outputs, index)
            if other.port_event.name not in {name, *wrong}
            and (other.scope, other.event.step) == (pair.scope, pair.event.step)
        ]
        # Another stream may run first, which does not depend on this value.
        leading = pair.port_event.shape[:-1]
        stream = [
            each for each in outputs if len(leading) > 1 and each.port_event.shape[:-1] == leading
        ]
        own = [other for other in later if other in stream]
        if not own and len({each.port_event.name for each in stream}) > 1:
            continue
        own = own[:1]
        following = [*later[:FOLLOWING], *own]
        equal = [is_equal(other) for other in following]
        if True in equal and False not in equal and (results or leads_to(pair, following)):
            wrong.add(name)
    return wrong


def _rest_of_pass(outputs: Sequence[Pair], index: int) -> Iterator[Pair]:
    """The pairs after one until a site of its step comes again.

    A video is decoded frame by frame: the next frame does not depend on a value of this one.
    """
    event = outputs[index].event
    before = {other.event.site for other in outputs[:index] if other.event.step == event.step}
    return takewhile(
        lambda other: other.event.site not in before - {event.site}, outputs[index + 1 :]
    )


def _guesses(pairs: Sequence[Pair]) -> tuple[str, ...]:
    """One remark for each method that only guesses."""
    remarks: list[str] = []
    for how, text in GUESSES.items():
        names = {p.port_event.site: p.event.site for p in pairs if p.how == how}
        if names:
            name, reference_name = next(iter(names.items()))
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            remarks.append(f"{text}: {name} with the reference's {reference_name}{more}")
    return tuple(remarks)
