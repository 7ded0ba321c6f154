"""Parts of the page of a comparison: each number, position and colour is that of its value."""

import base64
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from PIL import Image, ImageColor

from lydite.diff.result import Row
from lydite.report.diff import heat_maps, pictures, plots
from lydite.report.diff.error_curve import Curve, draw_curve
from lydite.report.diff.heat_maps import Maps, draw_maps
from lydite.report.diff.module_tree import build_tree
from lydite.report.diff.plots import density, histogram, lines
from lydite.report.diff.read_values import Value, _rows_with_notes, statistics
from lydite.report.diff.row_text import closest, described, number, short, times
from lydite.report.diff.wrong_value import (
    Tensor,
    _differences,
    headline,
    show_parameter,
    show_value,
)
from lydite.report.page import Table, environment
from lydite.trace.events import Event, Stats, WeightInfo
from support.png_pixels import png_pixels

SHAPE = (2, 3)


def row(site: str = "net/a", error: float | None = 1e-7, **more: Any) -> Row:
    known = Row(site, site, "out", 0, 0, "activation", SHAPE, "f32", error, 1e-7, 1e-6, False)
    return replace(known, **more)


def value_at(ticks: Sequence[Any], at: float, log: bool = False) -> float:
    """What stands at a position of an axis, by its labels."""
    labels = [float(tick.label.replace("−", "-").replace(",", "")) for tick in ticks]
    known = np.log10(labels) if log else np.array(labels)
    slope, start = np.polyfit([tick.at for tick in ticks], known, 1)
    assert np.allclose([slope * tick.at + start for tick in ticks], known, atol=0.08 * abs(slope))
    return float(10 ** (slope * at + start) if log else slope * at + start)


# ---- numbers


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (None, 3, ""), (0.0, 3, "0"), (math.nan, 3, "NaN"), (math.inf, 3, "∞"),
        (-math.inf, 3, "−∞"), (1e-3, 3, "0.001"), (9.99e-4, 3, "9.99e-4"), (-2.5, 3, "−2.5"),
        (999.0, 3, "999"), (1000.0, 3, "1,000"), (1234.56, 6, "1,234.56"), (99_999.0, 3, "99,999"),
        (1e5, 3, "1.00e5"), (-1.234e-7, 3, "−1.23e-7"), (0.12345, 4, "0.1235"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, digits: int, text: str) -> None:
    assert number(value, digits) == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"error": None, "wrong": True}, "shape"), ({"error": None}, ""), ({"error": 0.0}, "0 ×"),
        ({"error": math.nan}, "∞ ×"), ({"error": 1e-6}, "10.0 ×"), ({"error": 4e-9}, "0.04 ×"),
        ({"error": 1e-4}, "1,000 ×"), ({"error": 0.0, "floor": None}, "0 ×"),
        ({"error": 1e-9, "floor": None}, "∞ ×"), ({"error": 1e-9, "floor": 0.0}, "∞ ×"),
    ],
)  # fmt: skip
def test_the_error_in_units_of_rounding(changes: dict[str, Any], text: str) -> None:
    assert times(row(**changes)) == text


def test_the_largest_error_is_that_of_a_row_which_agrees() -> None:
    rows = [row(error=2e-7), row(error=5e-7), row(error=4e-7), row(error=1.0, wrong=True)]
    assert closest([*rows, row(error=None)]) == 1
    assert closest([row(error=1.0, wrong=True)]) is None


def test_a_long_name_keeps_both_ends() -> None:
    name = "".join(chr(65 + index % 50) for index in range(300))
    assert short(name, 300) == name
    for most in (5, 10, 80, 299):
        cut = short(name, most)
        head, _, tail = cut.partition("…")
        assert len(cut) == most
        assert name.startswith(head) and name.endswith(tail) and len(tail) >= len(head) > 0


def test_the_description_of_a_row() -> None:
    assert described(row(error=1e-6, step=7)).splitlines() == [
        "net/a, step 7", "error 1.00e-6 = 10.0 × rounding", "rounding 1.00e-7, limit 1.00e-6",
    ]  # fmt: skip
    assert "differ" in described(row(error=None, wrong=True))
    assert "not compared" in described(row(error=None)) and "limit" in described(row(error=None))
    assert "limit" not in described(row(floor=None)) + described(row(limit=None))
    assert headline(row(step=2)) == "net/a, step 2: 2×3, f32"
    assert "scalar" in headline(row(shape=()))


# ---- the error curve


