"""The values of a pair, brought into one axis order and measured."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations
from math import inf, prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.arrays import Distance, distance
from lydite.diff.axes import Fit, best_fit, fit_dims, possible_fits
from lydite.diff.calls import Pair
from lydite.diff.look import part_of
from lydite.trace.events import Event
from lydite.trace.store import Trace

CLOSE = 0.3  # relative error below which an axis order is believed
ONE = 1e-3  # relative error below which two values are one, in an order nothing else speaks for
LOOK_AT = 16  # values that are looked at first, for the axis orders they need


@dataclass(frozen=True)
class Seen:
    """The two values in the reference's axis order; None where only statistics were kept."""

    reference: NDArray[Any] | None
    port: NDArray[Any] | None
    fit: Fit | None
    note: str
    part: tuple[Any, ...] | None = None  # of the reference's value, when the port has no more
    order: tuple[int, ...] = ()  # in which the port's calls make up the reference's batch

    def like_reference(self, other: NDArray[Any]) -> NDArray[Any] | None:
        """A second reference's value cut as the first one's was; None when it has another shape."""
        cut = other if self.part is None else other[self.part]
        same = self.reference is not None and cut.shape == self.reference.shape
        return cut if same else None


@dataclass
class Layouts:
    """Axis orders that were needed so far: a value whose shape leaves it open follows them."""

    orders: Counter[tuple[int, ...]] = field(default_factory=Counter)
    named: dict[tuple[str, str], Fit] = field(default_factory=dict)  # of a value in earlier steps

    def learn(self, fit: Fit) -> None:
        """Remember an order that a shape or the axis names forced."""
        if not fit.plain and len(fit.order) >= 3:
            self.orders[_moved(fit)] += 1

    def prefer(self, fits: Sequence[Fit]) -> Fit | None:
        """The fit in an order seen before, if there is one."""
        known = [fit for fit in fits if self.orders[_moved(fit)]]
        return max(known, key=lambda fit: self.orders[_moved(fit)], default=None)

    def look_ahead(self, pairs: Sequence[Pair], reference: Trace, port: Trace) -> None:
        """Learn from inputs, axis names and shapes that settle it, wherever in the trace."""
        single = [pair for pair in pairs if len(pair.port) == len(pair.reference) == 1]
        for pair in single:
            named = pair.dims or pair.port_site.dims
            if pair.site.kind == "input" or (named and (pair.ref_dims or pair.site.dims)):
                see(pair, reference, port, self)
        settled = [
            pair
            for pair in single
            if pair.site.shape != pair.port_site.shape
            and sorted(pair.site.shape) == sorted(pair.port_site.shape)
        ]
        for pair in settled[:: max(1, len(settled) // LOOK_AT)]:
            see(pair, reference, port, self)


def see(pair: Pair, reference: Trace, port: Trace, layouts: Layouts) -> Seen:
    """Read both sides of a pair and find the axis order that makes them one."""
    if not all(reference.has_values(event) for event in pair.reference):
        return Seen(None, None, None, "")
    if not all(port.has_values(event) for event in pair.port):
        return Seen(None, None, None, "")
    theirs = _join(reference, pair.reference, pair.axis)
    if len(pair.port) > 1:
        return _see_parts(pair, theirs, port)
    ours = port.read(pair.port_site)
    if pair.site.kind in ("ids", "schedule"):
        return Seen(theirs, ours, None, "")
    fit = fit_dims(
        ours.shape,
        pair.dims or pair.port_site.dims,
        theirs.shape,
        pair.ref_dims or (pair.site.dims if len(pair.reference) == 1 else None),
    )
    fit = fit or _searched(ours, theirs, layouts, pair.site)
    if fit is None:
        return _see_part(ours, theirs)
    layouts.learn(fit)
    joined = f"{len(pair.reference)} values of the reference side by side"
    notes = [fit.note, joined if len(pair.reference) > 1 else ""]
    return Seen(theirs, fit.apply(ours), fit, "; ".join(note for note in notes if note))


def measure_pair(pair: Pair, seen: Seen) -> Distance | None:
    """How far the port is off, from values, sketches or statistics; None where nothing says it."""
    if seen.reference is not None and seen.port is not None:
        if seen.reference.shape != seen.port.shape:
            return None
        return distance(seen.port, seen.reference)
    return _from_summaries(pair.site, pair.port_site)


def _searched(
    ours: NDArray[Any], theirs: NDArray[Any], layouts: Layouts, site: Event
) -> Fit | None:
    fits = possible_fits(ours.shape, theirs.shape)
    if len(fits) < 2:
        return fits[0] if fits else None
    if ours.shape == theirs.shape:
        return _of_one_shape(fits, ours, theirs, layouts, site)
    chosen, error = best_fit(fits, ours, theirs)
    return chosen if error < CLOSE else layouts.prefer(fits) or fits[0]


def _of_one_shape(
    fits: Sequence[Fit],
    ours: NDArray[Any],
    theirs: NDArray[Any],
    layouts: Layouts,
    site: Event,
) -> Fit:
    """Equal shapes are taken as they are, unless an order that was needed elsewhere fits here.

    An input is one value on both sides, so any order that makes it one is its layout. A value that
    was equal in another order in one step is looked at in that order in the steps after it.
    """
    plain, place = fits[0], (site.name, site.slot)
    known = [
        fit
        for fit in (layouts.prefer(fits), layouts.named.get(place))
        if fit is not None and fit in fits
    ]
    chosen, error = best_fit((plain, *known), ours, theirs)
    if chosen is not None and (error < CLOSE or 2 * error < best_fit((plain,), ours, theirs)[1]):
        return chosen
    other, error = best_fit(fits, ours, theirs)
    if other is None or error >= ONE:
        return plain
    layouts.named[place] = other
    return other if site.kind == "input" else plain


def _see_part(ours: NDArray[Any], theirs: NDArray[Any]) -> Seen:
    """A port that has a part of the reference's value: the prompt alone, half of a projection."""
    best: tuple[float, int, NDArray[Any], Fit] | None = None
    for axis in (0, -1):
        shape = part_of(ours.shape, theirs.shape, axis)
        if shape is None:
            continue
        count = theirs.shape[axis] // shape[axis]
        for at, chunk in enumerate(np.split(theirs, count, axis)):
            fit, error = best_fit(possible_fits(ours.shape, chunk.shape), ours, chunk)
            if fit is not None and (best is None or error < best[0]):
                best = (error, at, chunk, fit)
        if best is None:
            continue
        where = "" if axis == 0 else " along the last axis"
        note = f"the port has part {best[1] + 1} of the reference's {count}{where}"
        notes = "; ".join(text for text in (note, best[3].note) if text)
        cut = slice(best[1] * shape[axis], (best[1] + 1) * shape[axis])
        part = (cut,) if axis == 0 else (..., cut)
        return Seen(best[2], best[3].apply(ours), best[3], notes, part)
    return Seen(theirs, ours, None, "")


def _see_parts(pair: Pair, theirs: NDArray[Any], port: Trace) -> Seen:
    """A batch that the port runs as several calls; the prompt may come before the empty one."""
    arrays = [port.read(event) for event in pair.port]
    best: tuple[float, NDArray[Any], tuple[int, ...], Fit] | None = None
    for order in permutations(range(len(arrays))) if len(arrays) <= 3 else [range(len(arrays))]:
        joined = np.concatenate([np.atleast_1d(arrays[at]) for at in order], axis=0)
        fits = possible_fits(joined.shape, theirs.shape)
        fit, error = best_fit(fits, joined, theirs)
        if fit is not None and (best is None or error < best[0]):
            best = (error, fit.apply(joined), tuple(order), fit)
    if best is None:
        return Seen(theirs, arrays[0], None, "")
    natural = best[2] == tuple(sorted(best[2]))
    note = f"{len(arrays)} calls joined" + ("" if natural else " in reverse order")
    notes = "; ".join(text for text in (note, best[3].note) if text)
    return Seen(theirs, best[1], best[3], notes, order=best[2])


def _moved(fit: Fit) -> tuple[int, ...]:
    """An order without the axes in front that stay: with or without a batch it is the same."""
    kept = 0
    while kept < len(fit.order) and fit.order[kept] == kept:
        kept += 1
    return tuple(axis - kept for axis in fit.order[kept:])


def _join(trace: Trace, events: Sequence[Event], axis: int) -> NDArray[Any]:
    if len(events) == 1:
        return trace.read(events[0])
    return np.concatenate([trace.read(event) for event in events], axis=axis)


def _from_summaries(theirs: Event, ours: Event) -> Distance | None:
    """An estimate from sketches, or what statistics cannot deny."""
    if prod(theirs.shape) != prod(ours.shape):
        return None
    if theirs.sketch and ours.sketch and theirs.shape == ours.shape:
        a, b = np.array(ours.sketch), np.array(theirs.sketch)
        power = float(b @ b)
        error = sqrt(float((a - b) @ (a - b)) / power) if power else inf
        return Distance(error, error, 0.0, prod(ours.shape))
    a, b = ours.stats, theirs.stats
    if a is None or b is None or a.rms is None or b.rms is None:
        return None
    if (a.nan, a.inf) != (b.nan, b.inf):
        return Distance(inf, inf, 0.0, a.count)
    if not b.rms:
        return Distance(0.0 if not a.rms else inf, 0.0, 0.0, a.count)
    gaps = [abs(a.rms - b.rms), abs((a.mean or 0.0) - (b.mean or 0.0))]
    return Distance(max(gaps) / b.rms, 0.0, 0.0, a.count)
