"""Text, or text and an image, to images: one pipeline for every family.

`Pipeline.open(model)` finds the parts, `plan(request)` completes and checks a request, and
`generate(run, seeds)` draws. Latents are channels last; noise is drawn channels first, as torch
does, so that a seed means the same picture as in diffusers.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from math import hypot
from pathlib import Path
from typing import Any, Self, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lydite.core.device import avoid_cuda_graphs
from lydite.core.errors import InputError, shown
from lydite.core.request import Request
from lydite.models.layers import at_timestep, on_cpu
from lydite.pipelines.family import Conditioning, Defaults, Family, Network, Run
from lydite.pipelines.inpainting import (
    Inpainting,
    Mask,
    hide,
    latent_mask,
    overlay,
)
from lydite.pipelines.model import DTYPES, Model, default_dtype
from lydite.pipelines.model_files import locate, open_model
from lydite.pipelines.model_hash import joined_hash, model_hash, sampled_hash
from lydite.pipelines.noise import NOISES, RunNoise, sampler_noise
from lydite.pipelines.observer import BOTH_PROMPTS, Observer, require_finite
from lydite.pipelines.picture import (
    Picture,
    Pixels,
    Record,
)
from lydite.pipelines.planning import check_inputs, check_refiner, complete, hand_over, plan_run
from lydite.pipelines.prompt_weights import plain_text
from lydite.pipelines.textual_inversion import Embedding, read_embedding
from lydite.pipelines.tiles import check_tile, decode_tiles
from lydite.sampling.denoiser import Guide, Guided
from lydite.sampling.scheduler_config import SchedulerConfig, read_scheduler_config
from lydite.weights.lora import read_lora
from lydite.weights.quantized_format import Format

AHEAD = 2 * 2**30  # bytes for a picture of 1024² in 16 bits
SILENT = Observer()
Batch = tuple[tuple[int, ...], mx.array]  # seeds and finished latents
T = TypeVar("T")


class Pipeline:
    """Open once, generate many. No method changes a weight."""

    def __init__(self, family: Family, model: Model, defaults: Defaults, name: str) -> None:
        self.family, self.model, self.defaults, self.name = family, model, defaults, name
        self.latents = family.latents(model)
        self.components: str | None = None  # the folder of parts that the checkpoint lacks
        self.tile: int | None = None  # pixels of a side, where larger pictures are decoded in tiles
        self.refiner: Pipeline | None = None  # runs the last steps and decodes

    @classmethod
    def open(
        cls,
        model: Path | str,
        *,
        components: Path | str | None = None,
        dtype: str = "auto",
        low_memory: bool = False,
        fetch: bool = True,
        bits: int | None = None,
        tile: int | None = None,
        loras: Sequence[tuple[Path | str, float]] = (),
        refiner: Path | str | None = None,
        embeddings: Sequence[tuple[Path | str, str | None]] = (),
    ) -> Self:
        """A diffusers folder, a single file, a hub id or `embedded`; no weights are read yet.

        What a single file lacks is taken from `components`. `bits`, 4 or 8: weights of transformers
        and large text encoders are rounded while they are read. `tile`: larger pictures are decoded
        in overlapping squares of this many pixels a side. `loras`, files with their weights, change
        the networks when these are loaded. `refiner` is a second model, which runs the last steps.
        `embeddings` are files of textual inversion, each with its word or None for its own.
        Without `fetch` nothing is downloaded.
        """
        if dtype not in ("auto", *DTYPES):
            raise InputError(f"dtype is {dtype!r}; expected auto, {', '.join(DTYPES)}.")
        extra = locate(str(components), fetch=fetch) if components else None
        family, opened, defaults = open_model(
            locate(str(model), fetch=fetch),
            extra,
            dtype=default_dtype() if dtype == "auto" else dtype,
            low_memory=low_memory,
            bits=None if bits is None else Format(bits).bits,
        )
        if family.network == "unet":
            avoid_cuda_graphs()
        if loras and bits:
            raise InputError("LoRAs change weights before they are rounded; leave out --bits.")
        networks = family.lora_networks(opened.components) if loras else []
        opened.loras = tuple((read_lora(Path(path), networks), weight) for path, weight in loras)
        opened.embeddings = _read_embeddings(embeddings, family, opened)
        pipeline = cls(family, opened, defaults, str(model))
        pipeline.tile = None if tile is None else check_tile(tile, pipeline.latents.vae_factor)
        pipeline.components = str(components) if components else None
        if refiner is not None:
            second = cls.open(
                refiner, dtype=dtype, low_memory=low_memory, fetch=fetch, bits=bits, tile=tile
            )
            second.model.embeddings = opened.embeddings
            check_refiner(pipeline, second)
            pipeline.refiner = second
        return pipeline

    @cached_property
    def scheduler(self) -> SchedulerConfig:
        """What the checkpoint's scheduler config says."""
        where = self.model.path / "scheduler" / "scheduler_config.json"
        return read_scheduler_config(
            self.model.scheduler, where=where, grid=self.family.flow_grid, mu=self.family.mu
        )

    @cached_property
    def model_hash(self) -> str:
        """Of all files of the model and of its refiner: see `pipelines.model_hash`."""
        own = model_hash(self.model)
        return joined_hash(own, self.refiner.model_hash) if self.refiner else own

    def made(self, record: Record) -> bool:
        """Whether this is the model that a picture was made with."""
        return record.model_hash in (self.model_hash, sampled_hash(self.model))

    def plan(self, request: Request, image: Pixels | None = None, mask: Mask | None = None) -> Run:
        """Complete and check a request; nothing is loaded.

        `image` is where img2img starts, `mask` is (H, W) and 255 where it is drawn anew.
        """
        check_inputs(self, image, mask)
        run = plan_run(self, complete(self, request, image, mask), image, mask)
        return run if self.refiner is None else hand_over(self, run, self.refiner)

    def generate(
        self,
        request: Request | Run,
        seeds: Sequence[int],
        *,
        image: Pixels | None = None,
        mask: Mask | None = None,
        batch: int = 1,
        observer: Observer = SILENT,
    ) -> Iterator[Picture]:
        """One picture per seed, `batch` of them at a time, each as soon as it is finished.

        A picture does not depend on which others share its batch, except for rounding. In
        low-memory mode all are denoised before the first is decoded.
        """
        run = request if isinstance(request, Run) else self.plan(request, image, mask)
        if batch < 1:
            raise InputError(f"batch is {batch}; expected at least 1.")
        batches = self.denoise(run, seeds, batch=batch, observer=observer)
        last = self.refiner or self
        try:
            for group, latents in _collected(batches) if self.model.low_memory else batches:
                for seed, pixels in zip(group, last.decode(latents, observer), strict=True):
                    if run.request.feather and run.image is not None and run.mask is not None:
                        pixels = overlay(pixels, run.image, run.mask)
                    yield Picture(pixels, seed, self.record(run, seed))
        finally:
            last.model.release("vae")

    def denoise(
        self, run: Run, seeds: Sequence[int], *, batch: int = 1, observer: Observer = SILENT
    ) -> Iterator[Batch]:
        """The finished latents of each batch of seeds."""
        groups = {
            first: tuple(seeds[first : first + batch]) for first in range(0, len(seeds), batch)
        }
        states = self._run_batches(run, self._starts(run, groups, observer), observer)
        if self.refiner is not None and run.refining is not None:
            handed = _collected(states) if self.model.low_memory else states
            # before the refiner loads anything: in low-memory mode our networks are freed by then
            first = list(islice(handed, 1))
            resumed = _resumed(run.refining, chain(first, handed), observer)
            states = self.refiner._run_batches(run.refining, resumed, observer)
        for state in states:
            yield state.seeds, state.x

    def _run_batches(
        self, run: Run, starts: Iterable["_State"], observer: Observer
    ) -> Iterator["_State"]:
        """Each batch after all steps of the run."""
        run = _observed_schedule(run, observer)
        conditioning = self.encode(run, observer)
        denoisers: dict[int, Denoiser] = {}  # by size of batch: the last may be smaller
        try:
            for state in starts:
                size = len(state.seeds)
                if size not in denoisers:
                    denoisers[size] = self.denoiser(run, conditioning, size, observer)
                denoisers[size].begin(run.first, state.inpainting)
                with self._few_buffers(size * run.shape[1] * run.shape[2] * self.latents.factor**2):
                    x = _run_steps(run, denoisers[size], state, observer)
                yield replace(state, x=x)
        finally:
            denoisers.clear()
            self.model.release(self.family.network)

    def _starts(
        self, run: Run, groups: Mapping[int, tuple[int, ...]], observer: Observer
    ) -> Iterator["_State"]:
        """Each batch before the first step."""
        # Then no image is encoded while the network is in memory.
        early = groups if self.model.low_memory and run.image is not None else ()
        starts = {first: self._start(run, groups[first], observer) for first in early}
        for first, group in groups.items():
            observer.begin_batch(first, group)
            noise, x, inpainting = starts.pop(first, None) or self._start(run, group, observer)
            yield _State(first, group, noise, x, inpainting)

    def encode(self, run: Run, observer: Observer = SILENT) -> Conditioning:
        """The family's conditioning of the run's prompts."""
        arrays = self.family.encode(self.model, run.prompts, run.request, observer)
        return {
            name: observer.observe("conditioning", array, name=name)
            for name, array in arrays.items()
        }

    def denoiser(
        self, run: Run, conditioning: Conditioning, batch: int, observer: Observer = SILENT
    ) -> "Denoiser":
        """`denoise(x, sigma)` for a run: what a sampler calls."""
        network = self.family.bind(self.model, conditioning, run, batch, observer)
        return Denoiser(network, run, self.family.guide, observer)

    def decode(self, latents: mx.array, observer: Observer = SILENT) -> list[Pixels]:
        """Pictures of finished latents, one at a time: decoding is the peak of memory."""
        vae = self.model.network("vae")
        raw = vae.denormalize(latents).astype(self.model.dtype_of("vae"))
        raw = observer.observe("vae_input", raw)
        require_finite("latents before the VAE", raw)
        pictures: list[Pixels] = []
        for index in range(raw.shape[0]):
            with self._few_buffers(raw.shape[1] * raw.shape[2] * self.latents.vae_factor**2):
                pictures.append(self._decode_one(vae, raw[index : index + 1], observer))
            mx.clear_cache()  # a decoder's buffers are the largest, and no step fits them
        return pictures

    def _decode_one(self, vae: Any, raw: mx.array, observer: Observer) -> Pixels:
        if self.tile is None:
            image = vae.decode(raw)
        else:
            image = decode_tiles(vae, raw, self.tile, self.latents.vae_factor)
        image = observer.observe("image", image)
        require_finite("vae output", image)  # a NaN would be saved as a black picture
        pixels = mx.clip(image.astype(mx.float32) / 2 + 0.5, 0, 1) * 255
        return np.array(mx.round(pixels[0]).astype(mx.uint8))

    @contextmanager
    def _few_buffers(self, pixels: int) -> Generator[None]:
        """Bound what MLX allocates beyond what is in memory now, for so many pixels.

        On CUDA it hands over the work of many operations in advance, and keeps the buffers of all
        of them: 8 to 12 GiB for a picture of 1024², where 2 give the same speed. Beyond the limit
        it waits until some are done.
        """
        if not mx.cuda.is_available() or on_cpu():
            yield
            return
        width = getattr(mx, self.model.dtype).size / mx.bfloat16.size
        limit = mx.get_active_memory() + int(AHEAD * width * max(pixels / 2**20, 1.0))
        before = mx.set_memory_limit(limit)
        if before < limit:
            mx.set_memory_limit(before)
        try:
            yield
        finally:
            mx.set_memory_limit(before)

    def truncated(self, run: Run) -> list[str]:
        """What text encoders do not read of the prompt, in a sentence each."""
        notes: list[str] = []
        for encoder in self.model.tokenizers:
            if encoder in self.defaults.untrained:
                continue
            tokenizer = self.model.tokenizer(encoder, run.request.text_length)
            words = plain_text(run.request.prompt, run.request.weighting)
            if lost := tokenizer.truncated(words):
                notes.append(
                    f"{encoder} reads {tokenizer.max_length} tokens; it does not read: "
                    f"…{shown(lost.strip())}"
                )
        return notes

    def record(self, run: Run, seed: int) -> Record:
        """What a picture's file remembers."""
        return Record(
            request=run.request,
            seed=seed,
            model=self.name,
            model_hash=self.model_hash,
            dtype=self.model.dtype,
            bits=self.model.bits,
            tile=self.tile,
            components=self.components,
            refiner=self.refiner.name if self.refiner else None,
            loras=tuple((str(lora.path), weight) for lora, weight in self.model.loras),
            embeddings=tuple((str(word.path), word.token) for word in self.model.embeddings),
            image_hash=run.image_hash,
            mask_hash=run.mask_hash,
        )

    def _start(
        self, run: Run, group: tuple[int, ...], observer: Observer
    ) -> tuple[RunNoise, mx.array, Inpainting | None]:
        """The noise of each seed, and what it begins with, or the noised image: (B, …, C)."""
        # diffusers draws, from one generator per image: the sample of the encoded image where it is
        # used, the noise, and with a mask the sample of the image without what is masked
        noise = NOISES[run.request.noise](group, run.shape, run.convention.stream)
        sigma = float(run.schedule.sigmas[0])
        takes_mask = "mask" in self.family.needs(self.model)
        whole = run.mask is not None and run.request.strength == 1  # nothing of the image stays
        clean = None
        starts = self.family.image == "start"
        unused = whole and takes_mask and not self.family.encodes_unused_image
        if run.image is not None and starts and not unused:
            scaled = run.image.astype(np.float32) / 127.5 - 1
            clean = self._encode_image(scaled, noise.first(), observer)
        normals = observer.observe("noise", noise.first())
        if clean is None or whole:
            x = run.prediction.start(normals, sigma, unit_variance=run.unit_variance)
        else:
            x = run.prediction.noised(clean, normals, sigma)
        if run.image is None or run.mask is None:
            return noise, x, None
        mask, drawn = latent_mask(run.mask, self.latents.factor), noise.first()
        if not takes_mask:
            return noise, x, Inpainting(mask, run.prediction, clean, normals)
        rest = self._encode_image(hide(run.image, run.mask), drawn, observer)
        channels = self.family.mask_channels(run.mask, rest, self.latents.factor)
        return noise, x, Inpainting(mask, run.prediction, channels=channels)

    def _encode_image(
        self, image: NDArray[np.float32], normals: mx.array, observer: Observer
    ) -> mx.array:
        """A sample of the latents of an image from -1 to 1, for each row of `normals`."""
        vae = self.model.network("vae")
        pixels = mx.array(image)[None]  # (1, H, W, 3)
        posterior = vae.encode(pixels.astype(self.model.dtype_of("vae")))
        mean = observer.observe("image_latents", posterior.mean)
        latents = vae.normalize(mean + posterior.std * normals)
        mx.eval(latents)  # before the VAE may be freed
        del vae
        self.model.release("vae")
        return latents


