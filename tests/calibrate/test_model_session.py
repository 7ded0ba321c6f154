"""What is stored is what the network was given, and storing changes no bit of a picture."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.calibrate.model_session import (
    ModelSession,
    count_steps,
    item_sizes,
    model_hash,
    require_model,
)
from lydite.calibrate.request_record import conditions_of
from lydite.calibrate.run import Sizes
from lydite.calibrate.settings import Description, Plan, Settings, plan_of
from lydite.core.errors import CalibrationError, InputError, NotFiniteError
from lydite.core.request import Request
from lydite.pipelines.families.sd3 import BoundMMDiT
from lydite.pipelines.pipeline import Pipeline

REQUEST = Request("", steps=3, guidance=3.0, text_length=4, width=32, height=32)


@pytest.fixture(scope="module")
def pipeline(untrained: Path) -> Pipeline:
    return Pipeline.open(untrained)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, np.ndarray]]]:
    """Every call of the network, recorded below the denoiser."""
    seen: list[tuple[float, np.ndarray]] = []
    original = BoundMMDiT.__call__

    def spy(self: BoundMMDiT, x: mx.array, timestep: float, prompts: int) -> mx.array:
        seen.append((timestep, np.array(x[0])))
        return original(self, x, timestep, prompts)

    monkeypatch.setattr(BoundMMDiT, "__call__", spy)
    yield seen


def session_of(pipeline: Pipeline, request: Request, plan: Plan) -> ModelSession:
    planned = pipeline.plan(request).request
    settings = Settings(model_hash(pipeline), conditions_of(planned, "float32"))
    return ModelSession(Description(settings, plan), pipeline)


@pytest.mark.parametrize(
    ("sampler", "calls_a_step"),
    [("euler", [1, 1, 1]), ("heun", [2, 2, 1]), ("euler_ancestral", [1, 1, 1])],
)
def test_a_sample_is_the_first_input_of_its_step(
    pipeline: Pipeline, calls: list[tuple[float, np.ndarray]], sampler: str, calls_a_step
) -> None:
    plan = plan_of([("a red fox", 7)], (0, 2))
    request = REQUEST.replace(sampler=sampler)
    made = session_of(pipeline, request, plan).items(plan.images[0], (0, 2, None))
    samples = {item.entry.step: item for item in made if item.entry.kind == "sample"}
    firsts = np.cumsum([0, *calls_a_step])
    assert len(calls) == firsts[-1] and samples.keys() == {0, 2}
    schedule = pipeline.plan(request).schedule
    for step, item in samples.items():
        timestep, x = calls[firsts[step or 0]]
        np.testing.assert_array_equal(item.arrays["x"], x)
        assert timestep == item.entry.timestep == schedule.timesteps[step or 0]
        assert item.entry.sigma == schedule.sigmas[step or 0]
        assert item.arrays["x"].shape == (4, 4, 16)


@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m_sde", "euler_cfg_pp"])
def test_storing_changes_no_bit_of_the_picture(pipeline: Pipeline, sampler: str) -> None:
    request = REQUEST.replace(sampler=sampler)
    (plain,) = pipeline.generate(request.replace(prompt="a red fox"), [7])
    plan, before = plan_of([("a red fox", 7)], (0, 1, 2)), model_hash(pipeline)
    made = session_of(pipeline, request, plan).items(plan.images[0], (0, 1, 2, None))
    np.testing.assert_array_equal(made[-1].arrays["pixels"], plain.pixels)
    assert model_hash(pipeline) == before


def test_only_what_is_wanted_is_made_and_conditioning_once_a_prompt(
    pipeline: Pipeline,
) -> None:
    plan = plan_of([("a", 0), ("a", 1)], (0, 1), conditioning=True)
    drawn = session_of(pipeline, REQUEST, plan)
    kinds = [
        [item.entry.kind for item in drawn.items(image, wanted)]
        for image, wanted in ((plan.images[0], (1, None)), (plan.images[1], (None,)))
    ]
    assert kinds == [["sample", "picture", "conditioning"], ["picture"]]
    *_, picture, found = drawn.items(plan.images[0], (None,))
    text, pooled = found.arrays["text"], found.arrays["pooled"]
    expected = Sizes(4 * 4 * 16, picture.arrays["pixels"].size, text.size + pooled.size)
    run = pipeline.plan(REQUEST.replace(prompt="a"))
    assert item_sizes(pipeline, run, conditioning=True) == expected
    np.testing.assert_array_equal(text, np.array(pipeline.encode(run)["text"]))


def test_a_picture_that_is_not_finite_is_named_with_prompt_and_seed(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: BoundMMDiT, x: mx.array, timestep: float, prompts: int) -> mx.array:
        return mx.concatenate([x * float("nan")] * prompts)

    monkeypatch.setattr(BoundMMDiT, "__call__", broken)
    plan = plan_of([("a", 0), ("a red fox", 7)], (0,))
    with pytest.raises(NotFiniteError, match="image 1, seed 7, 'a red fox': latents before the VA"):
        session_of(pipeline, REQUEST, plan).items(plan.images[1], (0, None))


@pytest.mark.parametrize("sampler", ["dpm_adaptive", "dpm_fast"])
def test_samplers_that_choose_their_own_steps_are_refused(pipeline: Pipeline, sampler: str) -> None:
    run = pipeline.plan(REQUEST.replace(sampler=sampler, steps=8))
    with pytest.raises(InputError, match=f"sampler {sampler} chooses its own steps"):
        count_steps(run)


def test_a_changed_parameter_is_found_at_the_start_and_at_the_end(untrained: Path) -> None:
    changed = Pipeline.open(untrained)
    planned = changed.plan(REQUEST).request
    settings = Settings(model_hash(changed), conditions_of(planned, "float32"))
    session = ModelSession(Description(settings, plan_of([("a", 0)], (0,))), changed)
    session.require_unchanged()
    transformer: Any = changed.model.network("transformer")
    bias = transformer.proj_out.bias
    transformer.proj_out.bias = bias + mx.where(mx.arange(bias.size) == 0, 1e-6, 0.0)
    with pytest.raises(CalibrationError, match="changed while it drew"):
        session.require_unchanged()
    with pytest.raises(CalibrationError, match="not the one the set was made with"):
        require_model(settings, changed)


@pytest.mark.parametrize(
    ("made", "options", "refused"),
    [(4, {}, False), (3, {}, True), (5, {}, True), (4, {"rtol": 0.05}, True)],
)
def test_steps_are_counted_unless_a_sampler_adapts_them(
    made: int, options: dict[str, float], refused: bool
) -> None:
    """Also where they happen to make as many as were asked for."""
    sampler = SimpleNamespace(name="own", options=options, run=lambda *_, **__: iter(range(made)))
    run: Any = SimpleNamespace(
        schedule=SimpleNamespace(sigmas=np.linspace(1, 0, 5)),
        prediction=SimpleNamespace(noise_model="flow"),
        sampler=sampler, options={}, steps=4,
    )  # fmt: skip
    if refused:
        with pytest.raises(InputError, match="own chooses its own steps"):
            count_steps(run)
    else:
        assert count_steps(run) == 4
