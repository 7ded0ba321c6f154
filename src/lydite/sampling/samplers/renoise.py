"""Noise taken away beyond the next sigma, and put back fresh."""

import math
from dataclasses import dataclass
from typing import Generic

from lydite.sampling.law import FLOW, Law
from lydite.sampling.steps import A, Noise


def ancestral_down(law: Law, sigma: float, sigma_next: float, eta: float) -> float:
    """The sigma an ancestral step solves down to before fresh noise lifts x to `sigma_next`.

    `ve`: eta = 1 leaves the noise of the diffusion's own reverse, as k-diffusion has it. `flow`: a
    straight share eta of the step again, as the `_RF` samplers of ComfyUI and diffusers'
    LTXEulerAncestralRF have it. eta = 0 is `sigma_next`: the ODE.
    """
    if law == FLOW:
        return max(0.0, sigma_next * (1 + eta * (sigma_next / sigma - 1)))
    return reverse_down(law, sigma, sigma_next, eta)


def reverse_down(law: Law, sigma: float, sigma_next: float, eta: float) -> float:
    """The same with the noise of the diffusion's own reverse, under either law."""
    if eta == 0 or sigma_next == 0:
        return sigma_next
    # how far the noise-to-image ratio falls: exp(−h), and 0 from pure noise
    fall = sigma_next * law.alpha(sigma) / (sigma * law.alpha(sigma_next))
    fresh = min(1.0, eta * math.sqrt(1 - fall**2))
    return rescaled(law, sigma_next, math.sqrt(1 - fresh**2))


def rescaled(law: Law, sigma: float, share: float) -> float:
    """The sigma whose noise-to-image ratio is `share` of that of `sigma`."""
    if share == 0:
        return 0.0
    return law.sigma_at(law.half_log_snr(sigma) - math.log(share))


def raised(law: Law, x: A, sigma: float, sigma_up: float, normals: A) -> A:
    """x at `sigma` with as much noise on top as makes it one at `sigma_up`."""
    keep = law.alpha(sigma_up) / law.alpha(sigma)
    return x * keep + normals * math.sqrt(max(0.0, sigma_up**2 - (sigma * keep) ** 2))


@dataclass(frozen=True)
class Churn(Generic[A]):
    """Noise added before each step between two sigmas: algorithm 2 of Karras et al. (2022).

    Names and numbers are the paper's. Under the law `flow` the noise-to-image ratio grows by the
    factor by which sigma grows in the paper, and x shrinks to match.
    """

    noise: Noise[A]
    s_churn: float
    s_tmin: float = 0.0
    s_tmax: float = math.inf
    s_noise: float = 1.0

    def lift(self, law: Law, x: A, sigma: float, steps: int) -> tuple[A, float]:
        """x and sigma as the step starts from them; pure noise is left as it is."""
        gamma = min(self.s_churn / steps, math.sqrt(2) - 1)
        if gamma <= 0 or not self.s_tmin <= sigma <= self.s_tmax or law.alpha(sigma) == 0:
            return x, sigma
        sigma_up = rescaled(law, sigma, 1 + gamma)
        return raised(law, x, sigma, sigma_up, self.noise(sigma, sigma_up) * self.s_noise), sigma_up