@dataclass(frozen=True, eq=False)
class _State:
    """One batch before or after the steps of a run."""

    first: int  # position of its first picture among all of the run
    seeds: tuple[int, ...]
    noise: RunNoise  # what comes next of each seed's
    x: mx.array  # latents
    inpainting: Inpainting | None = None


class Denoiser:
    """`denoise(x, sigma)` over a bound network; every value passes the run's observer."""

    def __init__(self, network: Network, run: Run, guide: Guide, observer: Observer) -> None:
        self._network, self._observer = network, observer
        self._prompts = len(run.prompts)
        self.noise_model = run.prediction.noise_model
        self.step = 0  # of the schedule, set by the loop over the sampler's steps
        self.inpainting: Inpainting | None = None  # of the batch
        self._started = False
        self._guided = Guided(
            self._outputs,
            run.prediction,
            run.schedule.timestep_of,
            run.strength,
            run.request.guidance_rescale,
            prompts=self._prompts,
            guide=guide,
            on_output=self._observed_prediction,
        )

    def begin(self, first: int = 0, inpainting: Inpainting | None = None) -> None:
        """A new batch follows, whose first step has this number."""
        self.step, self.inpainting, self._started = first, inpainting, False

    def __call__(self, x: mx.array, sigma: float) -> mx.array:
        """The clean latents the network sees in x, (B, …, C) in float32."""
        blended = self._blended(x, sigma)
        denoised = self._guided(self._observed_input(blended, sigma), sigma)
        return denoised if blended is x else denoised + (x - blended)

    def pair(self, x: mx.array, sigma: float) -> tuple[mx.array, mx.array]:
        """With guidance, and with the negative prompt alone."""
        blended = self._blended(x, sigma)
        guided, uncond = self._guided.pair(self._observed_input(blended, sigma), sigma)
        if blended is x:
            return guided, uncond
        return guided + (x - blended), uncond + (x - blended)

    def _blended(self, x: mx.array, sigma: float) -> mx.array:
        """Inpainting replaces a sampler's x within a step too, but not the one it starts from.

        The sampler goes on from the x that it gave: what it computes of it and the denoised latents
        is as of the replaced one, when the difference is added to the denoised latents.
        """
        started, self._started = self._started, True
        return self.inpainting.blend(x, sigma) if self.inpainting and started else x

    def _observed_input(self, x: mx.array, sigma: float) -> mx.array:
        return self._observer.observe("denoiser_input", x, step=self.step, sigma=sigma)

    def _observed_prediction(self, prediction: mx.array, sigma: float) -> mx.array:
        return self._observer.observe("prediction", prediction, step=self.step, sigma=sigma)

    def _outputs(self, x: mx.array, timestep: float, prompts: Sequence[int]) -> Sequence[mx.array]:
        """One output for each of the prompts, which are all of the run's or the last one."""
        name = BOTH_PROMPTS if len(prompts) > 1 else "cond" if self._prompts > 1 else ""
        if self.inpainting is not None and self.inpainting.channels is not None:
            x = mx.concatenate([x, self.inpainting.channels], axis=-1)
        with at_timestep(timestep):
            output = self._network(x, timestep, len(prompts))  # (prompts·B, …, C)
        mx.async_eval(output)  # the sampler draws its noise meanwhile
        output = self._observer.observe("network_output", output, name=name, step=self.step)
        return list(mx.split(output, len(prompts)))


