"""Text, or text and an image, to images: one pipeline for every family.

`Pipeline.open(model)` finds the parts, `plan(request)` completes and checks a request, and
`generate(run, seeds)` draws. Latents are channels last; noise is drawn channels first, as torch
does, so that a seed means the same picture as in diffusers.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lydite.core.device import avoid_cuda_graphs
from lydite.core.errors import InputError, shown
from lydite.core.request import Request
from lydite.models.layers import on_cpu
from lydite.pipelines.family import Conditioning, Defaults, Family, Run
from lydite.pipelines.inpainting import (
    Inpainting,
    Mask,
    as_mask,
    hide,
    latent_mask,
    overlay,
)
from lydite.pipelines.model import DTYPES, Model, default_dtype
from lydite.pipelines.model_files import locate, open_model
from lydite.pipelines.model_hash import joined_hash, model_hash, sampled_hash
from lydite.pipelines.noise import NOISES, whole_seeds
from lydite.pipelines.observer import Observer, require_finite
from lydite.pipelines.picture import (
    Picture,
    Pixels,
    Record,
    as_pixels,
)
from lydite.pipelines.planning import check_inputs, check_refiner, complete, hand_over, plan_run
from lydite.pipelines.prompt_weights import plain_text
from lydite.pipelines.steps import Batch, Denoiser, resume, run_steps
from lydite.pipelines.textual_inversion import read_embeddings
from lydite.pipelines.tiles import check_tile, decode_tiles
from lydite.sampling.scheduler_config import SchedulerConfig, read_scheduler_config
from lydite.weights.lora import read_lora
from lydite.weights.quantized_format import Format

AHEAD = 3 * 2**28  # bytes for a picture of 1024² in 16 bits
SILENT = Observer()
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
        avoid_cuda_graphs(together=20 if family.network == "unet" else 10)
        if loras and bits:
            raise InputError("LoRAs change weights before they are rounded; leave out --bits.")
        networks = family.lora_networks(opened.components) if loras else []
        opened.loras = tuple((read_lora(Path(path), networks), weight) for path, weight in loras)
        if embeddings:
            encoders = [name for name in family.embeddings.values() if name in opened]
            widths = {name: opened.config(name).hidden_size for name in encoders}
            opened.embeddings = read_embeddings(embeddings, family.embeddings, widths)
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

    def __repr__(self) -> str:
        title, model = self.family.title, self.model
        precision = model.dtype if model.bits is None else f"{model.dtype}, {model.bits} bits"
        width, height = self.latents.default
        return f"<Pipeline {self.name!r}: {title}, {precision}, {width}×{height}>"

    def plan(
        self,
        request: Request | str,
        image: Pixels | Image.Image | None = None,
        mask: Mask | Image.Image | None = None,
    ) -> Run:
        """Complete and check a request, or a prompt alone; nothing is loaded.

        `image` is where img2img starts: a PIL image, or an array of uint8, (H, W, 3). `mask` is the
        same, or (H, W), and white (255) where the image is drawn anew. Grey, transparency and 16
        bits are converted as in files.
        """
        request = Request(request) if isinstance(request, str) else request
        if not isinstance(request, Request):
            found = type(cast(object, request)).__name__
            raise InputError(f"request: expected a Request or a prompt, found {found}.")
        image = None if image is None else as_pixels(image)
        mask = None if mask is None else as_mask(mask)
        check_inputs(self, image, mask)
        run = plan_run(self, complete(self, request, image, mask), image, mask)
        return run if self.refiner is None else hand_over(self, run, self.refiner)

    def generate(
        self,
        request: Request | Run | str,
        seeds: Iterable[int],
        *,
        image: Pixels | Image.Image | None = None,
        mask: Mask | Image.Image | None = None,
        batch: int = 1,
        observer: Observer = SILENT,
    ) -> Iterator[Picture]:
        """One picture per seed, `batch` of them at a time, each as soon as it is finished.

        `request`, `image` and `mask` are as of `plan`, or `request` is a run that `plan` returned.
        What is wrong with them is raised now, the work begins with the first picture that is taken.
        A picture does not depend on which others share its batch, except for rounding. In
        low-memory mode all are denoised before the first is decoded.
        """
        if isinstance(request, Run) and not (image is None and mask is None):
            raise InputError("a planned run has its image and mask; pass them to `plan`.")
        run = request if isinstance(request, Run) else self.plan(request, image, mask)
        if not isinstance(batch, int) or batch < 1:
            raise InputError(f"batch is {shown(batch)}; expected a whole number, at least 1.")
        return self._pictures(run, whole_seeds(seeds), batch, observer)

    def _pictures(
        self, run: Run, seeds: Sequence[int], batch: int, observer: Observer
    ) -> Iterator[Picture]:
        batches = self.denoise(run, seeds, batch=batch, observer=observer)
        last = self.refiner or self
        try:
            for each in _collected(batches) if self.model.low_memory else batches:
                pictures = last.decode(each.x, observer)
                for seed, pixels in zip(each.seeds, pictures, strict=True):
                    if run.request.feather and run.image is not None and run.mask is not None:
                        pixels = overlay(pixels, run.image, run.mask)
                    yield Picture(pixels, seed, self.record(run, seed))
        finally:
            last.model.release("vae")

    def denoise(
        self, run: Run, seeds: Sequence[int], *, batch: int = 1, observer: Observer = SILENT
    ) -> Iterator[Batch]:
        """Each batch of seeds, with its finished latents."""
        groups = {
            first: tuple(seeds[first : first + batch]) for first in range(0, len(seeds), batch)
        }
        batches = self._run_batches(run, self._starts(run, groups, observer), observer)
        if self.refiner is not None and run.refining is not None:
            handed = _collected(batches) if self.model.low_memory else batches
            # before the refiner loads anything: in low-memory mode our networks are freed by then
            first = list(islice(handed, 1))
            resumed = resume(run.refining, chain(first, handed), observer)
            batches = self.refiner._run_batches(run.refining, resumed, observer)
        yield from batches

    def _run_batches(
        self, run: Run, starts: Iterable[Batch], observer: Observer
    ) -> Iterator[Batch]:
        """Each batch after all steps of the run."""
        run = _observed_schedule(run, observer)
        conditioning = self.encode(run, observer)
        denoisers: dict[int, Denoiser] = {}  # by size of batch: the last may be smaller
        try:
            for batch in starts:
                size = len(batch.seeds)
                if size not in denoisers:
                    denoisers[size] = self.denoiser(run, conditioning, size, observer)
                denoisers[size].begin(run.first, batch.inpainting)
                with self._few_buffers(size * run.shape[1] * run.shape[2] * self.latents.factor**2):
                    x = run_steps(run, denoisers[size], batch, observer)
                yield replace(batch, x=x)
        finally:
            denoisers.clear()
            self.model.release(self.family.network)

    def _starts(
        self, run: Run, groups: Mapping[int, tuple[int, ...]], observer: Observer
    ) -> Iterator[Batch]:
        """Each batch before the first step."""
        # Then no image is encoded while the network is in memory.
        early = groups if self.model.low_memory and run.image is not None else ()
        starts = {first: self._start(run, first, groups[first], observer) for first in early}
        for first, seeds in groups.items():
            observer.begin_batch(first, seeds)
            yield starts.pop(first, None) or self._start(run, first, seeds, observer)

    def encode(self, run: Run, observer: Observer = SILENT) -> Conditioning:
        """The family's conditioning of the run's prompts."""
        arrays = self.family.encode(self.model, run.prompts, run.request, observer)
        return {
            name: observer.observe("conditioning", array, name=name)
            for name, array in arrays.items()
        }

    def denoiser(
        self, run: Run, conditioning: Conditioning, batch: int, observer: Observer = SILENT
    ) -> Denoiser:
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
        of them: 8 to 12 GiB for a picture of 1024², where ¾ give the same speed. Beyond the limit
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
        words, weighting = run.request.prompt, run.request.weighting
        if weighting is not None:
            words = plain_text(words, weighting)
        for encoder in self.model.tokenizers:
            if encoder in self.defaults.untrained:
                continue
            tokenizer = self.model.tokenizer(encoder, run.request.text_length)
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

    def _start(self, run: Run, first: int, seeds: tuple[int, ...], observer: Observer) -> Batch:
        """A batch whose latents are what each seed's noise begins with, or the noised image."""
        # diffusers draws, from one generator per image: the sample of the encoded image where it is
        # used, the noise, and with a mask the sample of the image without what is masked
        noise = NOISES[run.request.noise](seeds, run.shape, run.convention.stream)
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
        inpainting = None
        if run.image is not None and run.mask is not None:
            mask, drawn = latent_mask(run.mask, self.latents.factor), noise.first()
            if takes_mask:
                rest = self._encode_image(hide(run.image, run.mask), drawn, observer)
                channels = self.family.mask_channels(run.mask, rest, self.latents.factor)
                inpainting = Inpainting(mask, run.prediction, channels=channels)
            else:
                inpainting = Inpainting(mask, run.prediction, clean, normals)
        return Batch(first, seeds, noise, x, inpainting)

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
