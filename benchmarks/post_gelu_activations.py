"""Post-GELU activations of the embedded model over the steps, recorded by the trace and drawn.

    .venv/bin/python benchmarks/post_gelu_activations.py --out docs/embedded-gelu.png

What every feed-forward's second linear takes, over all prompts, both halves of guidance, all tokens
and channels; without the tokens of the T5 stub, which are the same for every prompt. Each prompt's
trace, 80 MB, is counted into histograms and removed. The table goes to stdout.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.progress import track

from lydite import embedded
from lydite.core.request import Request
from lydite.embedded.captions import held_out_prompts
from lydite.pipelines.pipeline import Pipeline
from lydite.pipelines.recording import record
from lydite.trace.reader import Trace
from lydite.trace.writer import Capture

SEED, PROMPTS = 99993, 16
STREAMS = {"ff": "image stream", "ff_context": "text stream"}
LOW, HIGH, WIDTH = -0.2, 40.0, 0.002  # of the bins
EDGES = np.arange(round((HIGH - LOW) / WIDTH) + 1) * WIDTH + LOW
FLOOR = -0.17  # of tanh's GELU, near x = -0.75

TITLES = (
    "min",
    "negative",
    "99 %",
    "99 %, first → last step",
    "max",
    "max, first → last step",
    "largest / median channel",
    "maxima of channels, first against last step",
)
PAPER, INK, FAINT, GRID = "#faf9f7", "#26241f", "#6f6a5f", "#e4e0d6"
MOST, BAND, MIDDLE, LEAST = "#c8372d", "#ecd9a4", "#8a6212", "#2b5c8a"
STYLES = ((BAND, True), (LEAST, False))  # of the streams' histograms: colour, filled
COLUMN, ROW, LEFT, TOP = 468, 284, 84, 156  # pixels of the layout
SCALE = 3  # drawn larger and scaled down: Pillow's lines have no soft edges

Counts = NDArray[np.int64]
Streams = dict[str, list["Seen"]]  # by name of the feed-forward, a Seen for each block


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--model", type=Path, default=embedded.MODEL, help="a model of its kind")
    parser.add_argument("--steps", type=int, help="by default the model's own number")
    parser.add_argument("--guidance", type=float, help="by default the model's own")
    parser.add_argument("--out", type=Path, default=Path("docs/embedded-gelu.png"))
    options = parser.parse_args()
    request = Request(steps=options.steps, guidance=options.guidance)
    plot(options.out, options.model, request, options.prompts)


def plot(path: Path, model: Path, request: Request, prompts: int = PROMPTS) -> None:
    """Record, print a line for each block, and draw."""
    pipeline = Pipeline.open(model, dtype="float32")
    request = pipeline.plan(request).request
    streams = measure(pipeline, request, prompts)
    print(markdown(streams))
    title = (
        f"Post-GELU activations over the steps: {prompts} prompts, {request.steps} steps, "
        f"guidance {request.guidance:g}"
    )
    picture(streams, title).save(path, optimize=True)


@dataclass
class Seen:
    """The values of one block's feed-forward, counted step by step."""

    counts: Counts  # (steps, bins)
    low: NDArray[np.float64]  # (steps,)
    high: NDArray[np.float64]
    channel_high: NDArray[np.float64]  # (steps, channels)

    @classmethod
    def nothing(cls, steps: int, channels: int) -> "Seen":
        ends = np.full(steps, np.inf)
        counts = np.zeros((steps, len(EDGES) - 1), np.int64)
        return cls(counts, ends, -ends, np.full((steps, channels), -np.inf))

    def add(self, step: int, values: NDArray[np.float32]) -> None:
        bins = ((values.reshape(-1) - LOW) / WIDTH).astype(np.int64)
        size = self.counts.shape[1]
        self.counts[step] += np.bincount(np.minimum(bins, size - 1), minlength=size)
        self.low[step] = min(self.low[step], values.min())
        self.high[step] = max(self.high[step], values.max())
        largest = values.reshape(-1, values.shape[-1]).max(axis=0)
        self.channel_high[step] = np.maximum(self.channel_high[step], largest)


