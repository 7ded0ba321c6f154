"""Samplers on problems with known answers, on three array libraries, and against diffusers."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.sampling.law import FLOW
from lydite.sampling.prediction import flow_denoised
from lydite.sampling.samplers.euler import sample_euler
from lydite.sampling.schedules import flow_shift, sd3_diffusers
from lydite.sampling.steps import FunctionDenoiser, Step

MEAN, SPREAD = 0.7, 0.4


def gaussian_denoise(x: Any, sigma: float) -> Any:
    """The exact denoiser of a flow from noise to a Gaussian of MEAN and SPREAD."""
    clean = 1 - sigma
    variance = clean**2 * SPREAD**2 + sigma**2
    return (x - clean * MEAN) * (clean * SPREAD**2 / variance) + MEAN


def flow(function: Callable[[Any, float], Any]) -> FunctionDenoiser[Any]:
    return FunctionDenoiser(function, FLOW)


def last(steps: Any) -> Step[Any]:
    *_, step = steps
    return step


def noise(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 4, 8, 8))


def test_euler_converges_to_the_exact_solution_with_order_one():
    x = noise()
    exact = MEAN + SPREAD * x
    errors = [
        np.abs(
            last(sample_euler(flow(gaussian_denoise), x, np.linspace(1, 0, n + 1))).x - exact
        ).max()
        for n in (64, 128, 256, 512)
    ]
    orders = [np.log2(coarse / fine) for coarse, fine in pairwise(errors)]
    assert errors[-1] < 1e-2
    assert orders == pytest.approx([1, 1, 1], abs=0.1)


def test_a_denoiser_that_returns_zero_scales_x_with_sigma():
    x = noise()
    for step in sample_euler(flow(lambda x, sigma: x * 0), x, flow_shift(7, 3.0).sigmas):
        np.testing.assert_allclose(step.x, x * step.sigma_next, rtol=1e-13, atol=1e-15)


def test_a_denoiser_that_returns_x_leaves_x_alone():
    x = noise()
    for step in sample_euler(flow(lambda x, sigma: x), x, flow_shift(7, 3.0).sigmas):
        np.testing.assert_array_equal(step.x, x)


def test_one_step_from_one_to_zero_is_the_denoised_image():
    x = noise()
    (step,) = sample_euler(flow(lambda x, sigma: x * 0.25 + 3), x, [1.0, 0.0])
    np.testing.assert_allclose(step.x, step.denoised, rtol=1e-14)
    np.testing.assert_array_equal(step.denoised, x * 0.25 + 3)


def test_each_step_says_where_it_is():
    sigmas = flow_shift(5, 3.0).sigmas
    seen: list[float] = []

    def denoise(x: np.ndarray, sigma: float) -> np.ndarray:
        seen.append(sigma)
        return x * 0

    steps = list(sample_euler(flow(denoise), noise(), sigmas))
    assert [step.index for step in steps] == [0, 1, 2, 3, 4]
    assert [step.sigma for step in steps] == seen == sigmas[:-1].tolist()
    assert [step.sigma_next for step in steps] == sigmas[1:].tolist()
    # np.float64 left of an MLX array would make it a NumPy array without a word
    assert {type(sigma) for sigma in seen} == {float}


def test_nothing_is_computed_until_it_is_asked_for():
    calls: list[float] = []

    def denoise(x: np.ndarray, sigma: float) -> np.ndarray:
        calls.append(sigma)
        return x * 0

    steps = sample_euler(flow(denoise), noise(), [1.0, 0.5, 0.25, 0.0])
    assert calls == []
    next(steps)
    assert calls == [1.0]
    next(steps)
    assert calls == [1.0, 0.5]


def test_the_start_is_not_written_into():
    x = noise()
    before = x.copy()
    last(sample_euler(flow(gaussian_denoise), x, flow_shift(4, 3.0).sigmas))
    np.testing.assert_array_equal(x, before)


def same_numbers_as_numpy(make: Callable[..., Any], back: Callable[[Any], np.ndarray]) -> None:
    x = noise().astype(np.float32)
    sigmas = sd3_diffusers(28, 3.0).sigmas
    ours = list(sample_euler(flow(gaussian_denoise), x, sigmas))
    theirs = list(sample_euler(flow(gaussian_denoise), make(x), sigmas))
    assert len(ours) == len(theirs) == 28
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in ((mine.x, other.x), (mine.denoised, other.denoised)):
            assert type(b) is type(make(x))
            assert a.dtype == back(b).dtype == np.float32
            np.testing.assert_allclose(back(b), a, rtol=0, atol=1e-6)


def test_mlx_arrays_give_the_numbers_of_numpy():
    same_numbers_as_numpy(mx.array, np.array)


@pytest.mark.parity
def test_torch_tensors_give_the_numbers_of_numpy():
    torch = pytest.importorskip("torch")
    same_numbers_as_numpy(torch.from_numpy, torch.Tensor.numpy)


@pytest.mark.parity
@pytest.mark.parametrize("shift", (1.0, 3.0))
@pytest.mark.parametrize("steps", (1, 2, 3, 4, 7, 20, 28, 50, 1000))
def test_euler_follows_diffusers_over_the_whole_trajectory(steps: int, shift: float):
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)

    def velocity(x: Any, sigma: float) -> Any:  # bends with x and with sigma
        return torch.tanh(x) * sigma + x * 0.5

    def denoise(x: Any, sigma: float) -> Any:
        return flow_denoised(x, velocity(x, sigma), sigma)

    start = torch.from_numpy(noise().astype(np.float32))
    theirs, largest = start, 0.0
    ours = sample_euler(flow(denoise), start, sd3_diffusers(steps, shift).sigmas)
    for timestep, step in zip(scheduler.timesteps, ours, strict=True):
        prediction = velocity(theirs, float(timestep) / 1000)
        theirs = scheduler.step(prediction, timestep, theirs).prev_sample
        largest = max(largest, float((step.x - theirs).abs().max() / theirs.abs().max()))
    assert largest < (1e-6 if steps <= 50 else 4e-6)  # float32 rounding adds up as √steps
