"""What holds of every schedule: finite, falling, as many steps as it says, a timestep anywhere."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lydite.core.errors import InputError
from lydite.sampling.registry import SCHEDULES, find_schedule, make_schedule
from lydite.sampling.schedules.flow import FlowSigmas
from lydite.sampling.schedules.schedule import Points, Schedule, finish_schedule, from_step
from lydite.sampling.schedules.table import (
    COMFYUI_CLAMP,
    STABLE_DIFFUSION,
    ContinuousSigmas,
    alphas_cumprod,
    betas,
    noise_table,
)

STEPS = (1, 2, 3, 4, 7, 20, 50, 1000)
ZERO_TERMINAL = noise_table(
    alphas_cumprod(betas("scaled_linear", 0.00085, 0.012)), clamp=COMFYUI_CLAMP
)
MODELS: dict[str, Any] = {
    "sd": STABLE_DIFFUSION,
    "zero terminal": ZERO_TERMINAL,
    "cosine": noise_table(alphas_cumprod(betas("squaredcos_cap_v2", 0, 0))),
    "sd3": FlowSigmas(3.0),
    "flux": FlowSigmas(3.158, 10_000),
    "edm": ContinuousSigmas(),
    "v": ContinuousSigmas(0.01, 500.0, timestep_formula="v"),
    "cosmos": ContinuousSigmas(0.002, 80.0, timestep_formula="cosmos"),
}
MADE: dict[str, Any] = {"custom": {"sigmas": [0.9, 0.3, 0.0]}}


def kinds_of(model: Any) -> list[str]:
    return [name for name, kind in SCHEDULES.items() if model.noise_model.name in kind.noise_models]


CASES = [(model, name) for model in MODELS for name in kinds_of(MODELS[model])]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_every_schedule_is_finite_and_falls_for_every_model(model: str, name: str):
    described = MODELS[model]
    for steps in STEPS if name != "custom" else (2,):
        schedule = make_schedule(name, steps, described, **MADE.get(name, {}))
        assert schedule.name == name
        assert schedule.sigmas.dtype == schedule.timesteps.dtype == np.float64
        assert len(schedule.sigmas) == len(schedule.timesteps) + 1
        assert np.all(np.isfinite(schedule.sigmas))
        assert np.all(np.isfinite(schedule.timesteps))
        assert np.all(np.diff(schedule.sigmas) < 0)
        assert np.all(np.diff(schedule.timesteps) <= 0)
        assert schedule.sigmas[0] <= 1 or described.noise_model.name == "ve"
        if name != "kl_optimal_a1111":
            assert schedule.sigmas[-1] == 0
        if SCHEDULES[name].count == "n":
            assert len(schedule.timesteps) == steps
        for values in (schedule.sigmas, schedule.timesteps):
            with pytest.raises(ValueError, match="read-only"):
                values[0] = 0.5


def test_a_schedule_of_another_length_says_so():
    others = {
        name
        for (model, name), steps in itertools.product(CASES, (7, 200, 1000))
        if name != "custom" and len(make_schedule(name, steps, MODELS[model]).timesteps) != steps
    }
    assert others == {name for name, kind in SCHEDULES.items() if kind.count != "n"} - {
        "simple",  # only where there are more steps than levels
        "trailing",
    }


@pytest.mark.parametrize(("steps", "given"), ((7, 8), (30, 31), (300, 333), (600, 999)))
def test_ddim_uniform_gives_more_steps_than_asked(steps: int, given: int):
    assert len(make_schedule("ddim_uniform", steps, STABLE_DIFFUSION).timesteps) == given


@pytest.mark.parametrize(("steps", "given"), ((200, 199), (400, 387)))
def test_beta_timesteps_gives_fewer_steps_than_asked(steps: int, given: int):
    assert len(make_schedule("beta_timesteps", steps, STABLE_DIFFUSION).timesteps) == given


def test_the_two_betas_are_far_apart():
    by_timestep = make_schedule("beta_timesteps", 20, STABLE_DIFFUSION).sigmas[10]
    by_sigma = make_schedule("beta_sigmas", 20, STABLE_DIFFUSION).sigmas[10]
    assert by_timestep == pytest.approx(1.618, abs=1e-3)
    assert by_sigma == pytest.approx(6.79, abs=0.01)


def test_the_two_linspaces_are_far_apart():
    euler = make_schedule("linspace", 20, STABLE_DIFFUSION).sigmas
    dpm = make_schedule("linspace_dpm", 20, STABLE_DIFFUSION).sigmas
    assert np.max(dpm[:-1] / euler[:-1]) > 6


def test_kl_optimal_ends_in_zero_and_its_twin_at_sigma_min():
    for steps in (1, 20):
        one, twin = (
            make_schedule(name, steps, STABLE_DIFFUSION).sigmas
            for name in ("kl_optimal", "kl_optimal_a1111")
        )
        assert len(one) == len(twin) == steps + 1
        assert one[0] == twin[0] == STABLE_DIFFUSION.levels[-1]
        assert one[-1] == 0
        assert twin[-1] == pytest.approx(STABLE_DIFFUSION.levels[0], rel=1e-12)


def test_normal_on_a_flow_model_is_flow_shift_or_twice_shifted_sd3_diffusers():
    model = FlowSigmas(3.0)
    for twice, twin in ((False, "flow_shift"), (True, "sd3_diffusers")):
        ours = make_schedule("normal", 28, model, double_shift=twice).sigmas
        np.testing.assert_allclose(ours, make_schedule(twin, 28, model).sigmas, rtol=1e-12)


def test_vp_and_align_your_steps_keep_the_signal_to_noise_ratio_on_a_flow_model():
    for name in ("vp", "align_your_steps"):
        flow = make_schedule(name, 10, FlowSigmas(3.0)).sigmas[:-1]
        ve = make_schedule(name, 10, STABLE_DIFFUSION).sigmas[:-1]
        if name == "vp":  # the other interpolates between its points, after the change
            np.testing.assert_allclose(flow / (1 - flow), ve, rtol=1e-9)
        np.testing.assert_allclose(flow[0] / (1 - flow[0]), ve[0], rtol=1e-9)


@settings(deadline=None, max_examples=40)
@given(
    case=st.sampled_from([case for case in CASES if case[1] != "custom"]), steps=st.integers(1, 60)
)
@example(case=("sd", "linspace"), steps=7)  # whose timesteps are not those of the model
def test_the_grid_tells_its_own_timesteps(case: tuple[str, str], steps: int):
    schedule = make_schedule(case[1], steps, MODELS[case[0]])
    told = [schedule.timestep_of(float(sigma)) for sigma in schedule.sigmas[:-1]]
    assert told == schedule.timesteps.tolist()


@pytest.mark.parametrize("model", MODELS)
def test_between_grid_points_the_model_tells_the_timestep(model: str):
    schedule = make_schedule("karras", 5, MODELS[model])
    for sigma in np.sqrt(schedule.sigmas[:-2] * schedule.sigmas[1:-1]).tolist():
        assert schedule.timestep_of(sigma) == MODELS[model].timestep_of(sigma)
    assert from_step(schedule, 2).timestep_of(0.123) == schedule.timestep_of(0.123)
    assert from_step(schedule, 2).timestep_between == schedule.timestep_between


def test_a_schedule_without_a_model_interpolates_between_its_own():
    plain = Schedule("seeded", np.array([1.0, 0.5, 0.25, 0.0]), np.array([1000.0, 500.0, 250.0]))
    assert plain.timestep_of(0.5) == 500
    assert plain.timestep_of(0.75) == 750
    assert plain.timestep_of(0.1) == 250


def test_options_show_their_defaults():
    options = SCHEDULES["karras"].options
    assert options == {"rho": 7.0, "sigma_min": None, "sigma_max": None, "whole": False}


def test_ends_of_a_curve_can_be_chosen():
    ours = make_schedule("karras", 9, STABLE_DIFFUSION, sigma_min=0.1, sigma_max=10.0).sigmas
    assert ours[0] == 10
    assert ours[-2] == pytest.approx(0.1, rel=1e-12)


def test_custom_sigmas_are_left_alone():
    ours = make_schedule("custom", 3, STABLE_DIFFUSION, sigmas=[10, 3, 1, 0.5])
    assert ours.sigmas.tolist() == [10, 3, 1, 0.5]
    assert ours.timesteps.tolist() == [STABLE_DIFFUSION.timestep_of(s) for s in (10, 3, 1)]


@pytest.mark.parametrize(
    ("name", "steps", "model", "options", "message"),
    (
        ("karas", 20, "sd", {}, "there is no schedule 'karas'"),
        ("karras", 0, "sd", {}, "steps is 0; expected"),
        ("karras", True, "sd", {}, "steps is True; expected"),
        ("karras", 20, "sd", {"row": 7}, "schedule karras has no option 'row'; it has rho, sigma"),
        ("simple", 20, "sd", {"rho": 7}, "schedule simple has no option 'rho'; it has none."),
        ("karras", 20, "sd", {"sigma_min": 20.0}, "sigma_min 20.0 and sigma_max 14.6"),
        ("karras", 20, "sd", {"sigma_min": 0.0}, "sigma_min 0.0 and sigma_max 14.6"),
        ("flux", 20, "sd", {}, "schedule flux is for flow models, not for eps and v ones"),
        ("flow_match", 20, "sd3", {"grid": "odd"}, "grid is 'odd'; expected"),
        ("flow_match", 20, "sd3", {"curve": "odd"}, "curve is 'odd'; expected"),
        ("flow_shift", 20, "sd3", {"terminal": 1.0}, "terminal is 1.0; expected"),
        ("custom", 20, "sd", {}, "schedule custom needs the option 'sigmas'"),
        ("custom", 3, "sd", {"sigmas": [1, 0]}, "custom: 2 sigmas make 1 steps, not 3"),
        ("custom", 2, "sd", {"sigmas": [1, 2, 0]}, "schedule custom: its sigmas do not fall: 1, 2"),
        ("custom", 2, "sd", {"sigmas": [1, float("nan"), 0]}, "schedule custom: its sigmas do"),
        ("custom", 2, "sd", {"sigmas": [1, 0, -1]}, "schedule custom: sigmas outside"),
        ("custom", 1, "sd3", {"sigmas": [1.5, 0]}, "schedule custom: sigmas outside"),
        ("align_your_steps", 9, "sd", {"family": "sd4"}, "align_your_steps: family 'sd4'"),
        ("align_your_steps", 9, "sd3", {"by": "timestep"}, "align_your_steps by timestep is"),
        ("linear_quadratic", 9, "sd", {"linear_steps": 9}, "linear_quadratic: threshold 0.025"),
        ("beta_sigmas", 9, "sd", {"alpha": -1.0}, "beta quantile of "),
    ),
)
def test_bad_input_is_refused_in_one_line(
    name: str, steps: Any, model: str, options: dict[str, Any], message: str
):
    with pytest.raises(InputError) as error:
        make_schedule(name, steps, MODELS[model], **options)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_sigmas_that_repeat_are_dropped_with_their_timesteps():
    points = Points(np.array([9.0, 9.0, 4.0, 1.0, 1.0]), np.array([5.0, 5.0, 4.0, 3.0, 2.0]))
    made = finish_schedule("seeded", points, STABLE_DIFFUSION)
    assert made.sigmas.tolist() == [9, 4, 1, 0]
    assert made.timesteps.tolist() == [5, 4, 3]


def test_records_are_complete():
    for name, kind in SCHEDULES.items():
        assert kind is find_schedule(name)
        assert kind.proofs
        assert all(getattr(kind, field.name) is not None for field in dataclasses.fields(kind))
