"""Names that repeat with a number: what is paired in some blocks is paired in all of them.

A rule is, for example, that `joint_blocks.{i}.mlp.fc1` of the port is `blocks.{i}.ff.net.0` of the
reference. It is learned from pairs that were found otherwise, and holds where at least two agree.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from lydite.trace.events import Site

Sites = tuple[Site, ...]
Choice = TypeVar("Choice")
NUMBER = "\0"  # stands for the number in a template
MIN_SUPPORT = 2  # examples with different numbers that make a rule
MIN_SUPPORT_OF_ONE = 2  # pairs that make a rule where only one block has any: block 0 is block 0
NAMES_AT_ONCE = 1 << 14  # of two traces; each is asked for many times
MIN_SHARE = 0.9  # of the pairs in numbered blocks that have to agree on which block is which


@dataclass(frozen=True)
class _Target:
    """What a template of the port becomes: the reference's templates, and a shift of the number."""

    templates: Sites
    shift: int

    def at(self, number: int) -> Sites:
        filled = str(number + self.shift)
        return tuple(Site(t.name.replace(NUMBER, filled), t.slot) for t in self.templates)


class SiblingRules:
    """Rules learned from pairs, port name → reference sites."""

    def __init__(self, pairs: Mapping[str, Sites]) -> None:
        votes: dict[str, Counter[_Target]] = defaultdict(Counter)
        back: dict[_Target, Counter[str]] = defaultdict(Counter)
        for name, refs in pairs.items():
            for template, number in numbered_variants(name):
                for target in _targets(refs, number):
                    votes[template][target] += 1
                    back[target][template] += 1
        self.rules = {
            template: (target, count)
            for template, counts in votes.items()
            for target, count in [_winner(counts)]
            if target is not None and count >= MIN_SUPPORT and _winner(back[target])[0] == template
        }

    def predict(self, name: str) -> Sites | None:
        """The counterpart by the name's siblings; None where there is no rule, or they disagree."""
        support: Counter[Sites] = Counter()
        for template, number in numbered_variants(name):
            if template in self.rules:
                target, count = self.rules[template]
                support[target.at(number)] = max(support[target.at(number)], count)
        return _winner(support)[0]


class ScopeRules:
    """What begins names that end alike: `clip_l/transformer.` is `text_encoder/`."""

    def __init__(self, pairs: Mapping[str, Sites]) -> None:
        votes: dict[str, Counter[str]] = defaultdict(Counter)
        for name, refs in pairs.items():
            if len(refs) == 1 and refs[0].slot == "out":
                head, reference_head = _different_heads(name, refs[0].name)
                if head != reference_head:
                    votes[head][reference_head] += 1
        winners = ((head, _winner(counts)) for head, counts in votes.items())
        self.rules = {head: won for head, (won, count) in winners if won and count >= MIN_SUPPORT}

    def predict(self, name: str) -> Site | None:
        """The reference's name, from the longest known beginning."""
        known = [head for head in self.rules if name.startswith(head)]
        head = max(known, key=len, default=None)
        return None if head is None else Site(self.rules[head] + name[len(head) :])


class LastWords:
    """How the last words of names translate: `gn1` is `norm1`, `qkv` is `to_q`, `to_k`, `to_v`."""

    def __init__(self, pairs: Mapping[str, Sites]) -> None:
        votes: dict[str, Counter[Sites]] = defaultdict(Counter)
        for name, refs in pairs.items():
            for words in _endings(name):
                votes[words][_last_words(refs)] += 1
        winners = ((word, _winner(counts)[0]) for word, counts in votes.items())
        self.rules = {word: won for word, won in winners if won}

    def counterparts(self, name: str, sites: Collection[Site]) -> list[Sites]:
        """The sites of one place each that end as the counterpart of this name should."""
        wanted = next((self.rules[w] for w in _endings(name) if w in self.rules), ())
        starts = {
            site.name.removesuffix(wanted[0].name): None
            for site in sites
            if wanted and _last_words((site,)) == wanted[:1]
        }
        places = (tuple(Site(start + w.name, w.slot) for w in wanted) for start in starts)
        different = (place for place in places if len(set(place)) == len(place))
        return [place for place in different if all(site in sites for site in place)]


