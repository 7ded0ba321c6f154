"""What the network is given on the way from noise to a picture, seen from outside.

The pipeline runs as it always does. The denoiser that its sampler calls is one that also shows what
it is given; no module is touched and nothing is written into the model.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.run import Sizes
from lydite.calibrate.settings import Image, canonical
from lydite.calibrate.store.items import Maker
from lydite.calibrate.store.shards import Item
from lydite.core.dtypes import widen
from lydite.core.errors import CalibrationError, InputError, NotFiniteError, shown
from lydite.pipelines.request import Request
from lydite.pipelines.sd3 import Progress, StableDiffusion3
from lydite.pipelines.sd3_denoiser import Denoiser
from lydite.pipelines.sd3_text import Conditioning
from lydite.pipelines.watch import Watch, unwatched
from lydite.sampling.noise_model import FLOW
from lydite.sampling.samplers import find_sampler
from lydite.trace.arrays import to_numpy
from lydite.weights.load import parameter_hash

OnStep = Callable[[int], None]  # told the number of each finished step


@dataclass
class Seen:
    """What one image showed: at each kept step the first input of the network."""

    kept: frozenset[int]
    step: int = 0  # that is under way
    inputs: dict[int, tuple[Any, float]] = field(default_factory=dict)  # x (1, h, w, C), sigma
    conditioning: Conditioning | None = None

    def given(self, x: Any, sigma: float) -> None:
        """The network is asked about x at sigma; x is read when the picture is done."""
        if self.step in self.kept and self.step not in self.inputs:
            self.inputs[self.step] = x, sigma


class Trajectories:
    """Draws the images of a set, one at a time, and makes its items of what it sees."""

    def __init__(self, pipeline: StableDiffusion3, request: Request, make: Maker) -> None:
        self._pipeline, self._request, self._make = pipeline, request, make
        self._schedule = pipeline.schedule(request)
        self._first = {image.prompt: image.number for image in reversed(make.plan.images)}

    def items(
        self, image: Image, wanted: Iterable[int | None], on_step: OnStep | None = None
    ) -> list[Item]:
        """What is wanted of an image: the samples of these steps, and for None what has no step.

        Whatever is wanted, the picture is drawn from its noise on: a step follows from all before.
        """
        asked = set(wanted)
        seen = Seen(frozenset(step for step in asked if step is not None))

        def stepped(progress: Progress) -> None:
            seen.step = progress.index + 1
            if on_step:
                on_step(progress.index)

        request = replace(self._request, prompt=image.prompt)
        observed = _Observed(self._pipeline, seen)
        try:
            (picture,) = observed.generate(request, [image.seed], on_step=stepped)
        except NotFiniteError as error:
            raise NotFiniteError(
                f"image {image.number}, seed {image.seed}, {shown(image.prompt)}: {error}"
            ) from error
        items = [self._sample(image, step, seen) for step in sorted(seen.kept)]
        if None in asked and self._make.plan.pictures:
            items.append(self._make.picture(image.number, picture.pixels))
        keeps = self._make.plan.conditioning and self._first[image.prompt] == image.number
        if None in asked and keeps:
            items.append(self._make.conditioning(image.prompt, _arrays(seen.conditioning)))
        return items

    def _sample(self, image: Image, step: int, seen: Seen) -> Item:
        if step not in seen.inputs:
            raise CalibrationError(
                f"image {image.number}: the network was not asked at step {step}."
            )
        x, sigma = seen.inputs[step]
        tensors, timestep = {"x": to_numpy(x)[0]}, self._schedule.timestep_of(sigma)
        return self._make.sample(image.number, step, tensors, sigma=sigma, timestep=timestep)


class _Observed(StableDiffusion3):
    """The same pipeline on the same networks, which shows what passes to the network."""

    def __init__(self, pipeline: StableDiffusion3, seen: Seen) -> None:
        super().__init__(pipeline.files, dtype=pipeline.dtype)
        self.networks = pipeline.networks
        self._seen = seen

    def encode(self, request: Request, watch: Watch = unwatched) -> Conditioning:
        self._seen.conditioning = super().encode(request, watch)
        return self._seen.conditioning

    def denoiser(
        self, request: Request, conditioning: Conditioning, batch: int, watch: Watch = unwatched
    ) -> Denoiser:
        return _Observing(super().denoiser(request, conditioning, batch, watch), self._seen)


class _Observing(Denoiser):
    """A denoiser as it is, which shows what it is given."""

    def __init__(self, inner: Denoiser, seen: Seen) -> None:
        self.__dict__.update(vars(inner))
        self._seen = seen

    def __call__(self, x: Any, sigma: float) -> Any:
        self._seen.given(x, sigma)
        return super().__call__(x, sigma)

    def pair(self, x: Any, sigma: float) -> tuple[Any, Any]:
        self._seen.given(x, sigma)  # a call with guidance comes by here again, at the same step
        return super().pair(x, sigma)


def count_steps(pipeline: StableDiffusion3, request: Request) -> int:
    """How many steps a completed request has; samplers that choose their own are refused."""
    sampler, schedule = find_sampler(request.sampler), pipeline.schedule(request)
    sigmas, noise = schedule.sigmas.tolist(), np.zeros(1)
    walk = sampler.run(_Nothing(), noise, sigmas, noise=lambda *_: noise, **request.options)
    walked, expected = sum(1 for _ in walk), len(schedule.timesteps)
    if walked != expected or "rtol" in sampler.options:
        raise InputError(
            f"sampler {sampler.name} chooses its own steps; a calibration set keeps them by their "
            "number in the schedule. Choose another sampler."
        )
    return walked


class _Nothing:
    """A denoiser that needs no network."""

    noise_model = FLOW

    def __call__(self, x: Any, sigma: float) -> Any:
        return x * 0.0

    def pair(self, x: Any, sigma: float) -> tuple[Any, Any]:
        return x * 0.0, x * 0.0


def sizes(pipeline: StableDiffusion3, request: Request) -> Sizes:
    """How many values each item of a completed request has."""
    vae: Any = pipeline.files.components["vae"].config
    network: Any = pipeline.files.components["transformer"].config
    clip: Any = pipeline.files.components["text_encoder"].config
    assert request.width and request.height, "complete() fills the size in"
    pixels = request.width * request.height
    text = (clip.max_position_embeddings + request.text_length) * network.joint_attention_dim
    prompts = 1 + request.is_guided
    return Sizes(
        sample=pixels // vae.factor**2 * vae.latent_channels,
        picture=pixels * 3,
        conditioning=prompts * (text + network.pooled_projection_dim),
    )


def model_hash(pipeline: StableDiffusion3) -> str:
    """Of every parameter as it is in memory, every config, the schedule and the tokenizers."""
    total = hashlib.sha256(canonical(asdict(pipeline.files.scheduler)))
    for name, component in sorted(pipeline.files.components.items()):
        total.update(f"{name} {parameter_hash(pipeline.networks.get(name))}\n".encode())
        total.update(canonical(asdict(component.config)))
    for name, folder in sorted(pipeline.files.tokenizers.items()):
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.name.startswith("."):
                found = hashlib.sha256(path.read_bytes()).hexdigest()
                total.update(f"{name} {path.name} {found}\n".encode())
    return total.hexdigest()


def _arrays(conditioning: Conditioning | None) -> dict[str, NDArray[np.float32]]:
    """Of the negative prompt first, where guidance asks for it, then of the prompt."""
    assert conditioning is not None, "generate() encodes the prompt"
    found = {"text": conditioning.text, "pooled": conditioning.pooled}
    return {name: widen(to_numpy(array)) for name, array in found.items()}
