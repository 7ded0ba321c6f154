"""SEEDS of Gonzalez et al. (2023), arXiv 2305.14267: exponential SDE solvers on the denoised image.

One Brownian path is followed through the middles of a step: the noise of a middle is part of that
of the end. η = 0 is the ODE: exponential Runge-Kutta.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Literal

from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import A, Denoise, Noise, NoiseModel, Step
from lydite.sampling.samplers.algebra import (
    NEAR_ONE,
    ddim_step,
    exp_minus_h,
    finite_start,
    sigma_between,
    slope_weight,
)


def sample_seeds_2(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    eta: float = 1.0,
    s_noise: float = 1.0,
    r: float = 0.5,
    solver: Literal["phi_1", "phi_2"] = "phi_1",
    near_one: float = NEAR_ONE,
) -> Iterator[Step[A]]:
    """SEEDS-2, two calls a step: the second a share `r` of the way in λ.

    `phi_1` weighs the slope of the denoised by φ₁/2, as DPM-Solver++ does; `phi_2` by φ₂.
    """
    model = denoise.noise_model
    for index, (sigma, sigma_next) in enumerate(pairwise(finite_start(model, sigmas, near_one))):
        denoised = denoise(x, sigma)
        if sigma_next == 0:
            x = denoised
        else:
            path = _Path(model, noise, eta, s_noise)
            middle = sigma_next if r == 1 else sigma_between(model, sigma, sigma_next, r, near_one)
            halfway = ddim_step(model, x, denoised, sigma, middle, eta)
            lean = denoise(path.noised(halfway, sigma, middle), middle) - denoised
            whole = -(1 + eta) * math.log(exp_minus_h(model, sigma, sigma_next))
            weight = slope_weight(whole) if solver == "phi_2" else -math.expm1(-whole) / 2
            x = ddim_step(model, x, denoised, sigma, sigma_next, eta)
            x = path.noised(x + lean * (model.alpha(sigma_next) * weight / r), middle, sigma_next)
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_seeds_3(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    eta: float = 1.0,
    s_noise: float = 1.0,
    r_1: float = 1 / 3,
    r_2: float = 2 / 3,
    near_one: float = NEAR_ONE,
) -> Iterator[Step[A]]:
    """SEEDS-3, three calls a step: shares `r_1` and `r_2` of the way in λ."""
    model = denoise.noise_model
    for index, (sigma, sigma_next) in enumerate(pairwise(finite_start(model, sigmas, near_one))):
        denoised = denoise(x, sigma)
        if sigma_next == 0:
            x = denoised
        else:
            path = _Path(model, noise, eta, s_noise)
            whole = -(1 + eta) * math.log(exp_minus_h(model, sigma, sigma_next))
            middles = [sigma_between(model, sigma, sigma_next, r, near_one) for r in (r_1, r_2)]
            x_1 = ddim_step(model, x, denoised, sigma, middles[0], eta)
            x_1 = path.noised(x_1, sigma, middles[0])
            lean = denoise(x_1, middles[0]) - denoised
            weight = model.alpha(middles[1]) * slope_weight(r_2 * whole) * r_2 / r_1
            x_2 = ddim_step(model, x, denoised, sigma, middles[1], eta) + lean * weight
            x_2 = path.noised(x_2, *middles)
            lean = denoise(x_2, middles[1]) - denoised
            weight = model.alpha(sigma_next) * slope_weight(whole) / r_2
            x = ddim_step(model, x, denoised, sigma, sigma_next, eta) + lean * weight
            x = path.noised(x, middles[1], sigma_next)
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_exp_heun_2_x0(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    solver: Literal["phi_1", "phi_2"] = "phi_2",
    near_one: float = NEAR_ONE,
) -> Iterator[Step[A]]:
    """Heun's method as an exponential integrator: `seeds_2` with r = 1 and η = 0."""

    def none(sigma: float, sigma_next: float) -> A:
        raise AssertionError("η = 0 asks for no noise")

    return sample_seeds_2(
        denoise, x, sigmas, noise=none, eta=0.0, r=1.0, solver=solver, near_one=near_one
    )


def sample_exp_heun_2_x0_sde(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    eta: float = 1.0,
    s_noise: float = 1.0,
    solver: Literal["phi_1", "phi_2"] = "phi_2",
    near_one: float = NEAR_ONE,
) -> Iterator[Step[A]]:
    """`exp_heun_2_x0` as an SDE: `seeds_2` with r = 1."""
    return sample_seeds_2(
        denoise,
        x,
        sigmas,
        noise=noise,
        eta=eta,
        s_noise=s_noise,
        r=1.0,
        solver=solver,
        near_one=near_one,
    )


class _Path:
    """The noise of one step, gathered on the way from sigma to sigma."""

    def __init__(self, model: NoiseModel, noise: Noise[Any], eta: float, s_noise: float):
        self.noise_model, self.noise, self.eta, self.s_noise = model, noise, eta, s_noise
        self.gathered: Any = None
        self.start = 0.0

    def noised(self, x: Any, sigma: float, sigma_to: float) -> Any:
        """x with the noise gathered so far and that of the way from `sigma` to `sigma_to`."""
        if self.eta == 0:
            return x
        kept = min(
            1.0, exp_minus_h(self.noise_model, sigma, sigma_to) ** self.eta
        )  # rounded, where they meet
        if self.gathered is None:
            self.start = sigma
            self.gathered = self.noise(sigma, sigma_to) * math.sqrt(1 - kept**2)
        elif sigma == sigma_to:
            self.noise(self.start, sigma_to)  # drawn and not used: ComfyUI's stream goes on by one
        else:
            fresh = self.noise(sigma, sigma_to) * math.sqrt(1 - kept**2)
            self.gathered = self.gathered * kept + fresh
        return x + self.gathered * (sigma_to * self.s_noise)


METHODS = (
    Sampler(
        "seeds_2",
        sample_seeds_2,
        "an exponential SDE solver with two calls a step",
        "Gonzalez et al. (2023), as in ComfyUI",
        proofs=("ComfyUI", "identity", "order", "stationarity"),
        calls=2,
        noise="stream",
    ),
    Sampler(
        "seeds_3",
        sample_seeds_3,
        "an exponential SDE solver with three calls a step",
        "Gonzalez et al. (2023), as in ComfyUI",
        proofs=("ComfyUI", "identity", "order", "stationarity"),
        calls=3,
        noise="stream",
    ),
    Sampler(
        "exp_heun_2_x0",
        sample_exp_heun_2_x0,
        "Heun's method with the linear part solved exactly",
        "ComfyUI, after Gonzalez et al. (2023)",
        proofs=("ComfyUI", "identity", "order"),
        order=2,
        calls=2,
    ),
    Sampler(
        "exp_heun_2_x0_sde",
        sample_exp_heun_2_x0_sde,
        "exp_heun_2_x0 with fresh noise",
        "ComfyUI, after Gonzalez et al. (2023)",
        proofs=("ComfyUI", "identity", "stationarity"),
        calls=2,
        noise="stream",
    ),
)
