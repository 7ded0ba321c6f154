"""Stable Diffusion 3 and 3.5: text, or text and an image, to images.

Reference: diffusers 0.42.1, pipelines/stable_diffusion_3. Latents are channels last here; noise is
drawn channels first, as torch does, so that a seed means the same picture.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from numpy.typing import NDArray

from lydite.core.errors import ConfigError, InputError
from lydite.models.mmdit import MMDiT, MMDiTConfig
from lydite.models.text.clip import CLIPTextModel
from lydite.models.text.t5 import T5EncoderModel
from lydite.models.vae.kl import AutoencoderKL, AutoencoderKLConfig
from lydite.pipelines.networks import Networks
from lydite.pipelines.sd3_files import SD3Files, open_files
from lydite.pipelines.watch import Watch, unwatched
from lydite.sampling.guidance import cfg
from lydite.sampling.noise import TorchGenerator
from lydite.sampling.prediction import flow_denoised, flow_noised
from lydite.sampling.samplers import Step, sample_euler
from lydite.sampling.schedules import Schedule, flow_schedule, tail

Pixels = NDArray[np.uint8]  # (H, W, 3)


@dataclass(frozen=True)
class Request:
    """Everything but the seed that decides a picture."""

    prompt: str
    negative: str = ""
    steps: int = 28
    guidance: float = 7.0
    width: int | None = None  # None: the size the model was made for
    height: int | None = None
    schedule: str = "sd3_diffusers"
    text_length: int = 256  # T5 tokens; as many zero vectors when there is no T5
    noise: str = "torch"  # whose generator a seed means: torch's, or MLX's own
    image: Pixels | None = None  # img2img: where to start from
    strength: float = 0.6  # img2img: how much of the way from noise to run


@dataclass(frozen=True)
class Progress:
    """One finished step of one batch."""

    index: int
    total: int
    seeds: tuple[int, ...]
    preview: Callable[[], list[Pixels]]  # decodes what the network sees at this step


@dataclass(frozen=True)
class Picture:
    """One finished image and the seed it came from."""

    pixels: Pixels
    seed: int


@dataclass(frozen=True)
class Conditioning:
    """Text features of one or two prompts; the negative one comes first."""

    text: mx.array  # (C, S, D)
    pooled: mx.array  # (C, P)


class StableDiffusion3:
    """Load once, generate many. No method changes a weight."""

    def __init__(self, files: SD3Files, *, dtype: mx.Dtype, low_memory: bool = False) -> None:
        self.files = files
        self.dtype = dtype
        self.networks = Networks(files.components, dtype=dtype, low_memory=low_memory)

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
        return cls(files, dtype=dtype, low_memory=low_memory)

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

        A picture does not depend on which others share its batch, but for rounding.
        """
        request = self.complete(request)
        schedule = self.schedule(request)
        if batch < 1:
            raise InputError(f"batch is {batch}; expected at least 1.")
        conditioning = self.encode(request, watch)
        waiting: list[tuple[tuple[int, ...], mx.array]] = []
        stopped: KeyboardInterrupt | None = None
        for first in range(0, len(seeds), batch):
            group = tuple(seeds[first : first + batch])
            try:
                x = self._start(request, schedule, group, watch)
                waiting.append(
                    (
                        group,
                        self._denoise(request, conditioning, schedule, x, group, on_step, watch),
                    )
                )
            except KeyboardInterrupt as error:
                stopped = error  # what is finished is still decoded below
                break
            if not self.networks.low_memory:
                yield from self._finish(*waiting.pop(), watch)
        self.networks.done("transformer")
        for group, latent in waiting:
            yield from self._finish(group, latent, watch)
        self.networks.done("vae")
        if stopped:
            raise stopped

    def complete(self, request: Request) -> Request:
        """The request with its size filled in and checked against what the model can do."""
        model, factor = self._transformer_config, self._vae_config.factor
        default = model.sample_size * factor
        if request.image is not None and request.width is None and request.height is None:
            height, width = (side - side % 16 for side in request.image.shape[:2])
            request = replace(request, width=width, height=height)
        width, height = request.width or default, request.height or default
        unit, largest = (
            factor * model.patch_size,
            factor * model.patch_size * model.pos_embed_max_size,
        )
        for name, side in (("width", width), ("height", height)):
            if side % unit or not unit <= side <= largest:
                near = min(max(round(side / unit), 1), largest // unit) * unit
                raise InputError(
                    f"{name} is {side}; expected a multiple of {unit} from {unit} to {largest}. "
                    f"The nearest is {near}."
                )
        if request.noise not in NOISES:
            raise InputError(f"noise is {request.noise!r}; expected one of {', '.join(NOISES)}.")
        if request.text_length < 1:
            raise InputError(f"text_length is {request.text_length}; expected at least 1.")
        return replace(request, width=width, height=height)

    def schedule(self, request: Request) -> Schedule:
        """The steps this request will run."""
        schedule = flow_schedule(self.files.scheduler, request.steps, request.schedule)
        return tail(schedule, request.strength) if request.image is not None else schedule

    def encode(self, request: Request, watch: Watch = unwatched) -> Conditioning:
        """Text features of the prompt, and of the negative one when guidance uses it."""
        prompts = [request.negative, request.prompt] if request.guidance > 1 else [request.prompt]
        width = self._transformer_config.joint_attention_dim
        states: list[mx.array] = []
        pooled: list[mx.array] = []
        for name in ("text_encoder", "text_encoder_2"):
            encoder = cast(CLIPTextModel, self.networks.get(name))
            output = encoder(self._ids(name, prompts))
            watch(name, output.penultimate)
            watch(f"{name} pooled", output.pooled)
            states.append(output.penultimate)
            pooled.append(output.pooled)
            mx.eval(states, pooled)
            self.networks.done(name)
        clip = mx.concatenate(states, axis=-1)  # (C, S, D1 + D2)
        clip = mx.pad(clip, [(0, 0), (0, 0), (0, width - clip.shape[-1])])
        if "text_encoder_3" in self.networks:
            encoder = cast(T5EncoderModel, self.networks.get("text_encoder_3"))
            t5 = encoder(self._ids("text_encoder_3", prompts, request.text_length))
            watch("text_encoder_3", t5)
            t5 = t5.astype(self.dtype)
            mx.eval(t5)
            self.networks.done("text_encoder_3")
        else:  # the reference then attends to this many zero vectors, which is not nothing
            t5 = mx.zeros((len(prompts), request.text_length, width), self.dtype)
        return Conditioning(
            mx.concatenate([clip, t5], axis=1).astype(self.dtype),
            mx.concatenate(pooled, axis=-1).astype(self.dtype),
        )

    def _ids(self, name: str, prompts: list[str], length: int | None = None) -> mx.array:
        tokenizer = self.files.tokenizer(name, length)
        ids = np.stack([tokenizer(prompt) for prompt in prompts])
        vocabulary = self.files.components[name].config.vocab_size
        if int(ids.max()) >= vocabulary:  # MLX would read past the table and say nothing
            raise ConfigError(
                f"{self.files.tokenizers[name]}: gives token {ids.max()}, but {name} has only "
                f"{vocabulary}. The tokenizer belongs to another model."
            )
        return mx.array(ids)

    def _start(
        self, request: Request, schedule: Schedule, seeds: tuple[int, ...], watch: Watch
    ) -> mx.array:
        """Noise for each seed, or the noised image, (B, h, w, C) in float32."""
        factor, channels = self._vae_config.factor, self._vae_config.latent_channels
        assert request.width and request.height
        shape = (1, channels, request.height // factor, request.width // factor)
        draw = NOISES[request.noise](seeds, shape)
        if request.image is None:
            return draw()
        vae = cast(AutoencoderKL, self.networks.get("vae"))
        pixels = mx.array(request.image.astype(np.float32) / 127.5 - 1)[None]
        posterior = vae.encode(pixels.astype(self.networks.dtype_of("vae")))
        watch("vae encode", posterior.mean)
        # diffusers draws the encoder's sample and then the noise from one generator per image
        clean = vae.normalize(posterior.mean + posterior.std * draw())
        x = flow_noised(clean, draw(), float(schedule.sigmas[0]))
        mx.eval(x)
        self.networks.done("vae")
        return x

    def _denoise(
        self,
        request: Request,
        conditioning: Conditioning,
        schedule: Schedule,
        x: mx.array,
        seeds: tuple[int, ...],
        on_step: Callable[[Progress], None] | None,
        watch: Watch,
    ) -> mx.array:
        """Run the sampler; what is constant over the steps is computed before the first."""
        transformer = cast(MMDiT, self.networks.get("transformer"))
        B, C = len(seeds), conditioning.text.shape[0]
        timesteps = mx.array(schedule.timesteps.astype(np.float32))
        modulation = transformer.modulation(timesteps, conditioning.pooled)  # (S, C, n, D) each
        text = mx.repeat(transformer.embed_text(conditioning.text), B, axis=0)  # (C*B, S, D)
        positions = transformer.positions(x.shape[1], x.shape[2])
        mx.eval(modulation, text, positions)
        step_of = {float(sigma): index for index, sigma in enumerate(schedule.sigmas[:-1])}

        def denoise(x: mx.array, sigma: float) -> mx.array:
            index = step_of[sigma]
            tables = tree_map(lambda table: mx.repeat(table[index], B, axis=0), modulation)
            inputs = mx.concatenate([x] * C).astype(self.dtype)
            velocity = transformer(inputs, text, tables, positions).astype(mx.float32)
            if C == 1:
                watch(f"step {index} transformer", velocity)
            else:
                uncond, cond = mx.split(velocity, 2)
                watch(f"step {index} transformer uncond", uncond)
                watch(f"step {index} transformer cond", cond)
                velocity = cfg(uncond, cond, request.guidance)
            return flow_denoised(x, velocity, sigma)

        for step in sample_euler(denoise, x, schedule.sigmas):
            mx.eval(step.x)  # one step's graph at a time
            watch(f"step {step.index} latent", step.x)
            x = step.x
            if on_step:
                on_step(self._progress(step, len(step_of), seeds))
        return x

    def _progress(self, step: Step[mx.array], total: int, seeds: tuple[int, ...]) -> Progress:
        return Progress(step.index, total, seeds, lambda: self._decode(step.denoised, unwatched))

    def _finish(self, seeds: tuple[int, ...], latent: mx.array, watch: Watch) -> Iterator[Picture]:
        for seed, pixels in zip(seeds, self._decode(latent, watch), strict=True):
            yield Picture(pixels, seed)

    def _decode(self, latent: mx.array, watch: Watch) -> list[Pixels]:
        vae = cast(AutoencoderKL, self.networks.get("vae"))
        raw = vae.denormalize(latent).astype(self.networks.dtype_of("vae"))
        watch("vae input", raw)
        pictures: list[Pixels] = []
        for index in range(raw.shape[0]):  # one at a time: decoding is the peak of memory
            image = vae.decode(raw[index : index + 1])
            watch("vae output", image)
            pixels = mx.clip(image.astype(mx.float32) / 2 + 0.5, 0, 1) * 255
            pictures.append(np.array(mx.round(pixels[0]).astype(mx.uint8)))
        return pictures

    @property
    def _transformer_config(self) -> MMDiTConfig:
        return self.files.components["transformer"].config

    @property
    def _vae_config(self) -> AutoencoderKLConfig:
        return self.files.components["vae"].config


Draw = Callable[[], mx.array]  # the next normals of every image, (B, h, w, C) in float32


def _torch_noise(seeds: Sequence[int], shape: tuple[int, ...]) -> Draw:
    generators = [TorchGenerator(seed) for seed in seeds]

    def draw() -> mx.array:
        normals = np.concatenate([generator.randn(shape) for generator in generators])
        return mx.array(normals.transpose(0, 2, 3, 1))

    return draw


def _mlx_noise(seeds: Sequence[int], shape: tuple[int, ...]) -> Draw:
    keys = [mx.random.key(seed % 2**64) for seed in seeds]

    def draw() -> mx.array:
        normals: list[mx.array] = []
        for index, key in enumerate(keys):
            keys[index], use = mx.random.split(key)
            normals.append(mx.random.normal(shape, key=use))
        return mx.concatenate(normals).transpose(0, 2, 3, 1)

    return draw


NOISES: dict[str, Callable[[Sequence[int], tuple[int, ...]], Draw]] = {
    "torch": _torch_noise,
    "mlx": _mlx_noise,
}
