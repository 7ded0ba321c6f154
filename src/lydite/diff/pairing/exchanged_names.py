"""Parts of one module that have each other's names in the port.

Two repositories may count the norms of a block in another order. A port that computes one of two
parts first, which is the reference's second by name, may have exchanged the names, or the values.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import prod

from lydite.diff.data_flow import DataFlow
from lydite.diff.pairing.blocks import NUMBER
from lydite.diff.pairing.name_matching import close_stats, module_of
from lydite.diff.pairing.pair_names import NamePairs
from lydite.diff.pairing.paired_events import BY_NAME
from lydite.trace.events import Event, WeightInfo

SIMILAR = 0.05  # relative difference of the statistics of two values that may be equal


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


@dataclass(frozen=True)
class _Crossed:
    """Two parts of one module of the port, in its order, and their counterparts by name."""

    pairs: NamePairs
    flow: DataFlow
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
        results = self.flow.results(self.reference[1])
        later = [e for e in self.pairs.port_events.values() if e.i > self.port[0].i]
        return any(
            self._may_be_equal(result, event)
            and self.pairs.comparer.are_equal([result], [event]) is True
            for result in results
            for event in later
        )

    def _may_be_equal(self, reference: Event, port: Event) -> bool:
        comparer = self.pairs.comparer
        if prod(reference.shape) != prod(port.shape):
            return False
        a, b = comparer.port.stats(port), comparer.reference.stats(reference)
        return a is not None and b is not None and close_stats(a, b, SIMILAR)


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
    flow = DataFlow(names.reference)
    weights = names.port.weights(), names.reference.weights()
    modules = (_modules(weights[0]), _modules(weights[1])) if all(weights) else None
    for inside in parts.values():
        inside.sort(key=lambda name: names.port_events[name].i)
        for pair in combinations(inside, 2):
            crossed = _Crossed(names, flow, modules, pair)
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
