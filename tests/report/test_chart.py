"""Charts: every line is on the paper, whatever its numbers."""

import math

import numpy as np
import pytest

from lydite.report.chart import COLORS, Chart, Line, _apart, _label, _range, _ticks, draw


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
