"""Plots of two values: histograms, value against value, and short lists as lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite, isqrt, log10

import numpy as np
from PIL import Image

from lydite.report.contact_sheets import png_bytes
from lydite.report.diff.read_values import Array
from lydite.report.diff.row_text import number

BINS, CELLS = 72, 160  # at most: few values get fewer
MAX_VALUES = 2**22  # counted: more change no plot
OUTSIDE = 2e-4  # of the values on either end may be outside the plot
BIGGEST = 1e100  # larger values are drawn here: their distances would overflow
LONGEST = 400  # values of a list that is drawn as a line
WIDTH, HEIGHT = 520.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 510.0, 12.0, 264.0

# Paper to ink through gold, by the number of values at a position.
INK = ("#f4f1ea", "#e3c878", "#b07d1e", "#4a3208", "#161005")


@dataclass(frozen=True)
class Tick:
    """A position on an axis and its label."""

    at: float
    label: str


@dataclass(frozen=True)
class Histogram:
    """Counts of both sides on a logarithmic scale, as paths."""

    reference: str
    port: str
    x: tuple[Tick, ...]
    y: tuple[Tick, ...]
    note: str


@dataclass(frozen=True)
class Density:
    """The values of the port over those of the reference."""

    png: bytes
    low: str
    high: str


@dataclass(frozen=True)
class Lines:
    """A short list on both sides, value over position."""

    reference: str
    port: str
    x: tuple[Tick, ...]
    y: tuple[Tick, ...]


def histogram(reference: Array, port: Array) -> Histogram | None:
    """Both counted in the same bins; None when there is nothing finite."""
    expected, actual = _finite(reference), _finite(port)
    span = _span(expected, actual)
    if span is None:
        return None
    low, high = span
    bins = min(BINS, max(12, isqrt(max(expected.size, actual.size))))
    edges = np.linspace(low, high, bins + 1)
    counts = [np.histogram(np.clip(side, low, high), edges)[0] for side in (expected, actual)]
    top = max(1.0, ceil(log10(max(2, *(int(count.max()) for count in counts)))))
    outside = sum(int(((side < low) | (side > high)).sum()) for side in (expected, actual))
    sampled = max(reference.size, port.size) > MAX_VALUES
    notes = [
        f"{outside:,} values beyond the edges are counted in the last bins" if outside else "",
        f"{MAX_VALUES:,} values of each side, evenly taken" if sampled else "",
    ]
    return Histogram(
        _outline(counts[0], top, closed=True),
        _outline(counts[1], top, closed=False),
        tuple(Tick(_x(at, low, high), number(at)) for at in _round_numbers(low, high)),
        tuple(
            Tick(BOTTOM - power / top * (BOTTOM - TOP), f"{10**power:,}")
            for power in range(int(top) + 1)
        ),
        "; ".join(note for note in notes if note),
    )


def density(reference: Array, port: Array) -> Density | None:
    """How often a value of the reference became which value of the port."""
    step = _stride(reference.size)
    expected, actual = reference.reshape(-1)[::step], port.reshape(-1)[::step]
    both = np.isfinite(expected) & np.isfinite(actual)
    expected, actual = _bounded(expected[both]), _bounded(actual[both])
    span = _span(expected, actual)
    if span is None or expected.size < 16:
        return None
    low, high = span
    cells = min(CELLS, max(24, isqrt(4 * expected.size)))
    across, up = (
        np.clip((side - low) / (high - low) * cells, 0, cells - 1).astype(np.int64)
        for side in (expected, actual)
    )
    counts = np.bincount((cells - 1 - up) * cells + across, minlength=cells * cells)
    heat = np.log1p(counts) / np.log1p(max(1, int(counts.max())))
    index = np.where(counts == 0, 0, 40 + heat * 215).astype(np.uint8).reshape(cells, cells)
    image = Image.fromarray(index)
    image.putpalette(ramp(INK))
    scale = 2 * CELLS // cells
    image = image.resize((cells * scale, cells * scale), Image.Resampling.NEAREST)
    return Density(png_bytes(image), number(low), number(high))


def lines(reference: Array, port: Array) -> Lines | None:
    """Two short lists, as tables of sigmas are; None when they are long or not lists."""
    sides = [_bounded(side.reshape(-1)) for side in (reference, port)]
    flat = all(sum(size > 1 for size in side.shape) <= 1 for side in (reference, port))
    longest = max(side.size for side in sides)
    if not flat or not 2 <= longest <= LONGEST:
        return None
    finite = np.concatenate([side[np.isfinite(side)] for side in sides])
    if not finite.size:
        return None
    low, high = _widened(float(finite.min()), float(finite.max()))
    return Lines(
        _line(sides[0], longest, low, high),
        _line(sides[1], longest, low, high),
        tuple(Tick(_x(at, 0, longest - 1), f"{at:g}") for at in _whole_numbers(longest)),
        tuple(Tick(_y(at, low, high), number(at)) for at in _round_numbers(low, high)),
    )


def ramp(stops: Sequence[str]) -> bytes:
    """A palette of 256 colours through these."""
    colors = np.array([[int(stop[at : at + 2], 16) for at in (1, 3, 5)] for stop in stops])
    places, known = np.linspace(0, len(stops) - 1, 256), np.arange(len(stops))
    mixed = [np.interp(places, known, colors[:, channel]) for channel in range(3)]
    return bytes(np.rint(np.stack(mixed, axis=1)).astype(np.uint8).reshape(-1))


def _finite(array: Array) -> Array:
    flat = array.reshape(-1)[:: _stride(array.size)]
    return _bounded(flat[np.isfinite(flat)])


def _bounded(values: Array) -> Array:
    wide = values.astype(np.float64)
    return np.where(np.isfinite(wide), np.clip(wide, -BIGGEST, BIGGEST), np.nan)


def _stride(size: int) -> int:
    """Odd, so that it visits every channel of a power of two."""
    return max(1, ceil(size / MAX_VALUES)) | 1 if size > MAX_VALUES else 1


def _span(*sides: Array) -> tuple[float, float] | None:
    """The common range of both sides, without outliers."""
    filled = [side for side in sides if side.size]
    if not filled:
        return None
    ends = [np.quantile(side, (OUTSIDE, 1 - OUTSIDE)) for side in filled]
    return _widened(float(min(end[0] for end in ends)), float(max(end[1] for end in ends)))


def _widened(low: float, high: float) -> tuple[float, float]:
    room = 0.04 * (high - low) or 0.5 * (abs(high) or 1.0)
    return low - room, high + room


def _outline(counts: Array, top: float, *, closed: bool) -> str:
    """A path of steps; a bin with one value is a little above an empty one."""
    width = (RIGHT - LEFT) / len(counts)
    parts = [f"M{LEFT:.1f} {BOTTOM:.1f}"]
    for at, count in enumerate(counts):
        part = (log10(count) / top + 0.02) if count else 0.0
        parts.append(
            f"V{BOTTOM - min(part, 1.0) * (BOTTOM - TOP):.1f}H{LEFT + (at + 1) * width:.1f}"
        )
    return "".join(parts) + f"V{BOTTOM:.1f}" + ("Z" if closed else "")


def _line(side: Array, longest: int, low: float, high: float) -> str:
    parts: list[str] = []
    joined = False
    for at, value in enumerate(side):
        if isfinite(value):
            letter = "L" if joined else "M"
            parts.append(f"{letter}{_x(at, 0, longest - 1):.1f} {_y(value, low, high):.1f}")
        joined = isfinite(value)
    return "".join(parts)


def _x(value: float, low: float, high: float) -> float:
    return round(LEFT + (value - low) / (high - low) * (RIGHT - LEFT), 1)


def _y(value: float, low: float, high: float) -> float:
    return round(BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP), 1)


def _round_numbers(low: float, high: float) -> list[float]:
    """About five round numbers between two ends."""
    rough = (high - low) / 5
    if not isfinite(rough) or rough <= 0:
        return []
    unit = 10.0 ** np.floor(np.log10(rough))
    step = float(unit * min((1, 2, 5, 10), key=lambda times: abs(times * unit - rough)))
    first, last = ceil(low / step), int(np.floor(high / step))
    return [float(f"{at * step:.12g}") for at in range(first, last + 1)]


def _whole_numbers(count: int) -> list[int]:
    return list(range(0, count, max(1, ceil(count / 8))))