def spans(path: str) -> list[tuple[str, float, float, float]]:
    """A path of steps as (letter, from x, to x, height)."""
    found = re.findall(r"([ML])([\d.]+) ([\d.]+)H([\d.]+)", path)
    assert "".join(f"{a}{b} {c}H{d}" for a, b, c, d in found) == path
    return [(a, float(b), float(d), float(c)) for a, b, c, d in found]


def curve(rows: Sequence[Row], first: int | None = None, size: Any = (1000.0, 400.0)) -> Curve:
    drawn = draw_curve(rows, first, *size)
    assert drawn is not None
    return drawn


def twelve() -> list[Row]:
    draw = np.random.default_rng(0)
    rows = []
    for index in range(12):
        floor = float(10 ** draw.uniform(-8, -6))
        error = floor * (300 if index > 8 else 2)
        name = f"{'net' if index < 8 else 'decoder'}/layer.{index}"
        wrong = index > 8
        rows.append(row(name, error, step=index // 3, floor=floor, limit=floor * 20, wrong=wrong))
    return rows


@pytest.mark.parametrize("size", [(1000.0, 400.0), (380.0, 330.0)])
def test_every_row_is_a_dot_at_its_error(size: tuple[float, float]) -> None:
    rows = twelve()
    shown = curve(rows, 9, size)
    share = (shown.right - shown.left) / len(rows)
    assert [dot.index for dot in shown.dots] == list(range(12)) and not shown.lanes
    floors, limits = spans(shown.floor), spans(shown.limit)
    bands = [tuple(map(float, re.findall(r"[\d.]+", part))) for part in shown.band.split("Z")[:-1]]
    assert [part[0] for part in floors] == ["M"] + ["L"] * 11
    for index, (one, dot) in enumerate(zip(rows, shown.dots, strict=True)):
        start, stop = shown.left + index * share, shown.left + (index + 1) * share
        assert dot.x == pytest.approx((start + stop) / 2, abs=0.06) and dot.wrong == one.wrong
        assert value_at(shown.ticks, dot.y, log=True) == pytest.approx(one.error, rel=0.02)
        for line, wanted in ((floors, one.floor), (limits, one.limit)):
            assert line[index][1:3] == pytest.approx((start, stop), abs=0.06)
            assert value_at(shown.ticks, line[index][3], log=True) == pytest.approx(
                wanted, rel=0.02
            )
        corners = (start, floors[index][3], stop, limits[index][3], start)
        assert bands[index] == pytest.approx(corners, abs=0.06)
        assert described(one) == dot.text and shown.top <= dot.y <= shown.bottom
    middles = [shown.left + (3 * step + 1.5) * share for step in range(4)]
    assert [tick.at for tick in shown.steps] == pytest.approx(middles, abs=0.06)
    assert [tick.label for tick in shown.steps] == list("0123")
    edges = [shown.left + 3 * step * share for step in (1, 2, 3)]
    assert list(shown.boundaries) == pytest.approx(edges, abs=0.06)
    assert [tick.label for tick in shown.scopes] == ["net", "decoder"]
    assert shown.scopes[0].at == pytest.approx(shown.left + 4 * share, abs=0.06)
    assert shown.mark and shown.mark.dot.index == 9 and "first wrong" in shown.mark.label[1]
    assert shown.left <= shown.mark.label_x <= shown.right
    assert shown.top <= shown.mark.label_y <= shown.bottom


def test_a_row_without_rounding_interrupts_the_line() -> None:
    rows = twelve()
    rows[4] = replace(rows[4], floor=None)
    assert [part[0] for part in spans(curve(rows, 9).floor)] == ["M"] + ["L"] * 3 + ["M"] + [
        "L"
    ] * 6
    assert curve([replace(one, floor=None) for one in rows], 9).floor_end is None


def test_labels_of_both_lines_do_not_overlap() -> None:
    for factor in (1.05, 1000.0):
        shown = curve([row(floor=1e-7, limit=1e-7 * factor, error=1e-8)])
        assert shown.floor_end and shown.limit_end
        low, high = spans(shown.floor)[0][3], spans(shown.limit)[0][3]
        ends = shown.floor_end.at, shown.limit_end.at
        assert ends[0] - ends[1] >= 14 and sum(ends) == pytest.approx(low + high, abs=0.2)
        assert factor < 2 or ends == pytest.approx((low, high), abs=0.1)


def test_errors_without_a_logarithm_have_lanes_outside_the_scale() -> None:
    rows = [
        row(error=1e-3, wrong=True),
        row(error=None, wrong=True),
        row(error=math.inf),
        row(error=0.0),
    ]
    shown = curve(rows, 0)
    lanes = {tick.label: tick.at for tick in shown.lanes}
    heights = [tick.at for tick in shown.ticks]
    assert shown.top < lanes["shape"] < lanes["∞"] < min(heights)
    assert max(heights) < lanes["0"] < shown.bottom
    assert [dot.y for dot in shown.dots][1:] == [lanes["shape"], lanes["∞"], lanes["0"]]
    assert draw_curve([row(error=None)], None, 1000, 400) is None


@pytest.mark.parametrize("least", [-3, -12, -300])
def test_powers_of_ten_have_room(least: int) -> None:
    shown = curve([row(error=2.0, floor=None, limit=None), row(error=2 * 10.0**least)])
    heights = [tick.at for tick in shown.ticks]
    assert 3 <= len(heights) <= 14 and "1" in [tick.label for tick in shown.ticks]
    assert min(-np.diff(heights)) >= 24 and (least < -3 or len(heights) >= 4)


def test_many_rows_keep_the_extremes_and_no_dot_is_on_the_wrong_side() -> None:
    draw = np.random.default_rng(1)
    rows = []
    for index in range(6000):
        limit = float(10 ** draw.uniform(-6, -5))
        error = limit * float(10 ** draw.uniform(-2, -0.01 if index < 4000 else 1))
        rows.append(row(f"net/{index}", error, floor=limit / 10, limit=limit, wrong=error > limit))
    shown = curve(rows, next(index for index, one in enumerate(rows) if one.wrong))
    assert len(shown.dots) < 1400
    kept = {dot.index for dot in shown.dots}
    for wrong in (False, True):
        some = [index for index, one in enumerate(rows) if one.wrong == wrong]
        errors = {index: cast(float, rows[index].error) for index in some}
        assert {min(some, key=errors.__getitem__), max(some, key=errors.__getitem__)} <= kept
    limits = spans(shown.limit)
    for dot in shown.dots:
        (*_, height), *more = [part for part in limits if part[1] <= dot.x <= part[2]]
        if dot.wrong or dot.index < 4000:
            assert more or (dot.y <= height + 0.1 if dot.wrong else dot.y >= height - 0.1)
    for path, wrong in zip(shown.bars, (False, True), strict=True):
        ends = re.findall(r"M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)", path)
        assert ends and all(float(top) <= float(bottom) for _, top, _, bottom in ends)
        places = {(str(dot.x), str(dot.y)) for dot in shown.dots if dot.wrong == wrong}
        assert all((a, b) in places and (c, d) in places for a, b, c, d in ends)


# ---- plots and maps


def outline(path: str) -> np.ndarray:
    """Right end and height of each step."""
    found = re.findall(r"V([\d.]+)H([\d.]+)", path)
    return np.array([(float(x), float(y)) for y, x in found])


def test_a_histogram_has_the_counts_of_its_side() -> None:
    draw = np.random.default_rng(0)
    sides = draw.normal(-2, 0.5, 3000), draw.normal(3, 1, 400)
    shown = histogram(*sides)
    assert shown and not shown.note
    ones = next(tick.at for tick in shown.y if tick.label == "1")
    tens = next(tick.at for tick in shown.y if tick.label == "10")
    for path, side in zip((shown.reference, shown.port), sides, strict=True):
        steps = outline(path)
        filled = steps[:, 1] < ones - 1
        lift = 0.02 * (plots.BOTTOM - plots.TOP)  # of a bin with one value
        counts = np.where(filled, 10 ** ((ones - lift - steps[:, 1]) / (ones - tens)), 0)
        assert counts.sum() == pytest.approx(side.size, rel=0.02)
        width = steps[1, 0] - steps[0, 0]
        middles = [value_at(shown.x, x - width / 2) for x in steps[:, 0]]
        assert np.average(middles, weights=counts) == pytest.approx(side.mean(), abs=0.1)
        assert steps[:, 1].min() >= plots.TOP
    assert shown.reference.endswith("Z") and not shown.port.endswith("Z")
    assert histogram(np.full(3, np.nan), np.full(3, np.nan)) is None


def test_values_beyond_a_histogram_are_counted() -> None:
    values = np.append(np.random.default_rng(0).normal(size=20_000), [1e9, -1e9])
    shown = histogram(values, values[:-2])
    assert shown and re.match(r"\d+ values beyond", shown.note)
    assert abs(value_at(shown.x, plots.LEFT)) < 10 > abs(value_at(shown.x, plots.RIGHT))


def test_a_large_value_is_sampled_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "MAX_VALUES", 100)
    for size, sampled in ((100, False), (101, True), (10_000, True)):
        shown = histogram(np.linspace(0, 1, size), np.linspace(0, 1, size))
        assert shown and ("evenly" in shown.note) == sampled
        assert plots._finite(np.zeros(size)).size <= 101 and plots._stride(size) % 2


def test_the_port_is_drawn_over_the_reference() -> None:
    across = np.linspace(0, 1, 5000)
    shown = density(across, across**2)
    assert shown
    image = png_pixels(shown.png)
    side = len(image)
    dark = (image != ImageColor.getrgb(plots.INK[0])).any(axis=2)
    assert 0.003 < dark.mean() < 0.1 and shown.low.startswith("−0.0") and shown.high[:3] == "1.0"
    low, high = (float(text.replace("−", "-")) for text in (shown.low, shown.high))
    for x in (0.1, 0.5, 0.9):
        column, height = ((v - low) / (high - low) * side for v in (x, x * x))
        rows = np.flatnonzero(dark[:, int(column)])
        assert abs(side - rows.mean() - height) < 0.03 * side
    assert (image == ImageColor.getrgb(plots.INK[-1])).all(axis=2).any()
    assert density(np.zeros(15), np.zeros(15)) is None


def test_a_short_list_is_drawn_at_its_values() -> None:
    sides = np.array([1.0, 5.0, np.nan, 2.0, 9.0]), np.array([[1.0], [4.0], [3.0]])
    shown = lines(*sides)
    assert shown
    for path, side in zip((shown.reference, shown.port), sides, strict=True):
        found = re.findall(r"([ML])([\d.]+) ([\d.]+)", path)
        points = [(at, v) for at, v in enumerate(side.reshape(-1)) if math.isfinite(v)]
        for (letter, x, y), (at, value) in zip(found, points, strict=True):
            assert value_at(shown.x, float(x)) == pytest.approx(at, abs=0.01)
            assert value_at(shown.y, float(y)) == pytest.approx(value, abs=0.02)
            assert letter == ("M" if at == 0 or (side.size == 5 and at == 3) else "L")
    assert lines(np.zeros(401), np.zeros(401)) is None and lines(np.ones(400), np.ones(400))
    assert (
        lines(np.zeros((2, 2)), np.zeros((2, 2))) is None and lines(np.ones(1), np.ones(1)) is None
    )
    assert lines(np.full(3, np.nan), np.full(3, np.nan)) is None


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3e-9, 7e-9), (1e6, 1.1e6), (-5.0, -4.9)])
def test_axes_have_a_few_round_numbers(low: float, high: float) -> None:
    found = plots._round_numbers(low, high)
    assert 3 <= len(found) <= 9 and low <= found[0] and found[-1] <= high
    steps = np.diff(found)
    assert np.allclose(steps, steps[0]) and f"{steps[0]:.0e}"[0] in "125"
    assert found[0] - steps[0] < low and found[-1] + steps[0] > high