class BlockMap:
    """Which numbered block of the port is which of the reference, by the pairs so far."""

    def __init__(self, pairs: Mapping[str, Sites]) -> None:
        votes: dict[str, Counter[tuple[str, int]]] = defaultdict(Counter)  # (prefix, shift)
        numbers: dict[tuple[str, str, int], set[int]] = defaultdict(set)
        total: Counter[str] = Counter()
        for name, refs in pairs.items():
            for prefix, number in _block_prefixes(name):
                total[prefix] += 1
                for other, reference_number in _block_prefixes(refs[0].name):
                    shift = reference_number - number
                    votes[prefix][other, shift] += 1
                    numbers[prefix, other, shift].add(number)
        self.rules: dict[str, _Target] = {}
        self.numbers: dict[str, set[int]] = {}
        for prefix, counts in votes.items():
            supported = {
                (other, shift): count
                for (other, shift), count in counts.items()
                if len(numbers[prefix, other, shift]) >= MIN_SUPPORT
                or (shift == 0 and count >= MIN_SUPPORT_OF_ONE)
            }
            won, count = _winner(Counter(supported))
            if won is not None and count >= MIN_SHARE * total[prefix]:
                other, shift = won
                self.rules[prefix] = _Target((Site(other),), shift)
                self.numbers[prefix] = numbers[prefix, other, shift]

    def allows(self, name: str, reference_name: str) -> bool:
        """Whether a pair respects the blocks: never block 4 with block 5."""
        reference_numbers = dict(_block_prefixes(reference_name))
        for prefix, number in _block_prefixes(name):
            if target := self.rules.get(prefix):
                expected = number + target.shift
                if reference_numbers.get(target.templates[0].name, expected) != expected:
                    return False
        return True

    def knows(self, name: str) -> bool:
        """Whether the reference's block of this name is known."""
        return any(prefix in self.rules for prefix, _ in _block_prefixes(name))

    def same_block(self, name: str, reference_name: str) -> bool:
        """Whether a counterpart lies in the reference's block of this name, if that is known."""
        expected = {
            self.rules[prefix].at(number)[0].name
            for prefix, number in _block_prefixes(name)
            if prefix in self.rules
        }
        blocks = {_fill(prefix, number) for prefix, number in _block_prefixes(reference_name)}
        return expected <= blocks

    def from_other_blocks(
        self,
        name: str,
        pairs: Mapping[str, Sites],
        counts: Callable[[str], bool] = lambda _: True,
    ) -> Sites | None:
        """The counterpart that the name has in other blocks, moved to its own block.

        Of the names in other blocks only those that count.
        """
        support: Counter[Sites] = Counter()
        for prefix, number in _block_prefixes(name):
            target = self.rules.get(prefix)
            rest = name[len(_fill(prefix, number)) :]
            for other in self.numbers.get(prefix, ()):
                sibling = _fill(prefix, other) + rest
                refs = pairs.get(sibling)
                if target is None or other == number or not refs or not counts(sibling):
                    continue
                there, here = target.at(other)[0].name, target.at(number)[0].name
                if all(_begins_with(ref.name, there) for ref in refs):
                    moved = (Site(here + ref.name[len(there) :], ref.slot) for ref in refs)
                    support[tuple(moved)] += 1
        return _winner(support)[0]


@lru_cache(NAMES_AT_ONCE)
def numbered_variants(name: str) -> tuple[tuple[str, int], ...]:
    """The templates of a name: for each of its numbers, the name with that number left open."""
    return tuple(
        (f"{name[: match.start()]}{NUMBER}{name[match.end() :]}", int(match[0]))
        for match in re.finditer(r"\d+", name)
    )


def last_word(name: str) -> str:
    """What follows the last number of a block, or the last word; nothing where a name ends in one.

    `level.2.unit.0.gn1` ends in `gn1`, `blocks.3.attn.to_q` in `attn.to_q`.
    """
    numbers = [match.end() for match in re.finditer(r"(?<![^._/])\d+(?:[._/]|$)", name)]
    return name[numbers[-1] :] if numbers else re.split(r"[./]", name)[-1]


def _endings(name: str) -> list[str]:
    """The last words of a name, the most first: a block may have no number, or one in a word."""
    words = re.split(r"([./])", last_word(name) if re.search(r"\d", name) else name)
    return ["".join(words[n:]) for n in range(0, len(words), 2)]


def _last_words(refs: Sites) -> Sites:
    return tuple(Site(last_word(ref.name), ref.slot) for ref in refs)


def _targets(refs: Sites, number: int) -> Iterator[_Target]:
    """Every way to read one of the numbers of `refs` as the port's."""
    variants = (
        [(Site(t, ref.slot), value) for t, value in numbered_variants(ref.name)] for ref in refs
    )
    for row in zip(*variants, strict=False):
        if len({value for _, value in row}) == 1:
            yield _Target(tuple(template for template, _ in row), row[0][1] - number)


def _different_heads(name: str, reference_name: str) -> tuple[str, str]:
    """Two names without the whole words at their ends that are the same."""
    same = 0
    for a, b in zip(reversed(name), reversed(reference_name), strict=False):
        if a != b:
            break
        same += 1
    names = (name, reference_name)
    while same and not all((text[-same - 1 : -same] or "/") in "/." for text in names):
        same -= 1
    return (name[:-same], reference_name[:-same]) if same else names


@lru_cache(NAMES_AT_ONCE)
def _block_prefixes(name: str) -> tuple[tuple[str, int], ...]:
    """The beginnings of a name up to each of its numbers that can number a block."""
    return tuple(
        (name[: match.start()] + NUMBER, int(match[0]))
        for match in re.finditer(r"\d+(?=[ ._/\[\]]|$)", name)
    )


def _begins_with(name: str, start: str) -> bool:
    """Whether a name begins with a whole word: block 1 is not block 10."""
    return name.startswith(start) and not name[len(start) : len(start) + 1].isdigit()


def _fill(prefix: str, number: int) -> str:
    return prefix.replace(NUMBER, str(number))


def _winner(counts: Counter[Choice]) -> tuple[Choice | None, int]:
    """The choice with at least twice the votes of the next; None when there is none."""
    first, second = [*counts.most_common(2), (None, 0), (None, 0)][:2]
    return (first[0], first[1]) if first[1] >= 2 * second[1] else (None, 0)
