"""Order of convergence: halve the steps, and the error falls by 2 to the power of the order.

The data are Gaussian, so the ODE has an exact solution, and three widths of it are added up so that
no error is missed where it changes its sign. Steps are even in sigma, or grow from the start on:
there a method that needs a past has made it before its first steps count.
"""

import inspect
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from lydite.sampling.analytic import Gaussian
from lydite.sampling.registry import SAMPLERS, Sampler
from lydite.sampling.sampler_types import FLOW, VE, NoiseModel
from support.sampler_cases import Paired

NOISE_MODELS = {"ve": VE, "flow": FLOW}
ENDS = {"ve": (3.0, 0.2), "flow": (0.9, 0.1)}
WIDTHS = (0.3, 0.6, 1.2)
STEPS = (384, 768)  # both multiples of 3: dpm_fast ends in the same way
START = np.full(len(WIDTHS), 2.0)


def grid(noise_model: str, spacing: str, steps: int) -> list[float]:
    first, last = ENDS[noise_model]
    way = np.linspace(0, 1, steps + 1)
    return (first + (last - first) * (way**2 if spacing == "growing" else way)).tolist()


def error(
    sampler: Sampler, noise_model: NoiseModel, sigmas: list[float], options: dict[str, Any]
) -> float:
    widths: Any = np.array(WIDTHS)  # one for each value of x
    denoise = Paired(spread=widths, noise_model=noise_model)
    *_, step = sampler.run(denoise, START, sigmas, noise=lambda *_: START * 0, **options)
    exact = [
        Gaussian(spread=width, noise_model=noise_model).follow(value, sigmas[0], step.sigma_next)
        for width, value in zip(WIDTHS, START, strict=True)
    ]
    return float(np.abs(step.x - exact).sum())


def order(name: str, noise_model: str, spacing: str, **options: Any) -> float:
    """Measured over the last doubling of the steps, without noise."""
    sampler = SAMPLERS[name]
    if "eta" in inspect.signature(sampler.function).parameters:
        options = {"eta": 0.0, **options}
    errors = [
        error(sampler, NOISE_MODELS[noise_model], grid(noise_model, spacing, steps), options)
        for steps in STEPS
    ]
    return math.log2(errors[0] / errors[1])


STATED = [
    (name, noise_model)
    for name, sampler in SAMPLERS.items()
    if sampler.order is not None
    for noise_model in sampler.noise_models
]
WITHOUT_NOISE = {
    "euler_ancestral": 1,
    "dpm_2_ancestral": 2,
    "dpmpp_2s_ancestral": 2,
    "dpmpp_sde": 2,
    "dpmpp_2m_sde": 2,
    "dpmpp_2m_sde_heun": 2,
    "dpmpp_3m_sde": 2,
}


@pytest.mark.parametrize(("name", "noise_model"), STATED)
def test_a_sampler_converges_with_the_order_it_states(name: str, noise_model: str):
    stated, measured = SAMPLERS[name].order, {}
    assert stated is not None
    for spacing in ("even", "growing"):
        measured[spacing] = order(name, noise_model, spacing)
        if abs(measured[spacing] - stated) < 0.15:
            return
    pytest.fail(f"{name} states order {stated}; measured {measured}")


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
@pytest.mark.parametrize("name", WITHOUT_NOISE)
def test_without_its_noise_a_random_sampler_solves_the_ode(name: str, noise_model: str):
    assert order(name, noise_model, "even") == pytest.approx(WITHOUT_NOISE[name], abs=0.15)


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
def test_the_whole_second_derivative_makes_3m_of_third_order(noise_model: str):
    assert order("dpmpp_3m_sde", noise_model, "growing", curvature=1.0) == pytest.approx(
        3, abs=0.15
    )


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
@pytest.mark.parametrize("slopes", (1, 2, 3, 4))
def test_lms_is_of_the_order_of_its_slopes_once_started(slopes: int, noise_model: str):
    assert order("lms", noise_model, "growing", order=slopes) == pytest.approx(slopes, abs=0.15)


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
def test_a_cold_start_leaves_lms_of_order_two(noise_model: str):
    assert order("lms", noise_model, "even") == pytest.approx(2, abs=0.15)


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
@pytest.mark.parametrize(("solver", "gain"), ((2, 4), (3, 4)))
def test_dpm_adaptive_comes_closer_with_its_tolerance(solver: int, gain: float, noise_model: str):
    sigmas = [*ENDS[noise_model], 0.0]
    errors = [
        error(
            SAMPLERS["dpm_adaptive"],
            NOISE_MODELS[noise_model],
            sigmas,
            {"order": solver, "rtol": t, "atol": t},
        )
        for t in (1e-3, 1e-4, 1e-5)
    ]
    assert errors[0] < 1e-2
    assert all(coarse / fine > gain for coarse, fine in pairwise(errors)), errors
