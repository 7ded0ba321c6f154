"""The values of a pair in one axis order, and the distance between them."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations
from math import inf, prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lydite.diff.measure.axes import (
    Fit,
    Shape,
    best_correlation,
    best_fit,
    fit_dims,
    part_of,
    possible_fits,
)
from lydite.diff.measure.distance import Distance, distance, relative_error
from lydite.diff.measure.masks import as_masks
from lydite.diff.measure.rotations import rotations
from lydite.diff.measure.streams import Joined, in_other_order, joined_streams, other_orders
from lydite.diff.pairing.paired_events import BY_NAME, ROTATION, Pair
from lydite.trace.events import Event, Site
from lydite.trace.reader import Trace
from lydite.trace.statistics import distance as sketched_distance

CLOSE = 0.3  # relative error below which an axis order is accepted
MULTIPLE = 0.99  # correlation of a value with a multiple of it
FAR = 0.5  # relative error above which two values are not equal in an order
CLEARLY = 0.8  # of the error in any other order: then a wrong value still shows its order
LEARN_FROM = 16  # values read first, for the axis orders they need
HIDDEN = -1e8  # scores of attention that a mask hides are lower
MAX_JOINED = 64  # wrong values read for the order of the streams in them
BETWEEN = "pipeline"  # the scope of values between networks
SAME_TOKENS = 0.1  # relative error of equal tokens, in 16 bits and deep in a network


@dataclass(frozen=True)
class AlignedPair:
    """The two values in the reference's axis order; None where only statistics were kept."""

    reference: NDArray[Any] | None
    port: NDArray[Any] | None
    fit: Fit | None = None
    note: str = ""
    part: tuple[Any, ...] | None = None  # of the reference's value, when the port has no more
    order: tuple[int, ...] = ()  # in which the port's calls make up the reference's batch
    first_row: int = 0  # of the port's table: of the reference's offset 0
    hidden: NDArray[Any] | None = None  # scores that a mask hides: 0 on both sides
    are_masks: bool = False  # in another form, with 1 where a token is seen

    @property
    def is_own_form(self) -> bool:
        """Whether the port's value says the same in other numbers."""
        return bool(self.first_row) or self.hidden is not None or self.are_masks

    def like_reference(self, other: NDArray[Any]) -> NDArray[Any] | None:
        """A second reference's value cut as the first one's was; None when it has another shape."""
        if self.are_masks:
            return self.reference
        cut = other if self.part is None else other[self.part]
        if self.reference is None or cut.shape != self.reference.shape:
            return None
        return cut if self.hidden is None else np.where(self.hidden, np.zeros_like(cut), cut)


