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
ALIKE = 4  # pairs that make a rule where only one block has any: block 0 is block 0
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
            for key, number in spots(name):
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
        for key, number in spots(name):
            if key in self.rules:
                target, count = self.rules[key]
                support[target.at(number)] = max(support[target.at(number)], count)
        return _winner(support)[0]


class Scopes:
    """What stands before names that end alike: `clip_l/transformer.` is `text_encoder/`."""

    def __init__(self, pairs: Mapping[str, Refs]) -> None:
        votes: dict[str, Counter[str]] = defaultdict(Counter)
        for name, refs in pairs.items():
            head, ref_head = _heads(name, refs[0]) if len(refs) == 1 else (name, name)
            if head != ref_head:
                votes[head][ref_head] += 1
        winners = ((head, _winner(found)) for head, found in votes.items())
        self.rules = {head: won for head, (won, count) in winners if won and count >= SUPPORT}

    def predict(self, name: str) -> str | None:
        """The reference's name, by the longest beginning that is known."""
        known = [head for head in self.rules if name.startswith(head)]
        head = max(known, key=len, default=None)
        return None if head is None else self.rules[head] + name[len(head) :]


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
        self.numbers: dict[str, set[int]] = {}
        for prefix, found in votes.items():
            several = {
                target: count
                for target, count in found.items()
                if len(numbers[prefix, target]) >= SUPPORT or (target.shift == 0 and count >= ALIKE)
            }
            target, count = _winner(Counter(several))
            if target is not None and count >= SHARE * total[prefix]:
                self.rules[prefix], self.numbers[prefix] = target, numbers[prefix, target]

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

    def carry(self, name: str, pairs: Mapping[str, Refs]) -> Refs | None:
        """What a name is in another block, told of its own; None where blocks disagree."""
        found: Counter[Refs] = Counter()
        for prefix, number in _prefixes(name):
            target = self.rules.get(prefix)
            rest = name[len(_fill(prefix, number)) :]
            for other in self.numbers.get(prefix, ()):
                refs = pairs.get(_fill(prefix, other) + rest)
                if target is None or other == number or not refs:
                    continue
                there, here = target.at(other)[0], target.at(number)[0]
                if all(_begins(ref, there) for ref in refs):
                    found[tuple(here + ref[len(there) :] for ref in refs)] += 1
        return _winner(found)[0]

    def same(self, name: str, ref: str) -> bool:
        """Whether a value in a known block has its counterpart inside that block's."""
        wanted = self.place(name)
        starts = {_fill(prefix, number) for prefix, number in _prefixes(ref)}
        return wanted is None or set(wanted) <= starts


def _targets(refs: Refs, number: int) -> Iterator[_Target]:
    """Every way to read one of the numbers of `refs` as the port's."""
    for places in zip(*(spots(ref) for ref in refs), strict=False):
        if len({theirs for _, theirs in places}) == 1:
            yield _Target(tuple(key for key, _ in places), places[0][1] - number)


def _heads(name: str, ref: str) -> tuple[str, str]:
    """Two names without the whole words at their ends that are the same."""
    same = 0
    for a, b in zip(reversed(name), reversed(ref), strict=False):
        if a != b:
            break
        same += 1
    while same and not all((each[-same - 1 : -same] or "/") in "/." for each in (name, ref)):
        same -= 1
    return (name[:-same], ref[:-same]) if same else (name, ref)


def spots(name: str) -> list[tuple[str, int]]:
    """A name with one of its numbers left open, for each of them."""
    return [
        (f"{name[: found.start()]}{SPOT}{name[found.end() :]}", int(found[0]))
        for found in re.finditer(r"\d+", name)
    ]


def _prefixes(name: str) -> list[tuple[str, int]]:
    """The beginnings of a name up to each of its numbers that stands for a block."""
    return [
        (name[: found.start()] + SPOT, int(found[0]))
        for found in re.finditer(r"\d+(?=[ ._/\[\]]|$)", name)
    ]


def _begins(name: str, start: str) -> bool:
    """Whether a name begins so, with a whole word: block 1 is not block 10."""
    return name.startswith(start) and not name[len(start) : len(start) + 1].isdigit()


def _fill(prefix: str, number: int) -> str:
    return prefix.replace(SPOT, str(number))


def _winner(found: Counter[Choice]) -> tuple[Choice | None, int]:
    """The choice that has at least twice the votes of the next; None when there is none."""
    first, second = [*found.most_common(2), (None, 0), (None, 0)][:2]
    return (first[0], first[1]) if first[1] >= 2 * second[1] else (None, 0)
