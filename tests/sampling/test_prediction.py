"""Prediction types against k-diffusion, ComfyUI and diffusers, and the facts that hold without."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.sampling.denoiser import (
    EDM,
    EPS,
    PREDICTIONS,
    VELOCITY,
    X0,
    Guided,
    Prediction,
    V,
    constant,
    find_prediction,
)
from lydite.sampling.program_conventions import strength_steps
from lydite.sampling.registry import make_schedule
from lydite.sampling.sampler_types import FLOW, VE
from lydite.sampling.schedules.flow import FlowSigmas
from lydite.sampling.schedules.schedule import from_step
from lydite.sampling.schedules.table import STABLE_DIFFUSION

GOLDEN = np.load(Path(__file__).with_name("golden") / "schedules.npz")
GIVEN = {
    name: values.astype(np.float64)
    for name, values in zip(("image", "noise", "output"), GOLDEN["inputs"], strict=True)
}
RNG = np.random.default_rng(0)
IMAGE = RNG.standard_normal((1, 16, 8, 8)).astype(np.float32)
NOISE = RNG.standard_normal((1, 16, 8, 8)).astype(np.float32)
SIGMAS = {name: (0.05, 0.4, 0.9) if name == "flow" else (0.05, 1.0, 9.0) for name in PREDICTIONS}
CASES = [(name, sigma) for name in PREDICTIONS for sigma in SIGMAS[name]]


@pytest.mark.parametrize(("name", "sigma"), CASES)
def test_each_type_is_comfyuis(name: Any, sigma: float):
    kind = PREDICTIONS[name]

    def theirs(what: str) -> np.ndarray:
        return GOLDEN[f"comfyui/prediction/{name}/{sigma}/{what}"]

    x = kind.noised(GIVEN["image"], GIVEN["noise"], sigma)
    ours = {
        "noised": x,
        "full": kind.start(GIVEN["noise"], sigma, unit_variance=True),
        "input": x * kind.c_in(sigma),
        "denoised": kind.denoised(x, GIVEN["output"], sigma),
    }
    for what, values in ours.items():
        np.testing.assert_allclose(values, theirs(what), rtol=2e-6, atol=2e-6, err_msg=what)


@pytest.mark.parametrize("sigma", (0.05, 1.0, 9.0))
@pytest.mark.parametrize("name", ("eps", "v"))
def test_eps_and_v_are_k_diffusions(name: str, sigma: float):
    seen: list[Any] = []

    def network(x: np.ndarray, timestep: float, prompts: Sequence[int]) -> list[np.ndarray]:
        seen.extend((x, timestep))
        return [GIVEN["output"]]

    timestep_of = STABLE_DIFFUSION.timestep_of
    denoise = Guided(network, PREDICTIONS[name], timestep_of, constant(1.0), prompts=1)
    denoised = denoise(GIVEN["image"] + GIVEN["noise"] * sigma, sigma)
    found = {"input": seen[0], "timestep": seen[1], "denoised": denoised}
    for what, values in found.items():
        theirs = GOLDEN[f"k-diffusion/prediction/{name}/{sigma}/{what}"]
        np.testing.assert_allclose(values, theirs, rtol=2e-6, atol=2e-6, err_msg=what)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("kind", "theirs"), ((EPS, "epsilon"), (V, "v_prediction"), (X0, "sample")), ids=str
)
def test_the_denoised_image_is_that_of_diffusers_euler(kind: Prediction, theirs: str):
    torch, diffusers = pytest.importorskip("torch"), pytest.importorskip("diffusers")
    scheduler = diffusers.EulerDiscreteScheduler(prediction_type=theirs)
    scheduler.set_timesteps(7)
    x, output = torch.from_numpy(IMAGE * 3), torch.from_numpy(NOISE)
    step = scheduler.step(output, scheduler.timesteps[0], x)
    ours = kind.denoised(x, output, float(scheduler.sigmas[0]))
    np.testing.assert_allclose(ours, step.pred_original_sample, rtol=1e-5, atol=1e-4)
    scheduler._step_index = 0
    scaled = scheduler.scale_model_input(x, scheduler.timesteps[0])
    np.testing.assert_allclose(x * kind.c_in(float(scheduler.sigmas[0])), scaled, rtol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("sigma", (0.002, 0.7, 80.0))
def test_edm_is_that_of_diffusers(sigma: float):
    torch, diffusers = pytest.importorskip("torch"), pytest.importorskip("diffusers")
    scheduler = diffusers.EDMEulerScheduler(sigma_data=0.5)
    x, output = torch.from_numpy(IMAGE * sigma), torch.from_numpy(NOISE)
    theirs = scheduler.precondition_outputs(x, output, torch.tensor(sigma))
    np.testing.assert_allclose(EDM.denoised(x, output, sigma), theirs, rtol=1e-5, atol=1e-6)
    theirs = scheduler.precondition_inputs(x, torch.tensor(sigma))
    np.testing.assert_allclose(x * EDM.c_in(sigma), theirs, rtol=1e-6, atol=0)


# What a network without fault would output, for the image and the noise in x.
PERFECT: dict[str, Callable[[float], Any]] = {
    "eps": lambda sigma: NOISE,
    "v": lambda sigma: (NOISE - IMAGE * sigma) / np.hypot(1, sigma),
    "edm": lambda sigma: (IMAGE * sigma**2 - NOISE * sigma * 0.25) / (0.5 * sigma)
    / np.hypot(sigma, 0.5),
    "x0": lambda sigma: IMAGE,
    "flow": lambda sigma: NOISE - IMAGE,
    "cosmos": lambda sigma: NOISE - IMAGE,
}  # fmt: skip


@pytest.mark.parametrize(("name", "sigma"), CASES)
def test_a_network_without_fault_leads_back_to_the_image(name: str, sigma: float):
    kind = PREDICTIONS[name]
    x = kind.noised(IMAGE, NOISE, sigma)
    denoised = kind.denoised(x, PERFECT[name](sigma).astype(np.float32), sigma)
    np.testing.assert_allclose(denoised, IMAGE, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", PREDICTIONS)
def test_the_input_of_the_network_has_the_spread_it_was_trained_on(name: str):
    kind = PREDICTIONS[name]
    if name in ("flow", "cosmos"):  # between 0.7 and 1, by design
        return
    for sigma in SIGMAS[name]:
        spread = np.hypot(kind.sigma_data, sigma)  # of data of spread sigma_data, noised
        assert spread * kind.c_in(sigma) == pytest.approx(1)


@pytest.mark.parametrize("name", PREDICTIONS)
def test_every_type_is_finite_at_the_ends(name: str):
    kind = PREDICTIONS[name]
    for sigma in (0.0, 1.0) if name == "flow" else (0.0, 4518.0):
        for value in (kind.c_in(sigma), kind.c_skip(sigma), kind.c_out(sigma)):
            assert np.isfinite(value)
    x = kind.noised(IMAGE, NOISE, 0.0)
    np.testing.assert_array_equal(x, IMAGE)
    if name != "x0":  # there the network is all there is
        np.testing.assert_allclose(kind.denoised(x, NOISE, 0.0), IMAGE, rtol=1e-6)


def test_the_noise_models():
    assert {name: kind.noise_model for name, kind in PREDICTIONS.items()} == {
        name: FLOW if name == "flow" else VE for name in PREDICTIONS
    }


def test_a_run_that_ends_early_gives_the_share_of_the_image_back():
    assert VELOCITY.unscaled(np.array([0.6]), 0.4) == pytest.approx(1.0)
    assert VELOCITY.unscaled(np.array([0.6]), 0.0) == 0.6
    assert EPS.unscaled(np.array([0.6]), 0.4) == 0.6


@pytest.mark.parametrize("name", ("karras", "linspace", "leading"))
def test_a_network_gets_the_timestep_of_the_schedule(name: str):
    schedule = make_schedule(name, 5, STABLE_DIFFUSION)
    timesteps: list[float] = []

    def network(x: mx.array, timestep: float, prompts: Sequence[int]) -> list[mx.array]:
        timesteps.append(timestep)
        return [x * 0.0]

    denoise = Guided(network, EPS, schedule.timestep_of, constant(1.0), prompts=1)
    for sigma in schedule.sigmas[:-1].tolist():
        assert isinstance(denoise(mx.array(IMAGE), sigma), mx.array)
    assert timesteps == schedule.timesteps.tolist()


def test_an_unknown_type_lists_the_known_ones():
    assert find_prediction("v") is V
    with pytest.raises(InputError, match="'velocity'; expected one of eps, v, edm, x0, flow"):
        find_prediction("velocity")


@pytest.mark.parametrize("sigma", (0.0, 0.003, 0.5, 0.9, 1.0))
def test_the_true_velocity_leads_back_to_the_image(sigma: float):
    x = VELOCITY.noised(IMAGE, NOISE, sigma)
    denoised = VELOCITY.denoised(x, NOISE - IMAGE, sigma)
    np.testing.assert_allclose(denoised, IMAGE, rtol=0, atol=1e-6)


def test_the_ends_are_the_image_and_the_noise():
    np.testing.assert_array_equal(VELOCITY.noised(IMAGE, NOISE, 0.0), IMAGE)
    np.testing.assert_array_equal(VELOCITY.noised(IMAGE, NOISE, 1.0), NOISE)


def test_hand_computed_values():
    assert VELOCITY.denoised(np.array([2.0]), np.array([4.0]), 0.25) == 1.0
    assert VELOCITY.noised(np.array([2.0]), np.array([-4.0]), 0.25) == 0.5


def test_mlx_arrays_stay_mlx_arrays():
    image, noise = mx.array(IMAGE), mx.array(NOISE)
    for kind in PREDICTIONS.values():
        x = kind.noised(image, noise, 0.3)
        denoised = kind.denoised(x, noise, 0.3)
        assert isinstance(denoised, mx.array)
        assert denoised.dtype == mx.float32
        ours = kind.denoised(kind.noised(IMAGE, NOISE, 0.3), NOISE, 0.3)
        np.testing.assert_allclose(np.array(denoised), ours, rtol=0, atol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("strength", (0.1, 0.6, 1.0))
def test_noising_is_the_img2img_start_of_diffusers(strength: float):
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(28)
    begin = 28 - strength_steps("diffusers_sd3", 28, strength)[1]
    schedule = from_step(make_schedule("sd3_diffusers", 28, FlowSigmas(3.0)), begin)
    scheduler.set_begin_index(begin)
    image, noise = torch.from_numpy(IMAGE), torch.from_numpy(NOISE)
    theirs = scheduler.scale_noise(image, scheduler.timesteps[begin : begin + 1], noise)
    ours = VELOCITY.noised(image, noise, float(schedule.sigmas[0]))
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=0, atol=1e-6)
