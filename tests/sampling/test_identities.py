"""Where two samplers must give the same numbers."""

import math
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import InputError, NotFiniteError
from lydite.sampling.analytic import Mixture
from lydite.sampling.registry import SAMPLERS
from lydite.sampling.sampler_types import FLOW, VE, NoiseModel
from lydite.sampling.samplers.algebra import (
    Churn,
    add_noise,
    ancestral_down,
    reverse_down,
    scale_noise_ratio,
)
from support.denoisers import FunctionDenoiser

NOISE_MODELS = {"ve": VE, "flow": FLOW}
SIGMAS = {
    "ve": [9.0, 4.0, 2.5, 1.1, 0.5, 0.2, 0.04, 0.0],
    "flow": [1.0, 0.93, 0.8, 0.55, 0.3, 0.12, 0.03, 0.0],
}
DRAWN = np.random.default_rng(1).standard_normal((40, 3, 5))


def draws() -> Any:
    handed = iter(DRAWN)
    return lambda *_: next(handed)


def path(
    name: str, noise_model: str, sigmas: list[float] | None = None, **options: Any
) -> np.ndarray:
    """x after each step."""
    levels = SIGMAS[noise_model] if sigmas is None else sigmas
    denoise, start = Mixture(noise_model=NOISE_MODELS[noise_model]), DRAWN[-1] * levels[0]
    steps = SAMPLERS[name].run(denoise, start, levels, noise=draws(), **options)
    return np.stack([step.x for step in steps])


