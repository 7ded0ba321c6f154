"""Linear multistep: a polynomial through the last slopes, integrated to the next sigma."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import A, Denoise, Step
from lydite.sampling.samplers.algebra import adams_weights, slope


def sample_lms(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    order: int = 4,
    euler_at_end: bool = False,
) -> Iterator[Step[A]]:
    """Adams and Bashforth's method on uneven steps, with up to `order` slopes.

    `euler_at_end` makes a step to 0 Euler's, as ComfyUI does; k-diffusion keeps to the polynomial.
    """
    seen: list[float] = []  # newest first, as the slopes
    slopes: list[A] = []
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        denoised = denoise(x, sigma)
        most = 1 if euler_at_end and sigma_next == 0 else order
        seen = [sigma, *seen][:most]
        slopes = [slope(x, denoised, sigma), *slopes][:most]
        for weight, each in zip(adams_weights(seen, sigma_next), slopes, strict=True):
            x = x + each * weight
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


METHODS = (
    Sampler(
        "lms",
        sample_lms,
        "a polynomial through the last four slopes; of order 4 once started, 2 from a cold start",
        "k-diffusion; Adams and Bashforth (1883) on uneven steps",
        proofs=("k-diffusion", "diffusers LMSDiscreteScheduler", "ComfyUI", "order"),
        order=4,
    ),
)
