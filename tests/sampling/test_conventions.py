"""Presets: every choice recorded, and each one with the effect it names."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.pipelines.picture import A1111_NAMES
from lydite.sampling.program_conventions import (
    CONVENTIONS,
    discard_penultimate,
    find_convention,
    has_unit_variance,
    last_step_is_first_order,
    options_of,
    plan_schedule,
    schedule_name,
    start_below_one,
    uses_brownian_path,
)
from lydite.sampling.registry import SAMPLERS, SCHEDULES, make_schedule, suggestion
from lydite.sampling.schedules.flow import FlowSigmas
from lydite.sampling.schedules.table import STABLE_DIFFUSION, ContinuousSigmas

FLOW = FlowSigmas(3.0)
EULER: dict[str, Any] = {
    "sampler": "euler",
    "schedule": "karras",
    "steps": 20,
    "model": STABLE_DIFFUSION,
}


def plan(name: str, **changed: Any) -> Any:
    return plan_schedule(CONVENTIONS[name], **(EULER | changed))


def test_the_presets():
    assert list(CONVENTIONS) == ["lydite", "k-diffusion", "comfyui", "a1111", "diffusers"]
    with pytest.raises(InputError, match="'forge'; expected one of lydite, k-diffusion"):
        find_convention("forge")


@pytest.mark.parametrize("name", CONVENTIONS)
def test_every_schedule_a_preset_names_is_there(name: str):
    convention = CONVENTIONS[name]
    named = {*convention.names.values(), *convention.options, *convention.automatic.values()}
    assert named <= set(SCHEDULES)
    for schedule, options in convention.options.items():
        assert set(options) <= set(SCHEDULES[schedule].options)


def test_beta_means_what_the_program_means_and_nothing_without_one():
    assert schedule_name(CONVENTIONS["comfyui"], "beta") == "beta_timesteps"
    assert schedule_name(CONVENTIONS["a1111"], "beta") == "beta_sigmas"
    assert schedule_name(CONVENTIONS["diffusers"], "beta") == "beta_sigmas"
    for name in ("lydite", "k-diffusion"):
        with pytest.raises(InputError, match="name one of the two, or a convention"):
            plan(name, schedule="beta")


def test_other_names_of_a1111():
    assert plan("a1111", schedule="kl_optimal").sigmas[-1] > 0
    assert plan("comfyui", schedule="kl_optimal").sigmas[-1] == 0
    assert plan("a1111", schedule="uniform").name == "normal"
    assert plan("a1111", schedule="automatic").name == "normal"
    assert plan("a1111", schedule="automatic", sampler="dpmpp_2m").name == "karras"
    assert plan("a1111", schedule="automatic", sampler="dpmpp_3m_sde").name == "exponential"
    with pytest.raises(InputError, match="no schedule 'automatic'"):
        plan("comfyui", schedule="automatic")


# {'scheduler': …} in A1111's modules/sd_samplers_kdiffusion.py
A1111_AUTOMATIC = {
    "karras": (
        "dpmpp_2m",
        "dpmpp_sde",
        "dpmpp_2s_ancestral",
        "dpm_2",
        "dpm_2_ancestral",
        "restart",
    ),
    "exponential": ("dpmpp_2m_sde", "dpmpp_2m_sde_heun", "dpmpp_3m_sde"),
}


def test_automatic_is_the_schedule_that_a1111_has_for_the_sampler():
    chosen = {sampler: name for name, row in A1111_AUTOMATIC.items() for sampler in row}
    for sampler in SAMPLERS:
        found = schedule_name(CONVENTIONS["a1111"], "automatic", sampler)
        assert found == chosen.get(sampler, "normal"), sampler


def test_names_that_we_write_for_a1111_are_understood():
    for ours, shown in A1111_NAMES.items():
        assert suggestion(shown, SAMPLERS) == f" Did you mean {ours}?"
        assert suggestion(f"{shown} Karras", SAMPLERS).endswith(f"{ours} --schedule karras?")


def test_timesteps_are_interpolated_or_the_nearest():
    interpolated, nearest = plan("k-diffusion"), plan("comfyui")
    np.testing.assert_array_equal(interpolated.sigmas, nearest.sigmas)
    assert np.any(interpolated.timesteps % 1 != 0)
    np.testing.assert_array_equal(nearest.timesteps, np.rint(interpolated.timesteps))
    assert nearest.timestep_of(3.21) == round(interpolated.timestep_of(3.21))


def test_a_flow_model_keeps_its_fractions_in_comfyui():
    schedule = plan("comfyui", schedule="normal", model=FLOW)
    np.testing.assert_allclose(schedule.timesteps, schedule.sigmas[:-1] * 1000, rtol=1e-12)


def test_comfyui_shifts_twice_and_options_can_say_otherwise():
    twice = plan("comfyui", schedule="normal", model=FLOW)
    wanted = make_schedule("sd3_diffusers", 20, FlowSigmas(3.0))
    np.testing.assert_allclose(twice.sigmas, wanted.sigmas, rtol=1e-12)
    once = plan("comfyui", schedule="normal", model=FLOW, double_shift=False)
    assert once.sigmas[-2] < twice.sigmas[-2]
    np.testing.assert_array_equal(once.sigmas, plan("lydite", schedule="normal", model=FLOW).sigmas)


@pytest.mark.parametrize(
    ("name", "samplers"),
    (
        ("comfyui", ("dpm_2", "dpm_2_ancestral", "uni_pc", "uni_pc_bh2")),
        ("a1111", ("dpm_2", "dpm_2_ancestral", "dpmpp_3m_sde")),
    ),
)
def test_the_penultimate_sigma_is_discarded_and_no_step_lost(name: str, samplers: tuple[str, ...]):
    longer = plan(name, steps=21)
    for sampler in samplers:
        ours = plan(name, sampler=sampler)
        assert len(ours.timesteps) == 20
        np.testing.assert_array_equal(ours.sigmas, np.delete(longer.sigmas, 20))
        np.testing.assert_array_equal(ours.timesteps, longer.timesteps[:20])
    assert CONVENTIONS[name].discard_penultimate == frozenset(samplers)
    assert len(plan(name, sampler=samplers[0], steps=1).timesteps) == 1


def test_one_step_has_no_penultimate_sigma():
    with pytest.raises(InputError, match="no penultimate sigma"):
        discard_penultimate(make_schedule("karras", 1, STABLE_DIFFUSION))


@pytest.mark.parametrize(
    ("name", "made", "run"),
    (
        ("lydite", 20, 12),
        ("k-diffusion", 20, 12),
        ("comfyui", 33, 20),
        ("a1111", 20, 13),
        ("diffusers", 20, 12),
    ),
)
def test_strength_leaves_the_last_steps(name: str, made: int, run: int):
    ours, whole = plan(name, strength=0.6), plan(name, steps=made)
    assert len(ours.timesteps) == run
    np.testing.assert_array_equal(ours.sigmas, whole.sigmas[made - run :])
    np.testing.assert_array_equal(ours.timesteps, whole.timesteps[made - run :])


def test_strength_and_a_discarded_sigma_together():
    ours = plan("comfyui", sampler="dpm_2", strength=0.5)
    whole = plan("comfyui", steps=41)
    np.testing.assert_array_equal(ours.sigmas, np.delete(whole.sigmas, 40)[20:])


def test_comfyui_starts_flow_below_one_for_samplers_that_need_its_snr():
    plain = plan("comfyui", schedule="simple", model=FLOW)
    below = plan("comfyui", schedule="simple", model=FLOW, sampler="er_sde")
    assert plain.sigmas[0] == 1
    assert below.sigmas[0] == pytest.approx(3 * 0.9999 / (1 + 2 * 0.9999), rel=1e-12)
    assert below.timesteps[0] == pytest.approx(below.sigmas[0] * 1000, rel=1e-12)
    np.testing.assert_array_equal(below.sigmas[1:], plain.sigmas[1:])
    assert plan("lydite", schedule="simple", model=FLOW, sampler="er_sde").sigmas[0] == 1
    for same in (plan("comfyui", sampler="er_sde"), plan("comfyui")):
        np.testing.assert_array_equal(same.sigmas, plan("lydite").sigmas)
    img2img = make_schedule("simple", 20, FLOW)
    assert start_below_one(img2img, STABLE_DIFFUSION, 1e-4) is img2img


def test_the_final_sigma_can_be_sigma_min():
    ending = replace(CONVENTIONS["diffusers"], final="sigma_min")
    ours = plan_schedule(
        ending, sampler="euler", schedule="trailing", steps=20, model=STABLE_DIFFUSION
    )
    assert ours.sigmas[-1] == STABLE_DIFFUSION.levels[0]


@pytest.mark.parametrize(
    ("name", "schedule", "whole"),
    (
        ("lydite", "karras", False),
        ("k-diffusion", "karras", False),
        ("comfyui", "karras", True),
        ("comfyui", "vp", True),  # above the table
        ("comfyui", "leading", False),
        ("a1111", "karras", False),
        ("diffusers", "karras", False),
        ("diffusers", "trailing", False),
        ("diffusers", "leading", True),
        ("diffusers", "leading_dpm", True),
    ),
)
def test_who_widens_the_first_noise(name: str, schedule: str, whole: bool):
    made = plan(name, schedule=schedule)
    assert has_unit_variance(CONVENTIONS[name], made, STABLE_DIFFUSION) is whole


def test_img2img_in_comfyui_is_not_widened():
    made = plan("comfyui", strength=0.6)
    assert not has_unit_variance(CONVENTIONS["comfyui"], made, STABLE_DIFFUSION)


def test_the_last_step():
    short, long = (make_schedule("karras", n, STABLE_DIFFUSION) for n in (14, 20))
    open_short, open_long = (
        make_schedule("trailing", n, STABLE_DIFFUSION, final="sigma_min") for n in (14, 15)
    )
    for name in CONVENTIONS:
        assert last_step_is_first_order(CONVENTIONS[name], short)
        assert last_step_is_first_order(CONVENTIONS[name], long)
        assert not last_step_is_first_order(CONVENTIONS[name], open_long)
    assert last_step_is_first_order(CONVENTIONS["diffusers"], open_short)
    assert not last_step_is_first_order(CONVENTIONS["comfyui"], open_short)


def test_a_convention_sets_the_last_step_of_multistep_samplers():
    ends_open = make_schedule("trailing", 14, STABLE_DIFFUSION, final="sigma_min")

    def said(convention: str, sampler: str) -> dict[str, object]:
        return options_of(CONVENTIONS[convention], ends_open, SAMPLERS[sampler])

    assert said("diffusers", "uni_pc") == {"lower_order_final": True}
    assert said("comfyui", "uni_pc") == {"lower_order_final": False}
    assert said("diffusers", "euler") == said("diffusers", "dpmsolver_2s") == {}


def test_a_model_without_a_table_keeps_its_own_timesteps():
    model = ContinuousSigmas()
    schedule = plan("comfyui", model=model)
    assert schedule.timesteps[3] == model.timestep_of(float(schedule.sigmas[3]))


def test_streams_and_sde_noise_of_the_presets():
    streams = {name: each.stream for name, each in CONVENTIONS.items()}
    assert {name: (rule.batch, rule.delta) for name, rule in streams.items()} == {
        "lydite": ("image", None),
        "k-diffusion": ("whole", None),
        "comfyui": ("whole", 1),
        "a1111": ("image", None),
        "diffusers": ("image", None),
    }
    for name, each in CONVENTIONS.items():
        paths = [kind for kind in ("none", "stream", "path") if uses_brownian_path(each, kind)]
        assert paths == ([] if name == "diffusers" else ["path"])
