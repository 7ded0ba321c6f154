"""An evaluation as one page: figures with intervals, error over steps, pairs to look at."""

import numpy as np

from lydite.core.errors import counted
from lydite.evaluate.evaluation import (
    FRECHET_JUDGE,
    GROWTH,
    MEANINGS,
    Evaluation,
    Pair,
    identical_text,
    lower_is_better,
)
from lydite.evaluate.intervals import Summary
from lydite.evaluate.pictures import PictureSource, paired_pictures
from lydite.pipelines.picture import Pixels
from lydite.report.chart import Chart, Line, draw
from lydite.report.contact_sheets import png_bytes, scale_to_width
from lydite.report.page import (
    Block,
    Callout,
    Chapter,
    Comparison,
    Comparisons,
    Fact,
    Figure,
    Figures,
    Page,
    Table,
    Text,
    render,
)

SHOWN = 12  # pairs
WIDEST = 512  # pixels of a picture on the page
LEAD = (
    "Both sides drew the same prompts from the same noise. A mean stands with its 95 % confidence "
    "interval: the mean over all such prompts lies within it, with 95 % confidence."
)
PAIRS = (
    "The most damaged pairs first. Drag the lower right corner of a picture to uncover the "
    "candidate beneath the reference. The difference is shown as the distance from grey, "
    "enlarged by the factor that is given."
)
STEPS = (
    "The relative error of the latents at the beginning of each step. It grows where the candidate "
    "leaves the reference's trajectory."
)


def page(
    evaluation: Evaluation,
    reference: PictureSource,
    candidate: PictureSource,
    *,
    title: str | None = None,
) -> bytes:
    """The page of an evaluation, with its worst pairs.

    The title names both sides; one that names the candidate alone is followed by the reference.
    """
    chapters = [Chapter("Figures", LEAD if evaluation.paired else "", _tables(evaluation))]
    if len(evaluation.steps) > 1:
        chapters.append(Chapter("Error over steps", _steps_text(evaluation), (_curve(evaluation),)))
    if evaluation.flat_field:
        chapters.append(Chapter("Flat field", FLAT_FIELD, (_flat_field(evaluation),)))
    if evaluation.worst:
        block = Comparisons(tuple(_comparisons(evaluation.worst[:SHOWN], reference, candidate)))
        chapters.append(Chapter("Pairs", PAIRS, (block,)))
    chapters.append(Chapter("Record", "What the figures were made with.", (_record(evaluation),)))
    counts, against = evaluation.record["pictures"], _name(evaluation, "reference")
    if isinstance(counts, dict):
        pairs = counts["pairs"]
        lead = f"{counted(pairs, 'pair')} of pictures." if pairs else "Two sets."
    else:
        lead = f"{counted(counts, 'picture')}."
    if title is None:
        title = f"{_name(evaluation, 'candidate')} against {against}"
    else:
        lead = f"Against {against}. {lead}"
    facts = tuple(
        Fact(f"{summary.mean:.4g}", f"{name}, mean") for name, summary in evaluation.paired.items()
    )
    return render(Page(title, lead, tuple(chapters), facts, "lydite evaluate"))


FLAT_FIELD = (
    "A surface that should be even, drawn with more and more steps: the standard deviation of the "
    "picture minus its blur, in steps of 1/255."
)


def _steps_text(evaluation: Evaluation) -> str:
    if evaluation.growth is None:
        return STEPS
    return f"{STEPS} Growth: {evaluation.growth:.3g} a step, {MEANINGS[GROWTH]}."


def _name(evaluation: Evaluation, side: str) -> str:
    value = evaluation.record.get(side, side)
    if isinstance(value, dict):
        bits = f", {value['bits']} bits" if value.get("bits") else ""
        return f"{value['model']} in {value['dtype']}{bits}"
    return str(value)


