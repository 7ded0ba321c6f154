"""What is stored is what the network was given, and storing changes no bit of a picture."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.calibrate.conditions import conditions_of
from lydite.calibrate.model_session import Studio, require_model
from lydite.calibrate.run import Sizes
from lydite.calibrate.settings import Settings
from lydite.calibrate.store.items import Maker
from lydite.calibrate.store.set_file import Description, Plan, plan_of
from lydite.calibrate.trajectories import Trajectories, count_steps, model_hash, sizes
from lydite.core.errors import CalibrationError, InputError, NotFiniteError
from lydite.pipelines.request import Request
from lydite.pipelines.sd3 import StableDiffusion3
from lydite.pipelines.sd3_denoiser import Denoiser

REQUEST = Request("", steps=3, guidance=3.0, text_length=4, width=32, height=32)


@pytest.fixture(scope="module")
def pipeline(untrained: Path) -> StableDiffusion3:
    return StableDiffusion3.load(untrained)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, np.ndarray]]]:
    """Every call of the network, seen one floor below what the calibration sees."""
    seen: list[tuple[float, np.ndarray]] = []
    original = Denoiser._velocities

    def spy(self: Denoiser, x: mx.array, sigma: float, prompts: int) -> list[mx.array]:
        seen.append((sigma, np.array(x[0])))
        return original(self, x, sigma, prompts)

    monkeypatch.setattr(Denoiser, "_velocities", spy)
    yield seen


def trajectories(pipeline: StableDiffusion3, request: Request, plan: Plan) -> Trajectories:
    settings = Settings(model_hash(pipeline), conditions_of(request, "float32"))
    return Trajectories(pipeline, request, Maker(Description(settings, plan)))


@pytest.mark.parametrize(
    ("sampler", "calls_a_step"),
    [("euler", [1, 1, 1]), ("heun", [2, 2, 1]), ("euler_ancestral", [1, 1, 1])],
)
def test_a_sample_is_the_first_input_of_its_step(
    pipeline: StableDiffusion3, calls: list[tuple[float, np.ndarray]], sampler: str, calls_a_step
) -> None:
    plan = plan_of([("a red fox", 7)], (0, 2))
    request = replace(REQUEST, sampler=sampler)
    made = trajectories(pipeline, request, plan).items(plan.images[0], (0, 2, None))
    samples = {item.entry.step: item for item in made if item.entry.kind == "sample"}
    firsts = np.cumsum([0, *calls_a_step])
    assert len(calls) == firsts[-1] and samples.keys() == {0, 2}
    schedule = pipeline.schedule(request)
    for step, item in samples.items():
        sigma, x = calls[firsts[step or 0]]
        np.testing.assert_array_equal(item.arrays["x"], x)
        assert (item.entry.sigma, item.entry.timestep) == (sigma, schedule.timesteps[step or 0])
        assert item.arrays["x"].shape == (4, 4, 16)


@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m_sde", "euler_cfg_pp"])
def test_storing_changes_no_bit_of_the_picture(pipeline: StableDiffusion3, sampler: str) -> None:
    request = replace(REQUEST, sampler=sampler)
    (plain,) = pipeline.generate(replace(request, prompt="a red fox"), [7])
    plan, before = plan_of([("a red fox", 7)], (0, 1, 2)), model_hash(pipeline)
    made = trajectories(pipeline, request, plan).items(plan.images[0], (0, 1, 2, None))
    np.testing.assert_array_equal(made[-1].arrays["pixels"], plain.pixels)
    assert model_hash(pipeline) == before


def test_only_what_is_wanted_is_made_and_conditioning_once_a_prompt(
    pipeline: StableDiffusion3,
) -> None:
    plan = plan_of([("a", 0), ("a", 1)], (0, 1), conditioning=True)
    drawn = trajectories(pipeline, REQUEST, plan)
    kinds = [
        [item.entry.kind for item in drawn.items(image, wanted)]
        for image, wanted in ((plan.images[0], (1, None)), (plan.images[1], (None,)))
    ]
    assert kinds == [["sample", "picture", "conditioning"], ["picture"]]
    *_, picture, found = drawn.items(plan.images[0], (None,))
    text, pooled = found.arrays["text"], found.arrays["pooled"]
    expected = Sizes(4 * 4 * 16, picture.arrays["pixels"].size, text.size + pooled.size)
    assert sizes(pipeline, REQUEST) == expected
    expected = pipeline.encode(replace(REQUEST, prompt="a")).text
    np.testing.assert_array_equal(text, np.array(expected))


def test_a_picture_that_is_not_finite_is_named_with_prompt_and_seed(
    pipeline: StableDiffusion3, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Denoiser, x: mx.array, sigma: float, prompts: int) -> list[mx.array]:
        return [x * float("nan")] * prompts

    monkeypatch.setattr(Denoiser, "_velocities", broken)
    plan = plan_of([("a", 0), ("a red fox", 7)], (0,))
    with pytest.raises(NotFiniteError, match="image 1, seed 7, 'a red fox': latents before the VA"):
        trajectories(pipeline, REQUEST, plan).items(plan.images[1], (0, None))


@pytest.mark.parametrize("sampler", ["dpm_adaptive", "dpm_fast"])
def test_samplers_that_choose_their_own_steps_are_refused(
    pipeline: StableDiffusion3, sampler: str
) -> None:
    request = pipeline.complete(replace(REQUEST, sampler=sampler, steps=8))
    with pytest.raises(InputError, match=f"sampler {sampler} chooses its own steps"):
        count_steps(pipeline, request)


def test_a_changed_parameter_is_found_at_the_start_and_at_the_end(untrained: Path) -> None:
    changed = StableDiffusion3.load(untrained)
    settings = Settings(model_hash(changed), conditions_of(REQUEST, "float32"))
    studio = Studio(Description(settings, plan_of([("a", 0)], (0,))), changed)
    studio.require_unchanged()
    transformer: Any = changed.networks.get("transformer")
    bias = transformer.proj_out.bias
    transformer.proj_out.bias = bias + mx.where(mx.arange(bias.size) == 0, 1e-6, 0.0)
    with pytest.raises(CalibrationError, match="changed while it drew"):
        studio.require_unchanged()
    with pytest.raises(CalibrationError, match="not the one the set was made with"):
        require_model(settings, changed)