def maps(reference: Any, port: Any, dims: str | None = None) -> tuple[Maps, ...]:
    pair: Any = SimpleNamespace(ref_dims=None, event=SimpleNamespace(dims=dims))
    return draw_maps(Value(pair, np.asarray(reference), np.asarray(port), ""))


def test_a_colour_is_a_value_and_the_ring_is_at_the_largest_difference() -> None:
    port = np.array([[-8.0, -4.0, 0.0], [4.0, 8.0, 0.0]])
    reference = port.copy()
    reference[1, 0] -= 2.0
    (shown,) = maps(reference, port)
    assert (shown.scale, shown.difference, shown.note) == ("8", "2", "2 × 3") and not shown.stacked
    first, second, difference = shown.items
    assert [item.caption for item in shown.items] == ["reference", "port", "port − reference"]
    stops = [ImageColor.getrgb(stop) for stop in heat_maps.STOPS]
    times = heat_maps.SIDE // 3
    for item, wanted in ((second, [0, 1, 2, 3, 4, 2]), (difference, [2, 2, 2, 4, 2, 2])):
        image = png_pixels(item.png)
        assert image.shape == (2 * times, 3 * times, 3) and item.aspect == 1.5
        cells = image[times // 2 :: times, times // 2 :: times].reshape(-1, 3)
        assert np.abs(cells.astype(int) - [stops[at] for at in wanted]).max() <= 1
        assert item.ring == pytest.approx((100 * 0.5 / 3, 75))
    assert png_pixels(first.png)[-1, 0].tolist() != png_pixels(second.png)[-1, 0].tolist()
    assert all(item.ring is None for item in maps(port, port)[0].items)


def test_a_cell_of_a_large_value_is_its_worst_and_an_outlier_does_not_blank_the_map() -> None:
    draw = np.random.default_rng(0)
    reference = draw.normal(size=(600, 800))
    port = reference.copy()
    port[301, 7] += 1e6
    (shown,) = maps(reference, port)
    image = png_pixels(shown.items[2].png)
    assert image.shape == (200, 267, 3) and "3 × 3" in shown.note
    marked = np.argwhere((image == ImageColor.getrgb(heat_maps.STOPS[-1])).all(axis=2))
    assert marked.tolist() == [[100, 2]]
    assert shown.items[0].ring == pytest.approx((100 * 2.5 / 267, 100 * 100.5 / 200))
    (alone,) = maps(np.append(np.ones(99), 1e3).reshape(10, 10), np.zeros((10, 9)))[:1]
    assert alone.scale == number(8 * math.sqrt((99 + 1e6) / 100)) and len(alone.items) == 1


@pytest.mark.parametrize(
    ("shape", "dims", "titles", "aspect", "stacked"),
    [
        ((2, 90), None, ["[:, :] rows ↓, columns →"], 6.0, True),
        ((2, 4, 90), "b s d", ["[1, :, :] tokens ↓, channels →"], 6.0, True),
        ((1, 9, 8, 90), "b c h w", [f"[0, {n}, :, :] channel {n}" for n in (8, 7, 6, 5, 4, 3)],
         2.5, False),
        ((2, 6, 6, 3), None, [f"[1, :, :, {n}] channel {n}" for n in (2, 1, 0)], 1.0, False),
        ((30, 30, 3), None, [f"[:, :, {n}] channel {n}" for n in (2, 1, 0)], 1.0, False),
        ((7,), None, ["[:]"], 6.0, True),
    ],
)  # fmt: skip
def test_planes_are_cut_where_the_difference_is(
    shape: tuple[int, ...], dims: str | None, titles: list[str], aspect: float, stacked: bool
) -> None:
    port = np.arange(math.prod(shape), dtype=float).reshape(shape)
    shown = maps(np.zeros(shape), port, dims)
    assert [one.title for one in shown] == titles
    assert shown[0].items[0].aspect == aspect and shown[0].stacked == stacked


# ---- tables


def test_the_largest_differences_are_listed_and_whole_numbers_from_the_first() -> None:
    reference = np.linspace(0.5, 1.5, 20).reshape(4, 5)
    port = reference.copy()
    port[1, 2] += 1
    port[3, 4] -= 3
    title, table = _differences(reference, port)
    assert table and title.startswith("2 of 20 values") and "largest" in title
    assert [line[0] for line in table.rows] == ["[3, 4]", "[1, 2]"]
    assert table.rows[0][1:] == ("1.5", "−1.5", "3")
    whole = np.arange(20).reshape(4, 5)
    title, table = _differences(whole, np.where(whole == 3, 4, whole) + 10 * (whole > 5))
    assert table and title.startswith("15 of 20 values") and "first" in title
    assert len(table.rows) == 8 and table.rows[0] == ("[0, 3]", "3", "4", "1")
    assert _differences(whole, whole) == ("No value differs.", None)
    _, table = _differences(np.array([0.5]), np.array([0.500001]))
    assert table and table.rows[0][1:3] == ("0.5", "0.500001")


def test_statistics_of_a_value_leave_out_what_is_not_finite() -> None:
    values = np.array([3.0, -1.0, 0.0, np.nan, np.inf, -np.inf, 2.0])
    found = statistics(cast(Any, None), values)
    finite = np.array([3.0, -1.0, 0.0, 2.0])
    assert found and (found.min, found.max, found.mean) == (-1, 3, 1)
    assert found.std == pytest.approx(finite.std()) and found.rms == pytest.approx(math.sqrt(3.5))
    assert (found.count, found.nan, found.inf, found.zero) == (7, 1, 2, 1)
    nothing = statistics(cast(Any, None), np.array([np.nan]))
    assert nothing and (nothing.nan, nothing.inf, nothing.zero) == (1, 0, 0)


def test_the_tree_of_modules() -> None:
    rows = [
        row("net/blocks.0.a", 2e-7, step=4),
        row("net/blocks.0.a", 9e-6, wrong=True, call=1, slot="in.0", note="axes exchanged"),
        row("net/blocks.1", None, wrong=True, port_site="net/b.1", shape=()),
        row("decoder/out", 1e-7),
    ]  # fmt: skip
    net, decoder = build_tree(rows, 1)
    assert net.label == "net/blocks" and net.open and decoder.label == "decoder/out"
    assert (net.tally.state, net.tally.wrong, net.tally.total) == ("first", 2, 3)
    assert net.tally.worst == "shape" and decoder.tally.state == "right" and not decoder.open
    first, second = net.branches
    assert first.label == "0.a" and first.tally.worst == "90.0 ×" and second.label == "1"
    assert (second.tally.state, second.open) == ("wrong", False)
    assert first.values and second.values and second.values.port == "net/b.1"
    assert not first.values.port and [line.state for line in first.values.lines] == [
        "right",
        "first",
    ]
    head = (
        "step",
        "call",
        "slot",
        "error",
        "rounding",
        "limit",
        "error ÷ rounding",
        "shape",
        "note",
    )
    assert first.values.head == head
    assert first.values.lines[0].cells == (
        "4", "0", "out", "2.00e-7", "1.00e-7", "1.00e-6", "2.0 ×", "2×3", "",
    )  # fmt: skip
    assert second.values.lines[0].cells == ("0", "out", "shape", "1.00e-7", "1.00e-6", "", "scalar")
    assert [line.index for line in first.values.lines] == [0, 1]


# ---- places on the page


def written(macro: str, *words: Any) -> str:
    """What a macro of the page makes of a block."""
    macros: Any = environment().get_template("diff_blocks.html").module
    return str(getattr(macros, macro)(*words))


def source(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def test_each_map_has_its_own_words_scale_and_ring() -> None:
    draw = np.random.default_rng(0)
    reference = draw.normal(size=(12, 20))
    port = reference.copy()
    port[3, 4] += 0.5
    shown = Tensor("a note", Table(("", "reference", "port"), ()), "title", None)
    shown = replace(
        shown,
        maps=maps(reference, port),
        density=density(reference, port),
        histogram=replace(cast(Any, histogram(reference, port)), note="sampled"),
        lines=lines(reference[:1], port[:1]),
    )
    html = written("tensor", shown)
    (one,) = shown.maps
    assert shown.density and shown.histogram and shown.lines and one.scale != one.difference
    found = re.findall(
        r'<div class="map" style="aspect-ratio: ([\d.]+)"><img src="([^"]*)" alt="([^"]*)">'
        r'<i class="ring" style="left: ([\d.]+)%; top: ([\d.]+)%"></i></div>\s*'
        r'<figcaption>(.*?)<span class="scale"><span>−(.*?)</span><i></i><span>(.*?)</span>',
        html,
    )
    scales = one.scale, one.scale, one.difference
    assert found == [
        ("1.667", source(item.png), item.alt, "22.5", "29.17", item.caption, scale, scale)
        for item, scale in zip(one.items, scales, strict=True)
    ]
    assert "<p>a note</p>" in html and "<p>title</p>" in html and "; sampled</figcaption>" in html
    assert f"both from {shown.density.low} to {shown.density.high};" in html
    assert source(shown.density.png) in html
    for chart, filled in ((shown.lines, ""), (shown.histogram, "filled")):
        assert f'<path class="reference {filled}" d="{chart.reference}"/>' in html
        assert f'<path class="port" d="{chart.port}"/>' in html
        for tick in chart.x:
            assert f'<text class="middle" x="{tick.at}" y="282">{tick.label}</text>' in html
        for tick in chart.y:
            height = f'y="{round(tick.at + 4, 1)}">{tick.label}</text>'
            assert f'<path class="rule" d="M44 {round(tick.at, 1)}H510"/>' in html
            assert f'<text class="end" x="38" {height}' in html
    bare = written("tensor", Tensor("", shown.numbers, "", None))
    assert "<img" not in bare and "<svg" not in bare and "<figure" not in bare


def test_the_final_pictures_stand_above_their_names() -> None:
    pair: Any = SimpleNamespace(event=SimpleNamespace(name="image", dtype="u8"))
    one = np.full((8, 10, 3), 100, np.uint8)
    for by, word in ((20, " × 16"), (155, " × 2"), (0, "")):
        drawn = pictures._pictures(pair, one, one + np.uint8(by))
        assert drawn
        html = written("pictures", drawn)
        assert re.findall(r'<img src="([^"]*)" alt="[^"]*"><figcaption>(.*?)</fig', html) == [
            (source(drawn.reference), "reference"), (source(drawn.port), "port"),
            (source(drawn.difference), f"|port − reference|{word}"),
        ]  # fmt: skip
        assert png_pixels(drawn.reference).max() == 100 == png_pixels(drawn.port).max() - by
        assert "aspect-ratio: 10 / 8" in html
        assert ("pictures crisp" in html) == (drawn.width < 300)


def test_the_dots_of_the_curve_lead_to_their_rows() -> None:
    rows = [*twelve(), row("net/z", None, wrong=True, step=4)]
    shown = curve(rows, 9)
    html = written("curve", shown)
    dots = re.findall(
        r'<a href="#r(\d+)"><use href="#(\w+)" x="(.*?)" y="(.*?)" class="(\w+)"', html
    )
    assert dots == [
        (f"{dot.index}", state, f"{dot.x}", f"{dot.y}", state)
        for dot in shown.dots
        for state in ["wrong" if rows[dot.index].wrong else "right"]
    ]
    assert shown.mark and shown.limit_end and shown.floor_end and shown.lanes
    for name, path in (
        ("limit", shown.limit), ("floor", shown.floor), ("band", shown.band),
        ("bars right", shown.bars[0]), ("bars wrong", shown.bars[1]),
    ):  # fmt: skip
        assert f'<path class="{name}" d="{path}"/>' in html
    for end, word in ((shown.limit_end, "limit"), (shown.floor_end, "rounding")):
        assert f'y="{round(end.at + 4, 1)}">{word}</text>' in html
    for tick in (*shown.ticks, *shown.lanes):
        assert f'y="{round(tick.at + 4, 1)}">{tick.label}</text>' in html
    for tick in (*shown.steps, *shown.scopes):
        assert re.search(rf'x="{tick.at}" y="[\d.]+">{tick.label}</text>', html)
    assert '<g class="mark wrong">' in html and f'cx="{shown.mark.dot.x}"' in html
    (branch,) = build_tree([row("a"), row("a", 1.0, wrong=True)], 1)
    lines_of = written("branches", [branch])
    assert re.findall(r'<tr id="r(\d)" class="(\w+)">', lines_of) == [
        ("0", "right"),
        ("1", "first"),
    ]
    assert '<details class="first" open>' in lines_of and "<span>1 of 2</span>" in lines_of


# ---- pictures


@pytest.mark.parametrize(
    ("low", "high", "dtype", "wanted"),
    [
        (0.0, 1.0, "f32", (0, 1)), (-0.04, 1.04, "f32", (0, 1)), (-0.06, 1.0, "f32", (-1, 1)),
        (-1.0, 1.0, "f32", (-1, 1)), (0.0, 7.9, "f32", (0, 1)), (0.0, 8.1, "f32", (0, 255)),
        (0.0, 1.0, "u8", (0, 255)),
    ],
)  # fmt: skip
def test_what_black_and_white_are(
    low: float, high: float, dtype: str, wanted: tuple[float, float]
) -> None:
    assert pictures._values(np.array([low, np.nan, np.inf, high]), dtype) == wanted


def test_a_large_picture_is_shrunk_in_its_proportions() -> None:
    for size, wanted in (((512, 9), (512, 9)), ((1024, 512), (512, 256)), ((9, 1024), (4, 512))):
        shown = pictures._shrunk(Image.new("RGB", size))
        assert shown.size == wanted
    assert pictures._worst(np.zeros((600, 1300), np.int16)).shape == (200, 434)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((8, 9, 3), (8, 9, 3)), ((3, 8, 9), (8, 9, 3)), ((2, 3, 8, 9), (8, 9, 3)),
        ((2, 8, 9, 3), (8, 9, 3)), ((8, 9, 4), None), ((7, 9, 3), None), ((8, 9), None),
    ],
)  # fmt: skip
def test_which_values_are_pictures(shape: tuple[int, ...], wanted: tuple[int, ...] | None) -> None:
    found = pictures._channels_last(np.zeros(shape))
    assert (None if found is None else found.shape) == wanted


