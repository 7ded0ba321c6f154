"""Flow prediction: its two formulas invert each other, and noising is that of diffusers."""

import mlx.core as mx
import numpy as np
import pytest

from lydite.sampling.prediction import flow_denoised, flow_noised
from lydite.sampling.schedules import sd3_diffusers, tail

RNG = np.random.default_rng(0)
IMAGE = RNG.standard_normal((1, 16, 8, 8)).astype(np.float32)
NOISE = RNG.standard_normal((1, 16, 8, 8)).astype(np.float32)


@pytest.mark.parametrize("sigma", (0.0, 0.003, 0.5, 0.9, 1.0))
def test_the_true_velocity_leads_back_to_the_image(sigma: float):
    x = flow_noised(IMAGE, NOISE, sigma)
    np.testing.assert_allclose(flow_denoised(x, NOISE - IMAGE, sigma), IMAGE, rtol=0, atol=1e-6)


def test_the_ends_are_the_image_and_the_noise():
    np.testing.assert_array_equal(flow_noised(IMAGE, NOISE, 0.0), IMAGE)
    np.testing.assert_array_equal(flow_noised(IMAGE, NOISE, 1.0), NOISE)


def test_hand_computed_values():
    assert flow_denoised(np.array([2.0]), np.array([4.0]), 0.25) == 1.0
    assert flow_noised(np.array([2.0]), np.array([-4.0]), 0.25) == 0.5


def test_mlx_arrays_stay_mlx_arrays():
    image, noise = mx.array(IMAGE), mx.array(NOISE)
    x = flow_noised(image, noise, 0.3)
    denoised = flow_denoised(x, noise - image, 0.3)
    assert isinstance(denoised, mx.array)
    np.testing.assert_allclose(np.array(x), flow_noised(IMAGE, NOISE, 0.3), rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.array(denoised), IMAGE, rtol=0, atol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("strength", (0.1, 0.6, 1.0))
def test_noising_is_the_img2img_start_of_diffusers(strength: float):
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(28)
    schedule = tail(sd3_diffusers(28, 3.0), strength)
    begin = 28 - len(schedule.timesteps)
    scheduler.set_begin_index(begin)
    image, noise = torch.from_numpy(IMAGE), torch.from_numpy(NOISE)
    theirs = scheduler.scale_noise(image, scheduler.timesteps[begin : begin + 1], noise)
    ours = flow_noised(image, noise, float(schedule.sigmas[0]))
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=0, atol=1e-6)
