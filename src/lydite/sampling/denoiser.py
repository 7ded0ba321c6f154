"""From a network's outputs to the denoised image: prediction types, and guidance over two prompts.

Every prediction type is D = x·c_skip + output·c_out, and the network is shown x·c_in; D and the
sampler's x are not scaled by c_in. References: Ho et al. (2020), eps; Salimans and Ho (2022), v;
Karras et al. (2022), table 1, EDM; Lipman et al. (2023), flow; NVIDIA (2025), Cosmos.

A flow model sees x = σ·noise + (1 − σ)·image and predicts the velocity noise − image. Pass float32:
with a bf16 velocity the product σ·v would already be rounded to bf16.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol

import numpy as np

from lydite.core.errors import InputError
from lydite.sampling.sampler_types import FLOW, VE, A, NoiseModel

PredictionName = Literal["eps", "v", "edm", "x0", "flow", "cosmos"]


@dataclass(frozen=True)
class Prediction:
    """A prediction type, as three scalars at each sigma; `sigma_data` is for EDM."""

    name: PredictionName
    sigma_data: float = 1.0

    @property
    def noise_model(self) -> NoiseModel:
        return FLOW if self.name == "flow" else VE

    def c_in(self, sigma: float) -> float:
        if self.name == "flow":
            return 1.0
        return 1 / (1 + sigma) if self.name == "cosmos" else 1 / self._width(sigma)

    def c_skip(self, sigma: float) -> float:
        if self.name in ("v", "edm"):
            return (self.sigma_data / self._width(sigma)) ** 2
        if self.name == "cosmos":
            return 1 / (1 + sigma)
        return 0.0 if self.name == "x0" else 1.0

    def c_out(self, sigma: float) -> float:
        if self.name in ("v", "edm"):  # the same but for the sign
            size = sigma * self.sigma_data / self._width(sigma)
            return size if self.name == "edm" else -size
        if self.name == "cosmos":
            return -sigma / (1 + sigma)
        return 1.0 if self.name == "x0" else -sigma

    def scaled(self, x: A, sigma: float) -> A:
        """The network's input: x·c_in."""
        return x if self.name == "flow" else x * self.c_in(sigma)

    def denoised(self, x: A, output: A, sigma: float) -> A:
        """The image that the network's output points at; `x` is the sampler's, not scaled."""
        if self.name == "x0":
            return output
        if self.name in ("eps", "flow"):  # the general form, without a product by 1
            return x - output * sigma
        return x * self.c_skip(sigma) + output * self.c_out(sigma)

    def noised(self, image: A, noise: A, sigma: float) -> A:
        """Where img2img starts: the image with its share of noise at `sigma`."""
        return noise * sigma + image * self.noise_model.alpha(sigma)

    def start(self, noise: A, sigma: float, *, unit_variance: bool = False) -> A:
        """Where text-to-image starts: noise at `sigma`.

        `unit_variance` makes its width √(1 + σ²), as if an image of variance 1 were in it: ComfyUI
        at sigma_max, A1111 by an option, most schedulers of diffusers; never for flow and Cosmos.
        """
        widened = unit_variance and self.name not in ("flow", "cosmos")
        return noise * (math.hypot(1, sigma) if widened else sigma)

    def unscaled(self, x: A, sigma: float) -> A:
        """The image of a run that ended above 0: a flow latent there is still (1 − σ)·image."""
        return x / self.noise_model.alpha(sigma) if 0 < sigma < 1 else x

    def _width(self, sigma: float) -> float:
        return math.hypot(sigma, self.sigma_data)


EPS, V, X0 = Prediction("eps"), Prediction("v"), Prediction("x0")
EDM = Prediction("edm", sigma_data=0.5)
VELOCITY, COSMOS = Prediction("flow"), Prediction("cosmos")
PREDICTIONS: dict[str, Prediction] = {
    each.name: each for each in (EPS, V, EDM, X0, VELOCITY, COSMOS)
}


def find_prediction(name: str) -> Prediction:
    """The prediction type called `name`."""
    if name not in PREDICTIONS:
        raise InputError(f"prediction is {name!r}; expected one of {', '.join(PREDICTIONS)}.")
    return PREDICTIONS[name]


# How strong guidance is at a sigma; 1 is the prompt alone, and needs no second prediction.
Strength = Callable[[float], float]


def cfg(uncond: A, cond: A, scale: float) -> A:
    """Classifier-free guidance, Ho and Salimans (2022): 0 is uncond, 1 is cond, more goes beyond.

    The weight is diffusers' `guidance_scale`; the paper's own w is `scale - 1`.
    """
    return uncond + (cond - uncond) * scale


