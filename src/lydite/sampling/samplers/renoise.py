"""Noise taken away beyond the next sigma, and put back fresh."""

import math
from dataclasses import dataclass
from typing import Generic

from lydite.sampling.noise_model import FLOW, NoiseModel
from lydite.sampling.steps import A, Noise


def ancestral_down(model: NoiseModel, sigma: float, sigma_next: float, eta: float) -> float:
    """The sigma an ancestral step solves down to before fresh noise lifts x to `sigma_next`.

    `ve`: eta = 1 leaves the noise of the diffusion's own reverse, as k-diffusion has it. `flow`: a
    straight share eta of the step again, as the `_RF` samplers of ComfyUI and diffusers'
    LTXEulerAncestralRF have it. eta = 0 is `sigma_next`: the ODE.
    """
    if model == FLOW:
        return max(0.0, sigma_next * (1 + eta * (sigma_next / sigma - 1)))
    return reverse_down(model, sigma, sigma_next, eta)


def reverse_down(model: NoiseModel, sigma: float, sigma_next: float, eta: float) -> float:
    """The same with the noise of the diffusion's own reverse, under either noise model."""
    if eta == 0 or sigma_next == 0:
        return sigma_next
    # how far the noise-to-image ratio falls: exp(−h), and 0 from pure noise
    fall = sigma_next * model.alpha(sigma) / (sigma * model.alpha(sigma_next))
    fresh = min(1.0, eta * math.sqrt(1 - fall**2))
    return rescaled(model, sigma_next, math.sqrt(1 - fresh**2))


def rescaled(model: NoiseModel, sigma: float, share: float) -> float:
    """The sigma whose noise-to-image ratio is `share` of that of `sigma`."""
    if share == 0:
        return 0.0
    return model.sigma_at(model.half_log_snr(sigma) - math.log(share))


def raised(model: NoiseModel, x: A, sigma: float, sigma_up: float, normals: A) -> A:
    """x at `sigma` with as much noise on top as makes it one at `sigma_up`."""
    keep = model.alpha(sigma_up) / model.alpha(sigma)
    return x * keep + normals * math.sqrt(max(0.0, sigma_up**2 - (sigma * keep) ** 2))


@dataclass(frozen=True)
class Churn(Generic[A]):
    """Noise added before each step between two sigmas: algorithm 2 of Karras et al. (2022).

    Names and numbers are the paper's. With noise model `flow` the noise-to-image ratio grows by
    the factor by which sigma grows in the paper, and x shrinks to match.
    """

    noise: Noise[A]
    s_churn: float
    s_tmin: float = 0.0
    s_tmax: float = math.inf
    s_noise: float = 1.0

    def lift(self, model: NoiseModel, x: A, sigma: float, steps: int) -> tuple[A, float]:
        """x and sigma as the step starts from them; pure noise is left as it is."""
        gamma = min(self.s_churn / steps, math.sqrt(2) - 1)
        if gamma <= 0 or not self.s_tmin <= sigma <= self.s_tmax or model.alpha(sigma) == 0:
            return x, sigma
        sigma_up = rescaled(model, sigma, 1 + gamma)
        return raised(
            model, x, sigma, sigma_up, self.noise(sigma, sigma_up) * self.s_noise
        ), sigma_up
