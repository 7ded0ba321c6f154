"""Names that the port gives to other values than the reference.

Two repositories may count the norms of a block in another order. A port that computes one of two
parts first, which is the reference's second by name, may have exchanged the names, or the values.

One name may also be that of a norm on one side, and of the modulated norm on the other.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import prod

from lydite.diff.name_map import Rename
from lydite.diff.pairing.blocks import NUMBER, last_word, numbered_variants
from lydite.diff.pairing.name_matching import close_stats, module_of
from lydite.diff.pairing.pair_names import NamePairs
from lydite.diff.pairing.paired_events import BY_NAME
from lydite.trace.events import Event, Site, WeightInfo

SIMILAR = 0.05  # relative difference of the statistics of two values that may be equal
STEPS_BEHIND = 3  # modules in a row that show whether a value is right
MUCH_CLOSER = 0.25  # of the distance of two values that are no counterparts
FUSED = (2, 3)  # layers that a port may have as one
NEARBY = 60  # values around one among which another value of its name is searched


def by_exchanged_names(names: NamePairs) -> None:
    """Exchange the counterparts of such names, in all blocks where the port runs them that way."""
    groups: dict[tuple[str, str, str], list[_Crossed]] = defaultdict(list)
    for crossed in _crossed_pairs(names):
        groups[crossed.template].append(crossed)
    for group in groups.values():
        if _is_by_name_only(group):
            for each in group:
                a, b = each.names
                names.found[a], names.found[b] = names.found[b], names.found[a]


def _is_by_name_only(group: "list[_Crossed]") -> bool:
    """Whether the names of two parts are exchanged in all blocks, and not what they compute."""
    by_parameters = {each.has_parameters_of_other for each in group}
    if False in by_parameters or any(each.equals_own for each in group):
        return False
    return True in by_parameters or any(
        each.equals_other and each.result_is_right for each in group
    )


def by_names_of_others(names: NamePairs) -> None:
    """Pair a name's value with the one that it equals, in all blocks.

    Nothing is left out: the port has the reference's value of that name under another name, or
    what the reference computes from it, or the two values differ in size and the port's is no copy.
    """
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in _outputs_by_name(names):
        around = module_of(name)
        groups[re.sub(r"\d+", NUMBER, around), name[len(around) :]].append(name)
    for group in groups.values():
        equal = {name: _equals_counterpart(names, name) for name in group}
        found = None if True in equal.values() else _Renamed.first(names, group)
        if found is not None:
            for name in group:
                found.apply(names, name)


def by_words_of_earlier_blocks(names: NamePairs) -> None:
    """Pair a name by its last words in earlier blocks, where it equals another part's value.

    A port may exchange keys and values in its decoder only: what is called `k` there equals the
    reference's `to_v`. The spelling has to speak for the earlier blocks' counterpart.
    """
    known: dict[str, tuple[str, str]] = {}
    changed: dict[str, Site] = {}
    equal = [n for n, r in names.found.items() if r.how == "equal" and len(r.ref) == 1]
    for name in sorted(set(equal) & names.port_events.keys(), key=lambda n: names.port_events[n].i):
        site, word = names.found[name].ref[0], last_word(name)
        own = last_word(site.name), site.slot
        if not word or not own[0] or not numbered_variants(name):
            continue
        wanted, slot = known.setdefault(word, own)
        other = Site(site.name.removesuffix(own[0]) + wanted, slot)
        last = re.split("[._/]", word)[-1]
        is_alike = last in re.split("[._]", wanted) and last not in re.split("[._]", own[0])
        if other != site and is_alike and _is_another(names, name, other):
            changed[name] = other
    for name in changed:
        del names.found[name]
    free = set(names.free())
    for name, site in changed.items():
        if site in free:
            names.found[name] = Rename((site,), how="siblings")


def _is_another(names: NamePairs, name: str, site: Site) -> bool:
    """Whether a value of the reference can be a name's counterpart, and differs from its value."""
    event = names.reference_events.get(site)
    if event is None or not names.is_possible(name, (site,)):
        return False
    return names.comparer.are_equal([event], [names.port_events[name]]) is False


def _outputs_by_name(names: NamePairs) -> list[str]:
    """Names that have a counterpart by their spelling, for what they return."""
    return [
        name
        for name, rename in names.found.items()
        if rename.how in BY_NAME[1:]
        and [site.slot for site in rename.ref] == ["out"]
        and rename.ref[0] in names.reference_events
        and name in names.port_events
        and names.port_events[name].kind == "activation"
    ]


