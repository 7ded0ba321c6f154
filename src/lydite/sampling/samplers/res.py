"""RES: refined exponential solver, Zhang et al. (2023), arXiv 2308.02157, second order, multistep.

`written_for` is the noise model whose λ a step is taken in. ComfyUI, whose names these are, takes
λ = −ln σ and VE noise for every model. For the ODE that is only another choice of steps. On a
flow model its ancestral form leaves too much image in x, and its CFG++ leans on the prompt by
σ'·(guided − uncond) too much; "model" takes the model's own and does neither.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import A, Denoise, Noise, NoiseModel, PairDenoise, Step
from lydite.sampling.samplers.algebra import add_noise, ddim_step, reverse_down, slope_weight
from lydite.sampling.samplers.cfg_pp import Written, model_of, renoised, shifted


def sample_res_multistep(
    denoise: Denoise[A], x: A, sigmas: Iterable[float], *, written_for: Written = "ve"
) -> Iterator[Step[A]]:
    """The multistep scheme of RES, order 2; the first step and a step to 0 are Euler's."""
    return _steps(_twice(denoise), x, sigmas, model_of(written_for, denoise), None, 0.0, 1.0)


def sample_res_multistep_ancestral(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    eta: float = 1.0,
    s_noise: float = 1.0,
    written_for: Written = "ve",
) -> Iterator[Step[A]]:
    """RES beyond the next sigma, and back with fresh noise."""
    return _steps(_twice(denoise), x, sigmas, model_of(written_for, denoise), noise, eta, s_noise)


def sample_res_multistep_cfg_pp(
    denoise: PairDenoise[A], x: A, sigmas: Iterable[float], *, written_for: Written = "ve"
) -> Iterator[Step[A]]:
    """RES with CFG++, as ComfyUI has it.

    Its steps of order 2 start from x moved by guided − uncond and then follow the unconditional
    prediction, so that of the guidance only σ'/σ is left after them. Steps of order 1, the last
    among them, are CFG++ as Chung et al. (2024) write it.
    """
    return _steps(denoise.pair, x, sigmas, model_of(written_for, denoise), None, 0.0, 1.0)


def sample_res_multistep_ancestral_cfg_pp(
    denoise: PairDenoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    eta: float = 1.0,
    s_noise: float = 1.0,
    written_for: Written = "ve",
) -> Iterator[Step[A]]:
    """`res_multistep_cfg_pp` beyond the next sigma, and back with fresh noise."""
    return _steps(denoise.pair, x, sigmas, model_of(written_for, denoise), noise, eta, s_noise)


Pair = Callable[[Any, float], tuple[Any, Any]]


def _twice(denoise: Denoise[Any]) -> Pair:
    def pair(x: Any, sigma: float) -> tuple[Any, Any]:
        denoised = denoise(x, sigma)
        return denoised, denoised

    return pair


def _steps(
    pair: Pair,
    x: Any,
    sigmas: Iterable[float],
    model: NoiseModel,
    noise: Noise[Any] | None,
    eta: float,
    s_noise: float,
) -> Iterator[Step[Any]]:
    before: tuple[Any, float] | None = None  # unconditional, and the step in λ after it
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        guided, uncond = pair(x, sigma)
        down = reverse_down(model, sigma, sigma_next, eta)
        h = model.half_log_snr(down) - model.half_log_snr(sigma)
        if before is None or down == 0:
            x = renoised(model, x, guided, uncond, sigma, down)
        else:
            x = shifted(model, x, guided, uncond, sigma)
            x = ddim_step(model, x, uncond, sigma, down)
            # the slope is taken over the step before as it was solved, without its fresh noise
            weight = slope_weight(h) * h / before[1] * model.alpha(down)
            x = x + (uncond - before[0]) * weight
        if noise is not None and down < sigma_next:
            x = add_noise(model, x, down, sigma_next, noise(sigma, sigma_next) * s_noise)
        before = uncond, h
        step = Step(index, sigma, sigma_next, x, guided)
        yield step
        x = step.x


METHODS = (
    Sampler(
        "res_multistep",
        sample_res_multistep,
        "exponential steps with a straight line through the last two denoised images",
        "Zhang et al. (2023), as in ComfyUI",
        proofs=("ComfyUI", "order", "identity"),
        order=2,
    ),
    Sampler(
        "res_multistep_ancestral",
        sample_res_multistep_ancestral,
        "res_multistep beyond the next sigma and back with fresh noise",
        "ComfyUI, after Zhang et al. (2023)",
        proofs=("ComfyUI", "identity", "stationarity"),
        noise="stream",
    ),
    Sampler(
        "res_multistep_cfg_pp",
        sample_res_multistep_cfg_pp,
        "res_multistep that renoises with the unconditional prediction",
        "ComfyUI, after Zhang et al. (2023) and Chung et al. (2024)",
        proofs=("ComfyUI", "identity"),
        order=2,
        pair=True,
    ),
    Sampler(
        "res_multistep_ancestral_cfg_pp",
        sample_res_multistep_ancestral_cfg_pp,
        "res_multistep_ancestral that renoises with the unconditional prediction",
        "ComfyUI, after Zhang et al. (2023) and Chung et al. (2024)",
        proofs=("ComfyUI", "identity"),
        noise="stream",
        pair=True,
    ),
)
