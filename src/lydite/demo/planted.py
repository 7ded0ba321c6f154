"""Chapter: a bug planted into the running model, found by comparing two traces."""

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from lydite import embedded
from lydite.demo.parts import Part, Told
from lydite.demo.settings import Settings
from lydite.demo.sheet import picture_name
from lydite.demo.studio import Studio, Tick
from lydite.diff.compare import compare
from lydite.diff.result import Verdict
from lydite.pipelines import sd3_trace
from lydite.pipelines.images import Pixels, read_pixels
from lydite.pipelines.sd3 import Progress, Request
from lydite.report.page import Callout, Chapter, Commands, Figure, Figures
from lydite.report.sheets import png_bytes
from lydite.trace.store import Trace
from lydite.zoo.cases import Bug, bugs

TITLE = "A planted bug, found"
BUG = "one-plus-missing"
SEED = 0  # the first picture of the sheet
STEPS = 2  # recorded
FILE = "planted.png"


def tell(studio: Studio, tick: Tick) -> Told:
    """Draw the sheet's first picture once more, with a slip in one block, and ask for the slip."""
    (bug,) = (each for each in bugs() if each.id == BUG)
    request = studio.request(studio.settings.prompts[SEED])
    with bug.apply(studio.pipeline):
        wrong = next(studio.pipeline.generate(request, [SEED], on_step=lambda _: tick())).pixels
    studio.save(FILE, wrong)
    short = replace(request, steps=min(STEPS, request.steps))
    with tempfile.TemporaryDirectory() as scratch:
        clean, slipped = Path(scratch) / "clean", Path(scratch) / "slipped"
        _record(studio, short, clean, tick)
        _record(studio, short, slipped, tick, bug)
        with Trace.open(clean) as reference, Trace.open(slipped) as port:
            verdict = compare(reference, port)
    right = read_pixels(studio.folder / picture_name(SEED))
    return _told(studio, bug, verdict, (right, wrong))


def _record(
    studio: Studio, request: Request, folder: Path, tick: Tick, bug: Bug | None = None
) -> None:
    def on_step(_: Progress) -> None:
        tick()

    with ExitStack() as planted:
        if bug:
            planted.enter_context(bug.apply(studio.pipeline))
        sd3_trace.record(
            studio.pipeline, request, SEED, folder, model=embedded.NAME, on_step=on_step
        )


def _told(studio: Studio, bug: Bug, verdict: Verdict, pictures: tuple[Pixels, Pixels]) -> Told:
    truth = {place.name for place in bug.site}
    found = verdict.site in truth
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
    said = f"{verdict.sentence} The bug was planted at {', '.join(sorted(truth))}."
    blocks = (
        Figures(figures, size="large", crisp=True),
        Callout(said, "good" if found else "warn"),
        Commands(("lydite diff REFERENCE-TRACE YOUR-TRACE --html diff.html",)),
    )
    where = "found at its place" if found else "not found at its place"
    lines = (
        f"{bug.id}, {where}: {verdict.site}",
        f"what it does to the picture: {studio.folder / FILE}",
    )
    return Told(lines, Chapter(TITLE, lead, blocks), fine=found)


def _steps(settings: Settings) -> int:
    return settings.steps + 2 * min(STEPS, settings.steps)


PART = Part(TITLE, _steps, tell)
