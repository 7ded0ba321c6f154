"""Guidance: fixed points, hand-computed values, and diffusers' rescale."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.sampling.denoiser import (
    EPS,
    VELOCITY,
    X0,
    Guided,
    PerStep,
    Prediction,
    V,
    cfg,
    cfg_rescale,
    constant,
    over_steps,
)
from lydite.sampling.sampler_types import VE

UNCOND = np.array([1.0, -2.0, 0.5], np.float32)
COND = np.array([2.0, 1.0, 0.5], np.float32)
RNG = np.random.default_rng(1)
BATCH, OTHER = RNG.standard_normal((2, 3, 4, 5, 6)).astype(np.float32)


def test_scale_zero_is_uncond_and_scale_one_is_cond():
    np.testing.assert_array_equal(cfg(UNCOND, COND, 0.0), UNCOND)
    np.testing.assert_array_equal(cfg(UNCOND, COND, 1.0), COND)


def test_scale_seven_goes_beyond_cond():
    np.testing.assert_array_equal(cfg(UNCOND, COND, 7.0), [8.0, 19.0, 0.5])


def test_equal_predictions_are_left_alone():
    np.testing.assert_array_equal(cfg(COND, COND, 7.0), COND)


def test_mlx_arrays_stay_mlx_arrays():
    guided = cfg(mx.array(UNCOND), mx.array(COND), 4.5)
    assert isinstance(guided, mx.array)
    assert guided.dtype == mx.float32
    np.testing.assert_allclose(np.array(guided), cfg(UNCOND, COND, 4.5), rtol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("phi", (0.0, 0.3, 0.7, 1.0))
def test_rescale_is_diffusers(phi: float):
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from diffusers.guiders.guider_utils import rescale_noise_cfg

    guided, cond = torch.from_numpy(BATCH * 4 + 1), torch.from_numpy(OTHER)
    theirs = rescale_noise_cfg(guided, cond, guidance_rescale=phi)
    np.testing.assert_allclose(cfg_rescale(guided, cond, phi), theirs, rtol=0, atol=1e-5)
    for ours in (
        cfg_rescale(guided.numpy(), cond.numpy(), phi),
        np.array(cfg_rescale(mx.array(guided.numpy()), mx.array(cond.numpy()), phi)),
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_a_full_rescale_has_the_spread_of_the_prompt_image_by_image():
    ours = cfg_rescale(BATCH * np.arange(2, 5, dtype=np.float32)[:, None, None, None], OTHER, 1.0)
    np.testing.assert_allclose(ours.std(axis=(1, 2, 3)), OTHER.std(axis=(1, 2, 3)), rtol=1e-5)
    np.testing.assert_array_equal(cfg_rescale(BATCH, OTHER, 0.0), BATCH)


def test_rescaling_a_constant_image_is_finite():
    flat = np.full((2, 3, 3), 0.25, np.float32)
    np.testing.assert_allclose(cfg_rescale(flat, flat, 0.7), flat, rtol=1e-6)


@pytest.mark.parametrize(
    ("sigma", "scale"),
    ((20.0, 9.0), (10.0, 9.0), (4.0, 9.0), (3.0, 5.0), (1.1, 5.0), (1.0, 2.0), (0.2, 2.0), (0, 2)),
)
def test_a_table_goes_by_the_step_that_began(sigma: float, scale: float):
    assert PerStep([9.0, 5.0, 2.0], [10.0, 3.0, 1.0, 0.0])(sigma) == scale


def test_a_table_of_another_length_is_refused():
    with pytest.raises(InputError, match="guidance table has 2 scales for 3 steps"):
        PerStep([1.0, 2.0], [3.0, 2.0, 1.0, 0.0])


def strengths(steps: int, scale: float, **options: Any) -> list[float]:
    sigmas = np.linspace(1, 0, steps + 1).tolist()
    strength = over_steps(sigmas, scale, **options)
    return [strength(sigma) for sigma in sigmas[:-1]]


@pytest.mark.parametrize(
    ("share", "wanted"),
    (
        ((0.0, 1.0), [5.0] * 5),
        ((0.0, 0.5), [5.0, 5.0, 5.0, 1.0, 1.0]),
        ((0.5, 1.0), [1.0, 1.0, 1.0, 5.0, 5.0]),
        ((0.2, 0.8), [1.0, 5.0, 5.0, 5.0, 1.0]),
        ((0.0, 0.01), [5.0, 1.0, 1.0, 1.0, 1.0]),
    ),
)
def test_a_share_of_the_steps_is_guided(share: tuple[float, float], wanted: list[float]):
    assert strengths(5, 5.0, share=share) == wanted


def test_one_scale_for_each_step_within_a_share_of_them():
    assert strengths(4, 1.0, scales=(9.0, 7.0, 5.0, 3.0)) == [9.0, 7.0, 5.0, 3.0]
    within = strengths(4, 1.0, scales=(9.0, 7.0, 5.0, 3.0), share=(0.25, 0.75))
    assert within == [1.0, 7.0, 5.0, 1.0]


def test_shares_and_tables_that_fit_no_schedule_are_refused():
    with pytest.raises(InputError, match="guidance table has 3 scales for 4 steps; give one"):
        strengths(4, 1.0, scales=(9.0, 7.0, 5.0))
    with pytest.raises(InputError, match=r"none of the 4 steps; a step is 0\.25 of"):
        strengths(4, 5.0, share=(0.3, 0.45))
    for share in ((0.5, 0.5), (-0.1, 0.5), (0.5, 1.1), (float("nan"), 1.0)):
        with pytest.raises(InputError, match="expected two rising shares of the steps"):
            strengths(4, 5.0, share=share)


class Prompts:
    """A network with two prompts that answers with fixed outputs and records its calls."""

    def __init__(self, uncond: Any, cond: Any) -> None:
        self.outputs, self.calls = (uncond, cond), list[tuple[int, ...]]()

    def __call__(self, x: Any, timestep: float, prompts: Sequence[int]) -> list[Any]:
        self.calls.append(tuple(prompts))
        return [self.outputs[index] for index in prompts]


def guided(network: Any, strength: Any, prediction: Prediction = X0, **options: Any) -> Guided[Any]:
    return Guided(network, prediction, lambda sigma: 1000 * sigma, strength, **options)


def test_guidance_runs_both_prompts_and_gives_the_pair():
    network = Prompts(UNCOND, COND)
    denoise = guided(network, constant(7.0))
    assert denoise.noise_model == VE
    np.testing.assert_array_equal(denoise(UNCOND, 1.0), [8.0, 19.0, 0.5])
    result, uncond = denoise.pair(UNCOND, 1.0)
    np.testing.assert_array_equal(result, [8.0, 19.0, 0.5])
    np.testing.assert_array_equal(uncond, UNCOND)
    assert network.calls == [(0, 1), (0, 1)]


def test_where_the_scale_is_one_or_less_the_negative_prompt_is_not_run():
    network = Prompts(UNCOND, COND)
    denoise = guided(network, PerStep([1.0, 7.0, 0.5], [9.0, 3.0, 1.0, 0.0]))
    np.testing.assert_array_equal(denoise(UNCOND, 9.0), COND)
    np.testing.assert_array_equal(denoise(UNCOND, 3.0), [8.0, 19.0, 0.5])
    np.testing.assert_array_equal(denoise(UNCOND, 1.0), COND)
    assert network.calls == [(1,), (0, 1), (1,)]
    assert np.array_equal(denoise.pair(UNCOND, 9.0)[1], UNCOND)  # CFG++ needs it all the same


def test_one_prompt_is_not_guided():
    network = Prompts(COND, None)
    denoise = guided(network, constant(7.0), prompts=1)
    first, second = denoise.pair(UNCOND, 1.0)
    np.testing.assert_array_equal(denoise(UNCOND, 1.0), COND)
    assert first is second
    assert network.calls == [(0,), (0,)]


@pytest.mark.parametrize("prediction", (EPS, V, VELOCITY), ids=lambda each: each.name)
@pytest.mark.parametrize("rescale", (0.0, 0.7))
def test_guidance_and_rescale_are_on_the_networks_output(prediction: Prediction, rescale: float):
    sigma, x = 0.4, BATCH * 3
    denoise = guided(Prompts(OTHER, BATCH), constant(7.0), prediction, rescale=rescale)
    output = cfg(OTHER, BATCH, 7.0)
    if rescale:
        output = cfg_rescale(output, BATCH, rescale)
    wanted = x * prediction.c_skip(sigma) + output * prediction.c_out(sigma)
    np.testing.assert_array_equal(denoise(x, sigma), wanted)
    uncond = x * prediction.c_skip(sigma) + OTHER * prediction.c_out(sigma)
    np.testing.assert_array_equal(denoise.pair(x, sigma)[1], uncond)


def test_the_network_gets_the_scaled_input_and_the_timestep():
    calls: list[tuple[Any, float]] = []

    def network(x: Any, timestep: float, prompts: Sequence[int]) -> list[Any]:
        calls.append((x, timestep))
        return [x] * len(prompts)

    guided(network, constant(7.0), EPS)(COND, 0.75)
    np.testing.assert_array_equal(calls[0][0], COND * 0.8)
    assert calls[0][1] == 750


def test_what_an_observer_returns_is_used():
    def doubled(output: Any, sigma: float) -> Any:
        assert sigma == 0.5
        return output * 2

    denoise = guided(Prompts(UNCOND, COND), constant(3.0), VELOCITY, on_output=doubled)
    wanted = BATCH[0, 0, 0, :3] - cfg(UNCOND, COND, 3.0) * 2 * 0.5
    np.testing.assert_array_equal(denoise(BATCH[0, 0, 0, :3], 0.5), wanted)


def test_guided_mlx_arrays_stay_mlx_arrays():
    denoise = guided(Prompts(mx.array(UNCOND), mx.array(COND)), constant(3.0), VELOCITY)
    ours = denoise(mx.array(UNCOND), 0.5)
    assert isinstance(ours, mx.array)
    np.testing.assert_array_equal(np.array(ours), UNCOND - cfg(UNCOND, COND, 3.0) * 0.5)
