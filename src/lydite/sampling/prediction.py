"""Prediction types: from what a network predicts to the denoised image, and from image to noise.

Every type is D = x·c_skip + output·c_out, and the network is shown x·c_in; D and the sampler's x
are not scaled by c_in. References: Ho et al. (2020), eps; Salimans and Ho (2022), v; Karras et al.
(2022), table 1, EDM; Lipman et al. (2023), flow; NVIDIA (2025), Cosmos.

A flow model sees x = σ·noise + (1 − σ)·image and predicts the velocity noise − image. Pass float32:
with a bf16 velocity the product σ·v would already be rounded to bf16.
"""

import math
from dataclasses import dataclass
from typing import Literal

from lydite.core.errors import InputError
from lydite.sampling.noise_model import FLOW, VE, NoiseModel
from lydite.sampling.steps import A

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
