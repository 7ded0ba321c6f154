"""How similar two values are: by name, statistics and content."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from hashlib import blake2b
from math import inf, log10, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.measure.axes import (
    WHOLE,
    Cut,
    best_correlation,
    best_fit,
    fits_of,
    possible_fits,
)
from lydite.diff.measure.streams import Joined, joined_streams, other_orders
from lydite.diff.pairing.name_matching import close_stats, tokens
from lydite.diff.pairing.paired_events import joined_axis, same_kind
from lydite.trace.events import Event, Site, Stats
from lydite.trace.reader import Trace
from lydite.trace.statistics import measure

CLOSE = 0.3  # relative error below which content supports a pair
EQUAL = 1e-2  # relative error below which two values are equal, in any axis order
EQUAL_FINE = 1e-4  # the same in float32, where rounding is far smaller
FINE = ("", "f32", "f64")  # precisions of a run; "": no value shows it
MAX_VALUES = 2**22  # larger values are compared by their statistics only
MIN_ROWS = 8  # of a value whose rows show whether it is normed
ONE = 2e-2  # by how much a sum of bfloat16 probabilities misses one
ONE_SIZE = 0.02  # of the largest mean square of a row: by how much rows of one size differ
MAX_CACHED = 32  # values in memory while they are compared with others


class ValueReader:
    """The values and statistics of a trace, some of them cached."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.cache: dict[int, NDArray[Any]] = {}
        self.known_stats: dict[int, Stats | None] = {}
        self.normed: dict[int, bool | None] = {}
        self.probabilities: dict[int, bool] = {}

    def can_read(self, event: Event) -> bool:
        return prod(event.shape) <= MAX_VALUES and self.trace.has_values(event)

    def read(self, event: Event) -> NDArray[Any]:
        if event.i not in self.cache:
            if len(self.cache) >= MAX_CACHED:
                del self.cache[next(iter(self.cache))]
            self.cache[event.i] = self.trace.read(event)
        return self.cache[event.i]

    def stats(self, event: Event) -> Stats | None:
        """The statistics of a value; measured here where the trace has none."""
        if event.i not in self.known_stats:
            stats = event.stats
            if stats is None and self.can_read(event):
                stats = measure(self.read(event))
            self.known_stats[event.i] = stats
        return self.known_stats[event.i]

    def content(self, event: Event) -> str | None:
        """What tells values with other numbers apart; None where they were not kept."""
        if event.hash is not None or not self.can_read(event):
            return event.hash
        return blake2b(np.ascontiguousarray(self.read(event)).tobytes(), digest_size=16).hexdigest()

    def is_normed(self, event: Event) -> bool | None:
        """Whether all rows have one size, as after a norm without weights; None: not known."""
        if event.i not in self.normed:
            rows = None
            if len(event.shape) > 1 and event.shape[-1] > 1 and self.can_read(event):
                rows = self.read(event).reshape(-1, event.shape[-1])
            if rows is None or len(rows) < MIN_ROWS or rows.dtype.kind != "f":
                self.normed[event.i] = None
            else:
                sizes = np.square(rows.astype(np.float64)).mean(-1)
                self.normed[event.i] = bool(np.ptp(sizes) < ONE_SIZE * sizes.max())
        return self.normed[event.i]

    def is_probability(self, event: Event) -> bool:
        """Whether no number is negative, and those along an axis add up to one or are all zero."""
        if event.i not in self.probabilities:
            self.probabilities[event.i] = self._adds_up(event)
        return self.probabilities[event.i]

    def _adds_up(self, event: Event) -> bool:
        stats = self.stats(event) if event.kind == "activation" and len(event.shape) > 2 else None
        if stats is None or stats.min is None or stats.max is None or not self.can_read(event):
            return False
        if stats.min < 0 or not 0.1 < stats.max <= 1 + ONE:
            return False
        value = self.read(event).astype(np.float32)
        sums = (value.sum(axis) for axis in (-1, -2))
        return any(((np.abs(x - 1) < ONE) | (x == 0)).all() for x in sums)


