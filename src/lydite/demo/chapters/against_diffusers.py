"""Chapter: the same picture in diffusers, pixel by pixel, where diffusers is installed."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lydite.demo.chapter import DemoChapter, Result
from lydite.demo.chapters.contact_sheet import picture_name
from lydite.demo.demo import Demo, Tick
from lydite.pipelines.family import Run
from lydite.pipelines.picture import Pixels, read_pixels
from lydite.pipelines.pipeline import Pipeline
from lydite.reference.jobs import Job, ReferenceMissing, TraceOutput, run_job
from lydite.report.contact_sheets import png_bytes
from lydite.report.page import Callout, Chapter, Fact, Figure, Figures
from lydite.trace import pipeline_sites
from lydite.trace.reader import Trace

TITLE = "The same picture in diffusers"
SEED = 0  # the first picture of the sheet
FILES = ("diffusers.png", "difference.png")


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two pictures of the same size, and how far apart they are."""

    ours: Pixels
    theirs: Pixels
    largest: int  # difference of any channel of any pixel, of 255
    equal: int  # pixels with all three channels equal
    gain: int  # what the difference is multiplied by to be seen
    difference: Pixels  # grey: the channel that is furthest apart, times the gain


def compare(ours: Pixels, theirs: Pixels) -> Comparison:
    """Compare two pictures; the largest difference is drawn as white."""
    apart = np.abs(ours.astype(np.int64) - theirs.astype(np.int64)).max(axis=-1)  # (H, W)
    largest = int(apart.max())
    gain = 255 // max(largest, 1)
    grey = (apart * gain).astype(np.uint8)
    difference = np.stack([grey] * 3, axis=-1)  # (H, W, 3)
    return Comparison(ours, theirs, largest, int((apart == 0).sum()), gain, difference)


def run(demo: Demo, tick: Tick) -> Result:
    """Draw the sheet's first picture in diffusers, or say how to get diffusers."""
    prompt = demo.settings.prompts[SEED]
    try:
        reference = draw_reference(demo.pipeline, demo.plan(prompt), SEED, tick)
    except ReferenceMissing as error:
        return _skipped(demo, str(error))
    found = compare(read_pixels(demo.folder / picture_name(SEED)), reference)
    for name, pixels in zip(FILES, (found.theirs, found.difference), strict=True):
        demo.save(name, pixels)
    return _result(demo, prompt, found)


def draw_reference(pipeline: Pipeline, run: Run, seed: int, tick: Tick) -> Pixels:
    """The same picture by the reference; of its trace only the picture is recorded."""
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(
            family=pipeline.family.name,
            model=str(pipeline.model.path),
            request=run.request,
            seed=seed,
            outputs=(TraceOutput(str(Path(scratch) / "trace")),),
            points=(pipeline_sites.IMAGE,),
        )
        run_job(job, tick)
        with Trace.open(Path(scratch) / "trace") as trace:
            event = trace.find(pipeline_sites.IMAGE, "out", 0, 0)
            assert event is not None, "the only value that is recorded"
            image = np.asarray(trace.read(event), np.float32)
    return (image * 255).round().astype(np.uint8)  # as diffusers itself makes an image of it


def _skipped(demo: Demo, reason: str) -> Result:
    for name in FILES:  # of an earlier run: they would not belong to this page
        (demo.folder / name).unlink(missing_ok=True)
    text = f"Skipped: {reason}"
    lead = "This chapter draws one picture with diffusers on torch and compares ours with it."
    return Result((text,), Chapter(TITLE, lead, (Callout(text),)))


def _result(demo: Demo, prompt: str, found: Comparison) -> Result:
    tone = "good" if found.largest <= 1 else "warn"
    amount = _amount(found)
    verdict = f"{amount[0].upper()}{amount[1:]}."
    if tone == "warn":
        verdict += " In float32 on a CPU the two agree within 1."
    lead = (
        f"“{prompt}”, drawn by diffusers on torch and by Lydite on MLX from the same folder of "
        f"weights. Seed {SEED} is the same noise on both sides: Lydite draws torch's random "
        "numbers without torch."
    )
    figures = (
        Figure(png_bytes(found.ours), f"{prompt}, drawn by Lydite", "Lydite on MLX"),
        Figure(png_bytes(found.theirs), f"{prompt}, drawn by diffusers", "diffusers on torch"),
        Figure(
            png_bytes(found.difference),
            f"Difference of the two pictures, multiplied by {found.gain}",
            f"difference × {found.gain}",
        ),
    )
    blocks = (Figures(figures, size="large", crisp=True), Callout(verdict, tone))
    return Result(
        (f"{amount}: {demo.folder / FILES[1]}",),
        Chapter(TITLE, lead, blocks),
        Fact(f"{found.largest} / 255", "largest pixel difference from diffusers", tone),
    )


def _amount(found: Comparison) -> str:
    pixels = found.ours[..., 0].size
    if found.equal == pixels:
        return f"equal in all {pixels:,} pixels"
    return f"largest difference {found.largest} of 255, {found.equal:,} of {pixels:,} pixels equal"


CHAPTER = DemoChapter(TITLE, lambda settings: settings.steps, run)
