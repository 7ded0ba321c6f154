"""A line chart as a picture: a title, two axes, a name at the end of each line."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

from lydite.report.contact_sheets import INK, PAPER

# Okabe and Ito's colours, which most colour-blind people can distinguish, without the yellow
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5f4690", "#000000")
FAINT, GRID, TEXT = "#d9d5cb", "#ebe8e0", "#6b675e"
SCALE_UP = 3  # drawn larger and scaled down: Pillow does not smooth its lines
Scale = Literal["linear", "log"]


@dataclass(frozen=True)
class Line:
    """A name and its points; what is not finite, or not above 0 on a log axis, is left out."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Title, labels of the axes, and lines."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    size: tuple[int, int] = (1100, 680)
    note: str = ""


def draw(chart: Chart) -> Image.Image:
    """The chart as an image."""
    return _Canvas(chart).draw()


class _Canvas:
    """One chart, drawn SCALE_UP times as large as it will be."""

    def __init__(self, chart: Chart):
        self.chart = chart
        width, height = (length * SCALE_UP for length in chart.size)
        self.image = Image.new("RGB", (width, height), PAPER)
        self.pen = ImageDraw.Draw(self.image)
        self.small, self.plain, self.large = (
            ImageFont.load_default(size * SCALE_UP) for size in (14, 15, 21)
        )
        self.lines = [self._usable(line) for line in chart.lines]
        names = max((self.plain.getlength(line.name) for line in self.lines), default=0)
        self.left, self.right = 84 * SCALE_UP, width - 28 * SCALE_UP - int(names)
        self.top, self.bottom = 74 * SCALE_UP, height - 74 * SCALE_UP
        points = [point for line in self.lines for point in line.points]
        self.x_range = _range([x for x, _ in points], chart.x_scale)
        self.y_range = _range([y for _, y in points], chart.y_scale)

    def draw(self) -> Image.Image:
        self._axes()
        for line, color in zip(self.lines, _colors(len(self.lines)), strict=True):
            self._line(line, color)
        self._names()
        return self.image.resize(self.chart.size, Image.Resampling.LANCZOS)

    def _usable(self, line: Line) -> Line:
        def fits(value: float, scale: Scale) -> bool:
            return math.isfinite(value) and (scale == "linear" or value > 0)

        chart = self.chart
        return Line(
            line.name,
            [(x, y) for x, y in line.points if fits(x, chart.x_scale) and fits(y, chart.y_scale)],
        )

    def _at(self, x: float, y: float) -> tuple[float, float]:
        across = _share(x, self.x_range, self.chart.x_scale)
        up = _share(y, self.y_range, self.chart.y_scale)
        return (
            self.left + across * (self.right - self.left),
            self.bottom - up * (self.bottom - self.top),
        )

    def _axes(self) -> None:
        chart, pen = self.chart, self.pen
        pen.text((self.left, 22 * SCALE_UP), chart.title, fill=INK, font=self.large)
        for y in _ticks(self.y_range, chart.y_scale):
            at = self._at(self.x_range[0], y)[1]
            pen.line([(self.left, at), (self.right, at)], fill=GRID, width=SCALE_UP)
            pen.text(
                (self.left - 10 * SCALE_UP, at),
                _label(y),
                fill=TEXT,
                font=self.small,
                anchor="rm",
            )
        for x in _ticks(self.x_range, chart.x_scale, whole=True):
            at = self._at(x, self.y_range[0])[0]
            pen.line(
                [(at, self.bottom), (at, self.bottom + 6 * SCALE_UP)],
                fill=FAINT,
                width=SCALE_UP,
            )
            pen.text(
                (at, self.bottom + 10 * SCALE_UP),
                _label(x),
                fill=TEXT,
                font=self.small,
                anchor="mt",
            )
        pen.line(
            [(self.left, self.bottom), (self.right, self.bottom)],
            fill=FAINT,
            width=2 * SCALE_UP,
        )
        below = self.bottom + 38 * SCALE_UP
        pen.text((self.right, below), chart.x_label, fill=TEXT, font=self.small, anchor="rt")
        pen.text((self.left, 52 * SCALE_UP), chart.y_label, fill=TEXT, font=self.small, anchor="lt")
        if chart.note:
            pen.text((self.left, below), chart.note, fill=TEXT, font=self.small, anchor="lt")

    def _line(self, line: Line, color: str) -> None:
        places = [self._at(x, y) for x, y in line.points]
        if len(places) > 1:
            self.pen.line(places, fill=color, width=int(2.2 * SCALE_UP), joint="curve")
        dot = 3.4 * SCALE_UP if len(places) <= 24 else 1.6 * SCALE_UP
        for x, y in places:
            self.pen.ellipse([x - dot, y - dot, x + dot, y + dot], fill=color)

    def _names(self) -> None:
        """Each name beside its line's end, moved apart where two would touch."""
        ends = [
            (self._at(*line.points[-1])[1], line.name, color)
            for line, color in zip(self.lines, _colors(len(self.lines)), strict=True)
            if line.points
        ]
        height = 20 * SCALE_UP
        for place, (_, name, color) in zip(
            _apart([end[0] for end in sorted(ends)], height, self.top, self.bottom),
            sorted(ends),
            strict=True,
        ):
            at = (self.right + 12 * SCALE_UP, place)
            self.pen.text(at, name, fill=color, font=self.plain, anchor="lm")


