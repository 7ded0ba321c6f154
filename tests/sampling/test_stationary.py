"""A random sampler ends with the spread of its data, up to an error that falls with the steps.

No random numbers are drawn. The data are Gaussian, so x stays a sum of its start and of the noise
handed to the sampler: each of these is one axis of a vector, and the spread of x is its length.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest

from lydite.sampling.registry import SAMPLERS
from lydite.sampling.sampler_types import FLOW, VE
from support.sampler_cases import AS_THE_PAPER, Paired

NOISE_MODELS = {"ve": VE, "flow": FLOW}
SPREAD, END = 0.5, 0.05
CONSISTENCY = {"lcm", "tcd"}  # written for a network whose denoised is a sample, not a mean
WEAK_ORDERS = {
    "euler_ancestral": 1,
    "dpm_2_ancestral": 2,
    "dpmpp_2s_ancestral": 2,
    "dpmpp_sde": 2,
    "dpmpp_2m_sde": 2,
    "dpmpp_2m_sde_heun": 2,
    "dpmpp_3m_sde": 2,
    "restart": 2,
}
RANDOM = [
    (name, noise_model)
    for name, sampler in SAMPLERS.items()
    if sampler.noise != "none" and name not in CONSISTENCY
    for noise_model in sampler.noise_models
]


def schedule(noise_model: str, steps: int) -> list[float]:
    if noise_model == "flow":
        return np.linspace(1.0, END, steps + 1).tolist()
    return (np.linspace(10 ** (1 / 7), END ** (1 / 7), steps + 1) ** 7).tolist()


def path(intervals: list[tuple[float, float]]) -> tuple[Callable[[float, float], np.ndarray], int]:
    """Brownian motion in sigma, an axis for each stretch between sigmas it is asked about."""
    ends = sorted({end for interval in intervals for end in interval})
    axes, size = np.sqrt(np.diff(ends)), len(ends)

    def noise(sigma: float, sigma_next: float) -> np.ndarray:
        low, high = sorted((sigma, sigma_next))
        stretch = slice(ends.index(low), ends.index(high))
        normals = np.zeros(size)
        normals[1:][stretch] = axes[stretch] / math.sqrt(high - low)
        return normals

    return noise, size


def stream(count: int) -> tuple[Callable[[float, float], np.ndarray], int]:
    """An axis for each call."""
    axes = iter(np.eye(count + 1)[1:])
    return lambda *_: next(axes), count + 1


def excess(name: str, noise_model: str, steps: int, kind: str | None = None) -> float:
    """By how much the spread at the end is too large, as a share of itself."""
    sampler, denoise = (
        SAMPLERS[name],
        Paired(mean=0.0, spread=SPREAD, noise_model=NOISE_MODELS[noise_model]),
    )
    sigmas, asked, options = schedule(noise_model, steps), [], AS_THE_PAPER.get(name, {})

    def silent(sigma: float, sigma_next: float) -> np.ndarray:
        asked.append((sigma, sigma_next))
        return np.zeros(1)

    list(sampler.run(denoise, np.ones(1), sigmas, noise=silent, **options))
    noise, size = path(asked) if (kind or sampler.noise) == "path" else stream(len(asked))
    start = np.zeros(size)
    start[0] = math.hypot(denoise.noise_model.alpha(sigmas[0]) * SPREAD, sigmas[0])
    *_, step = sampler.run(denoise, start, sigmas, noise=noise, **options)
    due = math.hypot(denoise.noise_model.alpha(step.sigma_next) * SPREAD, step.sigma_next)
    return float(np.linalg.norm(step.x)) / due - 1


@pytest.mark.parametrize(("name", "noise_model"), RANDOM)
def test_the_spread_of_the_result_is_that_of_the_data(name: str, noise_model: str):
    coarse, fine = (abs(excess(name, noise_model, steps)) for steps in (80, 160))
    assert coarse < 0.04
    assert fine < coarse * 0.6 or fine < 1e-4


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
@pytest.mark.parametrize("name", WEAK_ORDERS)
def test_the_error_of_the_spread_falls_with_its_order(name: str, noise_model: str):
    coarse, fine = (abs(excess(name, noise_model, steps)) for steps in (80, 160))
    assert math.log2(coarse / fine) == pytest.approx(WEAK_ORDERS[name], abs=0.15)
    assert coarse < 0.005 or WEAK_ORDERS[name] == 1


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
def test_dpmpp_sde_needs_a_brownian_path(noise_model: str):
    """Noise halfway and noise at the end overlap; drawn apart, they leave an error of order 1."""
    along, apart = (abs(excess("dpmpp_sde", noise_model, 80, kind)) for kind in ("path", "stream"))
    assert along < 0.001
    assert 0.03 < apart < 0.04
    half = abs(excess("dpmpp_sde", noise_model, 160, "stream"))
    assert math.log2(apart / half) == pytest.approx(1, abs=0.15)
