"""One demo: its folder, its settings and the embedded model, loaded once, that draws for it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from PIL import Image

from lydite import embedded
from lydite.core.request import Request
from lydite.demo.chapter import Settings, Tick
from lydite.pipelines.family import Run
from lydite.pipelines.observer import FinishedStep, StepReporter
from lydite.pipelines.picture import Pixels, save_pixels
from lydite.pipelines.pipeline import Pipeline


@dataclass(frozen=True, eq=False)
class Drawn:
    """A finished picture and the file it is in."""

    prompt: str
    seed: int
    pixels: Pixels
    path: Path
    previews: tuple[Pixels, ...] = ()  # the denoised estimate of each step, on request


class Demo:
    """Draws with the embedded model in float32, so that the reference can be compared with it."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings

    @cached_property
    def pipeline(self) -> Pipeline:
        pipeline = Pipeline.open(embedded.NAME, dtype="float32")
        pipeline.model.prepare()
        return pipeline

    def plan(self, prompt: str) -> Run:
        """The prompt with the settings the model is meant to be run with."""
        return self.pipeline.plan(Request(prompt, steps=self.settings.steps))

    def draw(self, run: Run, seed: int, name: str, tick: Tick, *, previews: bool = False) -> Drawn:
        """Draw a picture and write it to `name` in the folder, with its metadata."""
        estimates: list[Pixels] = []

        def on_step(step: FinishedStep) -> None:
            if previews:
                estimates.extend(self.pipeline.decode(step.denoised))
            tick()

        picture = next(self.pipeline.generate(run, [seed], observer=StepReporter(on_step)))
        path = picture.save(self.folder / name, overwrite=True)
        return Drawn(run.request.prompt, seed, picture.pixels, path, tuple(estimates))

    def save(self, name: str, picture: Image.Image | Pixels) -> Path:
        """Write a sheet or a difference to `name` in the folder."""
        save_pixels(self.folder / name, picture)
        return self.folder / name