def quantiles(counts: Counts, share: float) -> Any:
    """Of (..., bins), to the width of a bin."""
    below = np.cumsum(counts, axis=-1) / counts.sum(axis=-1, keepdims=True)
    return EDGES[1:][(below >= share).argmax(axis=-1)]


def negative(counts: Counts) -> float:
    """The share of values below zero."""
    return counts[: round(-LOW / WIDTH)].sum() / counts.sum()


def measure(pipeline: Pipeline, request: Request, prompts: int) -> Streams:
    capture = Capture(points=tuple(f"transformer/*.{name}.net.0:out" for name in STREAMS))
    found: dict[tuple[str, int], Seen] = {}
    texts = [prompt.text for prompt in held_out_prompts(prompts, SEED)]
    for seed, text in enumerate(track(texts, "post-GELU", console=Console(stderr=True))):
        run = pipeline.plan(request.replace(prompt=text))
        assert run.request.text_length is not None
        with tempfile.TemporaryDirectory() as folder:
            record(pipeline, run, seed, folder, capture=capture)
            with Trace.open(folder) as trace:
                for event in trace.events:
                    if event.kind != "activation":
                        continue
                    _, block, name, *_ = event.name.split(".")
                    values = trace.read(event)  # (2, tokens, channels)
                    if name == "ff_context":
                        values = values[:, : -run.request.text_length]
                    nothing = Seen.nothing(run.steps, values.shape[-1])
                    found.setdefault((name, int(block)), nothing).add(event.step, values)
    return {
        name: [seen for (stream, _), seen in sorted(found.items()) if stream == name]
        for name in STREAMS
    }


def markdown(streams: Streams) -> str:
    """A line for each block: the numbers that the picture shows, and how channels change roles."""
    lines = [["", *TITLES], ["---", *["---:"] * len(TITLES)]]
    for name, blocks in streams.items():
        for index, seen in enumerate(blocks):
            counts, high = seen.counts.sum(axis=0), quantiles(seen.counts, 0.99)
            channels = seen.channel_high.max(axis=0)
            ends = np.corrcoef(seen.channel_high[0], seen.channel_high[-1])[0, 1]
            lines.append(
                [
                    f"{STREAMS[name]}, block {index}",
                    f"{seen.low.min():.2f}",
                    f"{negative(counts):.0%}",
                    f"{quantiles(counts, 0.99):.2f}",
                    f"{high[0]:.2f} → {high[-1]:.2f}",
                    f"{seen.high.max():.1f}",
                    f"{seen.high[0]:.1f} → {seen.high[-1]:.1f}",
                    f"{channels.max() / np.median(channels):.1f}",
                    f"r = {ends:.2f}",
                ]
            )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Canvas:
    """Lines, areas and words in pixels of the finished picture."""

    def __init__(self, width: int, height: int) -> None:
        self._size = width, height
        self._image = Image.new("RGB", (width * SCALE, height * SCALE), PAPER)
        self._pen = ImageDraw.Draw(self._image)

    def line(self, x: Any, y: Any, color: str, width: float = 1.0) -> None:
        self._pen.line(_points(x, y), color, round(width * SCALE), joint="curve")

    def area(self, x: Any, low: Any, high: Any, color: str) -> None:
        self._pen.polygon(_points([*x, *x[::-1]], [*low, *high[::-1]]), color)

    def words(
        self, x: float, y: float, text: str, size: int = 17, color: str = INK, anchor: str = "lm"
    ) -> float:
        """Written at (x, y), which is their left and middle; returns where they end."""
        font = ImageFont.load_default(size * SCALE)
        self._pen.text((x * SCALE, y * SCALE), text, color, font, anchor)
        return x + font.getlength(text) / SCALE

    def finished(self) -> Image.Image:
        return self._image.resize(self._size, Image.Resampling.LANCZOS)


