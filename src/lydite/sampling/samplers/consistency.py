"""Samplers for models that jump to the image: jump, then put noise back."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from lydite.core.errors import InputError
from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import A, Denoise, Noise, Step
from lydite.sampling.samplers.algebra import add_noise, ddim_step


def sample_lcm(
    denoise: Denoise[A], x: A, sigmas: Iterable[float], *, noise: Noise[A]
) -> Iterator[Step[A]]:
    """Multistep consistency sampling: Song et al. (2023), algorithm 1; Luo et al. (2023), LCM.

    The boundary scalings of a consistency model belong to its prediction type.
    """
    model = denoise.noise_model
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        denoised = denoise(x, sigma)
        x = denoised
        if sigma_next > 0:
            x = denoised * model.alpha(sigma_next) + noise(sigma, sigma_next) * sigma_next
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_tcd(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    gamma: float = 0.3,
    below: Callable[[float], float] | None = None,
) -> Iterator[Step[A]]:
    """Strategic stochastic sampling: Zheng et al. (2024), TCD.

    Each step but the last jumps beyond its sigma, to the time (1 − gamma)·t, and comes back with
    fresh noise. Time is sigma itself unless `below` says which sigma belongs to (1 − gamma)·t for
    the sigma of t: with the timesteps of SD 1.5 and SDXL, diffusers looks it up in their table.
    """
    if not 0 <= gamma <= 1:
        raise InputError(f"gamma is {gamma}; expected a number from 0 to 1.")
    levels, model = [float(sigma) for sigma in sigmas], denoise.noise_model
    for index, (sigma, sigma_next) in enumerate(pairwise(levels)):
        denoised = denoise(x, sigma)
        down = sigma_next
        if index < len(levels) - 2:
            down = (1 - gamma) * sigma_next if below is None else float(below(sigma_next))
        x = ddim_step(model, x, denoised, sigma, down)
        if down < sigma_next:
            x = add_noise(model, x, down, sigma_next, noise(sigma, sigma_next))
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


METHODS = (
    Sampler(
        "lcm",
        sample_lcm,
        "the denoised image with fresh noise",
        "Luo et al. (2023), arXiv 2310.04378; Song et al. (2023), arXiv 2303.01469",
        proofs=("diffusers LCMScheduler", "diffusers FlowMatchLCMScheduler", "ComfyUI", "identity"),
        noise="stream",
    ),
    Sampler(
        "tcd",
        sample_tcd,
        "ddim beyond the next sigma and back with fresh noise",
        "Zheng et al. (2024), arXiv 2402.19159",
        proofs=("diffusers TCDScheduler", "identity"),
        noise="stream",
    ),
)
