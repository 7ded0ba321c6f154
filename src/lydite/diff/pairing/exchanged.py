"""Modules whose parameters were exchanged when they were loaded.

A module of the port is paired with the module of the reference that has its parameters. Where two
of a block have each other's parameters, or two blocks do, the names in the other blocks show it:
then the exchange is the bug, and both modules give wrong values.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import pairwise

from lydite.diff.pairing.blocks import NUMBER, numbered_variants
from lydite.diff.pairing.similarity import name_similarity

FEWEST_BLOCKS = 3  # that show an order: two that are exchanged may be counted from the other end


Places = tuple[Mapping[str, int], Mapping[str, int]]  # when modules of port and reference ran


def without_exchanges(modules: Mapping[str, str], places: Places = ({}, {})) -> dict[str, str]:
    """Port module → reference module, as it would be if nothing had been exchanged."""
    return _inside_of_blocks(_blocks_in_order(modules, places), places)


def _blocks_in_order(modules: Mapping[str, str], places: Places) -> dict[str, str]:
    """Blocks in the reference's order, where theirs is another.

    That is the order in which they run; where it is not known that of their numbers, or its
    reverse.
    """
    groups: dict[tuple[str, str], list[tuple[int, int, str]]] = defaultdict(list)
    for name, target in modules.items():
        for template, number in numbered_variants(name):
            for other, reference_number in numbered_variants(target):
                groups[template, other].append((number, reference_number, name))
    result = dict(modules)
    for (_, other), members in groups.items():
        members.sort()
        names, numbers = [name for *_, name in members], [number for _, number, _ in members]
        targets = {number: other.replace(NUMBER, str(number)) for number in numbers}
        if len(targets) < len(members):
            continue
        own, right = places
        if all(n in own for n in names) and all(t in right for t in targets.values()):
            names.sort(key=lambda name: own[name])
            wanted = sorted(targets, key=lambda number: right[targets[number]])
        elif len(members) >= FEWEST_BLOCKS and len({b > a for a, b in pairwise(numbers)}) > 1:
            wanted = sorted(numbers)
        else:
            continue
        result |= {name: targets[number] for name, number in zip(names, wanted, strict=True)}
    return result if len({*result.values()}) == len({*modules.values()}) else dict(modules)


def _inside_of_blocks(modules: Mapping[str, str], places: Places) -> dict[str, str]:
    """Two modules of a block in the order that they have in most blocks, or by their names.

    Of two blocks the one is right in which they run in the reference's order.
    """
    own_places, right_places = places

    def in_order(*pairs: tuple[str, str]) -> bool:
        runs = [(own_places.get(a, 0), right_places.get(b, 0)) for a, b in pairs]
        return (runs[0][0] - runs[1][0]) * (runs[0][1] - runs[1][1]) > 0

    votes: dict[str, Counter[str]] = defaultdict(Counter)
    for name, target in modules.items():
        for template, _ in numbered_variants(name):
            votes[template].update(other for other, _ in numbered_variants(target))
    result = dict(modules)
    holders = {target: name for name, target in modules.items()}
    for name, target in modules.items():
        for template, number in numbered_variants(name):
            for own, reference_number in numbered_variants(target):
                for other in votes[template]:
                    wanted = other.replace(NUMBER, str(reference_number))
                    rival = holders.get(wanted, name)
                    block = template.partition(NUMBER)[0]
                    rivals = [
                        t
                        for t, n in numbered_variants(rival)
                        if n == number and t.partition(NUMBER)[0] == block
                    ]
                    if rival == name or not rivals or result[name] != target:
                        continue
                    straight = votes[template][other] + votes[rivals[0]][own]
                    crossed = votes[template][own] + votes[rivals[0]][other]
                    chosen = (name, wanted), (rival, target)
                    loaded = (name, target), (rival, wanted)
                    if (straight, in_order(*chosen), _likeness(*chosen[0], *chosen[1])) > (
                        crossed,
                        in_order(*loaded),
                        _likeness(*loaded[0], *loaded[1]),
                    ) and votes[rivals[0]][own]:
                        result[name], result[rival] = wanted, target
    return result


def _likeness(a: str, target: str, b: str, other: str) -> float:
    return name_similarity(a, target) + name_similarity(b, other)
