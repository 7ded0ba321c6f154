"""What samplers are written against: arrays of any library, a noise model, a denoiser, noise.

x = α(σ)·image + σ·noise. Samplers are written once, against a noise model. On the ODE dx/dσ =
(x − D)/σ both models agree; they differ where the half log-SNR λ = ln(α/σ) enters. VP latents are
VE ones divided by √(1 + σ²).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar


@dataclass(frozen=True)
class NoiseModel:
    """`ve`: α = 1, σ without end (SD 1.5, SDXL, EDM). `flow`: α = 1 − σ, σ up to 1 (SD3, FLUX)."""

    name: Literal["ve", "flow"]

    def alpha(self, sigma: float) -> float:
        return 1.0 if self.name == "ve" else 1.0 - sigma

    def half_log_snr(self, sigma: float) -> float:
        """λ: ∞ where there is no noise, −∞ where there is nothing else."""
        if sigma == 0:
            return math.inf
        alpha = self.alpha(sigma)
        return -math.inf if alpha == 0 else math.log(alpha / sigma)

    def sigma_at(self, half_log_snr: float) -> float:
        """The sigma of a λ."""
        if self.name == "ve":
            return math.exp(-half_log_snr)
        if half_log_snr > 0:  # two forms of one sigmoid, so that neither overflows
            ratio = math.exp(-half_log_snr)
            return ratio / (1 + ratio)
        return 1 / (1 + math.exp(half_log_snr))


VE, FLOW = NoiseModel("ve"), NoiseModel("flow")


class Array(Protocol):
    """What this package needs of an array; MLX, torch and NumPy arrays have it."""

    def __add__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __truediv__(self, other: Any, /) -> Any: ...


A = TypeVar("A", bound=Array)


class Denoise(Protocol[A]):
    """The network as a sampler sees it: the clean image it predicts from `x` at `sigma`."""

    @property
    def noise_model(self) -> NoiseModel: ...
    def __call__(self, x: A, sigma: float, /) -> A: ...


class PairDenoise(Denoise[A], Protocol):
    """A denoiser that also gives the unconditional prediction, as CFG++ needs."""

    def pair(self, x: A, sigma: float, /) -> tuple[A, A]:
        """(guided, unconditional)."""
        ...


# Standard normals in the shape of x for the way from one sigma to the next. A Brownian path gives
# the same ones for the same two sigmas, whatever steps lie between; a stream, the next ones.
Noise = Callable[[float, float], A]


@dataclass
class Step(Generic[A]):
    """One step from `sigma` to `sigma_next`: `x` after it, and the `denoised` that directed it.

    The sampler goes on from `x` as the caller leaves it.
    """

    index: int
    sigma: float
    sigma_next: float
    x: A
    denoised: A
