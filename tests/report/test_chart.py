"""Charts: every line is on the paper, whatever its numbers."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFont

from lydite.report import chart as chart_module
from lydite.report.chart import (
    COLORS,
    SCALE_UP,
    Chart,
    Line,
    _apart,
    _label,
    _range,
    _ticks,
    draw,
)


def colors(chart: Chart) -> dict[str, int]:
    """How many pixels have each line's own colour."""
    pixels = np.asarray(draw(chart)).reshape(-1, 3)
    wanted = {name: [int(name[i : i + 2], 16) for i in (1, 3, 5)] for name in COLORS}
    apart = {name: np.abs(pixels.astype(int) - rgb).max(1) for name, rgb in wanted.items()}
    return {name: int((distance < 12).sum()) for name, distance in apart.items()}


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_every_line_is_drawn(scale: str) -> None:
    lines = [Line(f"line {k}", [(n, (k + 1) * 2.0**-n) for n in range(9)]) for k in range(3)]
    found = colors(Chart("title", "across", "up", lines, y_scale=scale))  # type: ignore[arg-type]
    assert all(found[color] > 500 for color in COLORS[:3]), found
    assert all(found[color] < 50 for color in COLORS[3:6]), found


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1.0, 1.0)],
        [(1.0, 0.0), (2.0, -1.0)],
        [(1.0, math.nan), (2.0, math.inf), (3.0, 4.0)],
        [(1.0, 5.0), (2.0, 5.0)],
        [(1.0, 1e-300), (2.0, 1e300)],
    ],
)
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_odd_numbers_do_not_stop_it(points: list[tuple[float, float]], scale: str) -> None:
    chart = Chart("t", "x", "y", [Line("a", points)], x_scale=scale, y_scale=scale)  # type: ignore[arg-type]
    assert draw(chart).size == chart.size


