"""Every schedule against the programs it is known from: recorded numbers, and diffusers itself.

golden/schedules.npz is written by tools/record_schedules.py, which runs k-diffusion, ComfyUI and
A1111 in processes of their own. Where those leave the precision to torch's default it was float64.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.sampling.registry import SCHEDULES, make_schedule
from lydite.sampling.schedules.align_your_steps import SIGMAS
from lydite.sampling.schedules.flow import FlowSigmas
from lydite.sampling.schedules.table import STABLE_DIFFUSION, alphas_cumprod, betas, noise_table

GOLDEN = np.load(Path(__file__).with_name("golden") / "schedules.npz")
STEPS = (1, 2, 3, 4, 7, 20, 50, 1000)
BAR = 1e-6  # relative; the largest found is 5.9e-7, ComfyUI's kl_optimal, which is float32
SD3, FLUX = FlowSigmas(3.0), FlowSigmas(math.exp(1.15), 10_000)
FLOW_ENDS = {"sigma_min": 0.003, "sigma_max": 1.0}
TWICE = {"double_shift": True}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "k-diffusion/normal/eps": ("normal", STABLE_DIFFUSION, {}),
    "k-diffusion/vp/eps": ("vp", STABLE_DIFFUSION, {}),
    **{
        f"k-diffusion/{name}/{noise_model}": (name.removesuffix("_rho3"), model, ends | more)
        for noise_model, model, ends in (("eps", STABLE_DIFFUSION, {}), ("flow", SD3, FLOW_ENDS))
        for name, more in (
            ("karras", {}),
            ("karras_rho3", {"rho": 3.0}),
            ("exponential", {}),
            ("polyexponential", {"rho": 1.7}),
        )
    },
    **{
        f"comfyui/{theirs}/{noise_model}": (name, model, options)
        for noise_model, model in (("eps", STABLE_DIFFUSION), ("sd3", SD3), ("flux", FLUX))
        for theirs, name, options in (
            ("simple", "simple", {}),
            ("sgm_uniform", "sgm_uniform", TWICE),
            ("normal", "normal", TWICE),
            ("karras", "karras", {}),
            ("exponential", "exponential", {}),
            ("ddim_uniform", "ddim_uniform", {}),
            ("beta", "beta_timesteps", {}),
            ("linear_quadratic", "linear_quadratic", {}),
            ("kl_optimal", "kl_optimal", {}),
        )
    },
    "comfyui/ays/sd15": ("align_your_steps", STABLE_DIFFUSION, {"by": "timestep"}),
    "comfyui/ays/sdxl": (
        "align_your_steps",
        STABLE_DIFFUSION,
        {"by": "timestep", "family": "sdxl"},
    ),
    "comfyui/ays/svd": ("align_your_steps", STABLE_DIFFUSION, {"family": "svd"}),
    "a1111/align_your_steps/sdxl": (
        "align_your_steps",
        STABLE_DIFFUSION,
        {"ending": "append", "family": "sdxl"},
    ),
    **{
        f"a1111/{theirs}/eps": (name, STABLE_DIFFUSION, options)
        for theirs, name, options in (
            ("uniform", "normal", {}),
            ("normal", "normal", {}),
            ("karras", "karras", {}),
            ("exponential", "exponential", {}),
            ("polyexponential", "polyexponential", {}),
            ("sgm_uniform", "sgm_uniform", {}),
            ("kl_optimal", "kl_optimal_a1111", {}),
            ("simple", "simple", {}),
            ("ddim", "ddim_uniform", {}),
            ("beta", "beta_sigmas", {}),
            ("align_your_steps", "align_your_steps", {"ending": "append"}),
        )
    },
}


def thinned(sigmas: np.ndarray) -> np.ndarray:
    """As the recorder thins a long schedule."""
    if len(sigmas) < 30:
        return sigmas
    return sigmas[np.linspace(0, len(sigmas) - 1, 24).round().astype(int)]


def recorded(key: str) -> Iterator[tuple[int, int, np.ndarray]]:
    """(steps asked for, sigmas given, those of them that were kept)."""
    values = GOLDEN[key]
    while len(values):
        steps, length = (int(value) for value in values[:2])
        end = 2 + len(thinned(np.empty(length)))
        yield steps, length, values[2:end]
        values = values[end:]


@pytest.mark.parametrize("key", CASES)
def test_a_schedule_is_that_of_its_program(key: str):
    name, model, options = CASES[key]
    asked: list[int] = []
    for steps, length, theirs in recorded(key):
        ours = make_schedule(name, steps, model, **options).sigmas
        assert len(ours) == length
        np.testing.assert_allclose(thinned(ours), theirs, rtol=BAR, atol=0)
        asked.append(steps)
    assert tuple(asked) == (STEPS if key.split("/")[:2] != ["comfyui", "kl_optimal"] else STEPS[1:])


def test_every_recorded_schedule_is_compared():
    apart = {"levels", "timesteps", "prediction", "version", "laplace", "inputs"}
    keys = {key for key in GOLDEN.files if not apart & set(key.split("/"))}
    assert keys == set(CASES)


def test_laplace_is_comfyuis_which_appends_no_zero_and_repeats_the_ends():
    for steps, length, theirs in recorded("comfyui/laplace/eps"):
        assert length == steps
        raw = SCHEDULES["laplace"].function(STABLE_DIFFUSION, steps).sigmas
        np.testing.assert_allclose(thinned(raw), theirs, rtol=BAR, atol=0)
        ours = make_schedule("laplace", steps, STABLE_DIFFUSION).sigmas
        np.testing.assert_array_equal(ours[:-1], np.unique(raw)[::-1])
        assert ours[-1] == 0


def test_every_schedule_with_a_recorded_proof_has_one():
    proofs = {"k-diffusion": "k-diffusion", "comfyui": "ComfyUI", "a1111": "A1111"}
    shown: dict[str, set[str]] = {"laplace": {"ComfyUI"}, "sd3_diffusers": {"ComfyUI normal"}}
    for key, (name, _, _) in CASES.items():
        shown.setdefault(name, set()).add(proofs[key.split("/")[0]])
    for name, kind in SCHEDULES.items():
        claimed = {proof for proof in kind.proofs if not proof.startswith(("diffusers", "iden"))}
        assert claimed == shown.get(name, set()), name


# diffusers computes ᾱ in float32 and rounds its sigmas to it; with its own table that is all that
# is left between us: half a unit in the last place, 6e-8, but for the roundings before it.
ROUNDED = noise_table(alphas_cumprod(betas("scaled_linear", 0.00085, 0.012), float32=True))
SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def scheduler(kind: str, **config: Any) -> Any:
    return getattr(pytest.importorskip("diffusers"), kind)(**SD, **config)


def assert_same(name: str, steps: int, theirs: Any, **options: Any) -> None:
    theirs.set_timesteps(steps)
    sigmas, timesteps = theirs.sigmas.numpy(), theirs.timesteps.numpy()
    fresh = np.append(True, np.diff(sigmas) != 0)  # it repeats some, and runs steps of no length
    ours = make_schedule(name, steps, ROUNDED, **options)
    np.testing.assert_allclose(ours.sigmas, sigmas[fresh], rtol=BAR, atol=0)
    told = np.minimum(timesteps, 999)[fresh[:-1]]
    np.testing.assert_allclose(ours.timesteps, told, rtol=0, atol=2e-4)


@pytest.mark.parity
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("spacing", ("linspace", "leading", "trailing"))
def test_spacings_of_diffusers_euler(spacing: str, steps: int):
    theirs = scheduler("EulerDiscreteScheduler", timestep_spacing=spacing, steps_offset=1)
    assert_same(spacing, steps, theirs)
    if spacing == "leading":
        theirs = scheduler("EulerDiscreteScheduler", timestep_spacing=spacing, steps_offset=0)
        assert_same(spacing, steps, theirs, offset=0)


@pytest.mark.parity
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("spacing", ("linspace", "leading", "trailing"))
def test_spacings_of_diffusers_dpm_solver(spacing: str, steps: int):
    name = spacing if spacing == "trailing" else f"{spacing}_dpm"
    theirs = scheduler("DPMSolverMultistepScheduler", timestep_spacing=spacing, steps_offset=1)
    if (spacing, steps) == ("leading", 1000):  # 1000 // 1001 = 0: all its steps are one
        theirs.set_timesteps(steps)
        assert len(set(theirs.sigmas.tolist())) == 2
        assert len(make_schedule(name, steps, ROUNDED).timesteps) == 998
        return
    assert_same(name, steps, theirs)


@pytest.mark.parity
@pytest.mark.parametrize("steps", STEPS[1:])  # at 1 diffusers goes from sigma_min: see below
@pytest.mark.parametrize("curve", ("karras", "exponential", "beta"))
def test_curves_of_diffusers_euler(curve: str, steps: int):
    theirs = scheduler("EulerDiscreteScheduler", **{f"use_{curve}_sigmas": True})
    assert_same({"beta": "beta_sigmas"}.get(curve, curve), steps, theirs)


@pytest.mark.parity
@pytest.mark.parametrize("curve", ("karras", "exponential", "beta"))
def test_one_step_of_a_curve_starts_at_the_top_where_diffusers_starts_at_the_bottom(curve: str):
    theirs = scheduler("EulerDiscreteScheduler", **{f"use_{curve}_sigmas": True})
    theirs.set_timesteps(1)
    assert float(theirs.sigmas[0]) == pytest.approx(0.02917, rel=1e-3)
    ours = make_schedule({"beta": "beta_sigmas"}.get(curve, curve), 1, ROUNDED)
    np.testing.assert_array_equal(ours.sigmas, [ROUNDED.levels[-1], 0])


@pytest.mark.parity
@pytest.mark.parametrize("steps", STEPS[1:])
@pytest.mark.parametrize(
    ("curve", "rule"), (("karras", "round"), ("exponential", "truncate"), ("beta", "truncate"))
)
def test_timesteps_of_curves_in_diffusers_dpm_solver(curve: str, rule: Any, steps: int):
    theirs = scheduler("DPMSolverMultistepScheduler", **{f"use_{curve}_sigmas": True})
    theirs.set_timesteps(steps)
    table = noise_table(1 / (1 + ROUNDED.levels**2), rule=rule)
    ours = make_schedule({"beta": "beta_sigmas"}.get(curve, curve), steps, table)
    apart = ours.timesteps - theirs.timesteps.numpy()
    # float32 falls to the other side of a whole number now and then
    assert np.count_nonzero(apart) <= max(1, steps // 100)
    assert np.abs(apart).max() <= 1


@pytest.mark.parity
@pytest.mark.parametrize("final", ("zero", "sigma_min"))
def test_the_final_sigma_of_diffusers(final: Any):
    theirs = scheduler(
        "EulerDiscreteScheduler", final_sigmas_type=final, timestep_spacing="trailing"
    )
    theirs.set_timesteps(20)
    ours = make_schedule("trailing", 20, ROUNDED, final=final)
    np.testing.assert_allclose(ours.sigmas, theirs.sigmas.numpy(), rtol=BAR, atol=0)


@pytest.mark.parity
@pytest.mark.parametrize("steps", STEPS[1:])  # at 1 it divides by zero linear steps
def test_linear_quadratic_is_mochis(steps: int):
    pytest.importorskip("diffusers")
    from diffusers.pipelines.mochi import pipeline_mochi

    theirs = pipeline_mochi.linear_quadratic_schedule(steps, 0.025)
    ours = make_schedule("linear_quadratic", steps, FlowSigmas())
    np.testing.assert_allclose(ours.sigmas[:-1], theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parity
def test_align_your_steps_is_the_table_of_diffusers():
    pytest.importorskip("diffusers")
    from diffusers.schedulers.scheduling_utils import AysSchedules

    kinds = {"sd15": "StableDiffusion", "sdxl": "StableDiffusionXL", "svd": "StableDiffusionVideo"}
    for family, kind in kinds.items():
        ours = make_schedule("align_your_steps", 10, STABLE_DIFFUSION, family=family)
        np.testing.assert_allclose(ours.sigmas, AysSchedules[f"{kind}Sigmas"], rtol=1e-12)
    assert set(kinds) == set(SIGMAS)
