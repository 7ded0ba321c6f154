"""Chapter: a picture drawn again from nothing but its own PNG."""

import numpy as np

from lydite.demo.chapter import DemoChapter, Result
from lydite.demo.chapters.contact_sheet import picture_name
from lydite.demo.demo import Demo, Tick
from lydite.pipelines.picture import read_pixels, read_record
from lydite.report.contact_sheets import png_bytes
from lydite.report.page import Callout, Chapter, Commands, Fact, Figure, Figures, Table

TITLE = "Drawn again from its own PNG"
SEED = 1  # the picture of the sheet that is replayed, where there are as many


def run(demo: Demo, tick: Tick) -> Result:
    """Read a picture's metadata, draw it again, and compare the pixels."""
    seed = min(SEED, len(demo.settings.prompts) - 1)
    name = picture_name(seed)
    record = read_record(demo.folder / name)
    run = demo.pipeline.plan(record.request)
    request = record.request
    again = demo.draw(run, record.seed, "again.png", tick)
    first = read_pixels(demo.folder / name)
    same = np.array_equal(first, read_pixels(again.path))
    verdict = "identical" if same else "DIFFERENT"
    lead = (
        "A PNG made here carries its prompt, seed and every other setting, and a fingerprint of "
        "the model. The same settings on the same machine give the same picture, bit for bit."
    )
    figures = (
        Figure(png_bytes(first), f"{request.prompt}, first time", "first time", name),
        Figure(png_bytes(again.pixels), f"{request.prompt}, replayed", "replayed", "again.png"),
    )
    settings = Table(
        ("the PNG says", "value"),
        (
            ("prompt", request.prompt),
            ("seed", str(record.seed)),
            ("steps", str(request.steps)),
            ("guidance", f"{request.guidance:g}"),
            ("size", f"{request.width} × {request.height}"),
            ("model", f"{record.model} ({record.model_hash[:10]})"),
        ),
    )
    callout = Callout(
        "Identical in every pixel." if same else "The two pictures differ.",
        "good" if same else "bad",
    )
    command = Commands((f"lydite generate --from {name}",))
    return Result(
        (f"{name} again: {verdict}",),
        Chapter(TITLE, lead, (Figures(figures), settings, callout, command)),
        Fact(verdict, "a picture drawn again from its PNG", "good" if same else "bad"),
        passed=same,
    )


CHAPTER = DemoChapter(TITLE, lambda settings: settings.steps, run)