def test_the_difference_of_two_pictures() -> None:
    pair: Any = SimpleNamespace(event=SimpleNamespace(name="image", dtype="u8"))
    one = np.full((8, 10, 3), 100, np.uint8)
    for by, factor in ((0, 1), (1, 128), (2, 128), (3, 64), (40, 8), (100, 2), (155, 2)):
        other = one.copy()
        other[2, 3, 1] += by
        drawn = pictures._pictures(pair, one, other)
        assert drawn and drawn.amplified == factor and (drawn.width, drawn.height) == (10, 8)
        if by:
            assert f"by up to {by} of 255" in drawn.caption and "1.2% of 10 × 8" in drawn.caption
        else:
            assert drawn.caption == "All 10 × 8 pixels are equal."
        heat = png_pixels(drawn.difference)
        marked = np.argwhere((heat != ImageColor.getrgb(pictures.DARK[0])).any(axis=2))
        assert marked.tolist() == ([[2, 3]] if by else [])


def test_a_parameter_of_one_side_has_an_empty_column() -> None:
    info = WeightInfo((2, 3), "f32", None, Stats(6, -1.0, 2.0, 0.5, 1.0, 1.5, zero=1))
    shown = {name: cells for name, *cells in show_parameter(info, None).numbers.rows}
    assert shown["shape"] == ["2×3", ""] and shown["rms"] == ["1.5", ""]
    assert shown["zeros"] == ["1", ""] and "NaN" not in shown
    other = {
        name: cells for name, *cells in show_parameter(None, WeightInfo((), "f16")).numbers.rows
    }
    assert other["shape"] == ["", "scalar"] and other["dtype"] == ["", "f16"]


