"""Two traces side by side: how much speaks for two values being one place."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from math import inf, log10, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.axes import Fit, Shape, best_fit, best_likeness, possible_fits
from lydite.diff.names import close_stats, tokens
from lydite.trace.events import Event, Stats
from lydite.trace.statistics import measure
from lydite.trace.store import Trace

Cut = tuple[int, int]  # into how many parts, along which axis
CLOSE = 0.3  # relative error below which content speaks for a pair
EQUAL = 1e-2  # relative error below which two values are one, in whatever order they come
SAME = 1e-4  # the same in float32, where rounding is far smaller
FINE = (None, "float32", "float64", "f32", "f64")  # precisions of a run; None: it does not say
MOST_VALUES = 2**22  # larger values are judged by their statistics alone
MOST_PARTS = 8  # of a batch of which one side runs one
WHOLE = (1, 0)
KEPT = 32  # values held while they are compared with others
PORT = " : "  # between a module and the port of it that is meant, if not its output
_DIGITS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")  # numbers of inputs count no blocks
_BACK = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")


class Values:
    """The values of a trace, some of them held, and what can be said of them without reading."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.held: dict[int, NDArray[Any]] = {}
        self.known: dict[int, Stats | None] = {}

    def has(self, event: Event) -> bool:
        return prod(event.shape) <= MOST_VALUES and self.trace.has_values(event)

    def read(self, event: Event) -> NDArray[Any]:
        if event.i not in self.held:
            if len(self.held) >= KEPT:
                del self.held[next(iter(self.held))]
            self.held[event.i] = self.trace.read(event)
        return self.held[event.i]

    def stats(self, event: Event) -> Stats | None:
        """The statistics of a value; a dump written by hand has none, and they are made."""
        if event.i not in self.known:
            made = event.stats
            if made is None and self.has(event):
                made = measure(self.read(event))
            self.known[event.i] = made
        return self.known[event.i]


@dataclass(frozen=True)
class Look:
    """Two traces side by side."""

    reference: Values
    port: Values

    def score(self, theirs: Event, ours: Event) -> tuple[float, float]:
        """How much speaks for two events being one place, 1.2 being enough; and their error."""
        fits, cut = fits_of(ours.shape, theirs.shape)
        if not fits or theirs.kind != ours.kind:
            return -inf, inf
        score = similarity(theirs.name, ours.name) + _numbers(theirs.name, ours.name)
        a, b = self.port.stats(ours), self.reference.stats(theirs)
        same = a is not None and b is not None and _alike(a, b, cut)
        if not same and score <= 0.5:
            return score, inf
        if self.reference.has(theirs) and self.port.has(ours):
            mine = self.port.read(ours)
            error = min(best_fit(fits, mine, part)[1] for part in self._parts(theirs, cut))
            # A value that is equal outweighs any name; one that is merely close does not.
            near = 3 * (1 - error) + min(3.0, -log10(max(error, 1e-9)) / 2)
            return score + (near if error < CLOSE else 0.0), error
        return score + (1.0 if same and cut == WHOLE else 0.0), inf

    def likeness(self, theirs: Event, ours: Event) -> float:
        """The correlation of two values in the axis order that suits them best."""
        fits, cut = fits_of(ours.shape, theirs.shape)
        if not fits or not (self.reference.has(theirs) and self.port.has(ours)):
            return 0.0
        mine = self.port.read(ours)
        return max(best_likeness(fits, mine, part) for part in self._parts(theirs, cut))

    def _parts(self, theirs: Event, cut: Cut) -> list[NDArray[Any]]:
        count, axis = cut
        return np.split(self.reference.read(theirs), count, axis)

    def agree(self, theirs: Sequence[Event], ours: Sequence[Event]) -> bool | None:
        """Whether a value equals its counterpart or its parts side by side; None: not known.

        What a small error is diluted in comes close; only rounding makes two values one.
        """
        known = all(map(self.reference.has, theirs)) and all(map(self.port.has, ours))
        if not known or 1 not in (len(theirs), len(ours)):
            return None
        whole = _joined([self.reference.read(event) for event in theirs], -1)
        parts = [self.port.read(event) for event in ours]
        fits = possible_fits(_joined(parts, 0).shape, whole.shape)
        if not fits:
            return None
        run = self.port.trace.header.dtype
        coarse = run not in FINE or any(event.dtype not in ("f32", "f64") for event in ours)
        error = min(best_fit(fits, _joined(order, 0), whole)[1] for order in (parts, parts[::-1]))
        return error < (EQUAL if coarse else SAME)


def _joined(parts: Sequence[NDArray[Any]], axis: int) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)


def fits_of(port: Shape, reference: Shape) -> tuple[tuple[Fit, ...], Cut]:
    """How a value of the port can be the reference's, or one of the equal parts of it.

    A part of its batch, where the port runs the prompt alone; or of its last axis, where the port
    has two projections for one.
    """
    if prod(port) == prod(reference):
        return possible_fits(port, reference), WHOLE
    for axis in (0, -1):
        if (part := part_of(port, reference, axis)) is not None:
            return possible_fits(port, part), (reference[axis] // part[axis], axis)
    return (), WHOLE


def part_of(port: Shape, reference: Shape, axis: int) -> Shape | None:
    """The shape of an equal part of the reference along an axis that has the axes of the port."""
    mine, wanted = prod(port), prod(reference)
    count, rest = divmod(wanted, mine) if mine else (0, 1)
    if rest or not 1 < count <= MOST_PARTS or not reference or reference[axis] % count:
        return None
    part = list(reference)
    part[axis] //= count
    same = sorted(n for n in port if n != 1) == sorted(n for n in part if n != 1)
    return tuple(part) if same and (axis == 0 or len(reference) > 1) else None


def _alike(ours: Stats, theirs: Stats, cut: Cut) -> bool:
    """Whether statistics do not deny that two values are one, or one a part of the other."""
    if cut == WHOLE:
        return close_stats(ours, theirs, 0.05)
    a, b = ours.rms, theirs.rms
    return a is not None and b is not None and b < 2 * a < 4 * b


@lru_cache(maxsize=100_000)
def similarity(a: str, b: str) -> float:
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


def first_events(trace: Trace, names: Sequence[str]) -> dict[str, Event]:
    """The first output of each name, or the port that a name of `other_ports` means."""
    wanted, found = {place_of(name): name for name in names}, {}
    for event in trace.events:
        if (name := wanted.get((event.name, event.slot))) is not None:
            found.setdefault(name, event)
    return {name: found[name] for name in names if name in found}


def names_of(trace: Trace) -> list[str]:
    """Every name of a trace once, in order of execution."""
    return list(dict.fromkeys(e.name for e in trace.events if e.kind != "selftest"))


def other_ports(trace: Trace) -> list[str]:
    """Names for further outputs, and for inputs that are no module's output.

    A port may well record a sum, a product or the result of an attention under a name of its own;
    a capture of modules sees it only where it is handed to the next one.
    """
    made = {(event.hash, event.step) for event in trace.events if event.slot == "out"}
    found: dict[str, None] = {}
    for event in trace.events:
        if event.slot != "out" and event.hash and (event.hash, event.step) not in made:
            found[event.name + PORT + event.slot.translate(_DIGITS)] = None
            made.add((event.hash, event.step))
    return list(found)


def is_input(name: str) -> bool:
    """Whether a name of the pairing means what is handed to a module."""
    return place_of(name)[1].startswith("in")


def place_of(name: str) -> tuple[str, str]:
    """The name and port of an event that a name of the pairing means."""
    module, _, port = name.partition(PORT)
    return module, port.translate(_BACK) or "out"