@dataclass(frozen=True)
class Panel:
    """A plot's place and its two scales."""

    left: float
    top: float
    width: float
    height: float
    across: tuple[float, float]
    up: tuple[float, float]
    straight: float | None = None  # up to here about linear, then logarithmic; None: all linear

    def x(self, value: Any) -> Any:
        low, high = self.across
        return self.left + (np.asarray(value) - low) / (high - low) * self.width

    def y(self, value: Any) -> Any:
        low, high = (self._bent(end) for end in self.up)
        part = (self._bent(np.clip(value, *self.up)) - low) / (high - low)
        return self.top + (1 - part) * self.height

    def _bent(self, value: Any) -> Any:
        return np.arcsinh(value / self.straight) if self.straight else value

    def axes(
        self, canvas: Canvas, title: str, below: str, x: dict[float, str], y: dict[float, str]
    ) -> None:
        right, bottom = self.left + self.width, self.top + self.height
        canvas.words(self.left, self.top - 20, title, 19)
        for value, label in y.items():
            canvas.line([self.left, right], [self.y(value)] * 2, GRID)
            canvas.words(self.left - 8, float(self.y(value)), label, 15, FAINT, "rm")
        for value, label in x.items():
            canvas.line([self.x(value)] * 2, [bottom, bottom + 5], FAINT)
            canvas.words(float(self.x(value)), bottom + 17, label, 15, FAINT, "mm")
        canvas.line([self.left, right], [bottom, bottom], FAINT)
        canvas.words(self.left + self.width / 2, bottom + 38, below, 15, FAINT, "mm")


