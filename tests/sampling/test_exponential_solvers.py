"""RES, gradient estimation, ER-SDE and SEEDS: identities, orders, stationarity, hard ends.

The numbers of ComfyUI are in test_comfyui.py.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lydite.sampling.analytic import Gaussian, Mixture
from lydite.sampling.registry import SAMPLERS
from lydite.sampling.sampler_types import FLOW, VE
from lydite.sampling.samplers.algebra import ddim_step, exp_minus_h, finite_start, slope_weight

NOISE_MODELS = {"ve": VE, "flow": FLOW}
SIGMAS = {"ve": (9.0, 4.0, 1.5, 0.6, 0.2, 0.0), "flow": (1.0, 0.9, 0.7, 0.45, 0.2, 0.0)}
INSIDE = {"ve": (9.0, 4.0, 1.5, 0.6, 0.2), "flow": (0.97, 0.9, 0.7, 0.45, 0.2)}
ODE: dict[str, Any] = {"noise_scaling": lambda ratio: ratio}
REVERSE: dict[str, Any] = {"noise_scaling": lambda ratio: ratio**2}


def draws(seed: int = 3) -> Callable[[float, float], np.ndarray]:
    normals = np.random.default_rng(seed)
    return lambda sigma, sigma_next: normals.standard_normal(6)


def end(name: str, noise_model: str, sigmas: Any, **options: Any) -> np.ndarray:
    x = np.linspace(-2, 2, 6) * sigmas[0]
    denoise = Mixture(spread=0.3, noise_model=NOISE_MODELS[noise_model])
    *_, last = SAMPLERS[name].run(denoise, x, sigmas, noise=draws(), **options)
    return last.x


SAME = {  # two ways to the same numbers
    "res_a without noise": (("res_multistep_ancestral", {"eta": 0.0}), ("res_multistep", {})),
    "gamma 1 is euler": (("gradient_estimation", {"gamma": 1.0}), ("euler", {})),
    "er_sde 1, ode": (("er_sde", ODE | {"stages": 1}), ("euler", {})),
    "exp_heun sde without noise": (("exp_heun_2_x0_sde", {"eta": 0.0}), ("exp_heun_2_x0", {})),
    "seeds_2 at 1": (("seeds_2", {"r": 1.0, "solver": "phi_2"}), ("exp_heun_2_x0_sde", {})),
    "seeds_2 is 2s": (("seeds_2", {"eta": 0.0}), ("dpmpp_2s_ancestral", {"eta": 0.0})),
}


@pytest.mark.parametrize("noise_model", list(NOISE_MODELS))
@pytest.mark.parametrize("case", list(SAME))
def test_two_names_for_the_same_numbers(case: str, noise_model: str):
    (one, options), (other, others) = SAME[case]
    for sigmas in (INSIDE[noise_model], (*INSIDE[noise_model], 0.0), INSIDE[noise_model][-2:]):
        np.testing.assert_allclose(
            end(one, noise_model, sigmas, **options),
            end(other, noise_model, sigmas, **others),
            rtol=0,
            atol=1e-12,
        )


def test_er_sde_with_the_diffusions_own_noise_is_euler_ancestral():
    one = end("er_sde", "ve", SIGMAS["ve"], stages=1, **REVERSE)
    np.testing.assert_allclose(one, end("euler_ancestral", "ve", SIGMAS["ve"]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("noise_model", list(NOISE_MODELS))
def test_the_first_steps_have_as_many_stages_as_there_is_past(noise_model: str):
    for steps, stages in ((1, 1), (2, 2), (3, 3)):
        sigmas = INSIDE[noise_model][: steps + 1]
        ends = [end("er_sde", noise_model, sigmas, stages=each) for each in (1, 2, 3)]
        assert all(np.array_equal(ends[each], ends[stages - 1]) for each in range(stages, 3))
        assert all(not np.allclose(*pair) for pair in itertools.pairwise(ends[:stages]))


@pytest.mark.parametrize("noise_model", list(NOISE_MODELS))
def test_a_multistep_sampler_starts_with_euler(noise_model: str):
    for name in ("res_multistep", "gradient_estimation"):
        two = INSIDE[noise_model][:2]
        np.testing.assert_allclose(
            end(name, noise_model, two), end("euler", noise_model, two), rtol=0, atol=1e-12
        )
        assert not np.allclose(
            end(name, noise_model, INSIDE[noise_model][:3]),
            end("euler", noise_model, INSIDE[noise_model][:3]),
        )


def measured_order(name: str, noise_model: str, steps: int, **options: Any) -> float:
    """Over one doubling of the steps, even in λ; over several widths, so that no error cancels."""
    first, last = {"ve": (3.0, 0.2), "flow": (0.9, 0.1)}[noise_model]
    start, stop = (NOISE_MODELS[noise_model].half_log_snr(sigma) for sigma in (first, last))
    x, errors = np.array([2.0, -1.0]), [0.0, 0.0]
    for doubling, width in itertools.product((0, 1), (0.3, 0.6, 1.2)):
        denoise = Gaussian(spread=width, noise_model=NOISE_MODELS[noise_model])
        even = np.linspace(start, stop, (steps << doubling) + 1).tolist()
        sigmas = [NOISE_MODELS[noise_model].sigma_at(half_log_snr) for half_log_snr in even]
        *_, step = SAMPLERS[name].run(denoise, x, sigmas, noise=lambda *_: x * 0, **options)
        errors[doubling] += np.abs(step.x - denoise.follow(x, first, last)).max()
    return math.log2(errors[0] / errors[1])


ORDERS = {  # at eta = 0; test_orders.py has those that are ODE samplers by name
    "res_multistep_ancestral": ({"eta": 0.0}, 2),
    "seeds_2": ({"eta": 0.0}, 2),
    "seeds_2 phi_2": ({"eta": 0.0, "solver": "phi_2"}, 2),
    "seeds_2 r 0.8": ({"eta": 0.0, "r": 0.8}, 2),
    "seeds_3": ({"eta": 0.0}, 3),
    "exp_heun_2_x0 phi_1": ({"solver": "phi_1"}, 2),
    "exp_heun_2_x0_sde": ({"eta": 0.0}, 2),
    "gradient_estimation": ({}, 1),
    "gradient_estimation gamma 1": ({"gamma": 1.0}, 1),
    "res_multistep own": ({"written_for": "model"}, 2),
    "er_sde 1": (ODE | {"stages": 1}, 1),
    "er_sde 2": (ODE | {"stages": 2, "points": 2000}, 2),
    "er_sde 3": (ODE | {"stages": 3, "points": 2000}, 2),  # smaller errors, not of higher order
}


@pytest.mark.parametrize("noise_model", list(NOISE_MODELS))
@pytest.mark.parametrize("case", list(ORDERS))
def test_without_noise_the_ode_is_solved_with_the_order_of_the_method(case: str, noise_model: str):
    options, wanted = ORDERS[case]
    steps = 32 if case.startswith("er_sde") else 256
    measured = measured_order(case.split()[0], noise_model, steps, **options)
    assert measured == pytest.approx(wanted, abs=0.15)


def spread(name: str, noise_model: str, steps: int, **options: Any) -> float:
    """The spread of what a sampler ends with, exactly.

    The denoiser is linear, so x is a sum of the start and of the noise handed out, and each of
    those is an axis here.
    """
    denoise = Gaussian(mean=0.0, noise_model=NOISE_MODELS[noise_model])
    even = np.linspace(0, 1, steps)
    if noise_model == "ve":
        sigmas = (14.6 ** (1 / 7) + even * (0.03 ** (1 / 7) - 14.6 ** (1 / 7))) ** 7
    else:
        sigmas = 1 - np.arange(steps) / steps
    axes = iter(np.eye(1 + 3 * steps))
    x = next(axes) * math.hypot(
        sigmas[0], NOISE_MODELS[noise_model].alpha(sigmas[0]) * denoise.spread
    )
    levels = [*sigmas.tolist(), 0.0]
    *_, step = SAMPLERS[name].run(denoise, x, levels, noise=lambda *_: next(axes), **options)
    return float(np.linalg.norm(step.x))


STATIONARY = {
    "er_sde": {},
    "er_sde two": {"stages": 2},
    "er_sde reverse": REVERSE,
    "seeds_2": {},
    "seeds_2 half": {"eta": 0.5},
    "seeds_2 phi_2": {"solver": "phi_2"},
    "seeds_3": {},
    "seeds_3 half": {"eta": 0.5},
    "exp_heun_2_x0_sde": {},
    "res_multistep_ancestral": {"written_for": "model"},
}


@pytest.mark.parametrize("noise_model", list(NOISE_MODELS))
@pytest.mark.parametrize("case", list(STATIONARY))
def test_eighty_steps_end_with_the_spread_of_the_data(case: str, noise_model: str):
    ends = [spread(case.split()[0], noise_model, steps, **STATIONARY[case]) for steps in (80, 320)]
    bars = (
        (0.006, 0.003) if noise_model == "ve" else (0.02, 0.004)
    )  # 0.0009 is the last step's, of VE
    assert all(abs(got - 0.5) < bar for got, bar in zip(ends, bars, strict=True)), ends


def test_comfyuis_res_ancestral_spreads_a_flow_too_far():
    assert spread("res_multistep_ancestral", "flow", 320) > 0.6


@pytest.mark.parametrize("noise_model", list(NOISE_MODELS))
def test_a_step_carries_the_exact_solution_when_the_image_is_known(noise_model: str):
    model = NOISE_MODELS[noise_model]
    image, noise = np.array([0.7, -0.2]), np.array([1.3, 0.4])
    x = image * model.alpha(0.8) + noise * 0.8
    wanted = image * model.alpha(0.3) + noise * 0.3
    np.testing.assert_allclose(ddim_step(model, x, image, 0.8, 0.3), wanted, rtol=0, atol=1e-15)
    kept = exp_minus_h(model, 0.8, 0.3)  # with η = 1 that share of the noise outlives the step
    wanted = image * model.alpha(0.3) + noise * (0.3 * kept)
    np.testing.assert_allclose(
        ddim_step(model, x, image, 0.8, 0.3, 1.0), wanted, rtol=0, atol=1e-15
    )
    assert math.log(kept) == pytest.approx(model.half_log_snr(0.8) - model.half_log_snr(0.3))


def test_the_weight_of_a_slope_loses_no_digits():
    for h in (1e-12, 9.9e-6, 1.1e-5, 1e-3):
        series = h / 2 - h**2 / 6 + h**3 / 24
        assert slope_weight(h) == pytest.approx(series, rel=1e-9)
    assert slope_weight(2.0) == pytest.approx(1 - (1 - math.exp(-2.0)) / 2)
    assert slope_weight(math.inf) == 1


def test_only_pure_noise_is_moved():
    assert finite_start(FLOW, (1.0, 0.5, 0.0), 0.99) == [0.99, 0.5, 0.0]
    assert finite_start(FLOW, (0.995, 0.5), 0.99) == [0.995, 0.5]
    assert finite_start(VE, (1.0, 0.5), 0.99) == [1.0, 0.5]


@pytest.mark.parametrize("noise_model", list(NOISE_MODELS))
@pytest.mark.parametrize(
    "name",
    (
        "res_multistep",
        "res_multistep_ancestral",
        "gradient_estimation",
        "er_sde",
        "seeds_2",
        "seeds_3",
        "exp_heun_2_x0",
        "exp_heun_2_x0_sde",
    ),
)
def test_every_number_of_steps_is_finite(name: str, noise_model: str):
    first = SIGMAS[noise_model][0]
    own = {"written_for": "model"} if name.startswith("res") else {}
    for options in ({}, own):
        for sigmas in ((first, 0.0), (first, 0.5 * first), SIGMAS[noise_model]):
            assert np.isfinite(end(name, noise_model, sigmas, **options)).all()
