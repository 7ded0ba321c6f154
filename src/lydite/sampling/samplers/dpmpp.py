"""DPM-Solver++ of Lu et al. (2022b), arXiv 2211.01095: steps in λ on the denoised image.

With h the step in λ, D held for a whole step gives x·σ'/σ + D·α'·(1 − exp(−h)); the methods differ
in how they bend D by what they saw before. Where λ has no end (pure noise, σ = 0) the bend is 0.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Literal

from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import VE, A, Denoise, Noise, NoiseModel, Step
from lydite.sampling.samplers.algebra import (
    NEAR_ONE,
    add_noise,
    ddim_step,
    reverse_down,
    sigma_between,
    step_in_lambda,
)


def sample_dpmpp_2m(
    denoise: Denoise[A], x: A, sigmas: Iterable[float], *, clock: Literal["snr", "sigma"] = "snr"
) -> Iterator[Step[A]]:
    """DPM-Solver++(2M), algorithm 2. The first step and a step to 0 are of order 1.

    On a flow model ComfyUI measures its steps in −ln σ, `clock` "sigma"; diffusers, in λ.
    """
    model = denoise.noise_model
    clock_noise_model = model if clock == "snr" else VE
    before: tuple[A, float] | None = None  # denoised, and the step in λ after it
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        denoised = directed = denoise(x, sigma)
        h = step_in_lambda(clock_noise_model, sigma, sigma_next)
        if before is not None and sigma_next > 0:
            directed = denoised + (denoised - before[0]) * (h / (2 * before[1]))
        x = ddim_step(model, x, directed, sigma, sigma_next)
        before = denoised, h
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_dpmpp_sde(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    eta: float = 1.0,
    s_noise: float = 1.0,
    r: float = 0.5,
    near_one: float = NEAR_ONE,
) -> Iterator[Step[A]]:
    """DPM-Solver++(2S) as an SDE: fresh noise in the middle, a share `r` on, and at the end."""
    model = denoise.noise_model

    def drift(x: A, directed: A, sigma: float, sigma_next: float) -> A:
        down = reverse_down(model, sigma, sigma_next, eta)
        x = ddim_step(model, x, directed, sigma, down)
        if down == sigma_next:
            return x
        return add_noise(model, x, down, sigma_next, noise(sigma, sigma_next) * s_noise)

    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        denoised = directed = denoise(x, sigma)
        if sigma_next > 0:
            middle = sigma_between(model, sigma, sigma_next, r, near_one)
            second = denoise(drift(x, denoised, sigma, middle), middle)
            directed = denoised + (second - denoised) * (1 / (2 * r))
        x = drift(x, directed, sigma, sigma_next)
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_dpmpp_2m_sde(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    eta: float = 1.0,
    s_noise: float = 1.0,
    solver: Literal["midpoint", "heun"] = "midpoint",
) -> Iterator[Step[A]]:
    """DPM-Solver++(2M) as an SDE; `solver` says how the slope of D enters."""
    model = denoise.noise_model
    before: tuple[A, float] | None = None
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        denoised = denoise(x, sigma)
        h = step_in_lambda(model, sigma, sigma_next)
        if sigma_next == 0:
            x = denoised
        else:
            x = _drift(model, x, denoised, sigma, sigma_next, eta)
            if before is not None and h:
                whole = h * (1 + eta)
                lean = -math.expm1(-whole) / 2 if solver == "midpoint" else _phi_2(whole)
                lean = lean * model.alpha(sigma_next) * (h / before[1])
                x = x + (denoised - before[0]) * lean
            if eta:
                x = x + noise(sigma, sigma_next) * (
                    _fresh_noise_share(h, eta) * sigma_next * s_noise
                )
        before = denoised, h
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_dpmpp_2m_sde_heun(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    eta: float = 1.0,
    s_noise: float = 1.0,
) -> Iterator[Step[A]]:
    """dpmpp_2m_sde with `solver` heun."""
    return sample_dpmpp_2m_sde(
        denoise, x, sigmas, noise=noise, eta=eta, s_noise=s_noise, solver="heun"
    )


def sample_dpmpp_3m_sde(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    eta: float = 1.0,
    s_noise: float = 1.0,
    curvature: float = 0.5,
) -> Iterator[Step[A]]:
    """DPM-Solver++(3M) as an SDE: a parabola through the last three denoised images.

    k-diffusion and diffusers count the second derivative of D by half, so that theirs is of order
    2; `curvature` 1 counts it whole, and with eta = 0 the order is 3.
    """
    model = denoise.noise_model
    past: list[tuple[A, float]] = []  # (denoised, the step in λ after it), newest first
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        denoised = denoise(x, sigma)
        h = step_in_lambda(model, sigma, sigma_next)
        if sigma_next == 0:
            x = denoised
        else:
            x = _drift(model, x, denoised, sigma, sigma_next, eta)
            if past and h:
                bend = _correction(denoised, past, h, h * (1 + eta), curvature)
                x = x + bend * model.alpha(sigma_next)
            if eta:
                x = x + noise(sigma, sigma_next) * (
                    _fresh_noise_share(h, eta) * sigma_next * s_noise
                )
        past = [(denoised, h), *past][:2]
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def _drift(model: NoiseModel, x: A, denoised: A, sigma: float, sigma_next: float, eta: float) -> A:
    """The drift of the SDE over one step with `denoised` held."""
    h = step_in_lambda(model, sigma, sigma_next)
    more = eta * h if eta else 0.0  # 0·∞ from pure noise
    share = -math.expm1(-h - more) * model.alpha(sigma_next)
    return x * (sigma_next / sigma * math.exp(-more)) + denoised * share


def _correction(
    denoised: A, past: list[tuple[A, float]], h: float, whole: float, curvature: float
) -> A:
    """What the slope of D, and its second derivative once three are known, add over one step."""
    last, last_h = past[0]
    near = (denoised - last) * (h / last_h)  # per h
    if len(past) == 1:
        return near * _phi_2(whole)
    first, first_h = past[1]
    far = (last - first) * (h / first_h)
    slope = near + (near - far) * (last_h / (last_h + first_h))
    second = (near - far) * (2 * h / (last_h + first_h))  # per h²
    return slope * _phi_2(whole) - second * (curvature * (_phi_2(whole) / whole - 0.5))


def _phi_2(whole: float) -> float:
    return math.expm1(-whole) / whole + 1


def _fresh_noise_share(h: float, eta: float) -> float:
    """The share of the noise at the next sigma that is new."""
    return math.sqrt(-math.expm1(-2 * eta * h))


METHODS = (
    Sampler(
        "dpmpp_2m",
        sample_dpmpp_2m,
        "DPM-Solver++ with a straight line through the last two denoised images",
        "Lu et al. (2022b), DPM-Solver++(2M), as in k-diffusion",
        proofs=("k-diffusion", "diffusers DPMSolverMultistepScheduler", "ComfyUI", "order"),
        order=2,
    ),
    Sampler(
        "dpmpp_sde",
        sample_dpmpp_sde,
        "DPM-Solver++ with a call halfway and fresh noise twice a step",
        "k-diffusion, after Lu et al. (2022b)",
        proofs=(
            "k-diffusion",
            "diffusers DPMSolverSDEScheduler",
            "ComfyUI",
            "identity",
            "order",
            "stationarity",
        ),
        calls=2,
        noise="path",
    ),
    Sampler(
        "dpmpp_2m_sde",
        sample_dpmpp_2m_sde,
        "dpmpp_2m with fresh noise",
        "k-diffusion, after Lu et al. (2022b), SDE-DPM-Solver++(2M)",
        proofs=(
            "k-diffusion",
            "diffusers DPMSolverMultistepScheduler sde-dpmsolver++",
            "ComfyUI",
            "identity",
            "order",
            "stationarity",
        ),
        noise="path",
    ),
    Sampler(
        "dpmpp_2m_sde_heun",
        sample_dpmpp_2m_sde_heun,
        "dpmpp_2m_sde with the slope of D integrated exactly",
        "k-diffusion, after Lu et al. (2022b), SDE-DPM-Solver++(2M)",
        proofs=(
            "k-diffusion",
            "diffusers DPMSolverMultistepScheduler sde-dpmsolver++",
            "ComfyUI",
            "order",
            "stationarity",
        ),
        noise="path",
    ),
    Sampler(
        "dpmpp_3m_sde",
        sample_dpmpp_3m_sde,
        "a parabola through the last three denoised images, and fresh noise; of order 2",
        "k-diffusion, after Lu et al. (2022b)",
        proofs=("k-diffusion", "ComfyUI", "identity", "order", "stationarity"),
        noise="path",
    ),
)
