"""Which parameter of the port belongs to which of the reference.

By the user's map, by name, by equal values under any name; then parameters that are several of the
other side's in one. Blocks that are counted otherwise are no difference: then every parameter of a
block equals that of another one.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt

from lydite.diff.name_map import Rename
from lydite.diff.pairing.name_matching import (
    close_stats,
    match_spelling,
    match_weights,
    module_of,
    same_values,
    tokens,
)
from lydite.trace.events import Stats, WeightInfo

Weights = Mapping[str, WeightInfo]


@dataclass(frozen=True)
class ParameterPairs:
    """Port parameter → reference parameter, and how many are several of the other side's in one."""

    pairs: dict[str, str]
    fused: int  # parameters of the port that are several of the reference's, or parts of one


def pair_parameters(
    port: Weights, reference: Weights, renames: Mapping[str, Rename]
) -> ParameterPairs:
    """Pair the parameters of two models; those that nothing pairs are left out."""
    pairs = dict(_by_map(port, reference, renames))
    left, free = _left(port, pairs), _left(reference, pairs.values())
    named = match_spelling(left, free)
    equal = match_weights(port, reference)
    pairs |= _renumbered(_without_other_modules(named, equal), equal, port, reference)
    left, free = _left(port, pairs), _left(reference, pairs.values())
    pairs |= match_weights(left, free)
    left, free = _left(port, pairs), _left(reference, pairs.values())
    fused = sum(1 for _ in _fused(left, free)) + sum(count for count in _fused(free, left))
    return ParameterPairs(pairs, fused)


def _left(weights: Weights, taken: Iterable[str]) -> dict[str, WeightInfo]:
    names = set(taken)
    return {name: info for name, info in weights.items() if name not in names}


def _by_map(
    port: Weights, reference: Weights, renames: Mapping[str, Rename]
) -> Iterator[tuple[str, str]]:
    """Parameters of modules that the user's map names."""
    modules = {
        path: rename.ref[0].name
        for name, rename in renames.items()
        if rename.how == "map" and len(rename.ref) == 1
        for path in (name, name.rpartition("/")[2])
    }
    for name in port:
        target = modules.get(module_of(name)) or modules.get(module_of(name).rpartition("/")[2])
        if target is None:
            continue
        own = name[len(module_of(name)) + 1 :]
        for path in (target, target.partition("/")[2]):
            if f"{path}.{own}" in reference:
                yield name, f"{path}.{own}"
                break


def _without_other_modules(named: Mapping[str, str], equal: Mapping[str, str]) -> dict[str, str]:
    """Pairs by name, without those where the name is that of another parameter in the port.

    The port has the value of that name under another name, and so on, up to a name that the
    reference has not: then nothing was exchanged.
    """
    holders = {target: name for name, target in equal.items()}

    def is_renamed(name: str) -> bool:
        passed = {name}
        while (holder := holders.get(named[name])) is not None:
            if holder not in named:
                return True
            if holder in passed:
                return False
            passed.add(holder)
            name = holder
        return False

    return {
        name: target
        for name, target in named.items()
        if equal.get(name, target) == target or not is_renamed(name)
    }


def _renumbered(
    named: Mapping[str, str], equal: Mapping[str, str], port: Weights, reference: Weights
) -> dict[str, str]:
    """Pairs by name, with the blocks counted as the values show it.

    A block of the port is another block of the reference when all its parameters whose values
    decide it say so; a parameter that alone equals another block's was exchanged, which is a bug.
    """
    votes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name, target in named.items():
        found = equal.get(name)
        if found is None and not same_values(port[name], reference[target]):
            continue
        for (before, number), other in zip(_blocks(target), _blocks(found or target), strict=False):
            votes[before, number].add(other[1] if other[0] == before else "")
    result: dict[str, str] = {}
    for name, target in named.items():
        moved = target
        for before, number in reversed(_blocks(target)):
            numbers = votes.get((before, number), set())
            if len(numbers) == 1 and "" not in numbers:
                start = len(before)
                moved = moved[:start] + next(iter(numbers)) + moved[start + len(number) :]
        result[name] = moved if moved in reference else target
    return result if len(set(result.values())) == len(result) else dict(named)


def _blocks(name: str) -> list[tuple[str, str]]:
    """What comes before each number of a name, and the number."""
    return [(name[: match.start()], match[0]) for match in re.finditer(r"\d+", name)]


def _fused(whole: Weights, parts: Weights) -> Iterator[int]:
    """For each parameter that is two to four siblings of the other side in one, how many."""
    siblings: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in parts:
        siblings[(*tokens(name)[:-2], *tokens(name)[-1:])].append(name)
    for info in whole.values():
        for group in siblings.values():
            runs = (group[i : i + n] for n in (3, 2, 4) for i in range(len(group) - n + 1))
            match = next((run for run in runs if _is_together(info, run, parts)), None)
            if match is not None:
                yield len(match)
                break


def _is_together(whole: WeightInfo, names: list[str], parts: Weights) -> bool:
    """Whether a parameter has the count, range and moments of these together."""
    stats = [parts[name].stats for name in names]
    known = [s for s in stats if s is not None and s.rms is not None and s.mean is not None]
    if whole.stats is None or len(known) != len(names):
        return False
    count = sum(s.count for s in known)
    if count != whole.stats.count or not count:
        return False
    together = Stats(
        count,
        min(s.min or 0.0 for s in known),
        max(s.max or 0.0 for s in known),
        sum(s.count * (s.mean or 0.0) for s in known) / count,
        rms=sqrt(sum(s.count * (s.rms or 0.0) ** 2 for s in known) / count),
    )
    exact = whole.dtype == parts[names[0]].dtype
    return close_stats(whole.stats, together, 1e-5 if exact else 1e-2)
