"""Chapter: a bug planted into the running model, found by comparing two traces."""

import tempfile
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from lydite import embedded
from lydite.demo.parts import Part, Told
from lydite.demo.settings import Settings
from lydite.demo.sheet import picture_name
from lydite.demo.studio import Studio, Tick
from lydite.diff.compare import compare
from lydite.diff.result import Verdict
from lydite.pipelines import sd3_trace
from lydite.pipelines.images import Pixels, read_pixels
from lydite.pipelines.sd3 import Progress, Request, StableDiffusion3
from lydite.report.page import Callout, Chapter, Commands, Figure, Figures
from lydite.report.sheets import png_bytes
from lydite.trace.store import Trace

TITLE = "A planted bug, found"
BUG = "one-plus-missing"
SITE = "transformer/transformer_blocks.1.norm1"  # of the bug
SEED = 0  # the first picture of the sheet
STEPS = 2  # recorded
FILE = "planted.png"


def tell(studio: Studio, tick: Tick) -> Told:
    """Draw the sheet's first picture once more, with a bug in one block, and look for the bug."""
    request = studio.request(studio.settings.prompts[SEED])
    with planted_bug(studio.pipeline):
        wrong = next(studio.pipeline.generate(request, [SEED], on_step=lambda _: tick())).pixels
    studio.save(FILE, wrong)
    short = replace(request, steps=min(STEPS, request.steps))
    with tempfile.TemporaryDirectory() as scratch:
        clean, wrong_trace = Path(scratch) / "clean", Path(scratch) / "wrong"
        _record(studio, short, clean, tick)
        _record(studio, short, wrong_trace, tick, bug=True)
        with Trace.open(clean) as reference, Trace.open(wrong_trace) as port:
            verdict = compare(reference, port)
    right = read_pixels(studio.folder / picture_name(SEED))
    return _told(studio, verdict, (right, wrong))


@contextmanager
def planted_bug(pipeline: StableDiffusion3) -> Generator[None]:
    """Block 1 modulates by `scale` instead of `1 + scale`, until the context ends."""
    network: Any = pipeline.networks.get("transformer")
    norm = network.transformer_blocks[1].norm1
    right = type(norm)

    class WithoutOne(right):
        def __call__(self, x: Any, table: Any) -> Any:
            return self.norm(x) * table[:, 1, None] + table[:, 0, None]

    object.__setattr__(norm, "__class__", WithoutOne)
    try:
        yield
    finally:
        object.__setattr__(norm, "__class__", right)


def _record(
    studio: Studio, request: Request, folder: Path, tick: Tick, *, bug: bool = False
) -> None:
    def on_step(_: Progress) -> None:
        tick()

    with planted_bug(studio.pipeline) if bug else nullcontext():
        sd3_trace.record(
            studio.pipeline, request, SEED, folder, model=embedded.NAME, on_step=on_step
        )


def _told(studio: Studio, verdict: Verdict, pictures: tuple[Pixels, Pixels]) -> Told:
    found = verdict.site == SITE
    lead = (
        "In one block of the network the 1 of “1 + scale” was left out, as happens in ports. "
        "Both runs left a trace, and lydite diff was asked for the first wrong value "
        f"among {len(verdict.rows):,}; nobody told it a tolerance."
    )
    right, wrong = pictures
    figures = (
        Figure(png_bytes(right), "The picture without the bug", "as it should be"),
        Figure(png_bytes(wrong), "The picture with the bug", "with the planted bug"),
    )
    said = f"{verdict.sentence} The bug was planted at {SITE}."
    blocks = (
        Figures(figures, size="large", crisp=True),
        Callout(said, "good" if found else "warn"),
        Commands(("lydite diff REFERENCE-TRACE YOUR-TRACE --html diff.html",)),
    )
    where = "found at its place" if found else "not found at its place"
    lines = (
        f"{BUG}, {where}: {verdict.site}",
        f"what it does to the picture: {studio.folder / FILE}",
    )
    return Told(lines, Chapter(TITLE, lead, blocks), fine=found)


def _steps(settings: Settings) -> int:
    return settings.steps + 2 * min(STEPS, settings.steps)


PART = Part(TITLE, _steps, tell)