def test_every_part_of_a_value_is_drawn_with_its_sides_in_order() -> None:
    draw = np.random.default_rng(0)
    one, other = draw.normal(size=(40, 50)), 3 + draw.normal(size=(40, 50))
    event = Event(i=0, name="a", shape=(40, 50), dtype="f32")
    pair: Any = SimpleNamespace(ref_dims=None, event=event, reference=(event,), port=(event,))
    shown = show_value(Value(pair, one, other, "a note"))
    assert shown.note == "a note" and shown.lines is None
    assert shown.histogram == histogram(one, other) and shown.density == density(one, other)
    assert shown.maps == draw_maps(Value(pair, one, other, "")) and shown.differences
    assert shown.numbers.head == ("", "reference", "port") and shown.numbers.numeric == {1, 2}
    assert shown.differences.head == ("at", "reference", "port", "|difference|")
    cells = [text.replace("−", "-") for text in shown.differences.rows[0]]
    largest = tuple(int(at) for at in re.findall(r"\d+", cells[0]))
    assert largest == np.unravel_index(np.abs(other - one).argmax(), one.shape)
    assert [float(cell) for cell in cells[1:]] == pytest.approx(
        [one[largest], other[largest], abs(other - one)[largest]], rel=5e-3
    )
    means = next(cells for name, *cells in shown.numbers.rows if name == "mean")
    assert means == [number(one.mean()), number(other.mean())]
    ids = msgspec.structs.replace(event, kind="ids")
    pair.event = ids
    bare = show_value(Value(pair, one, other, ""))
    assert bare.differences and bare.histogram is None and not bare.maps
    pair.event = event
    list_ = show_value(Value(pair, one[:1, :9], other[:1, :9], ""))
    assert list_.lines == lines(one[:1, :9], other[:1, :9]) and list_.histogram is None