def cfg_rescale(guided: Any, cond: Any, phi: float) -> Any:
    """Lin et al. (2023), eq. 15 and 16: `phi` of the way back to the spread of `cond`.

    The spread is that of each image, over all axes but the first. It matters what is rescaled: the
    paper and diffusers take the network's output, ComfyUI the same as v.
    """
    return guided * (_spread(cond) / _spread(guided) * phi + (1 - phi))


def _spread(x: Any) -> Any:
    axes = tuple(range(1, len(x.shape)))
    away = x - x.mean(axis=axes, keepdims=True)
    # Without the small number a constant image would be 0/0.
    return ((away * away).mean(axis=axes, keepdims=True) + 1e-20) ** 0.5


Guide = Callable[[Any, Any, float], Any]  # (uncond, cond, scale) → the output that is used


def constant(scale: float) -> Strength:
    """The same guidance at every sigma."""
    return lambda sigma: scale


@dataclass(frozen=True)
class PerStep:
    """One scale for each step; a sigma between two grid points belongs to the step that began."""

    scales: Sequence[float]
    sigmas: Sequence[float]  # the schedule's, falling, one more than there are scales

    def __post_init__(self) -> None:
        if len(self.sigmas) != len(self.scales) + 1:
            raise InputError(
                f"guidance table has {len(self.scales)} scales for {len(self.sigmas) - 1} steps; "
                "give one for each."
            )

    def __call__(self, sigma: float) -> float:
        step = int(np.searchsorted(-np.asarray(self.sigmas), -sigma, side="right")) - 1
        return float(self.scales[min(max(step, 0), len(self.scales) - 1)])


def over_steps(
    sigmas: Sequence[float],
    scale: float,
    *,
    scales: Sequence[float] = (),
    share: tuple[float, float] = (0.0, 1.0),
) -> Strength:
    """Guidance over a schedule: one scale or one for each step, from one share of it to another.

    Of n steps, counted from 0, those are guided for which share[0] ≤ step/n < share[1].
    """
    steps, (first, last) = len(sigmas) - 1, share
    if not 0 <= first < last <= 1:
        raise InputError(
            f"guidance interval is {first:g} to {last:g}; expected two rising shares of the steps, "
            "from 0 to 1."
        )
    if not scales and share == (0.0, 1.0):
        return constant(scale)
    table = PerStep(tuple(scales) or (scale,) * steps, sigmas)
    guided = [first <= step / steps < last for step in range(steps)]
    if not any(guided):
        raise InputError(
            f"guidance interval {first:g} to {last:g} holds none of the {steps} steps; "
            f"a step is {1 / steps:.3g} of them."
        )
    within = [each if on else 1.0 for each, on in zip(table.scales, guided, strict=True)]
    return PerStep(within, sigmas)


class Network(Protocol[A]):
    """A network with its prompts; what is constant over the steps is inside."""

    def __call__(self, x: A, timestep: float, prompts: Sequence[int], /) -> Sequence[A]:
        """One output in float32 for each of the prompts, given by index."""
        ...


@dataclass(frozen=True)
class Guided(Generic[A]):
    """A network as a denoiser, with classifier-free guidance on its outputs.

    It has one prompt, or two: the negative one first. Where guidance is 1 or less the negative one
    is not run.
    """

    network: Network[A]  # is given x·c_in
    prediction: Prediction
    timestep_of: Callable[[float], float]  # of a schedule, or of the model's sigmas
    strength: Strength
    rescale: float = 0.0  # phi of `cfg_rescale`
    prompts: int = 2
    guide: Guide = cfg
    # Sees each guided output with its sigma, and returns the one to use.
    on_output: Callable[[A, float], A] | None = None

    @property
    def noise_model(self) -> NoiseModel:
        return self.prediction.noise_model

    def __call__(self, x: A, sigma: float) -> A:
        if self.prompts > 1 and self.strength(sigma) > 1:
            return self.pair(x, sigma)[0]
        (cond,) = self._outputs(x, sigma, (self.prompts - 1,))
        return self._denoised(x, cond, sigma)

    def pair(self, x: A, sigma: float) -> tuple[A, A]:
        """(guided, unconditional), as CFG++ needs; with one prompt both are the same."""
        if self.prompts == 1:
            denoised = self(x, sigma)
            return denoised, denoised
        uncond, cond = self._outputs(x, sigma, (0, 1))
        guided = self.guide(uncond, cond, float(self.strength(sigma)))
        if self.rescale:
            guided = cfg_rescale(guided, cond, self.rescale)
        denoised = self._denoised(x, guided, sigma)
        return denoised, self.prediction.denoised(x, uncond, sigma)

    def _outputs(self, x: A, sigma: float, prompts: tuple[int, ...]) -> Sequence[A]:
        return self.network(self.prediction.scaled(x, sigma), self.timestep_of(sigma), prompts)

    def _denoised(self, x: A, output: A, sigma: float) -> A:
        if self.on_output is not None:
            output = self.on_output(output, sigma)
        return self.prediction.denoised(x, output, sigma)
