"""Statistics of activations as a page or a picture: what drifts over the steps, what sticks out."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from lydite.calibrate.activations_queries import Curve, distinct, read_curves
from lydite.report.chart import Chart, Line, draw
from lydite.report.page import Chapter, Fact, Figure, Figures, Fold, Page, Table, render
from lydite.report.sheets import png_bytes

LINES, ROWS = 8, 15  # in one chart, in one table
DRIFT = (
    "From the 0.1 % to the 99.9 % quantile of all values of a layer, over the steps. Where this "
    "changes much, one range for all steps is too wide for some and too narrow for others. A +2 "
    "says that two more layers see the very same values."
)
OUTLIERS = (
    "The largest magnitude of each channel over all steps, largest first. A steep start is a few "
    "channels that widen the range of all the others."
)
MODULATED = "Layers of the modulation"
MODULATION = (
    "These layers see the timestep and the pooled text alone, so they follow the steps by nature. "
    "They are small, are computed once a picture, and mostly stay in full precision."
)
AFTER_GELU = (
    "What the second linear of a feed-forward takes. GELU gives nothing below -0.17, so its "
    "negative values lie in the dip from -0.17 to 0, on a small part of the range."
)


def page(path: Path) -> bytes:
    """The page of a file of statistics."""
    curves, told = read_curves(path)
    shown = _Shown(curves)
    chapters = [
        Chapter("Ranges over the steps", DRIFT, (_figure(shown.ranges), _drift(shown.drifting))),
        Chapter("Outlier channels", OUTLIERS, (_figure(shown.ranked), _worst(shown.outliers))),
    ]
    if shown.gelu:
        blocks = (*(_figure(chart) for chart in _gelu(shown.gelu)), _gelu_table(shown.gelu))
        chapters.append(Chapter("After GELU", AFTER_GELU, blocks))
    if shown.modulation:
        blocks = (_figure(_ranges(MODULATED, shown.modulation)), _drift(shown.modulation))
        chapters.append(Chapter("Modulation", MODULATION, blocks))
    folded = Fold(f"All {len(curves)} places", (_all(curves),))
    chapters.append(Chapter("Every layer", "Over all steps.", (folded,)))
    lead = f"Model {told['model'] or 'without a name'}, parameters {told['model_hash'][:12]}."
    footer = f"lydite calibrate activations, {path.name}"
    facts = shown.facts(int(told["samples"]))
    return render(Page("Activations", lead, tuple(chapters), facts, footer)).encode()


def picture(path: Path) -> bytes:
    """The charts of the page, one below the other."""
    shown = _Shown(read_curves(path)[0])
    charts = [shown.ranges, shown.ranked, *_gelu(shown.gelu)]
    if shown.modulation:
        charts.append(_ranges(MODULATED, shown.modulation))
    images = [draw(chart) for chart in charts]
    height = sum(image.height for image in images)
    sheet = Image.new("RGB", (max(image.width for image in images), height))
    top = 0
    for image in images:
        sheet.paste(image, (0, top))
        top += image.height
    return png_bytes(sheet)


class _Shown:
    """The places of a file, sorted into what the page tells of them."""

    def __init__(self, curves: Sequence[Curve]) -> None:
        self.places, self.steps = len(curves), len({s for each in curves for s in each.steps})
        each = sorted(distinct(list(curves)), key=lambda curve: -curve.drift)
        self.modulation = [curve for curve in each if curve.modulates]
        self.drifting = [curve for curve in each if not curve.modulates]
        self.outliers = sorted(self.drifting, key=lambda curve: -curve.outlier)
        self.gelu = [curve for curve in curves if curve.after_gelu]
        self.ranges = _ranges("Layers whose range changes most over the steps", self.drifting)
        self.ranked = _ranked(self.outliers)

    def facts(self, samples: int) -> tuple[Fact, ...]:
        return (
            Fact(f"{samples:,}", "samples"),
            Fact(f"{self.places:,}", "places"),
            Fact(f"{self.steps:,}", "steps, or parts of them"),
            Fact(f"{self.drifting[0].drift:.1f}×", "most drift over the steps"),
            Fact(f"{self.outliers[0].outlier:.1f}×", "largest over median channel"),
        )


def _ranges(title: str, curves: Sequence[Curve]) -> Chart:
    return Chart(
        title,
        "step",
        "from the 0.1 % to the 99.9 % quantile, logarithmic",
        [_over_steps(curve, curve.spread) for curve in curves[:LINES]],
        y_scale="log",
    )


def _ranked(curves: Sequence[Curve]) -> Chart:
    lines = []
    for curve in curves[:LINES]:
        ranked = np.sort(curve.channels)[::-1].tolist()
        points = [(rank / len(ranked), value) for rank, value in enumerate(ranked, 1)]
        lines.append(Line(curve.name, points))
    return Chart(
        "Layers with the largest outlier channels",
        "share of the channels, largest first, logarithmic",
        "largest magnitude of a channel, logarithmic",
        lines,
        x_scale="log",
        y_scale="log",
    )


def _gelu(curves: Sequence[Curve]) -> list[Chart]:
    """The 99.9 % quantile of every feed-forward, image and text apart."""
    charts: list[Chart] = []
    for title, chosen in (
        ("image stream", [curve for curve in curves if "context" not in curve.layer]),
        ("text stream", [curve for curve in curves if "context" in curve.layer]),
    ):
        every = max(1, -(-len(chosen) // LINES))
        lines = [_over_steps(curve, curve.values["p99_9"]) for curve in chosen[::every]]
        note = f"every {every}th block" if every > 1 else ""
        up = "99.9 % quantile of what the second linear takes"
        if lines:
            charts.append(Chart(f"After GELU, {title}", "step", up, lines, note=note))
    return charts


def _over_steps(curve: Curve, values: Sequence[float] | np.ndarray) -> Line:
    points = [(float(step), float(y)) for step, y in zip(curve.steps, values, strict=True)]
    return Line(curve.name, points)


def _figure(chart: Chart) -> Figures:
    names = ", ".join(line.name for line in chart.lines)
    alt = f"{chart.title}: {chart.up} over {chart.across} for {names}"
    return Figures((Figure(png_bytes(draw(chart)), alt),), size="whole")


def _drift(curves: Sequence[Curve]) -> Table:
    rows = tuple(
        (
            curve.name,
            f"{curve.drift:.2f}",
            f"{curve.spread[0]:.4g}",
            f"{curve.spread[-1]:.4g}",
            f"{curve.values['absmax'][0]:.4g}",
            f"{curve.values['absmax'][-1]:.4g}",
        )
        for curve in curves[:ROWS]
    )
    head = ("layer", "widest / narrowest", "range, first step", "last", "absmax, first", "last")
    return _numbers(head, rows)


def _worst(curves: Sequence[Curve]) -> Table:
    rows = tuple(
        (
            curve.name,
            f"{curve.outlier:.1f}",
            f"{int(curve.channels.argmax())}",
            f"{curve.channels.max():.4g}",
            f"{np.median(curve.channels):.4g}",
            f"{np.mean(curve.channels > 3 * np.median(curve.channels)):.1%}",
        )
        for curve in curves[:ROWS]
    )
    head = ("layer", "largest / median", "channel", "its absmax", "median", "above 3 × median")
    return _numbers(head, rows)


def _gelu_table(curves: Sequence[Curve]) -> Table:
    rows = tuple(
        (
            curve.name,
            f"{curve.values['min'].min():.3f}",
            f"{curve.values['max'].max():.3g}",
            f"{curve.values['p99'].max():.3g}",
            f"{curve.values['negative'].mean():.0%}",
            f"{curve.drift:.2f}",
        )
        for curve in curves
    )
    head = ("layer", "min", "max", "99 %", "in the dip", "widest / narrowest")
    return _numbers(head, rows)


def _all(curves: Sequence[Curve]) -> Table:
    rows = tuple(
        (
            curve.name,
            f"{len(curve.channels)}",
            f"{curve.values['min'].min():.4g}",
            f"{curve.values['max'].max():.4g}",
            f"{curve.values['zero'].mean():.1%}",
            f"{curve.drift:.2f}",
            f"{curve.outlier:.1f}",
        )
        for curve in curves
    )
    head = ("layer", "channels", "min", "max", "zeros", "drift", "outlier")
    return _numbers(head, rows)


def _numbers(head: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> Table:
    return Table(head, rows, numeric=frozenset(range(1, len(head))))
