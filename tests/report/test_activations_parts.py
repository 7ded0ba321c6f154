"""The page of statistics of activations: which layer stands in which chart, table and column."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lydite.calibrate.activations.queries import COLUMNS, QUANTILES, Curve
from lydite.report import activations as module
from lydite.report.activations import LINES, ROWS, _how, page, picture
from lydite.report.chart import Chart
from lydite.report.page import Figures, Fold, Page, Table

BLOCKS = "transformer_blocks."
ABOUT: dict[str, Any] = {
    "model": "m", "model_hash": "a" * 64, "set": "b" * 64, "conditions": {}, "part": None,
    "per": "step", "samples": 1234,
}  # fmt: skip


def curve(layer: str, spreads: Sequence[float], channels: Sequence[float], **more: Any) -> Curve:
    """A place whose spread at each step is given; each statistic has a value of its own."""
    steps = tuple(10 * n for n in range(len(spreads)))
    values: dict[str, Any] = {
        name: np.arange(len(spreads)) + 100.0 * number
        for number, name in enumerate((*COLUMNS, *QUANTILES))
    }
    values["p0_1"] = np.full(len(spreads), 1.0)
    values["p99_9"] = 1 + np.array(spreads, float)
    for name in ("zero", "negative"):
        values[name] = np.linspace(0.25, 0.5, len(spreads))
    return Curve(layer, more.pop("place", "in"), steps, values | more, np.array(channels, float))


FLAT = curve(f"{BLOCKS}0.attn.to_q", (2.0, 2.0), (1.0, 1.0, 9.0, 1.0))
WIDE = curve(f"{BLOCKS}1.attn.to_q", (1.0, 4.0), (2.0, 2.0, 6.0))
GELU = curve(f"{BLOCKS}0.ff.net.2", (3.0, 2.0), (1.0, 2.0))
TEXT = curve(f"{BLOCKS}0.ff_context.net.2", (3.0, 1.5), (4.0, 5.0))
MODULATED = curve(f"{BLOCKS}0.norm1.linear", (1.0, 50.0), (1.0, 90.0))
SLOW = curve(f"{BLOCKS}1.norm1.linear", (1.0, 3.0), (1.0, 80.0))
ALL = [FLAT, WIDE, GELU, TEXT, MODULATED, SLOW]


class Made:
    """Pages before they are HTML, and the charts on them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.charts: list[Chart] = []
        self.pages: list[Page] = []
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(module, "draw", self._draw)
        monkeypatch.setattr(module, "render", lambda one: self.pages.append(one) or b"")

    def _draw(self, chart: Chart) -> Image.Image:
        self.charts.append(chart)
        return Image.new("RGB", (20 + len(self.charts), 10), (len(self.charts), 0, 0))

    def give(self, curves: Sequence[Curve], **about: Any) -> None:
        self.charts.clear()
        self.monkeypatch.setattr(module, "read_curves", lambda _: (list(curves), ABOUT | about))

    def page(self, curves: Sequence[Curve], **about: Any) -> Page:
        self.give(curves, **about)
        page(Path("s.sqlite"))
        return self.pages[-1]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


def names(rows: Sequence[Any]) -> list[str]:
    """Of the layers in a table or a chart, without what all have in common."""
    cells = [row[0] if isinstance(row, tuple) else row.name for row in rows]
    return [cell.removesuffix(" in") for cell in cells]


def row(table: Any, layer: str) -> dict[str, str]:
    """A row of a table by its head; a head that occurs again has a number."""
    assert isinstance(table, Table)
    (cells,) = (cells for cells in table.rows if cells[0] == f"{layer} in")
    heads = [f"{head} {table.head[:at].count(head)}" if head in table.head[:at] else head
             for at, head in enumerate(table.head)]  # fmt: skip
    assert table.numeric == set(range(1, len(heads)))
    return dict(zip(heads, cells, strict=True))


