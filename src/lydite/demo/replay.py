"""Chapter: a picture drawn again from nothing but its own PNG."""

import numpy as np

from lydite.demo.parts import Part, Told
from lydite.demo.sheet import picture_name
from lydite.demo.studio import Studio, Tick
from lydite.pipelines.images import read_pixels
from lydite.pipelines.metadata import Record, read_record
from lydite.pipelines.sd3 import Request
from lydite.report.page import Callout, Chapter, Commands, Fact, Figure, Figures, Table
from lydite.report.sheets import png_bytes

TITLE = "Drawn again from its own PNG"
SEED = 1  # the picture of the sheet that is replayed, where there are as many


def tell(studio: Studio, tick: Tick) -> Told:
    """Read a picture's metadata, draw it again, and hold the pixels against each other."""
    seed = min(SEED, len(studio.settings.prompts) - 1)
    name = picture_name(seed)
    record = read_record(studio.folder / name)
    again = studio.draw(_request(record), record.seed, "again.png", tick)
    first = read_pixels(studio.folder / name)
    same = np.array_equal(first, read_pixels(again.path))
    verdict = "identical" if same else "DIFFERENT"
    lead = (
        "A PNG made here carries its prompt, seed and every other setting, and a fingerprint of "
        "the model. The same settings on the same machine give the same picture, bit for bit."
    )
    figures = (
        Figure(png_bytes(first), f"{record.prompt}, first time", "first time", name),
        Figure(png_bytes(again.pixels), f"{record.prompt}, replayed", "replayed", "again.png"),
    )
    settings = Table(
        ("the PNG says", "value"),
        (
            ("prompt", record.prompt),
            ("seed", str(record.seed)),
            ("steps", str(record.steps)),
            ("guidance", f"{record.guidance:g}"),
            ("size", f"{record.width} × {record.height}"),
            ("model", f"{record.model} ({record.model_hash[:10]})"),
        ),
    )
    callout = Callout(
        "Identical in every pixel." if same else "The two pictures differ.",
        "good" if same else "bad",
    )
    command = Commands((f"lydite generate --from {name}",))
    return Told(
        (f"{name} again: {verdict}",),
        Chapter(TITLE, lead, (Figures(figures), settings, callout, command)),
        Fact(verdict, "a picture drawn again from its PNG", "good" if same else "bad"),
        fine=same,
    )


def _request(record: Record) -> Request:
    return Request(
        prompt=record.prompt,
        negative=record.negative,
        steps=record.steps,
        guidance=record.guidance,
        width=record.width,
        height=record.height,
        schedule=record.schedule,
        text_length=record.text_length,
        noise=record.noise,
    )


PART = Part(TITLE, lambda settings: settings.steps, tell)
