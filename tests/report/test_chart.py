"""Charts: every line is on the paper, whatever its numbers."""

import math

import numpy as np
import pytest

from lydite.report.chart import COLORS, Chart, Line, draw


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
