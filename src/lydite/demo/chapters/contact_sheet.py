"""Chapter: pictures from prompts of every kind, and a contact sheet of them."""

import time

from lydite.demo.chapter import DemoChapter, Result, Settings
from lydite.demo.demo import Demo, Drawn, Tick
from lydite.report.contact_sheets import Tile, contact_sheet, png_bytes
from lydite.report.page import Chapter, Fact, Figure, Figures

TITLE = "Prompts to pictures"


def draw(demo: Demo, tick: Tick) -> tuple[Drawn, ...]:
    """One picture per prompt; picture i starts from seed i."""
    return tuple(
        demo.draw(demo.plan(prompt), seed, picture_name(seed), tick)
        for seed, prompt in enumerate(demo.settings.prompts)
    )


def picture_name(seed: int) -> str:
    """Where in the folder the picture of this seed is."""
    return f"pictures/{seed + 1:02d}.png"


def run(demo: Demo, tick: Tick) -> Result:
    """Draw, lay the sheet out, and say where it is."""
    start = time.perf_counter()
    pictures = draw(demo, tick)
    pace = (time.perf_counter() - start) / len(pictures)
    tiles = [Tile(picture.pixels, picture.prompt) for picture in pictures]
    path = demo.save("sheet.png", contact_sheet(tiles, columns=4, side=256))
    lead = (
        f"One, two and three objects, places, gradients, bare nouns: {len(pictures)} prompts, "
        f"{demo.settings.steps} steps each, none left out. Every PNG remembers its settings, so "
        "each can be drawn again."
    )
    figures = tuple(
        Figure(png_bytes(picture.pixels), picture.prompt, picture.prompt, f"seed {picture.seed}")
        for picture in pictures
    )
    line = f"{len(pictures)} pictures, {pace:.2g} s each: {path}"
    return Result(
        (line,),
        Chapter(TITLE, lead, (Figures(figures),)),
        Fact(str(len(pictures)), "prompts drawn, none left out"),
    )


def _steps(settings: Settings) -> int:
    return len(settings.prompts) * settings.steps


CHAPTER = DemoChapter(TITLE, _steps, run)
