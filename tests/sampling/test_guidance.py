"""Guidance: fixed points, hand-computed values, and diffusers' rescale."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.sampling.guidance import (
    Distilled,
    Guided,
    Interval,
    PerStep,
    TwoPrompts,
    cfg,
    cfg_rescale,
    constant,
    over_steps,
)
from lydite.sampling.noise_model import FLOW, VE
from lydite.sampling.prediction import V
from lydite.sampling.steps import FunctionDenoiser

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
    ((15.0, 1.0), (5.0, 7.0), (4.9, 7.0), (0.3, 1.0), (0.30001, 7.0), (0.0, 1.0)),
)
def test_an_interval_holds_its_upper_end_and_not_its_lower(sigma: float, scale: float):
    assert Interval(7.0, 0.3, 5.0)(sigma) == scale


@pytest.mark.parametrize(
    ("sigma", "scale"),
    ((20.0, 9.0), (10.0, 9.0), (4.0, 9.0), (3.0, 5.0), (1.1, 5.0), (1.0, 2.0), (0.2, 2.0), (0, 2)),
)
def test_a_table_goes_by_the_step_that_began(sigma: float, scale: float):
    assert PerStep([9.0, 5.0, 2.0], [10.0, 3.0, 1.0, 0.0])(sigma) == scale


def test_tables_and_intervals_that_make_no_sense_are_refused():
    with pytest.raises(InputError, match="guidance table has 2 scales for 3 steps"):
        PerStep([1.0, 2.0], [3.0, 2.0, 1.0, 0.0])
    with pytest.raises(InputError, match=r"guidance interval is 2\.0 to 1\.0"):
        Interval(7.0, 2.0, 1.0)


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


@dataclass
class Counting:
    """Two prompts that count what is asked of them."""

    noise_model = VE
    calls: list[str] = field(default_factory=list)

    def cond(self, x: np.ndarray, sigma: float) -> np.ndarray:
        self.calls.append("cond")
        return x * 0 + COND

    def both(self, x: np.ndarray, sigma: float) -> tuple[np.ndarray, np.ndarray]:
        self.calls.append("both")
        return x * 0 + UNCOND, x * 0 + COND


def test_guidance_asks_for_both_and_gives_the_pair():
    prompted = Counting()
    guided = Guided(prompted, constant(7.0))
    assert guided.noise_model == VE
    np.testing.assert_array_equal(guided(UNCOND, 1.0), [8.0, 19.0, 0.5])
    result, uncond = guided.pair(UNCOND, 1.0)
    np.testing.assert_array_equal(result, [8.0, 19.0, 0.5])
    np.testing.assert_array_equal(uncond, UNCOND)
    assert prompted.calls == ["both", "both"]


def test_where_the_scale_is_one_the_second_prompt_is_not_run():
    prompted = Counting()
    guided = Guided(prompted, Interval(7.0, 0.5, 5.0))
    np.testing.assert_array_equal(guided(UNCOND, 9.0), COND)
    np.testing.assert_array_equal(guided(UNCOND, 3.0), [8.0, 19.0, 0.5])
    assert prompted.calls == ["cond", "both"]
    assert np.array_equal(guided.pair(UNCOND, 9.0)[1], UNCOND)  # CFG++ needs it all the same


def test_rescale_is_a_part_of_guidance():
    prompted = TwoPrompts(
        FunctionDenoiser(lambda x, sigma: BATCH), FunctionDenoiser(lambda x, sigma: OTHER)
    )
    ours = Guided(prompted, constant(7.0), rescale=0.7)(BATCH, 1.0)
    np.testing.assert_array_equal(ours, cfg_rescale(cfg(OTHER, BATCH, 7.0), BATCH, 0.7))


def test_guidance_on_the_denoised_is_guidance_on_the_output():
    sigma, x = 2.0, BATCH * 3

    def image(output: Any) -> Any:
        return V.denoised(x, output, sigma)

    after = cfg(image(OTHER), image(BATCH), 7.0)
    np.testing.assert_allclose(after, image(cfg(OTHER, BATCH, 7.0)), rtol=0, atol=1e-5)


def test_two_denoisers_make_two_prompts():
    prompts = TwoPrompts(
        FunctionDenoiser(lambda x, sigma: x * 2.0, FLOW),
        FunctionDenoiser(lambda x, sigma: x, FLOW),
    )
    assert prompts.noise_model == FLOW
    ours = Guided(prompts, constant(3.0))(mx.array(UNCOND), 0.5)
    assert isinstance(ours, mx.array)
    np.testing.assert_array_equal(np.array(ours), UNCOND * 4)


def test_a_distilled_model_is_told_the_scale_and_has_no_pair():
    told: list[float] = []

    def network(x: np.ndarray, sigma: float, guidance: float) -> np.ndarray:
        told.append(guidance)
        return x * sigma

    distilled = Distilled(network, PerStep([3.5, 2.0], [1.0, 0.5, 0.0]), FLOW)
    for sigma in (1.0, 0.7, 0.5):
        np.testing.assert_array_equal(distilled(UNCOND, sigma), UNCOND * np.float32(sigma))
    assert told == [3.5, 3.5, 2.0]
    assert not hasattr(distilled, "pair")
