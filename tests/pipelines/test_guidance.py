"""Guidance on the real pipeline: where it acts, what it costs, and what CFG++ is given."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.core.request import Request
from lydite.pipelines.observer import Observer
from lydite.pipelines.pipeline import Pipeline
from lydite.sampling.denoiser import cfg_rescale

REQUEST = Request("a red fox", "snow", steps=4, width=32, height=32, text_length=4, guidance=3.0)


@pytest.fixture(scope="module")
def pipeline(untrained: Path) -> Pipeline:
    return Pipeline.open(untrained)


def draw(pipeline: Pipeline, **change) -> tuple[np.ndarray, list[str]]:
    """The picture, and each evaluation of the network."""
    calls: list[str] = []

    class Calls(Observer):
        def observe(self, stage, value, *, name="", step=None, sigma=None):
            if stage == "network_output":
                calls.append(f"step {step} {name}")
            return value

    (picture,) = pipeline.generate(REQUEST.replace(**change), [1], observer=Calls())
    return picture.pixels.astype(int), calls


def test_steps_outside_the_interval_ask_the_network_for_the_prompt_alone(pipeline) -> None:
    _, asked = draw(pipeline, guidance_interval=(0.25, 0.75))
    both = [f"step {step} uncond + cond" for step in (1, 2)]
    assert asked == ["step 0 cond", *both, "step 3 cond"]


def test_an_interval_is_a_table_with_ones_outside(pipeline) -> None:
    interval, asked = draw(pipeline, guidance_interval=(0.25, 0.75))
    table, same = draw(pipeline, guidance_steps=(1.0, 3.0, 3.0, 0.0))
    assert np.array_equal(interval, table) and asked == same
    both, _ = draw(pipeline, guidance_steps=(9.0, 3.0, 3.0, 9.0), guidance_interval=(0.25, 0.75))
    assert np.array_equal(interval, both)


def test_a_table_of_one_scale_is_that_scale(pipeline) -> None:
    plain, _ = draw(pipeline)
    assert np.array_equal(plain, draw(pipeline, guidance_steps=(3.0,) * 4, guidance=1.0)[0])
    assert not np.array_equal(plain, draw(pipeline, guidance_steps=(3.0, 3.0, 3.0, 1.0))[0])


def test_a_step_without_guidance_sees_what_a_run_without_guidance_sees(pipeline) -> None:
    off, _ = draw(pipeline, guidance=1.0)
    on, asked = draw(pipeline, guidance_steps=(1.0, 1.0, 1.0, 3.0))
    assert [place for place in asked if "uncond" in place] == ["step 3 uncond + cond"]
    request = pipeline.plan(REQUEST.replace(guidance_steps=(1.0, 1.0, 1.0, 3.0)))
    alone = pipeline.plan(REQUEST.replace(guidance=1.0))
    x = mx.random.normal((2, 4, 4, 16), key=mx.random.key(0))
    guided = pipeline.denoiser(request, pipeline.encode(request), 2)
    single = pipeline.denoiser(alone, pipeline.encode(alone), 2)
    for sigma in (1.0, 0.8123):  # on the grid, and between two steps
        np.testing.assert_allclose(
            np.array(guided(x, sigma)), np.array(single(x, sigma)), rtol=0, atol=2e-5
        )
    assert not np.array_equal(off, on)


def test_rescaling_gives_the_velocity_the_spread_of_the_prompt(pipeline) -> None:
    seen: dict[float, mx.array] = {}
    x = mx.random.normal((2, 4, 4, 16), key=mx.random.key(3))
    for phi in (0.0, 0.4, 1.0):
        request = pipeline.plan(REQUEST.replace(guidance_rescale=phi))
        denoise = pipeline.denoiser(request, pipeline.encode(request), 2)
        seen[phi] = x - denoise(x, 1.0)  # the velocity, at sigma 1
    alone = pipeline.plan(REQUEST.replace(guidance=1.0))
    cond = x - pipeline.denoiser(alone, pipeline.encode(alone), 2)(x, 1.0)
    for phi in (0.4, 1.0):
        due = cfg_rescale(seen[0.0], cond, phi)
        np.testing.assert_allclose(np.array(seen[phi]), np.array(due), rtol=0, atol=1e-4)
    spreads = [np.array(each).std(axis=(1, 2, 3)) for each in (seen[1.0], cond, seen[0.0])]
    np.testing.assert_allclose(spreads[0], spreads[1], rtol=1e-4)
    assert np.abs(spreads[2] / spreads[1] - 1).max() > 0.01


def test_cfg_pp_has_its_two_predictions_also_below_1(pipeline) -> None:
    weak, asked = draw(pipeline, sampler="euler_cfg_pp", guidance=0.6)
    assert asked[0] == "step 0 uncond + cond"
    other, _ = draw(pipeline, sampler="euler_cfg_pp", guidance=0.6, negative="a blue ring")
    assert not np.array_equal(weak, other)
    assert [place for place in draw(pipeline, guidance=0.6)[1] if "uncond" in place] == []


@pytest.mark.parametrize("name", ("ddim", "dpm_fast", "ddim_cfg_pp"))
def test_eta_adds_noise_of_the_seed(pipeline, name: str) -> None:
    plain, _ = draw(pipeline, sampler=name)
    noisy, _ = draw(pipeline, sampler=name, options={"eta": 1.0})
    again, _ = draw(pipeline, sampler=name, options={"eta": 1.0})
    assert np.array_equal(noisy, again) and not np.array_equal(plain, noisy)


def test_ddim_with_eta_1_is_ddpm_down_to_its_noise(pipeline) -> None:
    assert np.array_equal(
        draw(pipeline, sampler="ddim", options={"eta": 1.0})[0], draw(pipeline, sampler="ddpm")[0]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"guidance_steps": (3.0, 1.0)}, "guidance table has 2 scales for 4 steps; give one"),
        ({"guidance_steps": (3.0, float("inf"), 1.0, 1.0)}, "guidance is inf"),
        ({"guidance_interval": (0.5, 0.2)}, "guidance interval is 0.5 to 0.2; expected two rising"),
        ({"guidance_interval": (-1.0, 0.2)}, "guidance interval is -1 to 0.2"),
        ({"guidance_interval": (0.3, 0.4)}, "0.3 to 0.4 holds none of the 4 steps; a step is 0.25"),
        ({"guidance_rescale": 1.1}, "guidance_rescale is 1.1; expected 0 to 1"),
        ({"options": {"eta": 0.5}}, "no option 'eta' that can be set here; samplers that have it"),
        ({"sampler": "ddim", "options": {"eta": -0.5}}, "option eta is -0.5; expected 0 to 10"),
        ({"sampler": "ddim", "options": {"eta": 1.5}}, "eta is 1.5; expected a number from 0 to 1"),
        (
            {"sampler": "lms", "options": {"order": 9}},
            "sampler lms has no option 'order' that can be set here",
        ),
    ],
)
def test_bad_numbers_are_one_clear_error(pipeline, change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(pipeline.generate(REQUEST.replace(**change), [1]))
