"""Euler's method, with and without fresh noise at each step."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from lydite.sampling.samplers.sampler import Sampler
from lydite.sampling.steps import A, Denoise, Step


def sample_euler(denoise: Denoise[A], x: A, sigmas: Iterable[float]) -> Iterator[Step[A]]:
    """Euler steps: Algorithm 2 of Karras et al. (2022) without churn."""
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        denoised = denoise(x, sigma)
        slope = (x - denoised) / sigma
        x = x + slope * (sigma_next - sigma)
        yield Step(index, sigma, sigma_next, x, denoised)


FAMILY = (
    Sampler(
        "euler",
        sample_euler,
        "straight lines from sigma to sigma",
        "Karras et al. (2022), algorithm 2 without churn",
        proofs=("k-diffusion", "diffusers EulerDiscreteScheduler", "order"),
        order=1,
    ),
)
