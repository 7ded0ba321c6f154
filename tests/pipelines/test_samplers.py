"""Every sampler on the real pipeline: what it asks of the denoiser, and what a seed means then."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.request import Request
from lydite.pipelines.pipeline import Pipeline
from lydite.sampling.registry import SAMPLERS

REQUEST = Request("a red fox", steps=4, width=32, height=32, text_length=4, guidance=3.0)
FLOW = [name for name, sampler in SAMPLERS.items() if "flow" in sampler.noise_models]
RANDOM = ("euler_ancestral", "dpmpp_2m_sde", "dpmpp_sde")


@pytest.fixture(scope="module")
def pipeline(untrained: Path) -> Pipeline:
    return Pipeline.open(untrained)


def draw(pipeline: Pipeline, seeds: list[int], *, batch: int = 1, **change) -> list:
    request = REQUEST.replace(**change)
    return [picture.pixels for picture in pipeline.generate(request, seeds, batch=batch)]


@pytest.mark.parametrize("name", FLOW)
def test_every_sampler_for_flow_models_draws(pipeline, name: str) -> None:
    (picture,) = draw(pipeline, [1], sampler=name)  # a NaN would raise before the VAE
    assert picture.shape == (32, 32, 3) and picture.std() > 0


@pytest.mark.parametrize("name", RANDOM)
def test_a_picture_with_noise_in_every_step_does_not_depend_on_its_batch(pipeline, name) -> None:
    together = draw(pipeline, [1, 2], batch=2, sampler=name)
    for seed, picture in zip((1, 2), together, strict=True):
        (alone,) = draw(pipeline, [seed], sampler=name)
        assert np.abs(alone.astype(int) - picture.astype(int)).max() <= 1
    assert np.abs(together[0].astype(int) - together[1].astype(int)).max() > 1


def test_the_noise_of_comfyui_is_that_of_the_whole_batch(pipeline) -> None:
    first, second = draw(pipeline, [1, 2], batch=2, convention="comfyui")
    (alone,) = draw(pipeline, [2], convention="comfyui")
    assert np.array_equal(first, draw(pipeline, [1])[0])
    assert not np.array_equal(second, alone)


def denoisers(pipeline: Pipeline, guidance: float = 3.0):
    """The same prompt under a schedule of 4 steps and one of 2."""
    coarse = pipeline.plan(REQUEST.replace(steps=2, guidance=guidance))
    fine = pipeline.plan(REQUEST.replace(guidance=guidance))
    text = pipeline.encode(fine)
    return pipeline.denoiser(coarse, text, 1), pipeline.denoiser(fine, text, 1), fine


def test_a_sigma_between_two_steps_is_as_one_of_the_schedule(pipeline) -> None:
    coarse, fine, run = denoisers(pipeline)
    sigma = float(run.schedule.sigmas[1])
    x = mx.random.normal((1, 4, 4, 16), key=mx.random.key(0))
    between, on_grid = np.array(coarse(x, sigma)), np.array(fine(x, sigma))
    np.testing.assert_allclose(between, on_grid, rtol=0, atol=2e-5)  # one product of 1 row, or 4
    near = np.array(coarse(x, sigma * 0.99))
    assert np.abs(near - on_grid).max() > 1e-3


def test_a_pair_is_the_guided_image_and_the_one_without_the_prompt(pipeline) -> None:
    _, denoise, _ = denoisers(pipeline)
    _, weightless, _ = denoisers(pipeline, guidance=1.0)
    x = mx.random.normal((1, 4, 4, 16), key=mx.random.key(1))
    guided, uncond = denoise.pair(x, 1.0)
    assert np.array_equal(np.array(guided), np.array(denoise(x, 1.0)))
    assert not np.allclose(np.array(guided), np.array(uncond), atol=1e-4)
    cond, same = weightless.pair(x, 1.0)
    assert np.array_equal(np.array(cond), np.array(same))
    np.testing.assert_allclose(
        np.array(uncond + (cond - uncond) * 3.0), np.array(guided), atol=1e-5
    )