def _run_steps(run: Run, denoise: Denoiser, start: _State, observer: Observer) -> mx.array:
    """The latents after all steps."""
    kind = run.sampler.noise_for(run.options)
    added = sampler_noise(kind, run.convention, start.seeds, run.shape, start.noise)
    sigmas, x = run.schedule.sigmas.tolist(), start.x
    # A scheduler of diffusers that ends above 0 leaves the latents in the form it computes with.
    last = sigmas[-1 if run.stop is None else run.stop]
    scale = hypot(1, last) if run.variance_preserving else 1.0
    steps = run.sampler.run(denoise, x, sigmas, noise=added, **run.options)
    before = x
    for step in islice(steps, run.stop):
        if run.stop is not None and step.sigma_next != sigmas[step.index + 1]:
            raise InputError(
                f"sampler {run.sampler.name} chooses its own steps, so a refiner cannot go on "
                "after some of them. Choose another sampler."
            )
        # The next step is prepared while this one runs; two steps' graphs are the most there are.
        mx.async_eval(step.x)
        mx.eval(before)
        index = run.first + step.index
        observer.observe("denoised", step.denoised, step=index)
        if denoise.inpainting is not None and step.index < run.steps - 1:
            step.x = denoise.inpainting.blend(step.x, step.sigma_next)
        elif denoise.inpainting is not None:
            step.x = denoise.inpainting.finish(step.x, scale)
        before = x = step.x = observer.observe("latents", step.x, step=index)
        denoise.step = index + 1
    return x / scale if scale != 1 else x


