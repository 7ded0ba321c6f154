"""Two-call steps that go below the next sigma and come back with fresh noise."""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

from lydite.sampling.noise_model import NoiseModel
from lydite.sampling.samplers.heun import midpoint_step
from lydite.sampling.samplers.renoise import ancestral_down, raised
from lydite.sampling.samplers.sampler import Sampler
from lydite.sampling.steps import A, Denoise, Noise, Step

NEAR_ONE = 0.9999  # ComfyUI's middle of a step from pure noise, where λ has no end


def sample_dpm_2_ancestral(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    eta: float = 1.0,
    s_noise: float = 1.0,
) -> Iterator[Step[A]]:
    """dpm_2 with ancestral noise."""
    model = denoise.noise_model
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        down = ancestral_down(model, sigma, sigma_next, eta)
        x, denoised = midpoint_step(denoise, x, sigma, down)
        if down < sigma_next:
            x = raised(model, x, down, sigma_next, noise(sigma, sigma_next) * s_noise)
        yield Step(index, sigma, sigma_next, x, denoised)


def sample_dpmpp_2s_ancestral(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    eta: float = 1.0,
    s_noise: float = 1.0,
    near_one: float = NEAR_ONE,
) -> Iterator[Step[A]]:
    """DPM-Solver++(2S) of Lu et al. (2022b), algorithm 1 with r = ½, with ancestral noise."""
    model = denoise.noise_model
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        denoised = directed = denoise(x, sigma)
        down = ancestral_down(model, sigma, sigma_next, eta)
        if down > 0:
            middle = between(model, sigma, down, 0.5, near_one)
            directed = denoise(toward(model, x, denoised, sigma, middle), middle)
        x = toward(model, x, directed, sigma, down)
        if down < sigma_next:
            x = raised(model, x, down, sigma_next, noise(sigma, sigma_next) * s_noise)
        yield Step(index, sigma, sigma_next, x, denoised)


def toward(model: NoiseModel, x: A, denoised: A, sigma: float, sigma_next: float) -> A:
    """x at `sigma_next` if `denoised` stayed what it is: DPM-Solver++(1), or DDIM."""
    ratio = sigma_next / sigma
    return x * ratio + denoised * (model.alpha(sigma_next) - model.alpha(sigma) * ratio)


def between(
    model: NoiseModel, sigma: float, sigma_next: float, share: float, near_one: float
) -> float:
    """The sigma that lies `share` of the way in λ; from pure noise, `near_one`."""
    start, end = model.half_log_snr(sigma), model.half_log_snr(sigma_next)
    return near_one if start == -math.inf else model.sigma_at(start + share * (end - start))


FAMILY = (
    Sampler(
        "dpm_2_ancestral",
        sample_dpm_2_ancestral,
        "dpm_2 beyond the next sigma and back with fresh noise",
        "k-diffusion; ComfyUI's RF form for flow models",
        proofs=(
            "k-diffusion",
            "diffusers KDPM2AncestralDiscreteScheduler",
            "ComfyUI",
            "identity",
            "stationarity",
        ),
        calls=2,
        noise="stream",
    ),
    Sampler(
        "dpmpp_2s_ancestral",
        sample_dpmpp_2s_ancestral,
        "DPM-Solver++(2S) beyond the next sigma and back with fresh noise",
        "k-diffusion, after Lu et al. (2022b); ComfyUI's RF form for flow models",
        proofs=("k-diffusion", "ComfyUI", "identity", "order", "stationarity"),
        calls=2,
        noise="stream",
    ),
)
