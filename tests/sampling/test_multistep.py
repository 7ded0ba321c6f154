"""Solvers that look back, DDIM and its relatives: identities, ends, calls and refusals."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.sampling.analytic import Gaussian, Mixture
from lydite.sampling.registry import SAMPLERS
from lydite.sampling.sampler_types import FLOW, VE
from lydite.sampling.samplers import consistency, ddim, deis, dpm_solver, pndm, sa_solver, unipc
from lydite.sampling.samplers.dpm_solver import sample_dpm_multistep, sample_dpm_singlestep
from support.denoisers import FunctionDenoiser

NOISE_MODELS = {"ve": VE, "flow": FLOW}
SIGMAS = {
    "ve": [9.0, 4.0, 2.5, 1.1, 0.5, 0.2, 0.04, 0.0],
    "flow": [1.0, 0.93, 0.8, 0.55, 0.3, 0.12, 0.03, 0.0],
}
DRAWN = np.random.default_rng(1).standard_normal((40, 3, 5))
FAMILIES = (ddim, pndm, dpm_solver, deis, unipc, sa_solver, consistency)
MINE = {sampler.name: sampler for family in FAMILIES for sampler in family.METHODS}
NO_CORRECTOR = {"disable_corrector": range(999)}


@dataclass
class Draws:
    """Known noise in order, and between which sigmas it was asked for."""

    asked: list[tuple[float, float]]
    make: Callable[[Any], Any] = np.asarray

    def __call__(self, sigma: float, sigma_next: float) -> Any:
        self.asked.append((sigma, sigma_next))
        return self.make(DRAWN[len(self.asked) - 1])


def path(
    sampler: Any, noise_model: str, sigmas: Sequence[float] | None = None, **options: Any
) -> Any:
    """x after each step."""
    name, *more = sampler if isinstance(sampler, tuple) else (sampler,)
    options = (more[0] if more else {}) | options
    levels = SIGMAS[noise_model] if sigmas is None else sigmas
    denoise = options.pop("denoise", Mixture(noise_model=NOISE_MODELS[noise_model]))
    sample = name
    if isinstance(name, str):
        sample = SAMPLERS[name].function
        if SAMPLERS[name].noise != "none" or options.get("eta"):
            options.setdefault("noise", Draws([]))
    return np.stack([step.x for step in sample(denoise, DRAWN[-1] * levels[0], levels, **options)])


ON_NOISE = {"kind": "noise", "lower_order_final": False}
SAME = {
    "ddim is euler": ("ddim", "euler"),
    "downwards the inverse is ddim": ("ddim_inverse", "ddim"),
    "ddpm is ddim with all noise fresh": ("ddpm", ("ddim", {"eta": 1.0})),
    "tcd without noise is ddim": (("tcd", {"gamma": 0.0}), "ddim"),
    "multistep of order 1": ((sample_dpm_multistep, {"order": 1}), "ddim"),
    "on noise": ((sample_dpm_multistep, {"order": 1, "kind": "noise"}), "ddim"),
    "singlestep of order 1": ((sample_dpm_singlestep, {"order": 1}), "ddim"),
    "uni_pc of order 1": (("uni_pc", {"order": 1, **NO_CORRECTOR}), "ddim"),
    "deis of order 1": (("deis", {"order": 1}), "ddim"),
    "deis_tab of order 1": (("deis_tab", {"order": 1}), "ddim"),
    "ipndm of order 1": (("ipndm", {"order": 1}), "euler"),
    "2m": ((sample_dpm_multistep, {"order": 2}), "dpmpp_2m"),
    "2m by its predictor": (("uni_pc_bh2", {"order": 2, **NO_CORRECTOR}), "dpmpp_2m"),
    "3m": (
        ("dpmsolverpp_3m", {"solver": "heun", "lower_order_final": False}),
        ("dpmpp_3m_sde", {"eta": 0.0}),
    ),
    "deis of order 2": (
        ("deis", {"lower_order_final": False}),
        (sample_dpm_multistep, {"solver": "heun", **ON_NOISE}),
    ),
    "deis of order 3": (
        ("deis", {"order": 3, "lower_order_final": False}),
        (sample_dpm_multistep, {"order": 3, "solver": "heun", "curvature": 1.0, **ON_NOISE}),
    ),
    "ipndm_v with Adams and Bashforth's weights": (
        ("ipndm_v", {"exact": True, "end": "adams"}),
        "lms",
    ),
}


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
@pytest.mark.parametrize("case", SAME)
def test_two_names_for_the_same_numbers(case: str, noise_model: str):
    first, second = (path(each, noise_model) for each in SAME[case])
    np.testing.assert_allclose(first, second, rtol=1e-11, atol=1e-11)


def test_2m_with_its_slope_integrated_is_res_multistep():
    first = path((sample_dpm_multistep, {"solver": "heun"}), "ve")
    np.testing.assert_allclose(first, path("res_multistep", "ve"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("eta", (0.3, 1.0))
def test_ddim_with_noise_is_euler_ancestral(eta: float):
    first, second = (path((name, {"eta": eta}), "ve") for name in ("ddim", "euler_ancestral"))
    np.testing.assert_allclose(first, second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
def test_tcd_with_all_noise_fresh_is_lcm(noise_model: str):
    first, second = path(("tcd", {"gamma": 1.0}), noise_model), path("lcm", noise_model)
    np.testing.assert_allclose(first, second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", (1, 2, 3))
def test_on_even_steps_both_ipndm_have_the_same_weights_up_to_order_three(order: int):
    sigmas = np.linspace(4.0, 0.5, 8).tolist()
    first, second = (path((name, {"order": order}), "ve", sigmas) for name in ("ipndm", "ipndm_v"))
    np.testing.assert_allclose(first, second, rtol=1e-12)
    third = path("ipndm_v", "ve", sigmas)
    np.testing.assert_allclose(third[:3], path("ipndm", "ve", sigmas)[:3], rtol=1e-12)
    assert np.abs(third - path("ipndm", "ve", sigmas)).max() > 1e-4  # 11/24 instead of 9/24


@pytest.mark.parametrize("name", ("ipndm", "ipndm_v"))
def test_a_last_step_of_ipndm_is_like_any_other_or_takes_the_denoised_image(name: str):
    steps = {
        end: list(SAMPLERS[name].run(Mixture(), DRAWN[-1] * 9, SIGMAS["ve"], end=end))
        for end in ("adams", "denoised")
    }
    last = steps["denoised"][-1]
    np.testing.assert_array_equal(last.x, last.denoised)
    assert np.abs(steps["adams"][-1].x - last.x).max() > 1e-5
    np.testing.assert_array_equal(steps["adams"][-2].x, steps["denoised"][-2].x)


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
def test_an_image_that_stays_makes_all_solvers_exact(noise_model: str):
    image = FunctionDenoiser(lambda x, sigma: x * 0 + 0.7, NOISE_MODELS[noise_model])
    exact = path("ddim", noise_model, denoise=image)
    for name, sampler in MINE.items():
        if sampler.noise == "none":
            options = {"exact": True} if name == "ipndm_v" else {}
            got = path((name, options), noise_model, denoise=image)
            np.testing.assert_allclose(got, exact, rtol=1e-9, atol=1e-9, err_msg=name)
    assert (
        np.abs(path("ipndm_v", noise_model, denoise=image) - exact).max() > 0.01
    )  # ComfyUI's weights
    ancestral = path("ddpm", noise_model, denoise=image)
    for name in ("sa_solver", "sa_solver_pece"):
        got = path((name, {"tau": lambda *_: 1.0}), noise_model, denoise=image)
        np.testing.assert_allclose(got, ancestral, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
@pytest.mark.parametrize("name", MINE)
def test_one_step_to_zero_is_the_denoised_image(name: str, noise_model: str):
    if noise_model in MINE[name].noise_models:
        start = SIGMAS[noise_model][0]
        expected = Mixture(noise_model=NOISE_MODELS[noise_model])(DRAWN[-1] * start, start)
        (x,) = path(name, noise_model, [start, 0.0])
        np.testing.assert_allclose(x, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lower", (True, False))
@pytest.mark.parametrize("kind", ("data", "noise"))
@pytest.mark.parametrize("order", (1, 2, 3))
def test_every_order_is_finite_from_pure_noise_to_none(order: int, kind: str, lower: bool):
    samplers = (
        (sample_dpm_multistep, {"solver": "midpoint"}),
        (sample_dpm_multistep, {"solver": "heun"}),
        (sample_dpm_singlestep, {"solver": "midpoint"}),
        (sample_dpm_singlestep, {"solver": "heun"}),
        ("uni_pc", {}),
        ("uni_pc_bh2", {}),
    )
    for steps in (1, 2, 3, 4, 5, 16):
        sigmas = np.linspace(1, 0, steps + 1).tolist()
        for sampler in samplers:
            options = {"kind": kind, "order": order, "lower_order_final": lower}
            states = path(sampler, "flow", sigmas, **options)
            assert np.isfinite(states).all()
            assert len(states) == steps


@pytest.mark.parametrize("orders", ((1, 1), (2, 2), (3, 4)))
@pytest.mark.parametrize("tau", (0.0, 0.5, 1.0))
@pytest.mark.parametrize("pece", (False, True))
def test_sa_solver_is_finite_from_pure_noise_to_none(orders: Any, tau: float, pece: bool):
    for steps in (1, 2, 3, 4, 5, 16):
        for taper in ((0, 2), (-1, 0), None):
            states = path(
                ("sa_solver", {"predictor_order": orders[0], "corrector_order": orders[1]}),
                "flow",
                np.linspace(1, 0, steps + 1).tolist(),
                tau=lambda *_: tau,
                pece=pece,
                taper=taper,
            )
            assert np.isfinite(states).all()


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
def test_inversion_shows_the_image_to_the_network_as_if_it_were_noisier(noise_model: str):
    sigma, seen = 0.6, []

    def shown(x: np.ndarray, asked: float) -> np.ndarray:
        seen.append((x, asked))
        return x * 0 + 0.7

    denoise = FunctionDenoiser(shown, NOISE_MODELS[noise_model])
    (step,) = SAMPLERS["ddim_inverse"].run(denoise, DRAWN[0], [0.0, sigma])
    ((there, asked),) = seen
    size = math.hypot(1, sigma) if noise_model == "ve" else 1.0
    np.testing.assert_allclose(there, DRAWN[0] * size, rtol=1e-14)
    assert asked == sigma
    alpha = NOISE_MODELS[noise_model].alpha(sigma)
    np.testing.assert_allclose(step.x, DRAWN[0] * alpha + there - alpha * 0.7, rtol=1e-12)
    np.testing.assert_array_equal(step.denoised, DRAWN[0])


def test_inversion_comes_back_to_where_it_started():
    """Upwards the network is asked at the far end, downwards at the near one: the same sigma."""
    for noise_model, top in (("ve", 3.0), ("flow", 0.8)):
        gaps = []
        for steps in (20, 40, 80):
            rising = np.linspace(0, top, steps + 1).tolist()
            data = Gaussian(noise_model=NOISE_MODELS[noise_model])
            *_, up = SAMPLERS["ddim_inverse"].run(data, DRAWN[0], rising)
            *_, down = SAMPLERS["ddim"].run(data, up.x, rising[::-1])
            gaps.append(float(np.abs(down.x - DRAWN[0]).max()))
            assert up.sigma < up.sigma_next == top
        assert gaps[0] < 0.2
        ratios = [coarse / fine for coarse, fine in pairwise(gaps)]
        assert ratios == pytest.approx([2, 2], abs=0.2)


CALLS = {"plms": 8, "pndm": 16, "sa_solver_pece": 13}  # in seven steps; one each otherwise


@pytest.mark.parametrize("name", MINE)
def test_calls_are_counted_and_noise_is_asked_for_between_the_sigmas_of_a_step(name: str):
    calls: list[float] = []

    def counted(x: np.ndarray, sigma: float) -> np.ndarray:
        calls.append(sigma)
        return Mixture()(x, sigma)

    draws = Draws([])
    start, sigmas = DRAWN[-1] * 9, SIGMAS["ve"]
    steps = list(MINE[name].run(FunctionDenoiser(counted), start, sigmas, noise=draws))
    assert [(step.sigma, step.sigma_next) for step in steps] == list(pairwise(sigmas))
    assert len(calls) == CALLS.get(name, 7)
    assert all(type(sigma) is float and sigma > 0 for sigma in calls)
    between = [(step.sigma, step.sigma_next) for step in steps if step.sigma_next > 0]
    wanted = between if MINE[name].noise != "none" else []
    if name.startswith("sa_solver"):
        wanted = [pair for pair in between if 0.5705 <= pair[0] <= 5.1227]
    assert draws.asked == wanted


@pytest.mark.parametrize("name", MINE)
def test_mlx_arrays_give_the_numbers_of_numpy(name: str):
    sigmas = SIGMAS["ve"]
    data, start = Gaussian(), (DRAWN[-1] * 9).astype(np.float32)

    def states(make: Callable[[Any], Any]) -> list[Any]:
        noise = Draws([], lambda drawn: make(drawn.astype(np.float32)))
        return [step.x for step in MINE[name].run(data, make(start), sigmas, noise=noise)]

    for ours, theirs in zip(states(mx.array), states(np.asarray), strict=True):
        assert isinstance(ours, mx.array)
        assert ours.dtype == mx.float32
        np.testing.assert_allclose(np.array(ours), theirs, rtol=1e-5, atol=1e-5)


def test_the_noise_of_sa_solver_can_be_turned_down():
    draws = Draws([])
    half = path(("sa_solver", {"noise": lambda *ends: draws(*ends) * 0.5}), "ve")
    np.testing.assert_allclose(path(("sa_solver", {"s_noise": 0.5}), "ve"), half, rtol=1e-12)
    assert np.abs(path("sa_solver", "ve") - half).max() > 0.1


def test_what_cannot_be_done_is_refused():
    for eta in (-0.1, 1.1, math.nan):
        with pytest.raises(InputError, match=r"^eta is .*; expected a number from 0 to 1\.$"):
            path(("ddim", {"eta": eta}), "ve")
    with pytest.raises(InputError, match=r"^eta is 0\.5; pass a source of noise"):
        path(("ddim", {"eta": 0.5}), "ve", noise=None)
    with pytest.raises(InputError, match=r"^gamma is 1\.5; expected"):
        path(("tcd", {"gamma": 1.5}), "ve")
    with pytest.raises(InputError, match="sde_dpmsolver_2m is for eps and v models"):
        MINE["sde_dpmsolver_2m"].run(
            Gaussian(noise_model=FLOW), DRAWN[0], [1.0, 0.0], noise=Draws([])
        )