def test_names_of_lines_that_meet_are_moved_apart() -> None:
    lines = [Line(f"name {k}", [(0.0, 1.0), (1.0, 0.5)]) for k in range(12)]
    pixels = np.asarray(draw(Chart("t", "x", "y", lines)).convert("L"))
    right = pixels[74:610, 1030:]
    rows = (right < 200).any(1)
    assert (np.diff(rows.astype(int)) == 1).sum() >= 11  # a gap between each two


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_points_stand_at_their_values(scale: str) -> None:
    """On each axis the middle point is a quarter of the way, whatever the scale."""
    values = [0.0, 1.0, 4.0] if scale == "linear" else [1.0, 10.0, 1e4]
    line = Line("a", list(zip(values, values, strict=True)))
    flat = Line("b", [(value, values[0]) for value in values])
    chart = Chart("t", "x", "y", [line, flat], x_scale=scale, y_scale=scale)  # type: ignore[arg-type]
    image = np.asarray(draw(chart)).astype(int)[:, :1050]  # without the names of the lines
    blue = [int(COLORS[0][i : i + 2], 16) for i in (1, 3, 5)]
    rows, columns = np.nonzero(np.abs(image - blue).max(axis=2) < 12)
    left, right, top, bottom = columns.min(), columns.max(), rows.min(), rows.max()
    assert right - left > 800 and bottom - top > 400
    for share in (0.25, 0.6):
        at = rows[np.abs(columns - (left + share * (right - left))) < 1]
        assert (bottom - at.mean()) / (bottom - top) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(
    ("limits", "scale", "whole", "wanted"),
    [
        ((-0.1, 10.3), "linear", False, [0, 2, 4, 6, 8, 10]),
        ((0.0, 1.0), "linear", False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ((0.0, 3.0), "linear", True, [0, 1, 2, 3]),
        ((0.9, 40.0), "log", False, [1, 2, 4, 8, 16, 32]),
        ((0.003, 0.3), "log", False, [0.005, 0.01, 0.02, 0.05, 0.1, 0.2]),
        ((1e-3, 1.0), "log", False, [1e-3, 1e-2, 0.1, 1]),
        ((1e-16, 1.0), "log", False, [10.0**power for power in range(-16, 1, 3)]),
    ],
)
def test_ticks_are_round_numbers_within_the_limits(
    limits: tuple[float, float], scale: str, whole: bool, wanted: list[float]
) -> None:
    found = _ticks(limits, scale, whole=whole)  # type: ignore[arg-type]
    assert found == pytest.approx(wanted)


def test_labels_are_short() -> None:
    values = {
        0: "0",
        1e-3: "0.001",
        0.25: "0.25",
        99_999: "99999",
        1e5: "1e5",
        9e-4: "9e-4",
        -2: "-2",
    }
    assert {value: _label(value) for value in values} == values


@pytest.mark.parametrize("values", [[2.0], [1.0, 3.0], [5.0, 2.0, 90.0], []])
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_a_range_holds_its_values_with_a_small_margin(values: list[float], scale: str) -> None:
    low, high = _range(values, scale)  # type: ignore[arg-type]
    assert low < high and all(low < value < high for value in values)
    form = np.log if scale == "log" else np.asarray
    if len(values) > 1:
        span = float(form(max(values)) - form(min(values)))
        assert form(high) - form(low) < 1.1 * span


@pytest.mark.parametrize("places", [[50.0], [10.0, 15.0, 90.0], [95.0, 97.0, 99.0], []])
def test_places_are_moved_apart_and_stay_inside(places: list[float]) -> None:
    moved = _apart(places, 20, 0, 100)
    assert all(0 <= place <= 100 for place in moved) and np.all(np.diff(moved) >= 20)
    if len(places) < 2:
        assert moved == places


def test_a_chart_says_what_it_shows() -> None:
    """Each text is drawn at its place, and nothing where there is none."""
    line = Line("a", [(0.0, 0.0), (1.0, 1.0)])
    charts = Chart("", "", "", [line]), Chart("title", "across", "upward", [line], note="a note")
    bare, full = (np.asarray(draw(chart)).astype(int) for chart in charts)
    added = np.abs(full - bare).max(axis=2) > 40
    places = {"title": (20, 45, 80, 200), "up": (50, 72, 80, 200), "across": (640, 670, 900, 1100)}
    places["note"] = (640, 670, 80, 250)
    for name, (top, bottom, left, right) in places.items():
        assert added[top:bottom, left:right].sum() > 20, name
    rest = added.copy()
    for top, bottom, left, right in places.values():
        rest[top:bottom, left:right] = False
    assert not rest.any()
    gray = bare.max(axis=2) < 225
    assert gray[100:600, 40:80].any() and gray[612:640, 80:1050].any()  # labels of both axes


class Pen:
    """What a chart draws, in pixels of the finished picture, by kind."""

    def __init__(self, image: Image.Image) -> None:
        self.texts: dict[str, tuple[float, float]] = {}
        self.looks: dict[str, tuple[Any, Any]] = {}  # colour and anchor of a text
        self.lines: list[tuple[list[tuple[float, float]], Any]] = []
        self.dots: list[tuple[float, float, float]] = []  # x, y, diameter

    def text(self, at: Any, text: str, *, fill: Any, font: Any, anchor: str = "la") -> None:
        self.texts[text] = at[0] / SCALE_UP, at[1] / SCALE_UP
        self.looks[text] = fill, anchor

    def line(self, points: Any, *, fill: Any, width: int = 0, joint: str = "") -> None:
        self.lines.append(([(x / SCALE_UP, y / SCALE_UP) for x, y in points], fill))

    def ellipse(self, box: Any, *, fill: Any) -> None:
        x, y, right, bottom = (edge / SCALE_UP for edge in box)
        self.dots.append(((x + right) / 2, (y + bottom) / 2, right - x))


@pytest.fixture
def pen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pen]]:
    pens: list[Pen] = []
    monkeypatch.setattr(
        chart_module.ImageDraw, "Draw", lambda image: pens.append(Pen(image)) or pens[-1]
    )
    yield pens


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_labels_stand_at_their_values_and_names_at_the_ends_of_their_lines(
    scale: Any, pen: list[Pen]
) -> None:
    first = Line("falls", [(1.0, 512.0), (2.0, 30.0), (64.0, 1.0)])
    second = Line("rises", [(1.0, 1.0), (64.0, 300.0)])
    draw(Chart("t", "across", "up", [first, second], x_scale=scale, y_scale=scale, note="odd"))
    (drawn,) = pen
    form = math.log if scale == "log" else float
    lines = {color: points for points, color in drawn.lines if color in COLORS}
    dots = iter(drawn.dots)
    for line, color in zip((first, second), COLORS, strict=False):
        places = lines[color]
        assert np.allclose([next(dots)[:2] for _ in places], places)
        assert drawn.looks[line.name] == (color, "lm")
        x, y = drawn.texts[line.name]
        assert x > places[-1][0] and y == pytest.approx(places[-1][1], abs=0.01)
    (left, bottom), (right, _) = lines[COLORS[0]][0], lines[COLORS[0]][-1]
    top, bottom = lines[COLORS[0]][0][1], lines[COLORS[0]][-1][1]
    numbers = {text: at for text, at in drawn.texts.items() if text.replace(".", "").isdigit()}
    across = {text: x for text, (x, y) in numbers.items() if drawn.looks[text][1] == "mt"}
    up = {text: y for text, (x, y) in numbers.items() if drawn.looks[text][1] == "rm"}
    assert len({*across, *up}) >= 5
    for text, x in across.items():
        share = (form(float(text)) - form(1.0)) / (form(64.0) - form(1.0))
        assert x == pytest.approx(left + share * (right - left), abs=0.1)
        assert numbers[text][1] > bottom
    for text, y in up.items():
        share = (form(float(text)) - form(1.0)) / (form(512.0) - form(1.0))
        assert y == pytest.approx(bottom - share * (bottom - top), abs=0.1)
        assert numbers[text][0] < left
        assert any(  # a line of the grid from edge to edge at each of them
            start[1] == end[1] == y and start[0] < left < right < end[0]
            for (start, *_, end), _ in drawn.lines
        )
    assert drawn.texts["odd"][0] < drawn.texts["across"][0] and drawn.looks["across"][1] == "rt"
    assert drawn.texts["t"][1] < drawn.texts["up"][1] < top


