"""The error of every row on a logarithmic scale, in order of execution, as geometry for an SVG.

Thousands of rows share a few hundred columns of pixels. A column keeps its smallest and its largest
error, of right and of wrong rows separately, so that no outlier is lost.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

from lydite.diff.result import Row
from lydite.report.diff.row_text import closest, described, short, times

COLUMN = 3.0  # pixels that share at most four dots
LANE, LANE_EDGE = 28.0, 10.0  # height of a lane for values without a logarithm, and of its dots
STEP_GAP = 5.0  # pixels between two drawn boundaries of steps
LETTER = 6.6  # approximate width of a letter

Span = tuple[float, float, float]  # from x to x, at height y


@dataclass(frozen=True)
class Dot:
    """One row: a circle when right, a diamond when wrong."""

    index: int
    x: float
    y: float
    wrong: bool
    text: str


@dataclass(frozen=True)
class Tick:
    """A line across the plot, or a position on its edge, with a label."""

    at: float
    label: str


@dataclass(frozen=True)
class Mark:
    """The most important dot and its label."""

    dot: Dot
    label: tuple[str, str]
    anchor: str  # "start", "middle" or "end"
    label_x: float
    label_y: float


@dataclass(frozen=True)
class Curve:
    """Everything an SVG needs; coordinates are pixels of its own."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    dots: tuple[Dot, ...]
    bars: tuple[str, ...]  # path data, of right and of wrong rows
    floor: str  # path data
    limit: str
    band: str
    limit_end: Tick | None  # where the direct labels stand
    floor_end: Tick | None
    ticks: tuple[Tick, ...]
    lanes: tuple[Tick, ...]
    steps: tuple[Tick, ...]
    boundaries: tuple[float, ...]
    scopes: tuple[Tick, ...]
    mark: Mark | None


def draw_curve(rows: Sequence[Row], first: int | None, width: float, height: float) -> Curve | None:
    """The curve of these rows, `first` marked; None when no row was measured."""
    shown = [at for at, row in enumerate(rows) if row.error is not None or row.wrong]
    if not shown:
        return None
    narrow = width < 600
    frame = _Frame(rows, width - (56 if narrow else 72), height - 40, 42 if narrow else 48, 28)
    main = first if any(row.wrong for row in rows) else closest(rows)
    columns = _columns(rows, shown, frame)
    kept = {at for ends in columns.values() for at in ends} | set([] if main is None else [main])
    dots = {at: frame.dot(at) for at in sorted(kept)}
    floors, limits = frame.line("floor"), frame.line("limit")
    return Curve(
        width, height, frame.left, frame.right, frame.top, frame.bottom,
        dots=tuple(dots.values()),
        bars=tuple(
            _bars((dots[a], dots[b]) for (_, wrong), (a, b) in columns.items() if wrong == which)
            for which in (False, True)
        ),
        floor=_path(floors.values()),
        limit=_path(limits.values()),
        band=_band(floors, limits),
        **_ends(floors, limits),
        ticks=tuple(frame.decades()),
        lanes=tuple(Tick(y, word) for word, y in frame.lanes.items()),
        steps=tuple(_steps(rows, frame)),
        boundaries=tuple(_boundaries(rows, frame)),
        scopes=tuple(_scopes(rows, frame)),
        mark=None if main is None else _mark(rows, dots, main, frame),
    )  # fmt: skip


class _Frame:
    """The plot's edges and its two scales."""

    def __init__(
        self, rows: Sequence[Row], right: float, bottom: float, left: float, top: float
    ) -> None:
        self.rows, self.left, self.right = rows, left, right
        self.top, self.bottom = top, bottom
        errors = [row.error for row in rows if row.error is not None]
        high, low = top, bottom
        self.lanes: dict[str, float] = {}
        lanes = {
            "shape": any(row.error is None and row.wrong for row in rows),
            "∞": any(not isfinite(error) for error in errors),
        }
        for word, used in lanes.items():
            if used:
                self.lanes[word] = high + LANE_EDGE
                high += LANE
        if 0.0 in errors:
            self.lanes["0"] = low - LANE_EDGE
            low -= LANE
        self.high, self.low = high, low
        numbers = [*errors, *(v for row in rows for v in (row.floor, row.limit) if v is not None)]
        logs = [log10(v) for v in numbers if v > 0 and isfinite(v)] or [-8.0, 0.0]
        self.most, self.least = ceil(max(logs) + 0.15), floor(min(logs) - 0.15)

    def x(self, index: float) -> float:
        """The middle of a row's share of the width."""
        return self.left + (index + 0.5) / len(self.rows) * (self.right - self.left)

    def y(self, value: float | None) -> float:
        """A position on the logarithmic scale, or in a lane."""
        if value is None:
            return self.lanes["shape"]
        if not isfinite(value):
            return self.lanes["∞"]
        if value <= 0:
            return self.lanes.get("0", self.low)
        return self._height(log10(value))

    def _height(self, power: float) -> float:
        part = (self.most - power) / (self.most - self.least)
        return self.high + part * (self.low - self.high)

    def dot(self, index: int) -> Dot:
        row = self.rows[index]
        x, y = round(self.x(index), 1), round(self.y(row.error), 1)
        return Dot(index, x, y, row.wrong, described(row))

    def decades(self) -> Iterable[Tick]:
        """Powers of ten, as many as have room for their labels."""
        room = max(1.0, (self.low - self.high) / 26)
        every = ceil((self.most - self.least) / room)
        for power in range(self.least, self.most + 1):
            if power % every == 0:
                yield Tick(self._height(power), "1" if power == 0 else f"1e{power}")

    def line(self, name: str) -> dict[int, Span]:
        """Rounding or limit, one height for each column of pixels.

        The highest of right rows and the lowest where any is wrong: no dot is on the wrong side.
        """
        found: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for index, row in enumerate(self.rows):
            value = getattr(row, name)
            if value is not None and value > 0 and isfinite(value):
                found[int(self.x(index) / COLUMN)].append((index, value))
        spans: dict[int, Span] = {}
        for column, values in found.items():
            one = min if any(self.rows[index].wrong for index, _ in values) else max
            start, stop = self.x(values[0][0] - 0.5), self.x(values[-1][0] + 0.5)
            spans[column] = start, stop, self.y(one(value for _, value in values))
        return spans


