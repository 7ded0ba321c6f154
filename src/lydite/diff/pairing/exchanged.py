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


def without_exchanges(modules: Mapping[str, str]) -> dict[str, str]:
    """Port module → reference module, as it would be if nothing had been exchanged."""
    return _inside_of_blocks(_blocks_in_order(modules))


def _blocks_in_order(modules: Mapping[str, str]) -> dict[str, str]:
    """Blocks in the reference's order, where theirs is neither that nor its reverse."""
    groups: dict[tuple[str, str], list[tuple[int, int, str]]] = defaultdict(list)
    for name, target in modules.items():
        for template, number in numbered_variants(name):
            for other, reference_number in numbered_variants(target):
                groups[template, other].append((number, reference_number, name))
    result = dict(modules)
    for (_, other), members in groups.items():
        members.sort()
        numbers = [number for _, number, _ in members]
        rises = {b > a for a, b in pairwise(numbers)}
        if len(members) >= FEWEST_BLOCKS and len(rises) > 1 and len({*numbers}) == len(numbers):
            for (_, _, name), number in zip(members, sorted(numbers), strict=True):
                result[name] = other.replace(NUMBER, str(number))
    return result if len({*result.values()}) == len({*modules.values()}) else dict(modules)


def _inside_of_blocks(modules: Mapping[str, str]) -> dict[str, str]:
    """Two modules of a block in the order that they have in most blocks, or by their names."""
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
                    if (straight, _likeness(name, wanted, rival, target)) > (
                        crossed,
                        _likeness(name, target, rival, wanted),
                    ) and votes[rivals[0]][own]:
                        result[name], result[rival] = wanted, target
    return result


def _likeness(a: str, target: str, b: str, other: str) -> float:
    return name_similarity(a, target) + name_similarity(b, other)