def test_names_are_sorted_as_their_lines_end_and_stay_on_the_picture(pen: list[Pen]) -> None:
    names = [f"a name of the line {k}" for k in range(12)]
    lines = [Line(name, [(0.0, 0.0), (1.0, float(-k % 7))]) for k, name in enumerate(names)]
    draw(Chart("t", "x", "y", [*lines, Line("none", [(0.0, math.nan)])]))
    draw(Chart("t", "x", "y", [Line("b", [(0.0, 1.0)]), Line("a", [(0.0, 2.0)])]))
    many, two = pen
    heights = [many.texts[name][1] for name in names]
    ends = [line.points[-1][1] for line in lines]
    for one, other in itertools.combinations(range(12), 2):
        assert abs(heights[one] - heights[other]) >= 19.9
        if ends[one] != ends[other]:
            assert (heights[one] < heights[other]) == (ends[one] > ends[other])
    font = ImageFont.load_default(15)
    widest = max(font.getlength(name) for name in names)
    assert all(many.texts[name][0] + widest <= 1100 for name in names) and "none" not in many.texts
    assert two.texts["a"][1] < two.texts["b"][1] and len(two.dots) == 2
    assert not [points for points, color in two.lines if color in COLORS]


def test_dots_are_smaller_where_there_are_many(pen: list[Pen]) -> None:
    for count in (24, 25):
        draw(Chart("t", "x", "y", [Line("a", [(float(n), 1.0) for n in range(count)])]))
    few, many = pen
    assert len(few.dots) == 24 and few.dots[0][2] > 1.5 * many.dots[0][2] > 2


def test_long_axes_have_at_most_nine_ticks() -> None:
    for high in (1e9, 1e12, 1e40, 1e300):
        found = _ticks((1.0, high), "log")
        assert 3 <= len(found) <= 9 and found[0] == 1
    assert _ticks((1.0, 2.0**8), "log") == [2.0**power for power in range(9)][::2]
    assert _ticks((1.0, 2.0**7), "log") == [2.0**power for power in range(8)]
    assert _ticks((0.2, 0.5), "log") == [0.2, 0.5]  # the ends are within the limits
    assert _ticks((0.0, 0.7), "linear", whole=True) == [0]
