"""Gradient estimation, Permenter and Yuan (2023), arXiv 2306.04848: away from the last slope.

The last step, to σ = 0, takes the denoised image as it is, as ComfyUI does.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import A, Denoise, PairDenoise, Step
from lydite.sampling.samplers.cfg_pp import Written, model_of, renoised


def sample_gradient_estimation(
    denoise: Denoise[A], x: A, sigmas: Iterable[float], *, gamma: float = 2.0
) -> Iterator[Step[A]]:
    """Euler's method along γ·slope + (1 − γ)·last slope; γ = 1 is Euler."""
    last: A | None = None
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        denoised = denoise(x, sigma)
        slope = (x - denoised) / sigma
        if sigma_next == 0:
            x = denoised
        else:
            along = slope if last is None else slope * gamma + last * (1 - gamma)
            x = x + along * (sigma_next - sigma)
        last = slope
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_gradient_estimation_cfg_pp(
    denoise: PairDenoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    gamma: float = 2.0,
    written_for: Written = "ve",
) -> Iterator[Step[A]]:
    """The CFG++ step, plus what γ adds to the slope of the unconditional prediction.

    ComfyUI's CFG++ step is VE's on every model: see `cfg_pp`.
    """
    model = model_of(written_for, denoise)
    last: A | None = None
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        guided, uncond = denoise.pair(x, sigma)
        slope = (x - uncond) / sigma
        x = renoised(model, x, guided, uncond, sigma, sigma_next)
        if last is not None and sigma_next > 0:
            x = x + (slope - last) * ((gamma - 1) * (sigma_next - sigma))
        last = slope
        step = Step(index, sigma, sigma_next, x, guided)
        yield step
        x = step.x


METHODS = (
    Sampler(
        "gradient_estimation",
        sample_gradient_estimation,
        "euler along a slope that leans away from the last one",
        "Permenter and Yuan (2023), as in ComfyUI",
        proofs=("ComfyUI", "identity", "order"),
        order=1,
    ),
    Sampler(
        "gradient_estimation_cfg_pp",
        sample_gradient_estimation_cfg_pp,
        "gradient_estimation that renoises with the unconditional prediction",
        "ComfyUI, after Permenter and Yuan (2023) and Chung et al. (2024)",
        proofs=("ComfyUI", "identity"),
        order=1,
        pair=True,
    ),
)
