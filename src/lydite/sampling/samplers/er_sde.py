"""ER-SDE-Solver of Cui et al. (2023), arXiv 2309.06169: extended reverse-time SDE, 1 to 3 stages.

In e = σ/α, the noise-to-image ratio, the SDE is chosen by a function of noise f(e): f(e) = e is the
ODE, e² the diffusion's own reverse, and what grows faster adds more noise.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import A, Denoise, Noise, Step
from lydite.sampling.samplers.algebra import NEAR_ONE, finite_start


def er_sde_5(ratio: float) -> float:
    """What its authors' program calls SDE_5, the default there and in ComfyUI."""
    return ratio * (math.exp(ratio**0.3) + 10)


def sample_er_sde(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    s_noise: float = 1.0,
    noise_scaling: Callable[[float], float] = er_sde_5,
    stages: int = 3,
    points: int = 200,
    near_one: float = NEAR_ONE,
) -> Iterator[Step[A]]:
    """VE- and VP-ER-SDE-Solver-1 to -3 at once; step i has at most i stages.

    The third makes errors smaller, not of higher order: the slope stays that between two images.
    Integrals over 1/f are left sums of `points` values: 200 in ComfyUI, 100 in the authors' own.
    """
    model = denoise.noise_model
    sigmas = finite_start(model, sigmas, near_one)
    ratios = [sigma / model.alpha(sigma) for sigma in sigmas]
    last: A | None = None
    last_slope: A | None = None
    for index, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
        denoised = denoise(x, sigma)
        if sigma_next == 0:
            x = denoised
        else:
            here, there = ratios[index], ratios[index + 1]
            scale = model.alpha(sigma_next)
            keep = noise_scaling(there) / noise_scaling(here)
            x = x * (scale / model.alpha(sigma) * keep) + denoised * (scale * (1 - keep))
            if stages > 1 and last is not None:
                slope = (denoised - last) / (here - ratios[index - 1])
                first, second = _bends(noise_scaling, here, there, points)
                x = x + slope * (scale * first)
                if stages > 2 and last_slope is not None:
                    curve = (slope - last_slope) / ((here - ratios[index - 2]) / 2)
                    x = x + curve * (scale * second)
                last_slope = slope
            # √(there² − keep²·here²), which is 0 and not a rounding error for the ODE
            fresh = here * math.sqrt(max(0.0, (there / here - keep) * (there / here + keep)))
            x = x + noise(sigma, sigma_next) * (scale * fresh * s_noise)
        last = denoised
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def _bends(
    f: Callable[[float], float], here: float, there: float, points: int
) -> tuple[float, float]:
    """What the slope of the denoised, and its curve, add on the way from ratio to ratio."""
    width = (here - there) / points
    places = [there + part * width for part in range(points)]
    plain = math.fsum(1 / f(place) for place in places) * width
    leant = math.fsum((place - here) / f(place) for place in places) * width
    way = there - here
    return way + f(there) * plain, way * way / 2 + f(there) * leant


METHODS = (
    Sampler(
        "er_sde",
        sample_er_sde,
        "a reverse SDE with its own amount of noise, in up to three stages",
        "Cui et al. (2023), arXiv 2309.06169, as in ComfyUI",
        proofs=("ComfyUI", "identity", "order", "stationarity"),
        noise="stream",
    ),
)