def _columns(
    rows: Sequence[Row], shown: Sequence[int], frame: _Frame
) -> dict[tuple[int, bool], tuple[int, int]]:
    """The highest and the lowest row of every column of pixels, right and wrong separately."""
    columns: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for index in shown:
        columns[int(frame.x(index) / COLUMN), rows[index].wrong].append(index)

    def height(index: int) -> float:
        return frame.y(rows[index].error)

    return {key: (min(each, key=height), max(each, key=height)) for key, each in columns.items()}


def _bars(ends: Iterable[tuple[Dot, Dot]]) -> str:
    """A line from the highest to the lowest dot of a column that has more between them."""
    return "".join(f"M{a.x} {a.y}L{b.x} {b.y}" for a, b in ends if a.index != b.index)


def _path(spans: Iterable[Span]) -> str:
    parts: list[str] = []
    before: float | None = None
    for start, stop, y in spans:
        joined = before is not None and start - before < COLUMN
        parts.append(f"{'L' if joined else 'M'}{start:.1f} {y:.1f}H{stop:.1f}")
        before = stop
    return "".join(parts)


def _band(floors: dict[int, Span], limits: dict[int, Span]) -> str:
    """The area between rounding and limit."""
    return "".join(
        f"M{start:.1f} {bottom:.1f}H{stop:.1f}V{limits[column][2]:.1f}H{start:.1f}Z"
        for column, (start, stop, bottom) in floors.items()
        if column in limits
    )


def _ends(floors: dict[int, Span], limits: dict[int, Span]) -> dict[str, Tick | None]:
    """Labels at the right end of both lines, without overlap."""
    if not floors or not limits:
        return {"floor_end": None, "limit_end": None}
    low, high = list(floors.values())[-1][2], list(limits.values())[-1][2]
    if low - high < 14:
        middle = (low + high) / 2
        low, high = middle + 7, middle - 7
    return {"floor_end": Tick(low, "rounding"), "limit_end": Tick(high, "limit")}


def _segments(keys: Sequence[object]) -> Iterable[tuple[int, int]]:
    """Runs of equal keys as (start, stop)."""
    start = 0
    for index in range(1, len(keys) + 1):
        if index == len(keys) or keys[index] != keys[start]:
            yield start, index
            start = index


def _boundaries(rows: Sequence[Row], frame: _Frame) -> Iterable[float]:
    last = frame.left
    for start, _ in _segments([row.step for row in rows]):
        x = frame.x(start - 0.5)
        if start and x - last >= STEP_GAP:
            last = x
            yield round(x, 1)


def _steps(rows: Sequence[Row], frame: _Frame) -> Iterable[Tick]:
    """The number of a step in its middle, where it fits beside the one before."""
    free = frame.left
    segments = list(_segments([row.step for row in rows]))
    for start, stop in segments if len(segments) > 1 else ():
        word = str(rows[start].step)
        middle, half = (frame.x(start - 0.5) + frame.x(stop - 0.5)) / 2, len(word) * LETTER / 2
        if middle - half >= free and middle + half <= frame.right:
            free = middle + half + LETTER
            yield Tick(round(middle, 1), word)


def _scopes(rows: Sequence[Row], frame: _Frame) -> Iterable[Tick]:
    """Names of components under the axis, where they have room."""
    for start, stop in _segments([row.scope for row in rows]):
        left, right = frame.x(start - 0.5), frame.x(stop - 0.5)
        word = short(rows[start].scope, 28)
        if word and right - left >= len(word) * LETTER:
            yield Tick(round((left + right) / 2, 1), word)


def _mark(rows: Sequence[Row], dots: dict[int, Dot], main: int, frame: _Frame) -> Mark:
    """The main dot with a label of two lines where it covers the fewest other dots."""
    row, dot = rows[main], dots[main]
    span = frame.right - frame.left
    name = short(row.name, int(span / LETTER / 1.8))
    what = "first wrong value" if row.wrong else "largest error"
    label = (name, f"{what}: {times(row)}{' rounding' if row.error is not None else ' differs'}")
    wide = max(map(len, label)) * LETTER
    if dot.x + 14 + wide < frame.right:
        anchor, x, start = "start", dot.x + 14, dot.x + 14
    elif dot.x - 14 - wide > frame.left:
        anchor, x, start = "end", dot.x - 14, dot.x - 14 - wide
    else:
        start = min(max(dot.x - wide / 2, frame.left), frame.right - wide)
        anchor, x = "middle", start + wide / 2

    def covered(y: float) -> tuple[int, float]:
        inside = (
            start - 10 < each.x < start + wide + 10 and y - 16 < each.y < y + 24
            for each in dots.values()
        )
        return sum(inside), abs(y - dot.y)

    heights = range(int(frame.top) + 16, int(frame.bottom) - 20, 4)
    return Mark(dot, label, anchor, round(x, 1), float(min(heights, key=covered)))
