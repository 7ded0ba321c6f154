"""Statistics of activations as a page or a picture: drift over the steps, outlier channels."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lydite.calibrate.activations.queries import Curve, distinct, read_curves
from lydite.report.chart import Chart, Line, draw
from lydite.report.contact_sheets import png_bytes
from lydite.report.page import Chapter, Fact, Figure, Figures, Fold, Page, Table, render

LINES, ROWS = 8, 15  # in one chart, in one table
DRIFT = (
    "From the 0.1 % to the 99.9 % quantile of all values of a layer, over the steps. Where this "
    "changes much, one range for all steps is too wide for some and too narrow for others. A +2 "
    "says that two more layers see the very same values. The layers of the modulation come below."
)
TOGETHER = (
    "All steps are counted together here, so changes over the steps are not shown. "
    "Statistics made with --per step have it."
)
OUTLIERS = (
    "The largest magnitude of each channel over all steps, largest first. A steep start is a few "
    "channels that widen the range of all the others."
)
MODULATED = "Layers of the modulation"
MODULATION = (
    "These layers see the timestep and the pooled text alone, so they follow the steps by nature. "
    "They take one vector of each prompt at each step, where others take one for every token."
)
AFTER_GELU = (
    "What the second linear of a feed-forward takes. GELU gives nothing below -0.17, so its "
    "negative values lie in the dip from -0.17 to 0, on a small part of the range."
)


def page(path: Path) -> bytes:
    """The page of a file of statistics."""
    curves, about = read_curves(path)
    shown = _Shown(curves, about["per"])
    blocks = (_figure(shown.ranked), _worst(shown.outliers))
    chapters = [Chapter("Outlier channels", OUTLIERS, blocks)]
    if shown.over_steps:
        blocks = (_figure(shown.ranges), _drift(shown.drifting))
        chapters.insert(0, Chapter("Ranges over the steps", DRIFT, blocks))
    if shown.gelu:
        table = _gelu_table(shown.gelu, shown.over_steps)
        blocks = (*(_figure(chart) for chart in shown.gelu_charts), table)
        chapters.append(Chapter("After GELU", AFTER_GELU, blocks))
    if shown.modulation and shown.over_steps:
        blocks = (_figure(shown.modulated), _drift(shown.modulation))
        chapters.append(Chapter("Modulation", MODULATION, blocks))
    folded = Fold(f"All {len(curves)} places", (_all(curves, shown.over_steps),))
    chapters.append(Chapter("Every layer", "Over all steps.", (folded,)))
    lead = " ".join([*_lead(about), *([] if shown.over_steps else [TOGETHER])])
    footer = f"lydite calibrate activations, {path.name}"
    facts = shown.facts(int(about["samples"]))
    return render(Page("Activations", lead, tuple(chapters), facts, footer))


def _lead(about: dict[str, Any]) -> list[str]:
    """Which model, which set, how it was drawn, and what part of it was counted."""
    model = f"Model {about['model'] or 'without a name'}, parameters {about['model_hash'][:12]}."
    which = f"Set {about['set'][:12]}" if about["set"] else "Several sets"
    how = ", ".join(_how(about["conditions"]))
    sentences = [model, f"{which}: {how}." if how else f"{which}."]
    part, parts = about["part"] or (1, 1)
    if parts > 1:
        sentences.append(f"Part {part} of {parts} of its samples.")
    return sentences


def _how(conditions: dict[str, Any]) -> Iterator[str]:
    """The main conditions; a set of another tool may lack them."""
    if "sampler" in conditions:
        yield f"{conditions['sampler']}"
    if "steps" in conditions:
        yield f"{conditions['steps']} steps"
    if "guidance" in conditions:
        yield f"guidance {conditions['guidance']}"
    if "width" in conditions and "height" in conditions:
        yield f"{conditions['width']} × {conditions['height']} pixels"
    if "compute" in conditions:
        yield f"computed in {conditions['compute']}"


def picture(path: Path) -> bytes:
    """The charts of the page, one below the other."""
    curves, about = read_curves(path)
    shown = _Shown(curves, about["per"])
    charts = [shown.ranked, *shown.gelu_charts]
    if shown.over_steps:
        charts.insert(0, shown.ranges)
    if shown.over_steps and shown.modulation:
        charts.append(shown.modulated)
    images = [draw(chart) for chart in charts]
    height = sum(image.height for image in images)
    sheet = Image.new("RGB", (max(image.width for image in images), height))
    top = 0
    for image in images:
        sheet.paste(image, (0, top))
        top += image.height
    return png_bytes(sheet)


class _Shown:
    """The curves of a file, sorted by the parts of the page."""

    def __init__(self, curves: Sequence[Curve], per: str) -> None:
        self.places, self.bands = (
            len(curves),
            len({step for curve in curves for step in curve.steps}),
        )
        self.over_steps = self.bands > 1
        self.unit = "steps" if per == "step" else "parts of the steps"
        across = "step" if per == "step" else "first step of a part"
        ranked = sorted(distinct(list(curves)), key=lambda curve: -curve.drift)
        self.modulation = [curve for curve in ranked if curve.modulates]
        self.drifting = [curve for curve in ranked if not curve.modulates]
        self.outliers = sorted(self.drifting, key=lambda curve: -curve.outlier)
        self.gelu = [curve for curve in curves if curve.after_gelu]
        most = "Layers whose range changes most over the steps"
        self.ranges = _ranges(most, across, self.drifting)
        self.modulated = _ranges(MODULATED, across, self.modulation)
        self.ranked = _ranked(self.outliers)
        self.gelu_charts = _gelu(self.gelu, across) if self.over_steps else []

    def facts(self, samples: int) -> tuple[Fact, ...]:
        facts = [Fact(f"{samples:,}", "samples"), Fact(f"{self.places:,}", "places")]
        if self.over_steps:
            facts.append(Fact(f"{self.bands:,}", self.unit))
            drift = f"{self.drifting[0].drift:.1f}×"
            facts.append(Fact(drift, "most drift over the steps, but for the modulation"))
        if self.over_steps and self.modulation:
            facts.append(Fact(f"{self.modulation[0].drift:.1f}×", "most drift of the modulation"))
        facts.append(Fact(f"{self.outliers[0].outlier:.1f}×", "largest over median channel"))
        return tuple(facts)


def _ranges(title: str, across: str, curves: Sequence[Curve]) -> Chart:
    return Chart(
        title,
        across,
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


def _gelu(curves: Sequence[Curve], across: str) -> list[Chart]:
    """The 99.9 % quantile of every feed-forward, image and text apart."""
    charts: list[Chart] = []
    for title, chosen in (
        ("image stream", [curve for curve in curves if "context" not in curve.layer]),
        ("text stream", [curve for curve in curves if "context" in curve.layer]),
    ):
        every = max(1, -(-len(chosen) // LINES))
        lines = [_over_steps(curve, curve.values["p99_9"]) for curve in chosen[::every]]
        note = f"one of {every} blocks" if every > 1 else ""
        up = "99.9 % quantile of what the second linear takes"
        if lines:
            charts.append(Chart(f"After GELU, {title}", across, up, lines, note=note))
    return charts


def _over_steps(curve: Curve, values: Sequence[float] | np.ndarray) -> Line:
    points = [(float(step), float(y)) for step, y in zip(curve.steps, values, strict=True)]
    return Line(curve.name, points)


def _figure(chart: Chart) -> Figures:
    names = ", ".join(line.name for line in chart.lines)
    alt = f"{chart.title}: {chart.y_label} over {chart.x_label} for {names}"
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
    head = (
        "layer",
        "widest / narrowest",
        "range at first",
        "at last",
        "absmax at first",
        "at last",
    )
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


def _gelu_table(curves: Sequence[Curve], over_steps: bool) -> Table:
    rows = tuple(
        (
            curve.name,
            f"{curve.values['min'].min():.3f}",
            f"{curve.values['max'].max():.3g}",
            f"{curve.values['p99'].max():.3g}",
            f"{curve.values['negative'].mean():.0%}",
            *[f"{curve.drift:.2f}"][:over_steps],
        )
        for curve in curves
    )
    head = ("layer", "min", "max", "99 %", "in the dip", *["widest / narrowest"][:over_steps])
    return _numbers(head, rows)


def _all(curves: Sequence[Curve], over_steps: bool) -> Table:
    rows = tuple(
        (
            curve.name,
            f"{len(curve.channels)}",
            f"{curve.values['min'].min():.4g}",
            f"{curve.values['max'].max():.4g}",
            f"{curve.values['zero'].mean():.1%}",
            f"{curve.outlier:.1f}",
            *[f"{curve.drift:.2f}"][:over_steps],
        )
        for curve in curves
    )
    head = ("layer", "channels", "min", "max", "zeros", "outlier", *["drift"][:over_steps])
    return _numbers(head, rows)


def _numbers(head: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> Table:
    return Table(head, rows, numeric=frozenset(range(1, len(head))))
