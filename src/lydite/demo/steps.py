"""Chapter: one picture step by step, as the network guesses it."""

from lydite.demo.parts import Part, Told
from lydite.demo.sheet import picture_name
from lydite.demo.studio import Studio, Tick
from lydite.report.page import Chapter, Figure, Figures
from lydite.report.sheets import Tile, contact_sheet, png_bytes

TITLE = "One picture, step by step"
SEED = 2  # the picture of the sheet that is drawn again here, where there are as many


def tell(studio: Studio, tick: Tick) -> Told:
    """Draw one picture of the sheet again, with the network's guess at every step."""
    prompts = studio.settings.prompts
    seed = min(SEED, len(prompts) - 1)
    request = studio.request(prompts[seed])
    drawn = studio.draw(request, seed, picture_name(seed), tick, previews=True)
    sigmas = studio.pipeline.schedule(request).sigmas
    captions = [
        (f"step {index + 1}", f"noise {sigma:.0%}")
        for index, sigma in enumerate(sigmas[: len(drawn.previews)])
    ]
    tiles = [
        Tile(pixels, f"{step}, {noise}")
        for pixels, (step, noise) in zip(drawn.previews, captions, strict=True)
    ]
    path = studio.save("steps.png", contact_sheet(tiles, columns=8, side=160, text=13))
    lead = (
        f"“{drawn.prompt}”, seed {seed}. At each step the network is shown a noisy picture and "
        "guesses the finished one. These are its guesses: places and colours come first, edges "
        "last."
    )
    figures = tuple(
        Figure(png_bytes(pixels), f"The network's guess at {step}, {noise}", step, noise)
        for pixels, (step, noise) in zip(drawn.previews, captions, strict=True)
    )
    line = f"“{drawn.prompt}” in {len(figures)} steps: {path}"
    return Told((line,), Chapter(TITLE, lead, (Figures(figures, size="small"),)))


PART = Part(TITLE, lambda settings: settings.steps, tell)
