"""Two-call steps that go below the next sigma and come back with fresh noise."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import A, Denoise, Noise, Step
from lydite.sampling.samplers.algebra import (
    NEAR_ONE,
    add_noise,
    ancestral_down,
    ddim_step,
    midpoint_step,
    sigma_between,
)


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
            x = add_noise(model, x, down, sigma_next, noise(sigma, sigma_next) * s_noise)
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


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
            middle = sigma_between(model, sigma, down, 0.5, near_one)
            directed = denoise(ddim_step(model, x, denoised, sigma, middle), middle)
        x = ddim_step(model, x, directed, sigma, down)
        if down < sigma_next:
            x = add_noise(model, x, down, sigma_next, noise(sigma, sigma_next) * s_noise)
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


METHODS = (
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