@dataclass(frozen=True)
class Comparer:
    """Compares values of two traces that may be counterparts."""

    reference: ValueReader
    port: ValueReader
    joined: Joined

    @classmethod
    def of(cls, reference: Trace, port: Trace) -> "Comparer":
        return cls(ValueReader(reference), ValueReader(port), joined_streams(reference))

    def other_orders(self, value: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """A value of the reference with its two streams of tokens exchanged."""
        return other_orders(value, self.joined)

    def score(self, reference: Event, port: Event) -> tuple[float, float]:
        """How much supports that two events are counterparts (1.2 is enough), and their error."""
        fits, cut = fits_of(port.shape, reference.shape)
        if not fits or not same_kind(reference, port):
            return -inf, inf
        score = name_similarity(reference.name, port.name)
        score += _number_agreement(reference.name, port.name)
        a, b = self.port.stats(port), self.reference.stats(reference)
        similar = a is not None and b is not None and _similar_stats(a, b, cut)
        if not similar and score <= 0.5:
            return score, inf
        if self.reference.can_read(reference) and self.port.can_read(port):
            value = self.port.read(port)
            error = min(best_fit(fits, value, part)[1] for part in self._parts(reference, cut))
            if similar and error >= CLOSE and cut == WHOLE:
                others = self.other_orders(self.reference.read(reference))
                error = min((error, *(best_fit(fits, value, other)[1] for other in others)))
            # An equal value outweighs any name, and the closer of two values a number in a name.
            digits = -log10(max(error, 1e-9))
            near = 3 * (1 - error) + min(3.0, digits / 2) + min(1.0, digits / 2)
            return score + (near if error < CLOSE else 0.0), error
        return score + (1.0 if similar and cut == WHOLE else 0.0), inf

    def same_form(self, reference: Event, port: Event) -> bool:
        """False where one value is normed or holds probabilities, and the other does not.

        A norm is one without weights. The port's probabilities may be wrong and add up to another
        number than one.
        """
        sides = (self.reference.is_normed(reference), self.port.is_normed(port))
        if None not in sides and sides[0] != sides[1]:
            return False
        return not self.port.is_probability(port) or self.reference.is_probability(reference)

    def correlation(self, reference: Event, port: Event) -> float:
        """The correlation of two values in the axis order that fits best."""
        fits, cut = fits_of(port.shape, reference.shape)
        if not fits or not (self.reference.can_read(reference) and self.port.can_read(port)):
            return 0.0
        value = self.port.read(port)
        return max(best_correlation(fits, value, part) for part in self._parts(reference, cut))

    def distance(self, reference: Event, port: Event) -> float:
        """The relative error between two values of one size; infinite where it is not known."""
        fits = possible_fits(port.shape, reference.shape)
        if not fits or not (self.reference.can_read(reference) and self.port.can_read(port)):
            return inf
        return best_fit(fits, self.port.read(port), self.reference.read(reference))[1]

    def are_equal(self, reference: Sequence[Event], port: Sequence[Event]) -> bool | None:
        """Whether values are equal up to rounding, parts concatenated; None: not known."""
        error = self.joined_error(reference, port)
        coarse = any(d not in FINE for d in (self.port.trace.dtype, *(e.dtype for e in port)))
        return None if error is None else error < (EQUAL if coarse else EQUAL_FINE)

    def joined_error(self, reference: Sequence[Event], port: Sequence[Event]) -> float | None:
        """The relative error between values of one size, parts concatenated; None: not known."""
        readable = all(map(self.reference.can_read, reference)) and all(
            map(self.port.can_read, port)
        )
        if not readable or 1 not in (len(reference), len(port)):
            return None
        axis = joined_axis(port[0], reference)
        expected = _concatenated([self.reference.read(event) for event in reference], axis)
        parts = [self.port.read(event) for event in port]
        fits = possible_fits(_concatenated(parts, 0).shape, expected.shape)
        if not fits:
            return None
        return min(
            best_fit(fits, _concatenated(order, 0), expected)[1] for order in (parts, parts[::-1])
        )

    def _parts(self, reference: Event, cut: Cut) -> list[NDArray[Any]]:
        value = self.reference.read(reference)
        return [value] if cut == WHOLE else np.split(value, *cut)  # one number has no axis to split


def _concatenated(parts: Sequence[NDArray[Any]], axis: int) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)


def _similar_stats(port: Stats, reference: Stats, cut: Cut) -> bool:
    """Whether statistics permit that two values are equal, or one is a part of the other."""
    if cut == WHOLE:
        return close_stats(port, reference, 0.05)
    a, b = port.rms, reference.rms
    return a is not None and b is not None and b < 2 * a < 4 * b


@lru_cache(maxsize=100_000)
def name_similarity(a: str, b: str) -> float:
    """From 0 to 1: how similar two names are; the last word counts most."""
    words, other_words = tokens(a), tokens(b)
    whole = SequenceMatcher(None, " ".join(words), " ".join(other_words), autojunk=False).ratio()
    last = SequenceMatcher(None, words[-1], other_words[-1], autojunk=False).ratio()
    return (whole + last) / 2


def _number_agreement(a: str, b: str) -> float:
    """Equal block numbers support a pair, different ones speak against it."""
    numbers, other_numbers = re.findall(r"\d+", a), re.findall(r"\d+", b)
    if not numbers or not other_numbers:
        return 0.0
    return 0.5 if numbers == other_numbers else -0.5


def first_events(trace: Trace, sites: Iterable[Site]) -> dict[Site, Event]:
    """The first event of each site, in the order of `sites`."""
    sites = list(sites)
    first: dict[Site, Event] = {}
    wanted = set(sites)
    # A port may run the two calls of a step in the other order.
    for event in sorted(trace.events, key=lambda event: (event.step, event.call, event.i)):
        if event.site in wanted:
            first.setdefault(event.site, event)
    return {site: first[site] for site in sites if site in first}


def first_outputs(trace: Trace, names: Collection[str]) -> dict[str, Event]:
    """The first output of each name, in the order of `names`."""
    return {s.name: event for s, event in first_events(trace, map(Site, names)).items()}


def names_of(trace: Trace) -> list[str]:
    """Every name of a trace once, in order of execution."""
    return list(dict.fromkeys(e.name for e in trace.events if e.kind != "selftest"))


def other_slots(trace: Trace) -> list[Site]:
    """Further outputs of modules, and inputs that are no module's output.

    A port may record a sum, a product or the result of an attention under a name of its own; a
    capture of modules sees it only as the input of the next one.
    """
    made = {(event.hash, event.step) for event in trace.events if event.slot == "out"}
    sites: dict[Site, None] = {}
    for event in trace.events:
        if event.slot != "out" and event.hash and (event.hash, event.step) not in made:
            sites[event.site] = None
            made.add((event.hash, event.step))
    return list(sites)


def is_input(site: Site) -> bool:
    """Whether a site is an input of a module."""
    return site.slot.startswith("in")
