"""Chapter: a bug planted into the running model, found by comparing two traces."""

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lydite.demo.chapter import DemoChapter, Result, Settings
from lydite.demo.chapters.contact_sheet import picture_name
from lydite.demo.demo import Demo, Tick
from lydite.diff.compare import compare
from lydite.diff.result import Verdict
from lydite.pipelines.observer import StepReporter
from lydite.pipelines.picture import Pixels, read_pixels
from lydite.pipelines.pipeline import Pipeline
from lydite.pipelines.recording import record
from lydite.report.contact_sheets import png_bytes
from lydite.report.page import Callout, Chapter, Commands, Figure, Figures
from lydite.trace.reader import Trace

TITLE = "A planted bug, found"
BUG = "one-plus-missing"
SITE = "transformer/transformer_blocks.1.norm1"  # of the bug
SEED = 0  # the first picture of the sheet
STEPS = 2  # recorded
FILE = "planted.png"


def run(demo: Demo, tick: Tick) -> Result:
    """Draw the sheet's first picture once more, with a bug in one block, and look for the bug."""
    full = demo.plan(demo.settings.prompts[SEED])
    observer = StepReporter(lambda _: tick())
    with planted_bug(demo.pipeline):
        wrong = next(demo.pipeline.generate(full, [SEED], observer=observer)).pixels
    demo.save(FILE, wrong)
    steps = min(STEPS, demo.settings.steps)
    short = demo.pipeline.plan(full.request.replace(steps=steps))
    with tempfile.TemporaryDirectory() as scratch:
        clean, wrong_trace = Path(scratch) / "clean", Path(scratch) / "wrong"
        record(demo.pipeline, short, SEED, clean, observer=observer)
        with planted_bug(demo.pipeline):
            record(demo.pipeline, short, SEED, wrong_trace, observer=observer)
        with Trace.open(clean) as reference, Trace.open(wrong_trace) as port:
            verdict = compare(reference, port)
    right = read_pixels(demo.folder / picture_name(SEED))
    return _result(demo, verdict, (right, wrong))


@contextmanager
def planted_bug(pipeline: Pipeline) -> Generator[None]:
    """Block 1 modulates by `scale` instead of `1 + scale`, until the context ends."""
    norm = pipeline.model.network("transformer").transformer_blocks[1].norm1
    right = type(norm)

    class WithoutOne(right):
        def __call__(self, x: Any, table: Any) -> Any:
            return self.norm(x) * table[:, 1, None] + table[:, 0, None]

    object.__setattr__(norm, "__class__", WithoutOne)
    try:
        yield
    finally:
        object.__setattr__(norm, "__class__", right)


def _result(demo: Demo, verdict: Verdict, pictures: tuple[Pixels, Pixels]) -> Result:
    found = verdict.site == SITE
    lead = (
        "In one block of the network the 1 of “1 + scale” was left out, as happens in ports. "
        "Both runs were recorded, and lydite diff searched for the first wrong value among "
        f"{len(verdict.rows):,}, without a tolerance being given."
    )
    right, wrong = pictures
    figures = (
        Figure(png_bytes(right), "The picture without the bug", "as it should be"),
        Figure(png_bytes(wrong), "The picture with the bug", "with the planted bug"),
    )
    text = f"{verdict.sentence} The bug was planted at {SITE}."
    blocks = (
        Figures(figures, size="large", crisp=True),
        Callout(text, "good" if found else "warn"),
        Commands(("lydite diff REFERENCE-TRACE YOUR-TRACE --html diff.html",)),
    )
    where = "found at its place" if found else "not found at its place"
    lines = (
        f"{BUG}, {where}: {verdict.site}",
        f"what it does to the picture: {demo.folder / FILE}",
    )
    return Result(lines, Chapter(TITLE, lead, blocks), passed=found)


def _steps(settings: Settings) -> int:
    return settings.steps + 2 * min(STEPS, settings.steps)


CHAPTER = DemoChapter(TITLE, _steps, run)
