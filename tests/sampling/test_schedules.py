"""Schedules against diffusers itself, and the facts that hold without it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lydite.core.errors import InputError
from lydite.sampling.program_conventions import CONVENTIONS, plan_schedule
from lydite.sampling.registry import make_schedule
from lydite.sampling.schedules.flow import FlowSigmas
from lydite.sampling.schedules.schedule import Schedule, from_step

STEPS = (1, 2, 3, 4, 7, 20, 28, 50, 1000)
SHIFTS = (0.5, 1.0, 1.73, 3.0, 6.0, 12.0)


def reference(steps: int, **config: Any) -> Any:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**config)
    scheduler.set_timesteps(steps)
    return scheduler


@pytest.mark.parity
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("steps", STEPS)
def test_sd3_diffusers_is_what_diffusers_runs(steps: int, shift: float):
    theirs = reference(steps, shift=shift)
    ours = make_schedule("sd3_diffusers", steps, FlowSigmas(shift))
    # float32 there, rounded three times on the way
    np.testing.assert_allclose(ours.sigmas, theirs.sigmas.numpy(), rtol=5e-7, atol=0)
    np.testing.assert_allclose(ours.timesteps, theirs.timesteps.numpy(), rtol=5e-7, atol=0)


@pytest.mark.parity
@pytest.mark.parametrize("train", (10, 250, 4000))
def test_other_training_lengths_follow_diffusers(train: int):
    theirs = reference(20, shift=3.0, num_train_timesteps=train)
    ours = make_schedule("sd3_diffusers", 20, FlowSigmas(3.0, train, train))
    np.testing.assert_allclose(ours.sigmas, theirs.sigmas.numpy(), rtol=5e-7, atol=0)
    np.testing.assert_allclose(ours.timesteps, theirs.timesteps.numpy(), rtol=5e-7, atol=0)


@pytest.mark.parity
@pytest.mark.parametrize("shift", SHIFTS)
def test_flow_shift_is_diffusers_when_given_the_unshifted_grid(shift: float):
    theirs = reference(1, shift=shift)
    theirs.set_timesteps(sigmas=np.linspace(1.0, 0.001, 28).tolist())  # explicit: shifted once
    ours = make_schedule("flow_shift", 28, FlowSigmas(shift))
    np.testing.assert_allclose(ours.sigmas, theirs.sigmas.numpy(), rtol=5e-7, atol=0)
    np.testing.assert_allclose(ours.timesteps, theirs.timesteps.numpy(), rtol=5e-7, atol=0)


@pytest.mark.parametrize("steps", (2, 28, 50))
def test_the_two_forms_differ_most_at_the_last_step(steps: int):
    once = make_schedule("flow_shift", steps, FlowSigmas(3.0))
    twice = make_schedule("sd3_diffusers", steps, FlowSigmas(3.0))
    assert once.sigmas[-2] == pytest.approx(0.003 / 1.002, rel=1e-12)  # 0.00299
    assert twice.sigmas[-2] == pytest.approx(0.00892857, rel=1e-6)
    ratio = twice.sigmas[:-1] / once.sigmas[:-1]
    assert ratio[0] == 1
    assert np.all(np.diff(ratio) > 0)


@pytest.mark.parametrize("steps", STEPS)
def test_the_two_forms_agree_at_shift_one(steps: int):
    once = make_schedule("flow_shift", steps, FlowSigmas(1.0))
    twice = make_schedule("sd3_diffusers", steps, FlowSigmas(1.0))
    np.testing.assert_array_equal(once.sigmas, twice.sigmas)


@settings(deadline=None)
@given(
    name=st.sampled_from(("flow_shift", "sd3_diffusers")),
    steps=st.integers(1, 1200),
    shift=st.floats(0.01, 100.0),
    train=st.integers(2, 4000),
)
def test_every_schedule_falls_from_exactly_one_to_exactly_zero(
    name: str, steps: int, shift: float, train: int
):
    schedule = make_schedule(name, steps, FlowSigmas(shift, train, train))
    assert schedule.name == name
    assert schedule.sigmas.dtype == schedule.timesteps.dtype == np.float64
    assert schedule.sigmas.shape == (steps + 1,)
    assert schedule.timesteps.shape == (steps,)
    assert schedule.sigmas[0] == 1
    assert schedule.sigmas[-1] == 0
    assert np.all(np.diff(schedule.sigmas) < 0)
    np.testing.assert_allclose(schedule.timesteps, schedule.sigmas[:-1] * train, rtol=1e-15)


def test_a_schedule_cannot_be_written_into():
    schedule = from_step(make_schedule("flow_shift", 4, FlowSigmas(3.0)), 2)
    for values in (schedule.sigmas, schedule.timesteps):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ((0, 3.0), "steps is 0; expected"),
        ((-1, 3.0), "steps is -1; expected"),
        ((2.5, 3.0), "steps is 2.5; expected"),
        ((True, 3.0), "steps is True; expected"),
        (("28", 3.0), "steps is '28'; expected"),
        ((28, 0.0), "shift is 0.0; expected"),
        ((28, -3), "shift is -3; expected"),
        ((28, float("nan")), "shift is nan; expected"),
        ((28, float("inf")), "shift is inf; expected"),
        ((28, 3.0, 0), "num_train_timesteps is 0; expected"),
    ),
)
def test_bad_input_is_refused_in_one_line(arguments: Any, message: str):
    with pytest.raises(InputError) as error:
        make_schedule("flow_shift", arguments[0], FlowSigmas(*arguments[1:]))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def img2img(steps: int, strength: float) -> Schedule:
    return plan_schedule(
        CONVENTIONS["lydite"],
        sampler="euler",
        schedule="sd3_diffusers",
        steps=steps,
        model=FlowSigmas(3.0),
        strength=strength,
    )


@pytest.mark.parity
@pytest.mark.parametrize("steps", STEPS)
def test_img2img_starts_where_diffusers_starts(steps: int):
    diffusers = pytest.importorskip("diffusers")
    scheduler = reference(steps, shift=3.0)
    pipeline = SimpleNamespace(scheduler=scheduler)
    for strength in [percent / 100 for percent in range(1, 101)] + [1, 1e-9, 1 / 3, 1 / steps]:
        timesteps, count = diffusers.StableDiffusion3Img2ImgPipeline.get_timesteps(
            pipeline, steps, strength, None
        )
        ours = img2img(steps, strength)
        assert len(ours.timesteps) == count
        sigmas = scheduler.sigmas[scheduler.begin_index :]
        np.testing.assert_allclose(ours.sigmas, sigmas.numpy(), rtol=5e-7, atol=0)
        np.testing.assert_allclose(ours.timesteps, timesteps.numpy(), rtol=5e-7, atol=0)


def test_img2img_keeps_the_end_and_the_name():
    schedule, kept = make_schedule("sd3_diffusers", 28, FlowSigmas(3.0)), img2img(28, 0.6)
    assert kept.name == "sd3_diffusers"
    np.testing.assert_array_equal(kept.sigmas, schedule.sigmas[11:])
    np.testing.assert_array_equal(kept.timesteps, schedule.timesteps[11:])
