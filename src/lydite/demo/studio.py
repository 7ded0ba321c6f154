"""The embedded model, loaded once, and a folder of pictures that remember how they were made."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from PIL import Image

from lydite import embedded
from lydite.core.files import atomic_path
from lydite.demo.settings import Settings
from lydite.pipelines.images import Pixels
from lydite.pipelines.metadata import Record, model_hash, write_png
from lydite.pipelines.sd3 import Progress, Request, StableDiffusion3

Tick = Callable[[], None]  # called once per denoising step


@dataclass(frozen=True, eq=False)
class Drawn:
    """A finished picture and the file it is in."""

    prompt: str
    seed: int
    pixels: Pixels
    path: Path
    previews: tuple[Pixels, ...] = ()  # the network's guess at each step, when asked for


class Studio:
    """Draws with the embedded model in float32, so that the reference can be held against it."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings

    @cached_property
    def pipeline(self) -> StableDiffusion3:
        return StableDiffusion3.load(embedded.MODEL, dtype=mx.float32)

    def request(self, prompt: str) -> Request:
        """The prompt with the settings the model is meant to be run with."""
        request = Request(
            prompt,
            steps=self.settings.steps,
            guidance=embedded.GUIDANCE,
            text_length=embedded.TEXT_LENGTH,
        )
        return self.pipeline.complete(request)

    def draw(
        self, request: Request, seed: int, name: str, tick: Tick, *, previews: bool = False
    ) -> Drawn:
        """Draw a completed request and write it to `name` in the folder, with its metadata."""
        seen: list[Pixels] = []

        def on_step(progress: Progress) -> None:
            if previews:
                seen.extend(progress.preview())
            tick()

        picture = next(self.pipeline.generate(request, [seed], on_step=on_step))
        path = self.folder / name
        with atomic_path(path) as temporary:
            write_png(temporary, picture.pixels, self._record(request, seed))
        return Drawn(request.prompt, seed, picture.pixels, path, tuple(seen))

    def save(self, name: str, picture: Image.Image | Pixels) -> Path:
        """Write a sheet or a difference to `name` in the folder."""
        image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
        with atomic_path(self.folder / name) as temporary:
            image.save(temporary, format="PNG", optimize=True)
        return self.folder / name

    @cached_property
    def _fingerprint(self) -> str:
        return model_hash(self.pipeline.files.components)

    def _record(self, request: Request, seed: int) -> Record:
        assert request.width and request.height, "complete() fills the size in"
        return Record(
            model=embedded.NAME,
            model_hash=self._fingerprint,
            prompt=request.prompt,
            negative=request.negative,
            seed=seed,
            steps=request.steps,
            guidance=request.guidance,
            width=request.width,
            height=request.height,
            schedule=request.schedule,
            text_length=request.text_length,
            noise=request.noise,
            dtype="float32",
            mlx=version("mlx"),
        )
