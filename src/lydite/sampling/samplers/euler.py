"""Euler's method, with and without fresh noise at each step."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import A, Denoise, Noise, Step
from lydite.sampling.samplers.algebra import Churn, add_noise, ancestral_down, churned, slope


def sample_euler(
    denoise: Denoise[A], x: A, sigmas: Iterable[float], *, churn: Churn[A] | None = None
) -> Iterator[Step[A]]:
    """Euler steps: algorithm 2 of Karras et al. (2022) without its second half."""
    levels = [float(sigma) for sigma in sigmas]
    for index, (sigma, sigma_next) in enumerate(pairwise(levels)):
        x, start = churned(churn, denoise.noise_model, x, sigma, len(levels) - 1)
        denoised = denoise(x, start)
        x = x + slope(x, denoised, start) * (sigma_next - start)
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_euler_ancestral(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    eta: float = 1.0,
    s_noise: float = 1.0,
) -> Iterator[Step[A]]:
    """Euler steps that go below the next sigma and come back with fresh noise.

    Song et al. (2021), DDIM, in k-diffusion's form; flow models take the rectified-flow form.
    """
    model = denoise.noise_model
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        denoised = denoise(x, sigma)
        down = ancestral_down(model, sigma, sigma_next, eta)
        x = x + slope(x, denoised, sigma) * (down - sigma)
        if down < sigma_next:
            x = add_noise(model, x, down, sigma_next, noise(sigma, sigma_next) * s_noise)
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


METHODS = (
    Sampler(
        "euler",
        sample_euler,
        "straight lines from sigma to sigma",
        "Karras et al. (2022), algorithm 2, Euler steps",
        proofs=(
            "k-diffusion",
            "diffusers EulerDiscreteScheduler",
            "diffusers FlowMatchEulerDiscreteScheduler",
            "ComfyUI",
            "order",
        ),
        order=1,
    ),
    Sampler(
        "euler_ancestral",
        sample_euler_ancestral,
        "Euler beyond the next sigma and back with fresh noise",
        "k-diffusion; ComfyUI's RF form for flow models",
        proofs=(
            "k-diffusion",
            "diffusers EulerAncestralDiscreteScheduler",
            "diffusers LTXEulerAncestralRFScheduler",
            "ComfyUI",
            "identity",
            "stationarity",
        ),
        noise="stream",
    ),
)