def _resumed(run: Run, states: Iterable[_State], observer: Observer) -> Iterator[_State]:
    """Batches as another model left them, in the form that the run's sampler computes with."""
    scale = hypot(1, float(run.schedule.sigmas[0])) if run.variance_preserving else 1.0
    for state in states:
        observer.begin_batch(state.first, state.seeds)
        yield replace(state, x=state.x * scale)


def _read_embeddings(
    embeddings: Sequence[tuple[Path | str, str | None]], family: Family, model: Model
) -> tuple[Embedding, ...]:
    widths = {
        name: model.config(name).hidden_size
        for name in family.embeddings.values()
        if name in model.components
    }
    encoders = {tensor: name for tensor, name in family.embeddings.items() if name in widths}
    return tuple(read_embedding(Path(path), word, encoders, widths) for path, word in embeddings)


def _observed_schedule(run: Run, observer: Observer) -> Run:
    sigmas = observer.observe("sigmas", run.schedule.sigmas)
    timesteps = observer.observe("timesteps", run.schedule.timesteps)
    if sigmas is run.schedule.sigmas and timesteps is run.schedule.timesteps:
        return run
    return replace(run, schedule=replace(run.schedule, sigmas=sigmas, timesteps=timesteps))


def _collected(batches: Iterable[T]) -> Iterator[T]:
    """All batches, then the interrupt that ended them: finished latents are still decoded."""
    finished: list[T] = []
    interrupt: KeyboardInterrupt | None = None
    try:
        finished.extend(batches)
    except KeyboardInterrupt as error:
        interrupt = error
    yield from finished
    if interrupt:
        raise interrupt