def _tables(evaluation: Evaluation) -> tuple[Block, ...]:
    blocks: list[Block] = [Callout(text, "warn") for text in evaluation.warnings]
    if evaluation.identical:
        blocks.append(Callout(identical_text(evaluation.identical), "good"))
    if evaluation.paired:
        rows = tuple(_summary_row(name, summary) for name, summary in evaluation.paired.items())
        head = ("paired", "mean", "95 % interval", "median", "worst", "spread", "pictures")
        blocks.append(Table(head, rows, frozenset(range(1, 7))))
    if evaluation.distribution:
        rows = tuple(
            (
                name,
                f"{distance.value:.5g}",
                _interval(distance.ci95),
                " and ".join(str(count) for count in distance.n),
            )
            for name, distance in evaluation.distribution.items()
        )
        blocks.append(
            Table(("sets", "value", "95 % interval", "pictures"), rows, frozenset({1, 2}))
        )
        if FRECHET_JUDGE in evaluation.distribution:
            blocks.append(Text(f"{FRECHET_JUDGE}: {MEANINGS[FRECHET_JUDGE]}"))
    return tuple(blocks)


def _summary_row(name: str, summary: Summary) -> tuple[str, ...]:
    worst = summary.max if lower_is_better(name) else summary.min
    spread = "–" if summary.std is None else f"{summary.std:.3g}"
    return (
        name,
        f"{summary.mean:.4g}",
        _interval(summary.ci95),
        f"{summary.median:.4g}",
        f"{worst:.4g}",
        spread,
        str(summary.n),
    )


def _interval(ci95: tuple[float, float] | None) -> str:
    return "–" if ci95 is None else f"{ci95[0]:.4g} to {ci95[1]:.4g}"


def _curve(evaluation: Evaluation) -> Figures:
    steps = [step for step in evaluation.steps if step.error.mean > 0]
    lines = [
        Line("mean", [(float(step.step), step.error.mean) for step in steps]),
        Line("median", [(float(step.step), step.error.median) for step in steps]),
        Line("worst picture", [(float(step.step), step.error.max) for step in steps]),
    ]
    for name, end in ("interval, low", 0), ("interval, high", 1):
        points = [(float(s.step), s.error.ci95[end]) for s in steps if s.error.ci95]
        if points:
            lines.append(Line(name, points))
    chart = Chart(
        "Error of the latents", "step", "relative error, logarithmic", lines, y_scale="log"
    )
    alt = "The relative error of the latents over the steps: mean with its interval, median, worst"
    return Figures((Figure(png_bytes(draw(chart)), alt),), size="whole")


def _flat_field(evaluation: Evaluation) -> Table:
    rows = tuple(
        (str(row["steps"]), f"{row['reference']:.2f}", f"{row['candidate']:.2f}")
        for row in evaluation.flat_field
    )
    return Table(("steps", "reference", "candidate"), rows, frozenset({0, 1, 2}))


def _comparisons(
    pairs: list[Pair], reference: PictureSource, candidate: PictureSource
) -> list[Comparison]:
    """The pictures of these pairs, read again, in the order of the pairs."""
    by_name = {pair.name: pair for pair in pairs}
    found: dict[str, Comparison] = {}
    for name, one, other in paired_pictures(reference, candidate, set(by_name)):
        pair = by_name[name]
        factor, difference = _difference(one, other)
        figures = ", ".join(f"{metric} {value:.4g}" for metric, value in pair.metrics.items())
        seed = "" if pair.seed is None else f", seed {pair.seed}"
        found[name] = Comparison(
            reference=_png(one),
            candidate=_png(other),
            difference=_png(difference),
            title=pair.prompt or pair.name,
            note=f"{figures}{seed}; difference × {factor:g}",
        )
    return [found[pair.name] for pair in pairs]


def _difference(one: Pixels, other: Pixels) -> tuple[float, Pixels]:
    """candidate − reference around grey, enlarged so that the largest differences are seen."""
    apart = other.astype(np.float64) - one
    largest = float(np.quantile(np.abs(apart), 0.999))
    factor = max(1.0, min(32.0, 2.0 ** np.floor(np.log2(127 / max(largest, 1)))))
    return factor, (128 + factor * apart).clip(0, 255).astype(np.uint8)


def _png(pixels: Pixels) -> bytes:
    return png_bytes(scale_to_width(pixels, WIDEST) if pixels.shape[1] > WIDEST else pixels)


def _record(evaluation: Evaluation) -> Table:
    rows: list[tuple[str, str]] = []

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(f"{prefix}.{name}" if prefix else str(name), inner)
        elif value is not None:
            rows.append((prefix, str(value)))

    walk("", evaluation.record)
    return Table(("name", "value"), tuple(rows))
