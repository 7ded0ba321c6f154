"""Chapter: the same picture in diffusers, pixel by pixel, where diffusers is installed."""

from dataclasses import dataclass

import numpy as np

from lydite import embedded
from lydite.demo.parts import Part, Told
from lydite.demo.sheet import picture_name
from lydite.demo.studio import Studio, Tick
from lydite.pipelines.images import Pixels, read_pixels
from lydite.reference import diffusers_sd3
from lydite.report.page import Callout, Chapter, Fact, Figure, Figures
from lydite.report.sheets import png_bytes

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
    """Hold two pictures against each other; the largest difference is drawn as white."""
    apart = np.abs(ours.astype(np.int64) - theirs.astype(np.int64)).max(axis=-1)  # (H, W)
    largest = int(apart.max())
    gain = 255 // max(largest, 1)
    grey = (apart * gain).astype(np.uint8)
    difference = np.stack([grey] * 3, axis=-1)  # (H, W, 3)
    return Comparison(ours, theirs, largest, int((apart == 0).sum()), gain, difference)


def tell(studio: Studio, tick: Tick) -> Told:
    """Draw the sheet's first picture in diffusers, or say how to get diffusers."""
    request = studio.request(studio.settings.prompts[SEED])
    assert request.width and request.height, "complete() fills the size in"
    try:
        theirs = diffusers_sd3.draw(
            embedded.MODEL,
            request.prompt,
            seed=SEED,
            steps=request.steps,
            guidance=request.guidance,
            width=request.width,
            height=request.height,
            text_length=request.text_length,
            on_step=tick,
        )
    except diffusers_sd3.ReferenceMissing as error:
        return _skipped(studio, str(error))
    found = compare(read_pixels(studio.folder / picture_name(SEED)), theirs)
    for name, pixels in zip(FILES, (found.theirs, found.difference), strict=True):
        studio.save(name, pixels)
    return _told(studio, request.prompt, found)


def _skipped(studio: Studio, reason: str) -> Told:
    for name in FILES:  # of an earlier run: they would not belong to this page
        (studio.folder / name).unlink(missing_ok=True)
    text = f"Skipped: {reason}"
    lead = "This chapter draws one picture with diffusers on torch and holds ours against it."
    return Told((text,), Chapter(TITLE, lead, (Callout(text),)))


def _told(studio: Studio, prompt: str, found: Comparison) -> Told:
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
    return Told(
        (f"{amount}: {studio.folder / FILES[1]}",),
        Chapter(TITLE, lead, blocks),
        Fact(f"{found.largest} / 255", "largest pixel difference from diffusers", tone),
    )


def _amount(found: Comparison) -> str:
    pixels = found.ours[..., 0].size
    if found.equal == pixels:
        return f"equal in all {pixels:,} pixels"
    return f"largest difference {found.largest} of 255, {found.equal:,} of {pixels:,} pixels equal"


PART = Part(TITLE, lambda settings: settings.steps, tell)
