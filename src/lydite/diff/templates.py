"""Names that repeat with a number: what pairs in some blocks pairs in all of them.

A rule says that `joint_blocks.{i}.mlp.fc1` of the port is `blocks.{i}.ff.net.0` of the reference.
It is learnt from pairs that were found otherwise, and holds where two of them or more agree.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

Refs = tuple[str, ...]
Choice = TypeVar("Choice")
SPOT = "\0"  # where the number of a template stands
SUPPORT = 2  # examples with different numbers that make a rule
SHARE = 0.9  # of the pairs in numbered blocks that have to agree on which block is which


@dataclass(frozen=True)
class _Target:
    """What a template of the port becomes: the reference's, and a shift of the number."""

    keys: Refs
    shift: int

    def at(self, number: int) -> Refs:
        return tuple(key.replace(SPOT, str(number + self.shift)) for key in self.keys)


class Templates:
    """Rules learnt from pairs, port name -> reference names."""

    def __init__(self, pairs: Mapping[str, Refs]) -> None:
        votes: dict[str, Counter[_Target]] = defaultdict(Counter)
        back: dict[_Target, Counter[str]] = defaultdict(Counter)
        for name, refs in pairs.items():
            for key, number in _spots(name):
                for target in _targets(refs, number):
                    votes[key][target] += 1
                    back[target][key] += 1
        self.rules = {
            key: (target, count)
            for key, found in votes.items()
            for target, count in [_winner(found)]
            if target is not None and count >= SUPPORT and _winner(back[target])[0] == key
        }

    def predict(self, name: str) -> Refs | None:
        """What a name should be by its siblings; None where they say nothing or disagree."""
        support: Counter[Refs] = Counter()
        for key, number in _spots(name):
            if key in self.rules:
                target, count = self.rules[key]
                support[target.at(number)] = max(support[target.at(number)], count)
        return _winner(support)[0]


class Blocks:
    """Which numbered block of the port is which of the reference, as the pairs so far have it."""

    def __init__(self, pairs: Mapping[str, Refs]) -> None:
        votes: dict[str, Counter[_Target]] = defaultdict(Counter)
        numbers: dict[tuple[str, _Target], set[int]] = defaultdict(set)
        total: Counter[str] = Counter()
        for name, refs in pairs.items():
            for prefix, number in _prefixes(name):
                total[prefix] += 1
                for other, theirs in _prefixes(refs[0]):
                    target = _Target((other,), theirs - number)
                    votes[prefix][target] += 1
                    numbers[prefix, target].add(number)
        self.rules: dict[str, _Target] = {}
        for prefix, found in votes.items():
            target, count = _winner(found)
            if target is None or count < SHARE * total[prefix]:
                continue
            if len(numbers[prefix, target]) >= SUPPORT:
                self.rules[prefix] = target

    def allow(self, name: str, ref: str) -> bool:
        """Whether a pair keeps to the blocks: never block 4 with block 5."""
        theirs = dict(_prefixes(ref))
        for prefix, number in _prefixes(name):
            target = self.rules.get(prefix)
            if (
                target
                and theirs.get(target.keys[0], number + target.shift) != number + target.shift
            ):
                return False
        return True

    def place(self, name: str) -> Refs | None:
        """The beginnings that a counterpart has to have; None where no block is known."""
        found = tuple(
            self.rules[prefix].at(number)[0]
            for prefix, number in _prefixes(name)
            if prefix in self.rules
        )
        return found or None

    def same(self, name: str, ref: str) -> bool:
        """Whether a value in a known block has its counterpart inside that block's."""
        wanted = self.place(name)
        starts = {_fill(prefix, number) for prefix, number in _prefixes(ref)}
        return wanted is None or set(wanted) <= starts


def _targets(refs: Refs, number: int) -> Iterator[_Target]:
    """Every way to read one of the numbers of `refs` as the port's."""
    for spots in zip(*(_spots(ref) for ref in refs), strict=False):
        if len({theirs for _, theirs in spots}) == 1:
            yield _Target(tuple(key for key, _ in spots), spots[0][1] - number)


def _spots(name: str) -> list[tuple[str, int]]:
    """A name with one of its numbers left open, for each of them."""
    return [
        (f"{name[: found.start()]}{SPOT}{name[found.end() :]}", int(found[0]))
        for found in re.finditer(r"\d+", name)
    ]


def _prefixes(name: str) -> list[tuple[str, int]]:
    """The beginnings of a name up to each of its numbers that stands for a block."""
    return [
        (name[: found.start()] + SPOT, int(found[0]))
        for found in re.finditer(r"\d+(?=[._/\[\]]|$)", name)
    ]


def _fill(prefix: str, number: int) -> str:
    return prefix.replace(SPOT, str(number))


def _winner(found: Counter[Choice]) -> tuple[Choice | None, int]:
    """The choice that has more than twice the votes of the next; None when there is none."""
    first, second = [*found.most_common(2), (None, 0), (None, 0)][:2]
    return (first[0], first[1]) if first[1] > 2 * second[1] or not second[1] else (None, 0)