def _equals_counterpart(names: NamePairs, name: str) -> bool | None:
    counterpart = names.reference_events[names.found[name].ref[0]]
    return names.comparer.are_equal([counterpart], [names.port_events[name]])


@dataclass(frozen=True)
class _Renamed:
    """A name of the port, its counterpart by name, and those that have these two values."""

    name: str
    counterpart: Site
    value_of: Site  # of the reference: what the port's value is
    other_name: str | None  # of the port: what has the counterpart's value

    @classmethod
    def first(cls, names: NamePairs, group: Collection[str]) -> "_Renamed | None":
        """The first of these names that the values show to be another's."""
        for name in group:
            event, site = names.port_events[name], names.found[name].ref[0]
            right = names.reference_events[site]
            value_of = next(
                (
                    other
                    for other, e in names.reference_events.items()
                    if e.hash != right.hash and _are_near_and_equal(names, e, right, e, event)
                ),
                None,
            )
            if value_of is not None:
                other_name = _name_of_value(names, right, name)
                is_computed = prod(event.shape) != prod(right.shape) and name not in names.copies
                if other_name is not None or is_computed or _has_result(names, right, event):
                    return cls(name, site, value_of, other_name)
        return None

    def apply(self, names: NamePairs, name: str) -> None:
        """Pair this name, which is the same one of any block, and the other name likewise."""
        site = names.found.pop(name).ref[0]
        value_of = _in_block_of(self.value_of.name, self.counterpart.name, site.name)
        other_name = _in_block_of(self.other_name or "", self.name, name)
        free = set(names.free())
        for own, wanted in ((name, Site(value_of, self.value_of.slot)), (other_name, site)):
            is_left = own in names.port_events and own not in names.found
            if is_left and wanted in free and names.is_possible(own, (wanted,)):
                names.found[own] = Rename((wanted,), how="equal")


def _name_of_value(names: NamePairs, right: Event, name: str) -> str | None:
    """Another name of the port, near this one, that has a value of the reference.

    Not one that is paired with another by its spelling, and differs from that: two names that
    have each other's values may be exchanged values.
    """
    event, outputs = names.port_events[name], set(_outputs_by_name(names))
    for other, e in names.port_events.items():
        if (
            other != name
            and _are_near_and_equal(names, e, event, right, e)
            and (other not in outputs or _equals_counterpart(names, other))
        ):
            return other
    return None


def _has_result(names: NamePairs, right: Event, event: Event) -> bool:
    """Whether the port has a value that the reference computes from `right`, and not from another.

    In 16 bits all values differ: it is far closer to its counterpart than `event` is to `right`.
    """
    far = names.comparer.distance(right, event)
    results, new = [], [right]
    later = [e for e in names.port_events.values() if event.i < e.i <= event.i + NEARBY]
    if _has_fused(names, names.flow.results(right), later, far):
        return True
    for _ in range(STEPS_BEHIND):
        new = [e for each in new for e in names.flow.results(each)]
        results += new
    for result in {e.i: e for e in results}.values():
        for own in later:
            if own.step != result.step or not _may_be_equal(names, result, own):
                continue
            is_equal = names.comparer.are_equal([result], [own]) is True
            if is_equal or names.comparer.distance(result, own) < MUCH_CLOSER * far:
                return True
    return False


def _has_fused(
    names: NamePairs, results: Sequence[Event], later: Sequence[Event], far: float
) -> bool:
    """Whether the port has some of these results side by side: q, k and v of one layer."""
    outputs = [e for e in results if e.slot == "out"]
    return any(
        own.step == parts[0].step
        and prod(own.shape) == sum(prod(part.shape) for part in parts)
        and (names.comparer.joined_error(parts, [own]) or 0.0) < MUCH_CLOSER * far
        for count in FUSED
        for parts in combinations(outputs, count)
        if len({part.shape[:-1] for part in parts}) == 1
        for own in later
    )


def _are_near_and_equal(
    names: NamePairs, one: Event, beside: Event, reference: Event, port: Event
) -> bool:
    """Whether `one` lies near another value of its side, and the two sides' values are equal."""
    is_near = abs(one.i - beside.i) <= NEARBY or prod(one.shape) != prod(beside.shape)
    is_near = is_near and one.step == beside.step
    comparer = names.comparer
    return (
        is_near
        and _may_be_equal(names, reference, port)
        and comparer.are_equal([reference], [port]) is True
    )


