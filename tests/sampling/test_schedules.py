"""Schedules against diffusers itself, and the facts that hold without it."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lydite.core.errors import ConfigError, InputError
from lydite.sampling.conventions import CONVENTIONS, plan_schedule
from lydite.sampling.schedules import (
    FLOW_MATCH_FIXED,
    FLOW_MATCH_IGNORED,
    FlowMatchConfig,
    FlowSigmas,
    Schedule,
    from_step,
    make_schedule,
    read_flow_config,
)

STEPS = (1, 2, 3, 4, 7, 20, 28, 50, 1000)
SHIFTS = (0.5, 1.0, 1.73, 3.0, 6.0, 12.0)
SD3 = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "_diffusers_version": "0.29.0.dev0",
    "num_train_timesteps": 1000,
    "shift": 3.0,
}
SD35 = SD3 | {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "use_dynamic_shifting": False,
}
OTHER_VALUES = {
    "base_shift": 0.9,
    "max_shift": 2.0,
    "base_image_seq_len": 64,
    "max_image_seq_len": 128,
    "time_shift_type": "linear",
    "_class_name": "FlowMatchHeunDiscreteScheduler",
    "use_dynamic_shifting": True,
    "invert_sigmas": True,
    "shift_terminal": 0.02,
    "use_karras_sigmas": True,
    "use_exponential_sigmas": True,
    "use_beta_sigmas": True,
    "stochastic_sampling": True,
}


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


@pytest.mark.parametrize("raw", (SD3, SD35), ids=("sd3", "sd35"))
def test_configs_in_the_wild_are_read(raw: dict[str, Any]):
    config = read_flow_config(raw, where="scheduler_config.json")
    assert config == FlowMatchConfig(num_train_timesteps=1000, shift=3.0)


@pytest.mark.parametrize("key", sorted(FLOW_MATCH_FIXED))
def test_a_key_that_changes_the_numbers_is_refused(key: str):
    with pytest.raises(ConfigError, match=f"{key} is .* is supported"):
        read_flow_config(SD35 | {key: OTHER_VALUES[key]}, where="scheduler_config.json")


@pytest.mark.parametrize("key", ("shift", "num_train_timesteps"))
def test_a_missing_number_is_refused(key: str):
    raw = {name: value for name, value in SD3.items() if name != key}
    with pytest.raises(ConfigError, match=f"missing \\['{key}'\\]"):
        read_flow_config(raw, where="scheduler_config.json")


def test_an_unknown_key_is_refused():
    with pytest.raises(ConfigError, match="not understood \\['use_sine_sigmas'\\]"):
        read_flow_config(SD3 | {"use_sine_sigmas": False}, where="scheduler_config.json")


@pytest.mark.parity
def test_every_key_diffusers_writes_is_accounted_for():
    raw = json.loads(reference(1, shift=3.0).to_json_string())
    assert read_flow_config(raw, where="diffusers") == FlowMatchConfig(1000, 3.0)
    accounted = {"num_train_timesteps", "shift"} | FLOW_MATCH_IGNORED | set(FLOW_MATCH_FIXED)
    assert {key for key in raw if key != "_diffusers_version"} == accounted


@pytest.mark.parity
@pytest.mark.parametrize("key", sorted(FLOW_MATCH_IGNORED))
def test_an_ignored_key_changes_nothing_in_diffusers(key: str):
    plain = reference(28, shift=3.0)
    assert plain.config[key] != OTHER_VALUES[key]
    other = reference(28, shift=3.0, **{key: OTHER_VALUES[key]})
    assert plain.sigmas.tolist() == other.sigmas.tolist()
    assert plain.timesteps.tolist() == other.timesteps.tolist()


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
