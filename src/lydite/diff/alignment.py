"""Names that share nothing: paired by order, shape and content."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from math import inf, prod

import numpy as np

from lydite.diff.axes import best_fit, possible_fits
from lydite.diff.names import close_stats, tokens
from lydite.trace.events import Event
from lydite.trace.store import Trace

CLOSE = 0.3  # relative error below which content speaks for a pair
ENOUGH = 1.2  # score from which two names are taken for one place
MOST_VALUES = 2**22  # larger values are judged by their statistics alone


def align(
    reference: Trace, port: Trace, free: Sequence[str], left: Sequence[str]
) -> dict[str, str]:
    """Port name -> reference name, both in order of execution, by the best total score."""
    theirs, ours = _first_events(reference, free), _first_events(port, left)
    free = [name for name in free if name in theirs]
    left = [name for name in left if name in ours]
    scores = np.zeros((len(left), len(free)))
    by_size: dict[int, list[int]] = defaultdict(list)
    for column, name in enumerate(free):
        by_size[prod(theirs[name].shape)].append(column)
    for row, name in enumerate(left):
        for column in by_size[prod(ours[name].shape)]:
            score = _score(reference, theirs[free[column]], port, ours[name])
            scores[row, column] = score if score >= ENOUGH else 0.0
    return {left[row]: free[column] for row, column in _best_path(scores)}


def joined_parts(
    reference: Trace, port: Trace, free: Sequence[str], left: Sequence[str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Port names whose value is two or three of the reference's side by side: fused qkv."""
    theirs, ours = _first_events(reference, free), _first_events(port, left)
    taken: set[str] = set()
    for name, event in ours.items():
        for parts in _neighbours(theirs, event, taken):
            if not (port.has_values(event) and all(reference.has_values(theirs[p]) for p in parts)):
                continue
            joined = np.concatenate([reference.read(theirs[part]) for part in parts], axis=-1)
            _, error = best_fit(possible_fits(event.shape, joined.shape), port.read(event), joined)
            if error < CLOSE:
                taken.update(parts)
                yield name, parts
                break


def _neighbours(
    theirs: dict[str, Event], event: Event, taken: set[str]
) -> Iterator[tuple[str, ...]]:
    """Runs of sibling reference values that together have the size of `event`."""
    siblings: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, other in theirs.items():
        if name not in taken and other.shape:
            siblings[tokens(name)[:-1]].append(name)
    for group in siblings.values():
        for count in (3, 2):
            for start in range(len(group) - count + 1):
                parts = tuple(group[start : start + count])
                shapes = {theirs[part].shape[:-1] for part in parts}
                if len(shapes) == 1 and sum(prod(theirs[p].shape) for p in parts) == prod(
                    event.shape
                ):
                    yield parts


def _score(reference: Trace, theirs: Event, port: Trace, ours: Event) -> float:
    """How much speaks for two events being one place; 1.2 is enough."""
    fits = possible_fits(ours.shape, theirs.shape)
    if not fits or theirs.kind != ours.kind:
        return -inf
    score = _similarity(theirs.name, ours.name) + _numbers(theirs.name, ours.name)
    same = theirs.stats and ours.stats and close_stats(ours.stats, theirs.stats, 0.05)
    if same or score > 0.5:
        small = prod(ours.shape) <= MOST_VALUES
        if small and reference.has_values(theirs) and port.has_values(ours):
            _, error = best_fit(fits, port.read(ours), reference.read(theirs))
            score += 3 * (1 - error) if error < CLOSE else 0.0
        elif same:
            score += 1.0
    return score


def _best_path(scores: np.ndarray) -> list[tuple[int, int]]:
    """The pairs of rows and columns, in order on both sides, with the largest total."""
    rows, columns = scores.shape
    total = np.zeros((rows + 1, columns + 1))
    for row in range(rows):
        diagonal = total[row, :-1] + scores[row]
        best = np.maximum(total[row, 1:], np.where(scores[row] > 0, diagonal, 0.0))
        total[row + 1, 1:] = np.maximum.accumulate(best)
    path: list[tuple[int, int]] = []
    row, column = rows, columns
    while row and column:
        if total[row, column] == total[row - 1, column]:
            row -= 1
        elif total[row, column] == total[row, column - 1]:
            column -= 1
        else:
            row, column = row - 1, column - 1
            path.append((row, column))
    return path[::-1]


@lru_cache(maxsize=100_000)
def _similarity(a: str, b: str) -> float:
    """From 0 to 1: how alike two names are, with their last part counting most."""
    ours, theirs = tokens(a), tokens(b)
    whole = SequenceMatcher(None, " ".join(ours), " ".join(theirs), autojunk=False).ratio()
    last = SequenceMatcher(None, ours[-1], theirs[-1], autojunk=False).ratio()
    return (whole + last) / 2


def _numbers(a: str, b: str) -> float:
    """Block numbers that agree speak for a pair, others against it."""
    ours, theirs = re.findall(r"\d+", a), re.findall(r"\d+", b)
    if not ours or not theirs:
        return 0.0
    return 0.5 if ours == theirs else -0.5


def _first_events(trace: Trace, names: Sequence[str]) -> dict[str, Event]:
    """The first output of each name."""
    wanted, found = set(names), {}
    for event in trace.events:
        if event.name in wanted and event.port == "out":
            found.setdefault(event.name, event)
    return {name: found[name] for name in names if name in found}
