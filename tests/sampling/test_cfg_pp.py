"""CFG++: what it is where it is the plain sampler, what it is in the paper, and where ComfyUI errs.

The numbers of ComfyUI are in test_comfyui.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from lydite.sampling.analytic import Gaussian, Mixture
from lydite.sampling.denoiser import cfg
from lydite.sampling.registry import SAMPLERS
from lydite.sampling.sampler_types import FLOW, VE, NoiseModel
from lydite.sampling.samplers.algebra import ddim_step
from lydite.sampling.samplers.cfg_pp import renoised, shifted

NOISE_MODELS = {"ve": VE, "flow": FLOW}
SIGMAS = {"ve": (9.0, 4.0, 1.5, 0.6, 0.2, 0.0), "flow": (1.0, 0.9, 0.7, 0.45, 0.2, 0.0)}
PAIRS = [name for name, sampler in SAMPLERS.items() if sampler.pair]
START: dict[str, Any] = {"uncond_of": "start"}
OWN: dict[str, Any] = {"written_for": "model"}
STILL: dict[str, Any] = {"eta": 0.0}


@dataclass(frozen=True)
class Guided:
    """A prompt that `scale` says to follow: 0 not at all, 1 to the letter."""

    noise_model: NoiseModel
    scale: float

    def __call__(self, x: Any, sigma: float) -> Any:
        return self.pair(x, sigma)[0]

    def pair(self, x: Any, sigma: float) -> tuple[Any, Any]:
        uncond = Gaussian(-0.2, 0.6, self.noise_model)(x, sigma)
        return cfg(
            uncond, Mixture(spread=0.3, noise_model=self.noise_model)(x, sigma), self.scale
        ), uncond


def draws(seed: int = 3) -> Callable[[float, float], np.ndarray]:
    normals = np.random.default_rng(seed)
    return lambda sigma, sigma_next: normals.standard_normal(6)


def end(
    name: str, noise_model: str, scale: float = 0.0, sigmas: Any = None, **options: Any
) -> np.ndarray:
    levels = sigmas or SIGMAS[noise_model]
    x = np.linspace(-2, 2, 6) * levels[0]
    denoise = Guided(NOISE_MODELS[noise_model], scale)
    *_, last = SAMPLERS[name].run(denoise, x, levels, noise=draws(), **options)
    return last.x


PLAIN: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "euler": ("euler_cfg_pp", "ve flow", {}, "euler", {}),
    "ddim": ("ddim_cfg_pp", "ve flow", {}, "euler", {}),
    "euler_a": ("euler_ancestral_cfg_pp", "ve", {}, "euler_ancestral", {}),
    "euler_a half": ("euler_ancestral_cfg_pp", "ve", {"eta": 0.5}, "euler_ancestral", {"eta": 0.5}),
    "euler_a still": ("euler_ancestral_cfg_pp", "ve flow", STILL, "euler", {}),
    "2s": ("dpmpp_2s_ancestral_cfg_pp", "ve", START, "dpmpp_2s_ancestral", {}),
    "2s still": (
        "dpmpp_2s_ancestral_cfg_pp",
        "ve flow",
        START | OWN | STILL,
        "dpmpp_2s_ancestral",
        STILL,
    ),
    "2m": ("dpmpp_2m_cfg_pp", "ve", {}, "dpmpp_2m", {}),
    "2m own": ("dpmpp_2m_cfg_pp", "ve flow", OWN, "dpmpp_2m", {}),
    "res": ("res_multistep_cfg_pp", "ve flow", {}, "res_multistep", {}),
    "res own": ("res_multistep_cfg_pp", "ve flow", OWN, "res_multistep", OWN),
    "res_a": ("res_multistep_ancestral_cfg_pp", "ve flow", {}, "res_multistep_ancestral", {}),
    "res_a own": ("res_multistep_ancestral_cfg_pp", "ve flow", OWN, "res_multistep_ancestral", OWN),
    "res_a still": ("res_multistep_ancestral_cfg_pp", "ve flow", STILL, "res_multistep", {}),
    "ge": ("gradient_estimation_cfg_pp", "ve flow", {}, "gradient_estimation", {}),
    "ge own": ("gradient_estimation_cfg_pp", "ve flow", OWN, "gradient_estimation", {}),
}


@pytest.mark.parametrize("case", list(PLAIN))
def test_without_a_prompt_it_is_the_plain_sampler(case: str):
    name, noise_models, options, plain, others = PLAIN[case]
    for noise_model in noise_models.split():
        for sigmas in (
            SIGMAS[noise_model],
            SIGMAS[noise_model][:-1],
            SIGMAS[noise_model][:2],
            (SIGMAS[noise_model][0], 0.0),
        ):
            np.testing.assert_allclose(
                end(name, noise_model, 0.0, sigmas, **options),
                end(plain, noise_model, 0.0, sigmas, **others),
                rtol=0,
                atol=1e-12,
            )


def test_every_cfg_pp_sampler_has_its_plain_one():
    assert {case[0] for case in PLAIN.values()} == set(PAIRS)


@pytest.mark.parametrize("noise_model", list(NOISE_MODELS))
@pytest.mark.parametrize("case", list(PLAIN))
def test_with_a_prompt_it_is_another_sampler(case: str, noise_model: str):
    name, _, options, plain, others = PLAIN[case]
    inside = SIGMAS[noise_model][1:-1]
    ours, theirs = (
        end(name, noise_model, 1.5, inside, **options),
        end(plain, noise_model, 1.5, inside, **others),
    )
    assert np.abs(ours - theirs).max() > 0.05


@pytest.mark.parametrize("name", ("euler_cfg_pp", "ddim_cfg_pp"))
def test_it_is_the_papers_ddim_in_vp_coordinates(name: str):
    # The guided image at √ᾱ', and √(1 − ᾱ') of the unconditional noise.
    model = Guided(VE, 0.6)
    x = np.linspace(-2, 2, 6) * 9.0
    z = x / math.hypot(1, 9.0)
    steps = SAMPLERS[name].run(model, x, SIGMAS["ve"])
    for step in steps:
        kept, kept_next = (1 / (1 + level**2) for level in (step.sigma, step.sigma_next))
        guided, uncond = model.pair(z / math.sqrt(kept), step.sigma)
        noise = (z - uncond * math.sqrt(kept)) / math.sqrt(1 - kept)
        z = guided * math.sqrt(kept_next) + noise * math.sqrt(1 - kept_next)
        np.testing.assert_allclose(step.x * math.sqrt(kept_next), z, rtol=0, atol=1e-12)
        np.testing.assert_allclose(step.denoised, guided, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ("euler_ancestral_cfg_pp", "ddim_cfg_pp"))
def test_eta_is_that_of_ddim(name: str):
    # Song et al. (2021), equation 16, for the noise; the rest of the step as above.
    model, eta, fresh, other = Guided(VE, 0.6), 0.7, draws(), draws()
    x = np.linspace(-2, 2, 6) * 9.0
    z = x / math.hypot(1, 9.0)
    run = SAMPLERS[name].run(model, x, SIGMAS["ve"][:-1], noise=fresh, eta=eta)
    for step in run:
        kept, kept_next = (1 / (1 + level**2) for level in (step.sigma, step.sigma_next))
        guided, uncond = model.pair(z / math.sqrt(kept), step.sigma)
        noise = (z - uncond * math.sqrt(kept)) / math.sqrt(1 - kept)
        width = eta * math.sqrt((1 - kept_next) / (1 - kept) * (1 - kept / kept_next))
        z = guided * math.sqrt(kept_next) + noise * math.sqrt(1 - kept_next - width**2)
        z = z + other(step.sigma, step.sigma_next) * width
        np.testing.assert_allclose(step.x * math.sqrt(kept_next), z, rtol=0, atol=1e-12)


@pytest.mark.parametrize("noise_model", list(NOISE_MODELS))
def test_a_plain_step_from_the_moved_x_is_one_of_cfg_pp(noise_model: str):
    x, (guided, uncond) = np.array([0.4, -1.0]), np.array([[0.7, 0.1], [0.2, -0.6]])
    moved = shifted(NOISE_MODELS[noise_model], x, guided, uncond, 0.8)
    plain = ddim_step(NOISE_MODELS[noise_model], moved, guided, 0.8, 0.3)
    wanted = renoised(NOISE_MODELS[noise_model], x, guided, uncond, 0.8, 0.3)
    np.testing.assert_allclose(plain, wanted, rtol=0, atol=1e-15)


FIRST_ORDER = {
    "euler_cfg_pp": {},
    "euler_ancestral_cfg_pp": STILL,
    "dpmpp_2m_cfg_pp": OWN,
    "res_multistep_cfg_pp": OWN,
    "res_multistep_ancestral_cfg_pp": OWN | STILL,
    "gradient_estimation_cfg_pp": OWN,
}


@pytest.mark.parametrize("noise_model", list(NOISE_MODELS))
@pytest.mark.parametrize("name", list(FIRST_ORDER))
def test_a_first_step_puts_unconditional_noise_on_the_guided_image(name: str, noise_model: str):
    sigma, sigma_next = SIGMAS[noise_model][1:3]
    x = np.linspace(-2, 2, 6) * sigma
    guided, uncond = Guided(NOISE_MODELS[noise_model], 1.5).pair(x, sigma)
    noise = (x - uncond * NOISE_MODELS[noise_model].alpha(sigma)) / sigma
    wanted = guided * NOISE_MODELS[noise_model].alpha(sigma_next) + noise * sigma_next
    got = end(name, noise_model, 1.5, (sigma, sigma_next), **FIRST_ORDER[name])
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in FIRST_ORDER if not name.startswith("euler")])
def test_written_for_ve_a_step_of_a_flow_leans_on_the_prompt_by_its_sigma(name: str):
    sigma, sigma_next = 0.9, 0.7
    guided, uncond = Guided(FLOW, 1.5).pair(np.linspace(-2, 2, 6) * sigma, sigma)
    options = FIRST_ORDER[name]
    excess = end(name, "flow", 1.5, (sigma, sigma_next), **(options | {"written_for": "ve"})) - end(
        name, "flow", 1.5, (sigma, sigma_next), **options
    )
    np.testing.assert_allclose(excess, (guided - uncond) * sigma_next, rtol=0, atol=1e-12)


@pytest.mark.parametrize("noise_model", list(NOISE_MODELS))
def test_comfyuis_2s_does_not_converge_and_the_method_does(noise_model: str):
    first, last = {"ve": (3.0, 0.2), "flow": (0.9, 0.1)}[noise_model]
    model = Guided(NOISE_MODELS[noise_model], 0.0)  # no prompt: the ODE of a Gaussian
    x = np.array([2.0, -1.0])
    exact = Gaussian(-0.2, 0.6, NOISE_MODELS[noise_model]).follow(x, first, last)

    def error(steps: int, **options: Any) -> float:
        sigmas = np.linspace(first, last, steps + 1).tolist()
        run = SAMPLERS["dpmpp_2s_ancestral_cfg_pp"].run(
            model, x, sigmas, noise=draws(), eta=0.0, **options
        )
        *_, step = run
        return float(np.abs(step.x - exact).max())

    assert error(1000) > 0.9 * error(500) > 0.05
    assert math.log2(error(500, **START) / error(1000, **START)) == pytest.approx(2, abs=0.15)


@pytest.mark.parametrize("noise_model", list(NOISE_MODELS))
@pytest.mark.parametrize("name", PAIRS)
def test_every_number_of_steps_is_finite_and_ends_in_the_guided_image(name: str, noise_model: str):
    choices = (
        [{}] if name in ("euler_cfg_pp", "ddim_cfg_pp", "euler_ancestral_cfg_pp") else [{}, OWN]
    )
    first = SIGMAS[noise_model][0]
    for options in choices:
        for sigmas in ((first, 0.0), (first, 0.5 * first, 0.0), SIGMAS[noise_model]):
            x = np.linspace(-2, 2, 6) * first
            run = SAMPLERS[name].run(
                Guided(NOISE_MODELS[noise_model], 1.5), x, sigmas, noise=draws(), **options
            )
            *_, last = run
            assert np.isfinite(last.x).all()
            np.testing.assert_allclose(last.x, last.denoised, rtol=0, atol=1e-12)