def _in_block_of(name: str, one: str, other: str) -> str:
    """The name in the block of `other`, where it is in that of `one`: these differ in numbers."""
    parts, others = re.split(r"(\d+)", one), re.split(r"(\d+)", other)
    differ = [at for at, (a, b) in enumerate(zip(parts, others, strict=False)) if a != b]
    end = differ[-1] + 1 if differ else 0
    block = "".join(parts[:end])
    if not name.startswith(block):
        return name
    return "".join(others[:end]) + name[len(block) :]


def _may_be_equal(names: NamePairs, reference: Event, port: Event) -> bool:
    """Whether the statistics of two values of one size permit it."""
    comparer = names.comparer
    if prod(reference.shape) != prod(port.shape):
        return False
    a, b = comparer.port.stats(port), comparer.reference.stats(reference)
    return a is not None and b is not None and close_stats(a, b, SIMILAR)


@dataclass(frozen=True)
class _Crossed:
    """Two parts of one module of the port, in its order, and their counterparts by name."""

    pairs: NamePairs
    with_parameters: tuple[Collection[str], Collection[str]] | None  # modules of port, reference
    names: tuple[str, str]

    @property
    def template(self) -> tuple[str, str, str]:
        """What such parts have in common in all blocks."""
        a, b = self.names
        around = module_of(a)
        return re.sub(r"\d+", NUMBER, around), a[len(around) :], b[len(around) :]

    @property
    def port(self) -> list[Event]:
        return [self.pairs.port_events[name] for name in self.names]

    @property
    def reference(self) -> list[Event]:
        """The counterparts by name."""
        found = self.pairs.found
        return [self.pairs.reference_events[found[name].ref[0]] for name in self.names]

    @property
    def has_parameters_of_other(self) -> bool | None:
        """Whether the only part with parameters has another name; None: both or none have any."""
        if self.with_parameters is None:
            return None
        own, right = (
            [_path(event.name) in modules for event in events]
            for events, modules in zip(
                (self.port, self.reference), self.with_parameters, strict=True
            )
        )
        return None if sum(own) != 1 or sum(right) != 1 else own != right

    @cached_property
    def equal(self) -> list[list[bool | None]]:
        """Which value of the port equals which of the reference."""
        return [
            [self.pairs.comparer.are_equal([other], [event]) for other in self.reference]
            for event in self.port
        ]

    @property
    def equals_own(self) -> bool:
        """Whether a value equals the counterpart of its name, and not the other one."""
        return any(row[n] is True and row[1 - n] is False for n, row in enumerate(self.equal))

    @property
    def equals_other(self) -> bool:
        """Whether the first value of the port equals the counterpart of the second."""
        return self.equal[0][0] is False and self.equal[0][1] is True

    @property
    def result_is_right(self) -> bool:
        """Whether the port has a value that the reference computes from that one."""
        results = self.pairs.flow.results(self.reference[1])
        later = [e for e in self.pairs.port_events.values() if e.i > self.port[0].i]
        return any(
            _may_be_equal(self.pairs, result, event)
            and self.pairs.comparer.are_equal([result], [event]) is True
            for result in results
            for event in later
        )


def _crossed_pairs(names: NamePairs) -> Iterator[_Crossed]:
    """Two parts of one module that the sides compute in another order, as far as names tell."""
    parts: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, rename in names.found.items():
        event = names.port_events.get(name)
        is_output = [site.slot for site in rename.ref] == ["out"]
        is_block = name.rpartition(".")[2].isdigit()  # blocks may be counted from the other end
        if event is None or is_block or not is_output or rename.how not in BY_NAME[1:]:
            continue
        if rename.ref[0] in names.reference_events and event.kind == "activation":
            parts[module_of(name), module_of(rename.ref[0].name)].append(name)
    weights = names.port.weights(), names.reference.weights()
    modules = (_modules(weights[0]), _modules(weights[1])) if all(weights) else None
    for inside in parts.values():
        inside.sort(key=lambda name: names.port_events[name].i)
        for pair in combinations(inside, 2):
            crossed = _Crossed(names, modules, pair)
            first, second = crossed.reference
            if second.i < first.i and all(
                names.is_possible(name, (other.site,))
                for name, other in zip(pair, (second, first), strict=True)
            ):
                yield crossed


def _modules(weights: Mapping[str, WeightInfo] | None) -> set[str]:
    """The modules that have parameters of their own."""
    return {_path(module_of(name)) for name in weights or ()}


def _path(name: str) -> str:
    """A name without its component."""
    return name.rpartition("/")[2]