SAME = {  # without noise, or in its simplest form
    "euler_ancestral": (("euler_ancestral", {"eta": 0.0}), ("euler", {})),
    "dpm_2_ancestral": (("dpm_2_ancestral", {"eta": 0.0}), ("dpm_2", {})),
    "dpmpp_2m_sde": (("dpmpp_2m_sde", {"eta": 0.0}), ("dpmpp_2m", {})),
    "dpmpp_sde": (("dpmpp_sde", {"eta": 0.0}), ("dpmpp_2s_ancestral", {"eta": 0.0})),
    "lms": (("lms", {"order": 1}), ("euler", {})),
    "restart": (("restart", {"restarts": ()}), ("heun", {})),
    "few steps": (("restart", {}), ("heun", {})),
}


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
@pytest.mark.parametrize("case", SAME)
def test_two_names_for_the_same_numbers(case: str, noise_model: str):
    (name, options), (plain, plain_options) = SAME[case]
    expected = path(plain, noise_model, **plain_options)
    np.testing.assert_allclose(path(name, noise_model, **options), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
def test_the_2m_solvers_part_after_their_second_step(noise_model: str):
    midpoint, heun = (
        path("dpmpp_2m_sde", noise_model, solver=solver, eta=0.0) for solver in ("midpoint", "heun")
    )
    np.testing.assert_array_equal(midpoint[0], heun[0])
    assert np.abs(midpoint[2] - heun[2]).max() > 1e-4
    np.testing.assert_array_equal(heun, path("dpmpp_2m_sde_heun", noise_model, eta=0.0))


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
def test_two_calls_of_dpm_fast_are_one_step_of_dpm_2(noise_model: str):
    first, last = SIGMAS[noise_model][1], SIGMAS[noise_model][-2]
    (fast,) = path("dpm_fast", noise_model, [first, last, 0.0])
    (step,) = path("dpm_2", noise_model, [first, last])
    np.testing.assert_allclose(fast, step, rtol=1e-12)


def test_the_clock_of_dpmpp_2m_is_sigma_where_comfyui_has_it_so():
    """Its coefficients stay: that is 2M on a flow model taken for a VE one."""
    levels, start = SIGMAS["flow"], DRAWN[-1]
    seen = FunctionDenoiser(Mixture(noise_model=FLOW), VE)
    *_, step = SAMPLERS["dpmpp_2m"].run(seen, start, levels)
    ours = path("dpmpp_2m", "flow", clock="sigma")[-1]
    np.testing.assert_allclose(ours, step.x, rtol=1e-12)
    assert np.abs(ours - path("dpmpp_2m", "flow")[-1]).max() > 1e-3


def test_lms_with_euler_at_its_end_ends_in_the_denoised_image():
    for noise_model in NOISE_MODELS:
        steps = list(
            SAMPLERS["lms"].run(
                Mixture(noise_model=NOISE_MODELS[noise_model]),
                DRAWN[-1] * SIGMAS[noise_model][0],
                SIGMAS[noise_model],
                euler_at_end=True,
            )
        )
        np.testing.assert_allclose(steps[-1].x, steps[-1].denoised, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(steps[-2].x, path("lms", noise_model)[-2])


@dataclass(frozen=True)
class Viewed:
    """A `ve` denoiser seen from a flow: x / (1 − σ) at σ / (1 − σ)."""

    inner: Mixture
    noise_model: NoiseModel = FLOW

    def __call__(self, x: Any, sigma: float) -> Any:
        return self.inner(x / (1 - sigma), sigma / (1 - sigma))


INVARIANT: dict[str, dict[str, Any]] = {
    "euler": {},
    "dpmpp_2m": {},
    "dpmpp_2s_ancestral": {"eta": 0.0},
    "dpmpp_sde": {},
    "dpmpp_2m_sde": {"eta": 0.7},
    "dpmpp_2m_sde_heun": {},
    "dpmpp_3m_sde": {},
}


@pytest.mark.parametrize("name", INVARIANT)
def test_a_sampler_in_lambda_does_the_same_under_both_noise_models(name: str):
    levels, start = SIGMAS["ve"], DRAWN[-1] * 9.0
    plain = SAMPLERS[name].run(Mixture(), start, levels, noise=draws(), **INVARIANT[name])
    seen = SAMPLERS[name].run(
        Viewed(Mixture()),
        start / (1 + levels[0]),
        [sigma / (1 + sigma) for sigma in levels],
        noise=draws(),
        **INVARIANT[name],
    )
    for ours, theirs in zip(seen, plain, strict=True):
        shrunk = theirs.x / (1 + theirs.sigma_next)
        np.testing.assert_allclose(ours.x, shrunk, rtol=1e-10, atol=1e-10)


def test_churn_does_the_same_under_both_noise_models():
    levels, start = SIGMAS["ve"], DRAWN[-1] * 9.0
    churn = {"s_churn": 2.0, "s_noise": 1.1}
    plain = SAMPLERS["euler"].run(Mixture(), start, levels, churn=Churn(draws(), **churn))
    seen = SAMPLERS["euler"].run(
        Viewed(Mixture()),
        start / (1 + levels[0]),
        [sigma / (1 + sigma) for sigma in levels],
        churn=Churn(draws(), **churn),
    )
    for ours, theirs in zip(seen, plain, strict=True):
        shrunk = theirs.x / (1 + theirs.sigma_next)
        np.testing.assert_allclose(ours.x, shrunk, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ("euler", "heun", "dpm_2", "heunpp2"))
def test_no_churn_is_no_churn(name: str):
    for noise_model in NOISE_MODELS:
        churned = path(name, noise_model, churn=Churn(draws(), 0.0))
        np.testing.assert_array_equal(churned, path(name, noise_model))


def test_no_churn_is_larger_than_the_papers():
    for s_churn, factor in ((1.0, 1.1), (4.0, 1.4), (5.0, 2**0.5), (1e9, 2**0.5)):
        _, up = Churn(lambda *_: DRAWN[0], s_churn).add(VE, DRAWN[1], 3.0, 10)
        assert up == pytest.approx(3.0 * factor)


@pytest.mark.parametrize("name", ("euler", "heun", "dpm_2", "heunpp2"))
def test_pure_noise_is_not_churned(name: str):
    one = path(name, "flow", [1.0, 0.5], churn=Churn(draws(), 1.0))
    np.testing.assert_array_equal(one, path(name, "flow", [1.0, 0.5]))


@pytest.mark.parametrize("noise_model", NOISE_MODELS.values(), ids=NOISE_MODELS)
@pytest.mark.parametrize("rule", (ancestral_down, reverse_down))
def test_fresh_noise_makes_up_for_the_noise_taken(rule: Any, noise_model: NoiseModel):
    """A Gaussian of data and noise at the lower sigma is one at the next sigma after it."""
    data = 0.5
    for eta in (0.0, 0.3, 1.0):
        down = rule(noise_model, 0.8, 0.5, eta)
        assert down == 0.5 if eta == 0 else 0 < down < 0.5
        parts = np.array(
            [noise_model.alpha(down) * data, down, 0.0]
        )  # data, old noise, fresh noise
        up = add_noise(noise_model, parts, down, 0.5, np.array([0.0, 0.0, 1.0]))
        assert up[0] == pytest.approx(noise_model.alpha(0.5) * data, rel=1e-12)
        assert math.hypot(up[1], up[2]) == pytest.approx(0.5, rel=1e-12)


def test_eta_beyond_one_takes_all_the_noise_and_no_more():
    assert ancestral_down(VE, 2.0, 1.0, 5.0) == 0
    assert ancestral_down(FLOW, 0.8, 0.4, 5.0) == 0
    for name in ("euler_ancestral", "dpm_2_ancestral", "dpmpp_2s_ancestral", "dpmpp_sde"):
        for noise_model in NOISE_MODELS:
            assert np.isfinite(path(name, noise_model, eta=5.0)).all()


def test_a_share_of_the_noise_to_image_ratio():
    assert scale_noise_ratio(VE, 2.0, 0.25) == pytest.approx(0.5)
    assert scale_noise_ratio(FLOW, 0.5, 1 / 3) == pytest.approx(0.25)  # 1:1 becomes 1:3
    assert scale_noise_ratio(FLOW, 0.5, 0.0) == 0


def test_dpm_solvers_ask_for_noise_where_eta_does():
    for name in ("dpm_fast", "dpm_adaptive"):
        with pytest.raises(InputError, match="pass a source of it"):
            SAMPLERS[name].run(Mixture(), DRAWN[0], [2.0, 0.1, 0.0], eta=1.0)
        with pytest.raises(InputError, match="pass a source of noise"):
            list(SAMPLERS[name].function(Mixture(), DRAWN[0], [2.0, 0.1, 0.0], eta=1.0))


def test_dpm_adaptive_says_so_where_it_cannot_go_on():
    def run(function: Any, **options: Any) -> None:
        denoise = FunctionDenoiser(function)
        list(SAMPLERS["dpm_adaptive"].run(denoise, DRAWN[0], [2.0, 0.1, 0.0], **options))

    signs = cycle((1.0, -1.0))
    with pytest.raises(NotFiniteError, match=r"sigma 2\.0"):
        run(lambda x, sigma: x * np.nan)
    with pytest.raises(InputError, match="allow more"):
        run(lambda x, sigma: x * 0 + next(signs), atol=1e-12, rtol=0.0)
    with pytest.raises(InputError, match="expected 2 or 3"):
        run(lambda x, sigma: x, order=4)
