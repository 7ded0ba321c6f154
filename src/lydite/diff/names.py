"""Names of the two sides brought together: spelling, scopes, parameters that are equal."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from lydite.trace.events import Stats, WeightInfo

Tokens = tuple[str, ...]


def tokens(name: str) -> Tokens:
    """A name without its spelling: `Blocks/2.attn` and `blocks.2.attn` are one."""
    return tuple(part for part in re.split(r"[/.:\[\]\s]+", name.lower()) if part)


def match_spelling(port: Iterable[str], reference: Iterable[str]) -> dict[str, str]:
    """Port name -> reference name where only spelling or leading scopes differ, and uniquely."""
    port, reference = list(port), list(reference)
    found: dict[str, str] = {name: name for name in set(port) & set(reference)}
    taken = set(found.values())
    left = [name for name in port if name not in found]
    by_tail: dict[Tokens, list[str]] = defaultdict(list)
    for name in reference:
        if name not in taken:
            parts = tokens(name)
            for start in range(len(parts)):
                if _is_tail(name, parts, start):
                    by_tail[parts[start:]].append(name)
    claims: dict[str, list[str]] = defaultdict(list)
    for name in left:
        for candidate in _tails(tokens(name), by_tail):
            claims[candidate].append(name)
    chosen: dict[str, list[str]] = defaultdict(list)
    for candidate, names in claims.items():
        if len(names) == 1:
            chosen[names[0]].append(candidate)
    found |= {name: only[0] for name, only in chosen.items() if len(only) == 1}
    return found | _match_paths(set(port) - set(found), set(reference) - set(found.values()))


def _match_paths(port: Iterable[str], reference: Iterable[str]) -> dict[str, str]:
    """Names that differ in their component alone: `first_stage_model/a.b` and `vae/a.b`."""
    sides: list[dict[Tokens, list[str]]] = []
    for names in (port, reference):
        paths: dict[Tokens, list[str]] = defaultdict(list)
        for name in names:
            paths[tokens(name.rpartition("/")[2])].append(name)
        sides.append(paths)
    ours, theirs = sides
    return {
        ours[path][0]: theirs[path][0]
        for path in ours.keys() & theirs.keys()
        if len(path) > 1 and len(ours[path]) == len(theirs[path]) == 1
    }


def match_weights(
    port: Mapping[str, WeightInfo], reference: Mapping[str, WeightInfo]
) -> dict[str, str]:
    """Port parameter -> reference parameter where their values are the same in some layout.

    Range and moments do not change when axes move, so equal statistics of equal sizes are taken
    for equal parameters when nothing else has them.
    """
    buckets: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, info in reference.items():
        buckets[_size(info)].append(name)
    claims: dict[str, list[str]] = defaultdict(list)
    for name, info in port.items():
        for other in buckets[_size(info)]:
            if same_values(info, reference[other]):
                claims[name].append(other)
    taken: dict[str, int] = defaultdict(int)
    for others in claims.values():
        for other in others:
            taken[other] += 1
    return {
        name: others[0]
        for name, others in claims.items()
        if len(others) == 1 and taken[others[0]] == 1
    }


def module_renames(weights: Mapping[str, str]) -> dict[str, str]:
    """Port module -> reference module, from parameters that were matched."""
    votes: dict[str, set[str]] = defaultdict(set)
    for ours, theirs in weights.items():
        votes[_module(ours)].add(_module(theirs))
    return {ours: next(iter(theirs)) for ours, theirs in votes.items() if len(theirs) == 1}


def same_values(a: WeightInfo, b: WeightInfo) -> bool:
    """Whether two parameters hold the same values, whatever their axis order."""
    if a.hash and b.hash and a.hash == b.hash:
        return True
    if a.stats is None or b.stats is None or a.stats.rms is None or b.stats.rms is None:
        return False
    if a.stats.rms == 0.0 or a.stats.std == 0.0:
        return False  # constants tell nothing
    return close_stats(a.stats, b.stats, 1e-5 if a.dtype == b.dtype else 1e-2)


def close_stats(a: Stats, b: Stats, tolerance: float) -> bool:
    """Whether range and moments agree, relative to the size of the values."""
    if a.count != b.count or None in (a.rms, b.rms, a.mean, b.mean, a.min, b.min, a.max, b.max):
        return False
    scale = tolerance * max(abs(b.rms or 0.0), 1e-30)
    return (
        abs((a.rms or 0.0) - (b.rms or 0.0)) <= scale
        and abs((a.mean or 0.0) - (b.mean or 0.0)) <= scale
        and abs((a.min or 0.0) - (b.min or 0.0)) <= 10 * scale
        and abs((a.max or 0.0) - (b.max or 0.0)) <= 10 * scale
    )


def _is_tail(name: str, parts: Tokens, start: int) -> bool:
    """Whether what is left of a name without its beginning still names it.

    One word does when only a scope or one other word stands before it: `v` is not
    `encoder.0.attention.v`, and `noise` is `pipeline/noise`.
    """
    alone = start == len(parts) - 1
    return not alone or start <= 1 or tokens(name.rpartition("/")[2]) == parts[start:]


def _tails(parts: Tokens, by_tail: Mapping[Tokens, list[str]]) -> list[str]:
    """Reference names that end as this one does, or that this one ends in."""
    if parts in by_tail:
        return by_tail[parts]
    for start in range(1, len(parts)):
        whole = [name for name in by_tail.get(parts[start:], ()) if tokens(name) == parts[start:]]
        if whole:
            return whole
    return []


def _size(info: WeightInfo) -> tuple[int, ...]:
    return tuple(sorted(size for size in info.shape if size != 1))


def _module(parameter: str) -> str:
    return re.split(r"[./](?=[^./]*$)", parameter)[0]
