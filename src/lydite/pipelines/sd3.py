"""Stable Diffusion 3 and 3.5: text, or text and an image, to images.

Reference: diffusers 0.42.1, pipelines/stable_diffusion_3. Latents are channels last here; noise is
drawn channels first, as torch does, so that a seed means the same picture.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from lydite.core.errors import InputError
from lydite.models.mmdit import MMDiT
from lydite.models.vae.kl import AutoencoderKL
from lydite.pipelines.images import Pixels, resize
from lydite.pipelines.networks import Networks
from lydite.pipelines.noise import NOISES, RunNoise, sampler_noise
from lydite.pipelines.request import Request, check_request
from lydite.pipelines.sd3_denoiser import Denoiser
from lydite.pipelines.sd3_files import SD3Files, open_files
from lydite.pipelines.sd3_text import Conditioning, encode
from lydite.pipelines.watch import Watch, require_finite, unwatched
from lydite.sampling.conventions import find_convention, options_of, planned
from lydite.sampling.guidance import Strength, over_steps
from lydite.sampling.prediction import flow_noised
from lydite.sampling.samplers import find_sampler
from lydite.sampling.schedules import FlowSigmas, Schedule
from lydite.sampling.steps import Step


@dataclass(frozen=True)
class Progress:
    """One finished step of one batch."""

    index: int
    total: int
    first: int  # position of the batch's first picture among all that were asked for
    seeds: tuple[int, ...]
    preview: Callable[[], list[Pixels]]  # decodes what the network sees at this step


@dataclass(frozen=True)
class Picture:
    """One finished image and the seed it came from."""

    pixels: Pixels
    seed: int


class StableDiffusion3:
    """Load once, generate many. No method changes a weight."""

    def __init__(self, files: SD3Files, *, dtype: mx.Dtype, low_memory: bool = False) -> None:
        self.files = files
        self.dtype = dtype
        self.networks = Networks(files.components, dtype=dtype, low_memory=low_memory)
        self._transformer: Any = files.components["transformer"].config
        self._vae: Any = files.components["vae"].config

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        dtype: mx.Dtype = mx.float32,
        low_memory: bool = False,
        components: Path | str | None = None,
    ) -> "StableDiffusion3":
        """Open a diffusers folder or a single file; what it lacks is taken from `components`."""
        files = open_files(Path(path), Path(components) if components else None)
        pipeline = cls(files, dtype=dtype, low_memory=low_memory)
        pipeline.networks.prepare()
        return pipeline

    def generate(
        self,
        request: Request,
        seeds: Sequence[int],
        *,
        batch: int = 1,
        on_step: Callable[[Progress], None] | None = None,
        watch: Watch = unwatched,
    ) -> Iterator[Picture]:
        """One picture per seed, `batch` of them at a time, each as soon as it is finished.

        A picture does not depend on which others share its batch, but for rounding. In low-memory
        mode all are denoised before the first is decoded.
        """
        request = self.complete(request)
        schedule = self.schedule(request)
        self.strength(request)  # refused before anything is loaded
        if batch < 1:
            raise InputError(f"batch is {batch}; expected at least 1.")
        conditioning = self.encode(request, watch)
        denoisers: dict[int, Denoiser] = {}  # by size of batch: the last may be smaller
        waiting: list[tuple[tuple[int, ...], mx.array]] = []
        stopped: KeyboardInterrupt | None = None
        try:
            for first in range(0, len(seeds), batch):
                group = tuple(seeds[first : first + batch])
                try:
                    noise = self._noise(request, group)
                    x = self._start(request, schedule, noise, watch)
                    if len(group) not in denoisers:
                        made = self.denoiser(request, conditioning, len(group), watch)
                        denoisers[len(group)] = made
                        del made
                    report = _Report(on_step, first, group, len(schedule.timesteps), self._decode)
                    denoise = denoisers[len(group)]
                    steps = self._steps(request, schedule, denoise, x, group, noise)
                    latent = _finished(x, steps, report, watch)
                    del steps, denoise
                except KeyboardInterrupt as error:
                    stopped = error  # what is finished is still decoded below
                    break
                if self.networks.low_memory:
                    waiting.append((group, latent))  # the VAE comes when the transformer has gone
                else:
                    yield from self._finish(group, latent, watch)
            denoisers.clear()
            self.networks.done("transformer")
            for group, latent in waiting:
                yield from self._finish(group, latent, watch)
        finally:
            denoisers.clear()
            self.networks.done("transformer")
            self.networks.done("vae")
        if stopped:
            raise stopped

    def complete(self, request: Request) -> Request:
        """The request with its size filled in and checked, and its image at that size."""
        factor, patch = self._vae.factor, self._transformer.patch_size
        unit, largest = factor * patch, factor * patch * self._transformer.pos_embed_max_size
        width = height = self._transformer.sample_size * factor
        if request.image is not None:
            height, width = (max(side - side % unit, unit) for side in request.image.shape[:2])
        width, height = request.width or width, request.height or height
        for name, side in (("width", width), ("height", height)):
            if side % unit or not unit <= side <= largest:
                near = min(max(round(side / unit), 1), largest // unit) * unit
                raise InputError(
                    f"{name} is {side}; expected a multiple of {unit} from {unit} to {largest}. "
                    f"The nearest is {near}."
                )
        check_request(request)
        if request.image is not None:
            request = replace(request, image=resize(request.image, width, height))
        return replace(request, width=width, height=height)

    def schedule(self, request: Request) -> Schedule:
        """The steps this request will run."""
        trained = self.files.scheduler.num_train_timesteps
        return planned(
            find_convention(request.convention),
            sampler=request.sampler,
            schedule=request.schedule,
            steps=request.steps,
            model=FlowSigmas(self.files.scheduler.shift, trained, full=trained),
            strength=1.0 if request.image is None else request.strength,
        )

    def strength(self, request: Request) -> Strength:
        """How strong guidance is at each sigma of this request."""
        return over_steps(
            self.schedule(request).sigmas.tolist(),
            request.guidance,
            scales=request.guidance_steps,
            share=request.guidance_interval,
        )

    def encode(self, request: Request, watch: Watch = unwatched) -> Conditioning:
        """Text features of the prompt, and before it of the negative one when guidance is on."""
        prompts = [request.negative, request.prompt][not request.is_guided :]
        return encode(
            self.files,
            self.networks,
            prompts,
            text_length=request.text_length,
            dtype=self.dtype,
            watch=watch,
        )

    def denoiser(
        self, request: Request, conditioning: Conditioning, batch: int, watch: Watch = unwatched
    ) -> Denoiser:
        """`denoise(x, sigma)` for a completed request: what a sampler calls."""
        _, height, width = self._latent_shape(request)
        return Denoiser(
            cast(MMDiT, self.networks.get("transformer")),
            conditioning,
            self.schedule(request),
            height=height,
            width=width,
            batch=batch,
            strength=self.strength(request),
            rescale=request.guidance_rescale,
            watch=watch,
        )

    def _noise(self, request: Request, seeds: tuple[int, ...]) -> RunNoise:
        rule = find_convention(request.convention).stream
        return NOISES[request.noise](seeds, self._latent_shape(request), rule)

    def _start(
        self, request: Request, schedule: Schedule, noise: RunNoise, watch: Watch
    ) -> mx.array:
        """Noise for each seed, or the noised image, (B, h, w, C) in float32."""
        if request.image is None:
            return noise.first()
        # diffusers draws the encoder's sample and then the noise from one generator per image
        clean = self._encode_image(request.image, noise.first(), watch)
        self.networks.done("vae")
        return flow_noised(clean, noise.first(), float(schedule.sigmas[0]))

    def _steps(
        self,
        request: Request,
        schedule: Schedule,
        denoise: Denoiser,
        x: mx.array,
        seeds: tuple[int, ...],
        noise: RunNoise,
    ) -> Iterator[Step[mx.array]]:
        sampler, convention = find_sampler(request.sampler), find_convention(request.convention)
        options = {**options_of(convention, schedule, sampler), **request.options}
        shape = self._latent_shape(request)
        added = sampler_noise(sampler.noise_for(options), convention, seeds, shape, noise)
        return sampler.run(denoise, x, schedule.sigmas.tolist(), noise=added, **options)

    def _encode_image(self, image: Pixels, normals: mx.array, watch: Watch) -> mx.array:
        """A sample of the image's latents for each row of `normals`."""
        vae = cast(AutoencoderKL, self.networks.get("vae"))
        pixels = mx.array(image.astype(np.float32) / 127.5 - 1)[None]  # (1, H, W, 3)
        posterior = vae.encode(pixels.astype(self.networks.dtype_of("vae")))
        watch("vae encode", posterior.mean)
        latents = vae.normalize(posterior.mean + posterior.std * normals)
        mx.eval(latents)  # before the VAE may be freed
        return latents

    def _finish(self, seeds: tuple[int, ...], latent: mx.array, watch: Watch) -> Iterator[Picture]:
        for seed, pixels in zip(seeds, self._decode(latent, watch), strict=True):
            yield Picture(pixels, seed)

    def _decode(self, latent: mx.array, watch: Watch = unwatched) -> list[Pixels]:
        vae = cast(AutoencoderKL, self.networks.get("vae"))
        raw = vae.denormalize(latent).astype(self.networks.dtype_of("vae"))
        watch("vae input", raw)
        require_finite("latents before the VAE", raw)
        pictures: list[Pixels] = []
        for index in range(raw.shape[0]):  # one at a time: decoding is the peak of memory
            image = vae.decode(raw[index : index + 1])
            watch("vae output", image)
            require_finite("vae output", image)  # a NaN would be saved as a black picture
            pixels = mx.clip(image.astype(mx.float32) / 2 + 0.5, 0, 1) * 255
            pictures.append(np.array(mx.round(pixels[0]).astype(mx.uint8)))
        return pictures

    def _latent_shape(self, request: Request) -> tuple[int, int, int]:
        assert request.width and request.height, "complete() fills the size in"
        factor = self._vae.factor
        return self._vae.latent_channels, request.height // factor, request.width // factor


@dataclass(frozen=True)
class _Report:
    """Tells the caller of each finished step of one batch."""

    on_step: Callable[[Progress], None] | None
    first: int
    seeds: tuple[int, ...]
    total: int
    decode: Callable[[mx.array], list[Pixels]]

    def __call__(self, step: Step[mx.array]) -> None:
        if self.on_step:
            preview = partial(self.decode, step.denoised)
            self.on_step(Progress(step.index, self.total, self.first, self.seeds, preview))


def _finished(
    x: mx.array, steps: Iterator[Step[mx.array]], report: _Report, watch: Watch
) -> mx.array:
    for step in steps:
        mx.eval(step.x)  # one step's graph at a time
        watch(f"step {step.index} latent", step.x)
        x = step.x
        report(step)
    return x
