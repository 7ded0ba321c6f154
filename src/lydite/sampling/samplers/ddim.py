"""DDIM and what is DDIM in disguise: DDPM is its noisiest form, inversion its way back.

Song et al. (2021), arXiv 2010.02502, eq. 12 and 16, for any noise model: there √ᾱ is α and √(1−ᾱ)
is σ. DPM-Solver of order 1 is the same step, in either of its forms.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

from lydite.core.errors import InputError
from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import VE, A, Denoise, Noise, NoiseModel, Step


def sample_ddim(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A] | None = None,
    eta: float = 0.0,
) -> Iterator[Step[A]]:
    """The image seen, noised again: with the noise seen (eta 0), or up to eta with fresh noise."""
    if not 0 <= eta <= 1:
        raise InputError(f"eta is {eta}; expected a number from 0 to 1.")
    if eta and noise is None:
        raise InputError(f"eta is {eta}; pass a source of noise, or leave eta at 0.")
    model = denoise.noise_model
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        denoised = denoise(x, sigma)
        fresh = eta * reverse_spread(model, sigma, sigma_next) if eta else 0.0
        kept = math.sqrt(sigma_next**2 - fresh**2)
        seen = (x - denoised * model.alpha(sigma)) / sigma
        x = denoised * model.alpha(sigma_next) + seen * kept
        if noise is not None and fresh > 0:
            x = x + noise(sigma, sigma_next) * fresh
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_ddpm(
    denoise: Denoise[A], x: A, sigmas: Iterable[float], *, noise: Noise[A]
) -> Iterator[Step[A]]:
    """Ancestral steps of Ho et al. (2020), arXiv 2006.11239, eq. 7, with the smaller variance."""
    return sample_ddim(denoise, x, sigmas, noise=noise, eta=1.0)


def sample_ddim_inverse(denoise: Denoise[A], x: A, sigmas: Iterable[float]) -> Iterator[Step[A]]:
    """DDIM from an image to its noise; pass the sigmas rising. Falling ones give `ddim`.

    Of a step's two ends the network is asked at the noisier, as in diffusers' DDIMInverseScheduler:
    x goes in as it would stand there, so that a start at sigma 0 can be asked about as well.
    """
    model = denoise.noise_model
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        asked = max(sigma, sigma_next)
        there = x * (_size(model, asked) / _size(model, sigma))
        denoised = denoise(there, asked)
        seen = (there - denoised * model.alpha(asked)) / asked
        if asked > sigma:
            denoised = (x - seen * sigma) / model.alpha(sigma)
        x = denoised * model.alpha(sigma_next) + seen * sigma_next
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def reverse_spread(model: NoiseModel, sigma: float, sigma_next: float) -> float:
    """The spread of x at `sigma_next` where x at `sigma` and the image are known (eq. 16)."""
    fall = sigma_next * model.alpha(sigma) / (sigma * model.alpha(sigma_next))  # exp(−h)
    return sigma_next * math.sqrt(1 - fall**2)


def _size(model: NoiseModel, sigma: float) -> float:
    """How large x is for the network: VE latents reach it divided by √(1 + σ²), flow ones as is."""
    return math.hypot(1.0, sigma) if model == VE else 1.0


METHODS = (
    Sampler(
        "ddim",
        sample_ddim,
        "the image seen, noised again with the noise seen; eta mixes in fresh noise",
        "Song et al. (2021), arXiv 2010.02502",
        proofs=("diffusers DDIMScheduler", "identity", "order"),
        order=1,
        noise_with_eta=True,
    ),
    Sampler(
        "ddim_inverse",
        sample_ddim_inverse,
        "ddim from an image up to its noise, along rising sigmas",
        "Song et al. (2021), arXiv 2010.02502, as in diffusers",
        proofs=("diffusers DDIMInverseScheduler", "identity", "order"),
        order=1,
    ),
    Sampler(
        "ddpm",
        sample_ddpm,
        "the reverse of the diffusion itself: ddim with eta 1",
        "Ho et al. (2020), arXiv 2006.11239",
        proofs=("diffusers DDPMScheduler", "ComfyUI", "identity", "stationarity"),
        noise="stream",
    ),
)
