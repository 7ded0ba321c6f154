"""Chapter: one picture step by step, as the network guesses it."""

from lydite.demo.chapter import DemoChapter, Result
from lydite.demo.chapters.contact_sheet import picture_name
from lydite.demo.demo import Demo, Tick
from lydite.report.contact_sheets import Tile, contact_sheet, png_bytes
from lydite.report.page import Chapter, Figure, Figures

TITLE = "One picture, step by step"
SEED = 2  # the picture of the sheet that is drawn again here, where there are as many


def run(demo: Demo, tick: Tick) -> Result:
    """Draw one picture of the sheet again, with the network's estimate at every step."""
    prompts = demo.settings.prompts
    seed = min(SEED, len(prompts) - 1)
    run = demo.plan(prompts[seed])
    drawn = demo.draw(run, seed, picture_name(seed), tick, previews=True)
    sigmas = run.schedule.sigmas
    captions = [
        (f"step {index + 1}", f"noise {sigma:.0%}")
        for index, sigma in enumerate(sigmas[: len(drawn.previews)])
    ]
    tiles = [
        Tile(pixels, f"{step}, {noise}")
        for pixels, (step, noise) in zip(drawn.previews, captions, strict=True)
    ]
    path = demo.save("steps.png", contact_sheet(tiles, columns=8, side=160, text=13))
    lead = (
        f"“{drawn.prompt}”, seed {seed}. At each step the network is shown a noisy picture and "
        "estimates the finished one. These are its estimates: places and colours come first, edges "
        "last."
    )
    figures = tuple(
        Figure(png_bytes(pixels), f"The network's estimate at {step}, {noise}", step, noise)
        for pixels, (step, noise) in zip(drawn.previews, captions, strict=True)
    )
    line = f"“{drawn.prompt}” in {len(figures)} steps: {path}"
    return Result((line,), Chapter(TITLE, lead, (Figures(figures, size="small"),)))


CHAPTER = DemoChapter(TITLE, lambda settings: settings.steps, run)