def test_each_chapter_has_its_own_layers_the_worst_first(made: Made) -> None:
    shown = made.page(ALL)
    chapters = {chapter.title: chapter for chapter in shown.chapters}
    assert list(chapters) == [
        "Ranges over the steps", "Outlier channels", "After GELU", "Modulation", "Every layer",
    ]  # fmt: skip
    assert "too wide" in chapters["Ranges over the steps"].lead
    assert "magnitude" in chapters["Outlier channels"].lead
    assert "-0.17" in chapters["After GELU"].lead and "pooled" in chapters["Modulation"].lead
    by_title = {chart.title: chart for chart in made.charts}
    assert {title: names(chart.lines) for title, chart in by_title.items()} == {
        "Layers whose range changes most over the steps":
            ["1.attn.to_q", "0.ff_context.net.2", "0.ff.net.2", "0.attn.to_q"],
        "Layers with the largest outlier channels":
            ["0.attn.to_q", "1.attn.to_q", "0.ff.net.2", "0.ff_context.net.2"],
        "After GELU, image stream": ["0.ff.net.2"],
        "After GELU, text stream": ["0.ff_context.net.2"],
        "Layers of the modulation": ["0.norm1.linear", "1.norm1.linear"],
    }  # fmt: skip
    ranges = by_title["Layers whose range changes most over the steps"]
    outliers = by_title["Layers with the largest outlier channels"]
    image = by_title["After GELU, image stream"]
    assert list(ranges.lines[0].points) == [(0, 1), (10, 4)]
    assert (ranges.x_label, ranges.x_scale, ranges.y_scale) == ("step", "linear", "log")
    assert list(outliers.lines[0].points) == [(0.25, 9), (0.5, 1), (0.75, 1), (1, 1)]
    assert (outliers.x_scale, outliers.y_scale) == ("log", "log")
    assert "channel" in outliers.x_label and "magnitude" in outliers.y_label
    assert list(image.lines[0].points) == [(0, 4), (10, 3)] and image.y_scale == "linear"
    tables = {title: chapter.blocks[-1] for title, chapter in chapters.items()}
    assert row(tables["Ranges over the steps"], "1.attn.to_q") == {
        "layer": "1.attn.to_q in", "widest / narrowest": "4.00", "range at first": "1",
        "at last": "4", "absmax at first": "200", "at last 1": "201",
    }  # fmt: skip
    assert row(tables["Outlier channels"], "0.attn.to_q") == {
        "layer": "0.attn.to_q in", "largest / median": "9.0", "channel": "2", "its absmax": "9",
        "median": "1", "above 3 × median": "25.0%",
    }  # fmt: skip
    assert row(tables["Outlier channels"], "1.attn.to_q")["above 3 × median"] == "0.0%"
    assert row(tables["After GELU"], "0.ff.net.2") == {
        "layer": "0.ff.net.2 in", "min": "0.000", "max": "101", "99 %": "1e+03",
        "in the dip": "38%", "widest / narrowest": "1.50",
    }  # fmt: skip
    assert names(getattr(tables["Modulation"], "rows", ())) == ["0.norm1.linear", "1.norm1.linear"]
    fold = tables["Every layer"]
    assert isinstance(fold, Fold) and fold.summary == "All 6 places"
    assert row(fold.blocks[0], "0.norm1.linear") == {
        "layer": "0.norm1.linear in", "channels": "2", "min": "0", "max": "101", "zeros": "37.5%",
        "outlier": "2.0", "drift": "50.00",
    }  # fmt: skip
    assert [(fact.value, fact.label.partition(",")[0]) for fact in shown.facts] == [
        ("1,234", "samples"), ("6", "places"), ("2", "steps"),
        ("4.0×", "most drift over the steps"), ("50.0×", "most drift of the modulation"),
        ("9.0×", "largest over median channel"),
    ]  # fmt: skip
    for chapter in shown.chapters[:-1]:
        for figures in chapter.blocks[:-1]:
            assert isinstance(figures, Figures) and figures.size == "whole"
            assert all(figure.alt.split(":")[0] in by_title for figure in figures.items)
    assert shown.footer.endswith("s.sqlite")