def picture(streams: Streams, title: str) -> Image.Image:
    """Panels for the blocks of either stream, three in a row, and histograms of all below."""
    rows = sum(ceil(len(blocks) / 3) for blocks in streams.values())
    canvas = Canvas(3 * COLUMN + 36, TOP + (rows + 1) * ROW + 32)
    canvas.words(36, 38, title, 27)
    _legend(canvas, 36, 80)
    top = TOP
    for name, blocks in streams.items():
        highest = max(seen.high.max() for seen in blocks)
        for index, seen in enumerate(blocks):
            left = LEFT + index % 3 * COLUMN
            across, up = (1.0, max(2.0, len(seen.high))), (-0.25, 1.7 * highest)
            place = (left, top + index // 3 * ROW, COLUMN - LEFT, ROW - 92)
            _over_steps(
                canvas, Panel(*place, across, up, 0.3), seen, f"{STREAMS[name]}, block {index}"
            )
        top += ceil(len(blocks) / 3) * ROW
    left = LEFT + 2 * COLUMN
    for number, line in enumerate(("In the last block the text", "ends at the attention.")):
        canvas.words(left, top - ROW + 40 + 24 * number, line, 17, FAINT)
    counts = [np.sum([seen.counts for seen in blocks], axis=(0, 1)) for blocks in streams.values()]
    _all_values(canvas, top + 16, counts)
    _near_zero(canvas, left, top + 16, counts)
    return canvas.finished()


def _legend(canvas: Canvas, x: float, y: float) -> None:
    for color, label in ((MOST, "max"), (MIDDLE, "median"), (LEAST, "min")):
        canvas.line([x, x + 30], [y, y], color, 2.5)
        x = canvas.words(x + 38, y, label) + 28
    canvas.area([x, x + 30], [y + 9, y + 9], [y - 9, y - 9], BAND)
    x = canvas.words(x + 38, y, "1 % to 99 %") + 28
    note = "Scales of values are stretched near 0 (arcsinh), equal within a stream."
    canvas.words(x, y, note, 17, FAINT)


def _over_steps(canvas: Canvas, panel: Panel, seen: Seen, title: str) -> None:
    steps = np.arange(len(seen.high)) + 1
    ticks = [float(value) for value in (0, 0.5, 1, 2, 5, 10, 20, 50) if value < panel.up[1]]
    up = {FLOOR: f"{FLOOR:g}"} | {value: f"{value:g}" for value in ticks}
    across = {float(step): f"{step}" for step in steps if step == 1 or step % 4 == 0}
    panel.axes(canvas, title, "step", across, up)
    x = panel.x(steps)
    low, middle, high = (quantiles(seen.counts, share) for share in (0.01, 0.5, 0.99))
    canvas.area(x, panel.y(low), panel.y(high), BAND)
    for values, color in ((seen.low, LEAST), (middle, MIDDLE), (seen.high, MOST)):
        canvas.line(x, panel.y(values), color, 2.5)
    for at, anchor in ((0, "ls"), (-1, "rs")):
        height = float(panel.y(seen.high[at])) - 9
        canvas.words(float(x[at]), height, f"{seen.high[at]:.1f}", 15, MOST, anchor)


def _all_values(canvas: Canvas, top: float, counts: Sequence[Counts]) -> None:
    """The whole range on a logarithmic scale."""
    every, least = round(0.2 / WIDTH), -8
    last = max(int(each.nonzero()[0][-1]) for each in counts)
    highest = EDGES[last + 1]
    across, up = (-0.4, 1.05 * highest), (float(least), 0.0)
    panel = Panel(LEFT, top, 2 * COLUMN - LEFT, ROW - 60, across, up)
    powers = {float(power): f"1e{power}" if power else "1" for power in range(least, 1, 2)}
    whole = {float(value): f"{value}" for value in range(0, int(highest) + 1, 2)}
    panel.axes(canvas, "all blocks and steps: share of values in each 0.2", "value", whole, powers)
    bins = last // every + 1
    for each, style in zip(counts, STYLES, strict=True):
        shares = each[: bins * every].reshape(-1, every).sum(axis=1) / each.sum()
        heights = np.log10(np.maximum(shares, 10.0**least))
        _stairs(canvas, panel, EDGES[::every], heights, *style)
    total = np.sum(counts, axis=0)
    words = (
        f"{negative(total):.0%} of the values are negative, "
        f"on {-FLOOR / (highest - FLOOR):.1%} of the range"
    )
    right = panel.left + panel.width
    canvas.words(right - 8, top + 16, words, 17, INK, "rm")
    x = right - 300
    for (color, filled), label in zip(STYLES, STREAMS.values(), strict=True):
        canvas.line([x, x + 26], [top + 46, top + 46], color, 10 if filled else 2.5)
        x = canvas.words(x + 34, top + 46, label) + 26


def _near_zero(canvas: Canvas, left: float, top: float, counts: Sequence[Counts]) -> None:
    """The same around zero on a linear scale."""
    every, high = round(0.01 / WIDTH), 0.5
    last = round((high - LOW) / WIDTH)
    shares = [each[:last].reshape(-1, every).sum(axis=1) / each.sum() for each in counts]
    most = 1.1 * max(float(each.max()) for each in shares)
    panel = Panel(left, top, COLUMN - LEFT, ROW - 60, (-0.25, high), (0.0, most))
    ticks = {part / 10: f"{part * 10} %" for part in range(int(10 * most) + 1)}
    across = {value: f"{value:g}" for value in (FLOOR, 0.0, 0.25, 0.5)}
    panel.axes(canvas, "the same near 0, in each 0.01", "value", across, ticks)
    for each, style in zip(shares, STYLES, strict=True):
        _stairs(canvas, panel, EDGES[::every], each, *style)


def _stairs(
    canvas: Canvas, panel: Panel, edges: Any, heights: Any, color: str, filled: bool
) -> None:
    x = panel.x(np.repeat(edges[: len(heights) + 1], 2)[1:-1])
    y = panel.y(np.repeat(heights, 2))
    if filled:
        canvas.area(x, np.full(len(x), panel.top + panel.height), y, color)
    else:
        canvas.line(x, y, color, 2)


def _points(x: Any, y: Any) -> list[tuple[float, float]]:
    return [(float(a) * SCALE, float(b) * SCALE) for a, b in zip(x, y, strict=True)]


if __name__ == "__main__":
    main()