def test_what_one_side_lacks_is_shown_of_the_other() -> None:
    events = [
        Event(i=at, name="a", shape=(4, 5 + at), dtype=dtype, stats=Stats(20, max=3.0 + at))
        for at, dtype in enumerate(("f32", "bf16"))
    ]
    both: Any = SimpleNamespace(
        ref_dims=None, event=events[0], reference=(events[0],), port=(events[1], events[1])
    )
    value = np.arange(20.0).reshape(4, 5)
    for one, other, maxima in ((value, None, ["19", "4"]), (None, value, ["3", "19"])):
        shown = show_value(Value(both, one, other, "lacks"))
        cells = {name: rest for name, *rest in shown.numbers.rows}
        assert cells["max"] == maxima and cells["dtype"] == ["f32", "bf16"]
        assert cells["shape"] == ["4×5", "4×6 + 4×6"]
        assert shown.differences is None and not shown.differences_title and not shown.maps
        assert Value(both, one, other, "").together is None
    empty = np.zeros((0, 3))
    assert Value(both, empty, empty, "").together is None
    assert statistics(events[1], empty) == statistics(events[1], None) == events[1].stats
    assert Value(both, value, value.T, "").together is None
    assert Value(both, value, value + 1, "").together is not None


def test_one_row_is_read_first_for_each_assumption() -> None:
    rows = [row("a", note="x"), row("b"), row("c", note="y"), row("d", note="x")]
    assert [each.site for each in _rows_with_notes(rows)] == ["a", "c"]
    many = [row(f"{n}", note=f"{n}") for n in range(40)]
    assert [each.site for each in _rows_with_notes(many)] == [f"{n}" for n in range(12)]