def test_what_a_file_does_not_hold_is_not_shown(made: Made) -> None:
    plain = made.page([FLAT, WIDE])
    assert [chapter.title for chapter in plain.chapters] == [
        "Ranges over the steps", "Outlier channels", "Every layer",
    ]  # fmt: skip
    assert not [fact for fact in plain.facts if "modulation" in fact.label.split(", ")[0]]
    together = [curve(each.layer, (2.0,), each.channels.tolist()) for each in ALL]
    alone = made.page(together, per="all")
    titles = [chapter.title for chapter in alone.chapters]
    assert titles == ["Outlier channels", "After GELU", "Every layer"]
    assert alone.lead.endswith("have it.") and not plain.lead.endswith("have it.")
    assert [fact.label for fact in alone.facts] == [
        "samples", "places", "largest over median channel",
    ]  # fmt: skip
    for title, last in (("After GELU", "in the dip"), ("Every layer", "outlier")):
        (table,) = alone.chapters[titles.index(title)].blocks[-1:]
        table = table.blocks[0] if isinstance(table, Fold) else table
        assert isinstance(table, Table) and table.head[-1] == last
    parts = made.page(ALL, per="2")
    assert made.charts[0].x_label != "step" and "parts of the steps" in {
        fact.label for fact in parts.facts
    }


def test_long_lists_are_cut_and_equal_places_are_one(made: Made) -> None:
    many = [
        curve(f"{BLOCKS}{n}.{kind}", (1.0, 2.0 + n), (1.0, 2.0 + n), mean=np.array([n, side]))
        for n in range(ROWS + 2)
        for side, kind in enumerate(("ff.net.2", "norm1.linear"))
    ]
    shown = made.page(many)
    last = ROWS + 1
    for chart in made.charts:
        if chart.title.startswith("After GELU"):
            assert names(chart.lines) == [f"{n}.ff.net.2" for n in range(0, ROWS + 2, 3)]
            assert chart.note == "one of 3 blocks"
        else:
            kind = "norm1.linear" if "modulation" in chart.title else "ff.net.2"
            assert names(chart.lines) == [f"{last - n}.{kind}" for n in range(LINES)]
            assert not chart.note
    counts = [len(getattr(chapter.blocks[-1], "rows", ())) for chapter in shown.chapters]
    assert counts == [ROWS, ROWS, ROWS + 2, ROWS, 0]
    made.page(many[: 2 * LINES])
    (chart,) = (chart for chart in made.charts if chart.title.startswith("After GELU"))
    assert len(chart.lines) == LINES and chart.note == ""
    twins = [curve(f"{BLOCKS}0.attn.{name}", (1.0, 2.0), (1.0, 2.0)) for name in ("a", "b", "c")]
    shown = made.page(twins)
    assert [line.name for line in made.charts[0].lines] == ["0.attn.a in +2"]
    assert shown.facts[1].value == "3" and len(made.charts) == 2


def test_the_picture_has_the_charts_of_the_page_below_each_other(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheets: list[Image.Image] = []
    monkeypatch.setattr(module, "png_bytes", lambda image: sheets.append(image) or b"")
    for curves, count in ((ALL, 5), ([FLAT, WIDE], 2), ([WIDE, MODULATED], 3)):
        made.page(curves)
        titles = {chart.title for chart in made.charts}
        made.give(curves)
        picture(Path("s.sqlite"))
        assert {chart.title for chart in made.charts} == titles and len(made.charts) == count
        assert made.charts[0].title.startswith("Layers whose range")
        sheet = np.asarray(sheets[-1])
        assert sheet.shape == (10 * count, 20 + count, 3)
        assert sheet[5::10, 0, 0].tolist() == list(range(1, count + 1))


def test_only_known_conditions_are_told() -> None:
    known = {
        "sampler": "euler", "steps": 3, "guidance": 0, "width": 64, "height": 32,
        "compute": "float32", "other": 1,
    }  # fmt: skip
    told = {
        "sampler": "euler", "steps": "3 steps", "guidance": "guidance 0",
        "width": "64 × 32 pixels", "compute": "computed in float32",
    }  # fmt: skip
    assert list(_how(known)) == list(told.values())
    for name, text in told.items():
        rest = {key: value for key, value in known.items() if key != name}
        assert list(_how(rest)) == [each for each in told.values() if each != text]
    assert list(_how({"height": 1})) == []
