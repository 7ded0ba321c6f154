"""The results of a run and of its steps: values at an end, which are paired because they are there.

Each function is a method of `pairing_methods`.
"""

from math import prod

from lydite.diff.name_map import Rename
from lydite.diff.pairing.pair_names import GUESSED, MIN_RESULT, WEAK, NamePairs, compatible
from lydite.diff.pairing.similarity import is_input, name_similarity
from lydite.diff.result import scope_of
from lydite.trace.events import Event, Site

SIMILAR = 0.45  # names of results: prompt_embeds and prompt_features


def by_ends_of_steps(names: NamePairs) -> None:
    """The values that end every step of a loop: the latents."""
    ends = ends_of_steps(names)
    event = names.left_events().get(ends[0].name) if ends else None
    free = names.free_events()
    if ends and event is not None and ends[1] in free and compatible(event, [free[ends[1]]]):
        names.found[ends[0].name] = Rename((ends[1],), how="siblings")


def ends_of_steps(names: NamePairs) -> tuple[Site, Site] | None:
    """What ends every step in the port, and in the reference; None where it is not one value."""
    ends: list[set[Site]] = []
    for trace in (names.port, names.reference):
        last = {e.step: e.site for e in trace.events if e.slot[:3] == "out"}
        ends.append({*last.values()} if len(last) > 1 else set())
    if len(ends[0]) != 1 or len(ends[1]) != 1:
        return None
    return ends[0].pop(), ends[1].pop()


def by_last_values(names: NamePairs) -> None:
    """Pair the last values of both sides where each is recorded once more, or has no other.

    A port that returns another layer's value records a value that the reference has too, but
    not at its end. A last value without any counterpart is the wrong result.
    """
    ends = [
        max((e for e in events.values() if e.slot[:3] == "out"), key=lambda e: e.i, default=None)
        for events in (names.port_events, names.reference_events)
    ]
    port, reference = ends
    if port is None or reference is None or not compatible(port, [reference]):
        return
    used = names.found.get(port.name)
    if used is not None and used.how not in GUESSED:
        return
    copies = port.alias_of is not None and reference.alias_of is not None
    joined = used is not None and len(used.ref) > 1  # of other layers, say
    if (copies or joined) and sorted(port.shape) == sorted(reference.shape):
        if names.comparer.are_equal([reference], [port]) is False:
            names.found[port.name] = Rename((reference.site,), how="end")
    elif used is None and reference.site in names.free() and prod(port.shape) >= MIN_RESULT:
        names.found[port.name] = Rename((reference.site,), how="position")


def by_results(names: NamePairs) -> None:
    """Values recorded by hand after the modules of a component, by shape and similar names.

    Equal ones are paired by now: these differ, as another layer's features do. Those may be paired
    with the other layer.
    """
    last = max((event.i for event in names.port_events.values()), default=0)
    guessed = {name for name, rename in names.found.items() if rename.how in WEAK}
    paired = {ref for name, refs in names.refs().items() if name not in guessed for ref in refs}
    for site, event in _recorded_by_hand(names).items():
        if site in paired or event.kind != "activation":
            continue
        is_copy = any(e.hash == event.hash for s, e in names.reference_events.items() if s != site)
        others = {
            name: names.port_events[name]
            for name, rename in names.found.items()
            if (name in guessed or (is_copy and rename.how == "equal"))
            and name in names.port_events
        }
        alike = {
            name: name_similarity(name.rpartition("/")[2], site.name.rpartition("/")[2])
            for name, other in (names.left_events() | others).items()
            if other.shape == event.shape and prod(event.shape) >= MIN_RESULT
            if other.i > last / 2  # embeddings of tokens are no result, whatever their name is
        }
        best = max(alike, key=lambda name: alike[name], default="")
        if best and alike[best] > SIMILAR:
            names.found[best] = Rename((site,), how="end")


def _recorded_by_hand(names: NamePairs) -> dict[Site, Event]:
    """Sites that are no module's, after the last value of a component."""
    modules = {event.name for event in names.reference.events if is_input(event.site)}
    inside = tuple(f"{name}{mark}" for name in modules for mark in "./")
    parts = [e for e in names.reference.events if e.name in modules or e.name.startswith(inside)]
    last = {scope_of(event.name): event.i for event in parts}
    before: dict[Site, Event] = {}
    for site, event in names.reference_events.items():
        scope = next((scope_of(e.name) for e in reversed(parts) if e.i < event.i), None)
        if scope is not None and last[scope] < event.i and event not in parts:
            before[site] = event
    return before