def _colors(count: int) -> list[str]:
    return [COLORS[index % len(COLORS)] for index in range(count)]


def _range(values: Sequence[float], scale: Scale) -> tuple[float, float]:
    if not values:
        return (1.0, 10.0) if scale == "log" else (0.0, 1.0)
    low, high = min(values), max(values)
    if scale == "log":
        margin = math.exp(0.04 * (math.log(high) - math.log(low))) if high > low else 2.0
        return max(low / margin, 5e-324), min(high * margin, 1e308)
    margin = 0.03 * (high - low) or 0.5
    return low - margin, high + margin


def _share(value: float, limits: tuple[float, float], scale: Scale) -> float:
    low, high = limits
    if scale == "log":
        return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
    return (value - low) / (high - low)


def _ticks(limits: tuple[float, float], scale: Scale, *, whole: bool = False) -> list[float]:
    """Round numbers within the limits: powers of ten, of two, 1-2-5, or even steps."""
    low, high = limits
    if scale == "log":
        decades = math.log10(high) - math.log10(low)
        if decades < 2.5:
            if low < 0.5:  # powers of two have many digits there: 0.00390625
                first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
                round_numbers = [
                    float(f"{digit}e{power}")
                    for power in range(first, last + 1)
                    for digit in (1, 2, 5)
                ]
                return [value for value in round_numbers if low <= value <= high]
            powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
            every = max(1, math.ceil(len(powers) / 8))
            return [2.0**power for power in powers][::every]
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        every = max(1, math.ceil(len(powers) / 8))
        return [10.0**power for power in powers][::every]
    rough = (high - low) / 7
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    step = max(1.0, step) if whole else step
    first = math.ceil(low / step)
    return [index * step for index in range(first, math.floor(high / step) + 1)]


def _label(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.6g}"
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _apart(places: Sequence[float], height: float, top: float, bottom: float) -> list[float]:
    """Positions moved as little as possible so that neighbours are `height` apart."""
    result = list(places)
    for index in range(1, len(result)):
        result[index] = max(result[index], result[index - 1] + height)
    over = max(0.0, (result[-1] if result else 0.0) - bottom)
    for index in range(len(result) - 1, -1, -1):
        limit = bottom if index == len(result) - 1 else result[index + 1] - height
        result[index] = min(result[index], limit) if over else result[index]
    return [max(place, top) for place in result]
