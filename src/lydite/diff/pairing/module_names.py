"""Pair modules by their names, by the parameters that they have, or by their parts.

Methods of `pairing_methods`: each takes what is paired so far and adds to it.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import takewhile
from math import prod

from lydite.diff.measure.axes import is_packed, possible_fits
from lydite.diff.name_map import Rename
from lydite.diff.pairing.exchanged import without_exchanges
from lydite.diff.pairing.name_matching import (
    close_stats,
    match_spelling,
    match_weights,
    module_renames,
)
from lydite.diff.pairing.pair_names import WEAK, NamePairs, compatible
from lydite.diff.pairing.similarity import is_input
from lydite.trace.events import Event, Site


def by_spelling(names: NamePairs) -> None:
    """Names that are equal, or differ in spelling or leading scopes only."""
    by_name = {s.name if s.slot == "out" else f"{s.name}.{s.slot}": s for s in names.free()}
    matched = match_spelling(names.left(), by_name)
    names.add({a: by_name[b] for a, b in matched.items() if a == b}, "name")
    spelled = {a: _of_its_size(names, a, by_name[b]) for a, b in matched.items() if a != b}
    spelled = {a: b for a, b in spelled.items() if not _is_of_other_form(names, a, b)}
    names.add(spelled, "spelling")


def _of_its_size(names: NamePairs, name: str, site: Site) -> Site:
    """The only value inside a module that has a port's axes, where the module's has not.

    A port may name a table of positions as the module that adds one to its tokens.
    """
    event, other = names.port_events.get(name), names.reference_events.get(site)
    if event is None or other is None or prod(event.shape) == prod(other.shape):
        return site
    inside = [
        place
        for place, value in names.free_events(inputs=False).items()
        if place.name.startswith((f"{site.name}.", f"{site.name}/"))
        and possible_fits(event.shape, value.shape)
    ]
    return inside[0] if len(inside) == 1 and not is_input(site) else site


def _is_of_other_form(names: NamePairs, name: str, site: Site) -> bool:
    """Whether a value has as many numbers as that of its name, in axes that no order makes equal.

    Latents after the loop may have the name of those in it, which are tokens there. One value
    that the reference recorded by hand may also equal a later one.
    """
    event, other = names.port_events.get(name), names.reference_events.get(site)
    if event is None or other is None or prod(event.shape) != prod(other.shape):
        return False
    if not possible_fits(event.shape, other.shape):
        return True
    if is_packed(event.shape, other.shape) and event.step > other.step:
        return True
    modules = {e.name for e in names.reference.events if is_input(e.site)}
    return site.name not in modules and _equal_instead(names, name, site) is not None


def by_parameters(names: NamePairs) -> None:
    """Modules that have the same parameters."""
    weights, reference_weights = names.port.weights(), names.reference.weights()
    if not weights or not reference_weights:
        return
    loaded = module_renames(match_weights(weights, reference_weights))
    outputs = [s for s in names.free() if s.slot == "out" and s in names.reference_events]
    by_path = _by_path(site.name for site in outputs)
    places = (
        {path: names.port_events[n].i for path, n in _by_path(names.port_events).items()},
        {path: names.reference_events[Site(name)].i for path, name in by_path.items()},
    )
    modules = without_exchanges(loaded, places)
    for name in names.left():
        for module in dict.fromkeys((name.rpartition("/")[2], name)):
            target = Site(by_path.get(modules.get(module, ""), ""))
            if target.name and names.is_possible(name, (target,)):
                is_loaded = modules[module] == loaded[module] and name in names.port_events
                equal = _equal_instead(names, name, target) if is_loaded else None
                how = "equal" if equal else "weights"
                names.found[name] = Rename((equal or target,), how=how)
                break


def _equal_instead(names: NamePairs, name: str, site: Site) -> Site | None:
    """A later output that a value equals, where it is not that of the layer with its parameters.

    A port may record what it makes of the layer's output, as a sum with positions. An earlier one
    is what the layer takes: the port leaves it out.
    """
    port, layer, comparer = names.port_events[name], names.reference_events[site], names.comparer
    if comparer.are_equal([layer], [port]) is not False:
        return None
    later = {s: e for s, e in names.free_events(inputs=False).items() if e.i > layer.i}
    same_size = (s for s, e in later.items() if prod(e.shape) == prod(port.shape))
    return next((s for s in same_size if comparer.are_equal([later[s]], [port])), None)


def _by_path(names: Iterable[str]) -> dict[str, str]:
    """Names by themselves, and by what follows the component where only one has it."""
    names = list(names)
    counts = Counter(name.rpartition("/")[2] for name in names)
    unique = {path: name for name in names if counts[path := name.rpartition("/")[2]] == 1}
    return unique | {name: name for name in names}


def by_containers(names: NamePairs) -> None:
    """Names that contain others, with the module that contains their counterparts.

    Where an operation is missing in the port, such a name has the value of one of its parts.
    """
    around = {
        name: module
        for name, event in names.port_events.items()
        if (module := _module_around(names, name)) and compatible(event, [module])
    }
    known = {n: m for n, m in around.items() if _is_known(names, n, m)}
    of_name = {n: names.reference_events.get(names.found[n].ref[0]) for n in known}
    if not known or any(e is None or e.hash != known[n].hash for n, e in of_name.items()):
        return
    for name, module in around.items():
        rename = names.found.get(name)
        inside = rename is None or rename.ref[0].name.startswith(f"{module.name}.")
        if rename is not None and rename.how == "equal" and not _has_value_of_part(names, name):
            continue  # a norm whose modulated value has a name inside of its own
        if inside and module.site in names.free():
            names.found[name] = Rename((module.site,), how="siblings")


def _has_value_of_part(names: NamePairs, name: str) -> bool:
    """Whether a name has the value of a part of it, in any axis order."""
    stats, own = names.comparer.port.stats, names.port_events[name]
    right = stats(own)
    parts = (e for n, e in names.port_events.items() if n.startswith((f"{name}.", f"{name}/")))
    return right is not None and any(
        (other := stats(part)) is not None and close_stats(other, right, 1e-5) for part in parts
    )


def _module_around(names: NamePairs, name: str) -> Event | None:
    """The output of the innermost module around the counterparts of a name's parts."""
    parts = [
        rename.ref[0].name
        for part, rename in names.found.items()
        if part.startswith((f"{name}.", f"{name}/")) and rename.ref
    ]
    around = [name.split(".")[:-1] for name in parts]
    same = takewhile(lambda words: len(set(words)) == 1, zip(*around, strict=False))
    return names.reference_events.get(Site(".".join(words[0] for words in same))) if parts else None


def _is_known(names: NamePairs, name: str, module: Event) -> bool:
    """Whether a name that contains others has a counterpart of its own, outside of its module."""
    rename = names.found.get(name)
    if rename is None or rename.how in WEAK:
        return False
    return not rename.ref[0].name.startswith(f"{module.name}.")