@dataclass
class Layouts:
    """Axis orders needed so far; a value whose shape does not decide its order follows them."""

    orders: dict[tuple[int, ...], set[Site]] = field(default_factory=lambda: defaultdict(set))
    by_site: dict[Site, Fit] = field(default_factory=dict)  # one order for all steps and calls
    joined: Joined = field(default_factory=dict)  # streams that the port joins in the other order
    # Of values that agree, by both shapes: a wrong value of these shapes has the same order.
    of_shapes: dict[tuple[Shape, Shape], Fit] = field(default_factory=dict)

    def add(self, fit: Fit, site: Site) -> None:
        """Remember an order that a shape or the axis names forced."""
        if not fit.plain and len(fit.order) >= 3:
            self.orders[fit.moved_axes].add(site)

    def prefer(self, fits: Sequence[Fit]) -> Fit | None:
        """The fit in an order needed before, if there is one."""
        known = [fit for fit in fits if self.orders.get(fit.moved_axes)]
        return max(known, key=lambda fit: len(self.orders[fit.moved_axes]), default=None)

    def permit(self, fit: Fit, site: Site) -> bool:
        """Whether a fit is a layout: one that exchanges axes of equal length may be a bug.

        Unless other values have that order too.
        """
        return not fit.exchanges_equal or bool(self.orders.get(fit.moved_axes, set()) - {site})

    def learn(self, pairs: Sequence[Pair], reference: Trace, port: Trace) -> None:
        """Learn from inputs, axis names and shapes that decide the order, anywhere in the trace."""
        single = [pair for pair in pairs if len(pair.port) == len(pair.reference) == 1]
        for pair in single:
            named = pair.dims or pair.port_event.dims
            if pair.event.kind == "input" or (named and (pair.ref_dims or pair.event.dims)):
                align_values(pair, reference, port, self)
        decided = [
            pair
            for pair in single
            if pair.event.shape != pair.port_event.shape
            and sorted(pair.event.shape) == sorted(pair.port_event.shape)
        ]
        for pair in decided[:: max(1, len(decided) // LEARN_FROM)]:
            align_values(pair, reference, port, self)
        undecided: dict[Site, list[Pair]] = defaultdict(list)
        for pair in single:
            shape = pair.event.shape
            if shape == pair.port_event.shape and len(possible_fits(shape, shape)) > 1:
                undecided[pair.event.site].append(pair)
        for site, group in undecided.items():
            if (fit := _common_order(group, reference, port)) is not None:
                self.by_site[site] = fit

    def learn_joined(self, wrong: Sequence[Pair], reference: Trace, port: Trace) -> bool:
        """Learn from wrong values in which order the port joins two streams of tokens.

        Image and text may be joined in either order, if several values of the port have that order:
        attention and layers of single tokens do not depend on it. Between the networks the order is
        that of the reference. Whether one was found.
        """
        possible = joined_streams(reference)
        found: dict[tuple[int, int], set[Site]] = defaultdict(set)
        of_streams = [
            pair
            for pair in wrong
            if {*pair.event.shape[:-1]} & possible.keys() and pair.scope != BETWEEN
        ]
        for pair in of_streams[:MAX_JOINED]:
            if len(pair.port) > 1 or not port.has_values(pair.port_event):
                continue
            if not all(map(reference.has_values, pair.reference)):
                continue
            value, expected = port.read(pair.port_event), _concatenated(reference, pair)
            fits = possible_fits(value.shape, expected.shape)
            for count in {*expected.shape[:-1]} & possible.keys():
                for first in possible[count]:
                    other = in_other_order(expected, count, count - first)
                    if best_fit(fits, value, other)[1] < SAME_TOKENS:
                        found[count, first].add(pair.event.site)
        self.joined = {count: (n,) for (count, n), sites in found.items() if len(sites) > 1}
        return bool(self.joined)

    def in_order(self, value: NDArray[Any], expected: NDArray[Any]) -> tuple[NDArray[Any], str]:
        """The port's value with its streams in the reference's order, and a note."""
        if value.shape == expected.shape and {*value.shape[:-1]} & self.joined.keys():
            error = relative_error(value, expected)
            for other in other_orders(value, self.joined):
                if relative_error(other, expected) < error:
                    return other, "two streams of tokens are joined in the other order"
        return value, ""


def align_values(pair: Pair, reference: Trace, port: Trace, layouts: Layouts) -> AlignedPair:
    """Read both sides of a pair and find the axis order in which they are closest."""
    if not all(reference.has_values(event) for event in pair.reference):
        return AlignedPair(None, None)
    if not all(port.has_values(event) for event in pair.port):
        return AlignedPair(None, None)
    if pair.how == ROTATION:
        return _align_rotations(pair, reference, port)
    expected = _concatenated(reference, pair)
    if len(pair.port) > 1:
        return _align_calls(pair, expected, port)
    value = port.read(pair.port_event)
    if pair.scope == BETWEEN:
        value = _in_direction_of(expected, value)
    if pair.event.kind in ("ids", "schedule"):
        return _align_table(value, expected)
    if (masks := as_masks(value, expected)) is not None:
        note = "masks of attention, compared by which tokens are seen"
        return AlignedPair(masks[1], masks[0], note=note, are_masks=True)
    fit = fit_dims(
        value.shape,
        pair.dims or pair.port_event.dims,
        expected.shape,
        pair.ref_dims or (pair.event.dims if len(pair.reference) == 1 else None),
    )
    fit = fit or _searched_fit(value, expected, layouts, pair.event)
    if fit is None:
        return _align_part(value, expected)
    layouts.add(fit, pair.event.site)
    names = ", ".join(
        event.name.rpartition(".")[2] if event.slot == "out" else str(event.site)
        for event in pair.reference
    )
    fused = f"fused: equals {names} concatenated" if len(pair.reference) > 1 else ""
    value, order = fit.apply(value), ""
    if pair.scope != BETWEEN:
        value, order = layouts.in_order(value, expected)
    notes = [fit.note, fused, order]
    if first := _first_row(value, expected) if pair.how not in BY_NAME else 0:
        value = value - first
        notes.append(f"rows of a table: offset 0 is row {first}")
    if (hidden := _hidden_scores(value, expected)) is not None:
        expected, value = (np.where(hidden, np.zeros_like(x), x) for x in (expected, value))
        notes.append("scores that a mask hides are not compared")
    note = "; ".join(filter(None, notes))
    return AlignedPair(expected, value, fit, note, first_row=first, hidden=hidden)


def _hidden_scores(value: NDArray[Any], expected: NDArray[Any]) -> NDArray[Any] | None:
    """Where a mask hides scores of attention: on both sides, or on the only side with a mask.

    Ports hide scores by other numbers, or record them before the mask. A mask hides the same scores
    of all heads; an overflow does not.
    """
    both = (value, expected)
    if value.shape != expected.shape or value.ndim < 3 or value.shape[-3] < 2:
        return None
    if any(x.dtype.kind not in "fV" for x in both):
        return None
    hidden = [x <= max(HIDDEN, 0.9 * float(ml_dtypes.finfo(x.dtype).min)) for x in both]
    some = [bool(x.any()) for x in hidden]
    of_one_head = (np.array_equal(x, np.repeat(x[..., :1, :, :], x.shape[-3], -3)) for x in hidden)
    if not any(some) or any(x.all() for x in hidden) or not all(of_one_head):
        return None
    return hidden[0] & hidden[1] if all(some) else hidden[0] | hidden[1]


def _first_row(value: NDArray[Any], expected: NDArray[Any]) -> int:
    """The row of offset 0, where the port has rows of a table for the reference's offsets; else 0.

    Offsets may be negative, rows may not.
    """
    if value.dtype.kind not in "iu" or expected.dtype.kind != "i" or not value.size:
        return 0
    if value.shape != expected.shape or expected.min() >= 0 or value.min() < 0:
        return 0
    difference = value.astype(np.int64) - expected
    return int(difference.flat[0]) if difference.min() == difference.max() else 0


def measure_pair(pair: Pair, values: AlignedPair) -> Distance | None:
    """The port's distance, from values, sketches or statistics; None where it is unknown."""
    if values.reference is not None and values.port is not None:
        if values.reference.shape != values.port.shape:
            return None
        return distance(values.port, values.reference)
    return _distance_of_summaries(pair.event, pair.port_event)


def _searched_fit(
    value: NDArray[Any], expected: NDArray[Any], layouts: Layouts, event: Event
) -> Fit | None:
    fits = possible_fits(value.shape, expected.shape)
    if len(fits) < 2:
        return fits[0] if fits else None
    if value.shape == expected.shape:
        return _fit_of_equal_shapes(fits, value, expected, layouts, event)
    chosen, error = best_fit(fits, value, expected)
    if chosen is not None and not layouts.permit(chosen, event.site):
        layouts.add(chosen, event.site)
        fits = tuple(fit for fit in fits if layouts.permit(fit, event.site)) or fits
        chosen, error = best_fit(fits, value, expected)
    if error < CLOSE:
        is_near = fits[0].plain and best_fit(fits[:1], value, expected)[1] < 2 * error
        fit = fits[0] if is_near or chosen is None else chosen
        if error < SAME_TOKENS:
            layouts.of_shapes.setdefault((value.shape, expected.shape), fit)
        return fit
    if (known := layouts.of_shapes.get((value.shape, expected.shape))) in fits:
        return known
    if fits[0].plain and best_correlation(fits[:1], value, expected) > MULTIPLE:
        return fits[0]
    others = [fit for fit in fits if fit is not chosen]
    if error < CLEARLY * best_fit(others, value, expected)[1]:
        return chosen
    return layouts.prefer(fits) or next(filter(_splits_heads, fits), fits[0])


def _splits_heads(fit: Fit) -> bool:
    """Whether (batch, tokens, width) becomes (batch, heads, tokens, width of a head)."""
    return len(fit.shape) == 4 and len(fit.split) == 4 and fit.order == (0, 2, 1, 3)


def _fit_of_equal_shapes(
    fits: Sequence[Fit],
    value: NDArray[Any],
    expected: NDArray[Any],
    layouts: Layouts,
    event: Event,
) -> Fit:
    """The order that all steps and calls of a value have; else as it is, or an order in use.

    An input is one value on both sides, so any order that makes it equal is its layout.
    """
    plain, known = fits[0], layouts.by_site.get(event.site)
    if known is not None and known in fits:
        return known
    common = layouts.prefer(fits)
    chosen, error = best_fit((plain, common) if common else (plain,), value, expected)
    plain_error = best_fit((plain,), value, expected)[1]
    if chosen is not None and (error < CLOSE or 2 * error < plain_error):
        return chosen
    other = _other_order(fits, value, expected) if event.kind == "input" else None
    return other or plain


def _common_order(pairs: Sequence[Pair], reference: Trace, port: Trace) -> Fit | None:
    """The order other than the plain one that makes a value equal at its steps and calls.

    Channels at the other end are a layout. Any other order may be a bug, unless the value has it
    again and again: a wrong value would spoil its next one.
    """
    chosen = pairs[:: max(1, len(pairs) // LEARN_FROM)]
    found: Counter[Fit] = Counter()
    for pair in chosen:
        if not reference.has_values(pair.event) or not port.has_values(pair.port_event):
            continue
        expected, value = reference.read(pair.event), port.read(pair.port_event)
        fits = possible_fits(value.shape, expected.shape)
        if best_fit(fits[:1], value, expected)[1] < CLOSE:
            return None
        if (fit := _other_order(fits, value, expected)) is not None:
            found[fit] += 1
    if len(found) != 1:
        return None
    fit, count = found.most_common(1)[0]
    repeated = count >= 2 and 2 * count > len(chosen)
    return fit if repeated or fit.moves_channels or pairs[0].event.kind == "input" else None


def _other_order(fits: Sequence[Fit], value: NDArray[Any], expected: NDArray[Any]) -> Fit | None:
    """The only order in which two values of equal shape are close, where they are not as they are.

    Rounding to 16 bits over a network may take a tenth.
    """
    near = [fit for fit in fits if best_fit((fit,), value, expected)[1] < FAR]
    if len(near) != 1 or near[0].plain:
        return None
    return near[0] if best_fit(near, value, expected)[1] < CLOSE else None


def _align_part(value: NDArray[Any], expected: NDArray[Any]) -> AlignedPair:
    """A port that has a part of the reference's value: the prompt alone, half of a projection."""
    best: tuple[float, int, NDArray[Any], Fit] | None = None
    once = expected[..., ::2] if expected.ndim else expected
    is_once = np.squeeze(value).shape == np.squeeze(once).shape and value.size > 0
    if is_once and expected.ndim and np.array_equal(once, expected[..., 1::2]):
        fit = possible_fits(value.shape, once.shape)[0]
        text = "the reference has each number of the last axis twice, the port once"
        note = "; ".join(filter(None, (text, fit.note)))
        return AlignedPair(once, fit.apply(value), fit, note, (..., slice(None, None, 2)))
    for axis in (0, -1):
        shape = part_of(value.shape, expected.shape, axis)
        if shape is None:
            continue
        count = expected.shape[axis] // shape[axis]
        for number, chunk in enumerate(np.split(expected, count, axis)):
            fit, error = best_fit(possible_fits(value.shape, chunk.shape), value, chunk)
            if fit is not None and (best is None or error < best[0]):
                best = (error, number, chunk, fit)
        if best is None:
            continue
        _, number, chunk, fit = best
        where = "of the batch" if axis == 0 else "of the last axis"
        note = f"the port holds part {number + 1} of {count} {where}"
        note = "; ".join(text for text in (note, fit.note) if text)
        cut = slice(number * shape[axis], (number + 1) * shape[axis])
        part = (cut,) if axis == 0 else (..., cut)
        return AlignedPair(chunk, fit.apply(value), fit, note, part)
    return AlignedPair(expected, value)


def _align_rotations(pair: Pair, reference: Trace, port: Trace) -> AlignedPair:
    """Tables of rotations, each with its cosines beside its sines; streams one after the other."""
    events = pair.reference
    parts = [rotations([reference.read(event)]) for event in events]
    if any(part is None for part in parts):
        parts = [rotations([reference.read(event) for event in events])]
    own = rotations([port.read(event) for event in pair.port])
    if own is None or any(part is None for part in parts):
        return AlignedPair(None, None)
    expected = np.concatenate([part for part in parts if part is not None])
    both = (np.stack((np.real(x), np.imag(x)), -1).reshape(len(x), -1) for x in (expected, own))
    right, value = (x.astype(np.float32) for x in both)
    return AlignedPair(right, value, note="rotations with each cosine beside its sine")


def _in_direction_of(expected: NDArray[Any], value: NDArray[Any]) -> NDArray[Any]:
    """A table that falls where the other rises, in reverse: ports list times in either order."""
    tables = (expected, value)
    if any(x.ndim != 1 or x.size < 3 or x.dtype.kind not in "fiuV" for x in tables):
        return value
    steps = [np.diff(x.astype(np.float64)) for x in tables]
    opposed = (np.all(a <= 0) and np.all(b >= 0) for a, b in (steps, steps[::-1]))
    return value[::-1] if any(opposed) else value


def _align_table(value: NDArray[Any], expected: NDArray[Any]) -> AlignedPair:
    """A table in the axis order that has most entries at their places: ids with tokens first."""
    fits = possible_fits(value.shape, expected.shape) if value.shape != expected.shape else ()
    tables = [(fit, fit.apply(value)) for fit in fits]
    if not tables:
        return AlignedPair(expected, value)
    fit, table = max(tables, key=lambda each: np.count_nonzero(each[1] == expected))
    return AlignedPair(expected, table, fit, fit.note)


def _align_calls(pair: Pair, expected: NDArray[Any], port: Trace) -> AlignedPair:
    """A batch that the port runs as several calls, in whatever order of the prompts."""
    arrays = [port.read(event) for event in pair.port]
    best: tuple[float, NDArray[Any], tuple[int, ...], Fit] | None = None
    for order in permutations(range(len(arrays))) if len(arrays) <= 3 else [range(len(arrays))]:
        joined = np.concatenate([np.atleast_1d(arrays[index]) for index in order], axis=0)
        fit, error = best_fit(possible_fits(joined.shape, expected.shape), joined, expected)
        if fit is not None and (best is None or error < best[0]):
            best = (error, fit.apply(joined), tuple(order), fit)
    if best is None:
        return AlignedPair(expected, arrays[0])
    _, value, order, fit = best
    note = f"{len(arrays)} calls joined" + ("" if order == tuple(sorted(order)) else " in reverse")
    note = "; ".join(text for text in (note, fit.note) if text)
    return AlignedPair(expected, value, fit, note, order=order)


def _concatenated(reference: Trace, pair: Pair) -> NDArray[Any]:
    parts = [reference.read(event) for event in pair.reference]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=pair.axis)


def _distance_of_summaries(reference: Event, port: Event) -> Distance | None:
    """An estimate from sketches, or a lower bound from statistics."""
    if prod(reference.shape) != prod(port.shape):
        return None
    a, b = port.stats, reference.stats
    if a is not None and b is not None:  # moments and sketches are of the finite values
        if (a.nan, a.inf) != (b.nan, b.inf):
            return Distance(inf, inf, 0.0, a.count)
        if a.nan + a.inf == a.count:
            return None
    if reference.sketch and port.sketch and reference.shape == port.shape:
        error = sketched_distance(port.sketch, reference.sketch)
        return Distance(error, error, 0.0, prod(port.shape))
    if a is None or b is None or a.rms is None or b.rms is None:
        return None
    if not b.rms:
        return Distance(0.0 if not a.rms else inf, 0.0, 0.0, a.count)
    gaps = [abs(a.rms - b.rms), abs((a.mean or 0.0) - (b.mean or 0.0))]
    return Distance(max(gaps) / b.rms, 0.0, 0.0, a.count)
