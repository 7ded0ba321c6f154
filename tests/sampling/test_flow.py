"""Shifts, grids and flags of flow schedules, against diffusers itself."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.sampling.registry import make_schedule
from lydite.sampling.schedules.flow import (
    FlowSigmas,
    flux2_mu,
    mu_of_tokens,
    shift_of_mu,
    shift_sigmas,
    stretch_to_terminal,
)

GOLDEN = np.load(Path(__file__).with_name("golden") / "schedules.npz")
STEPS = (1, 2, 3, 4, 7, 20, 50, 1000)
BAR = 1e-6  # relative
MULTISTEP = {"use_flow_sigmas": True, "flow_shift": 3.0, "prediction_type": "flow_prediction"}
CURVES = (None, "karras", "exponential", "beta")


def reference(**config: Any) -> Any:
    return pytest.importorskip("diffusers").FlowMatchEulerDiscreteScheduler(**config)


def flags(curve: str | None) -> dict[str, bool]:
    return {f"use_{curve}_sigmas": True} if curve else {}


def assert_same(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours.sigmas, theirs.sigmas.numpy(), rtol=BAR, atol=0)
    np.testing.assert_allclose(ours.timesteps, theirs.timesteps.numpy(), rtol=BAR, atol=0)


@pytest.mark.parity
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", ("exponential", "linear"))
def test_dynamic_shift_on_the_grid_of_flux(kind: Any, steps: int):
    for mu in (0.5, 0.8, 1.15, 2.02):
        theirs = reference(use_dynamic_shifting=True, time_shift_type=kind)
        theirs.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        assert_same(make_schedule("flux", steps, FlowSigmas(shift_of_mu(mu, kind))), theirs)


@pytest.mark.parity
@pytest.mark.parametrize("steps", STEPS)
def test_dynamic_shift_on_its_own_grid_is_shifted_once(steps: int):
    theirs = reference(use_dynamic_shifting=True)
    theirs.set_timesteps(steps, mu=1.15)
    assert_same(make_schedule("flow_shift", steps, FlowSigmas(math.exp(1.15))), theirs)


@pytest.mark.parity
@pytest.mark.parametrize("steps", STEPS[1:])  # at 1 diffusers divides 0 by 0, see below
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("terminal", (None, 0.02, 0.1))
def test_terminal_and_curve(terminal: float | None, curve: Any, steps: int):
    theirs = reference(use_dynamic_shifting=True, shift_terminal=terminal, **flags(curve))
    theirs.set_timesteps(steps, mu=0.9)  # float64 until the last line
    options = {"terminal": terminal, "curve": curve}
    assert_same(make_schedule("flow_match", steps, FlowSigmas(math.exp(0.9)), **options), theirs)


@pytest.mark.parity
@pytest.mark.parametrize("steps", STEPS[1:])
def test_terminal_on_the_grid_of_flux(steps: int):
    theirs = reference(use_dynamic_shifting=True, shift_terminal=0.02)
    theirs.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=0.9)
    ours = make_schedule("flux", steps, FlowSigmas(math.exp(0.9)), terminal=0.02)
    # all float32 there, and 1 − (1 − 0.02) leaves 4e-6 of the last sigma in doubt
    np.testing.assert_allclose(ours.sigmas, theirs.sigmas.numpy(), rtol=5e-6, atol=0)


@pytest.mark.parity
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("curve", CURVES)
def test_curve_on_the_twice_shifted_grid_of_sd3(curve: Any, steps: int):
    theirs = reference(shift=3.0, **flags(curve))
    theirs.set_timesteps(steps)
    options = {"double_shift": True, "curve": curve}
    assert_same(make_schedule("flow_match", steps, FlowSigmas(3.0), **options), theirs)


@pytest.mark.parity
@pytest.mark.parametrize("steps", STEPS)
def test_flow_sigmas_of_dpm_solver(steps: int):
    diffusers = pytest.importorskip("diffusers")
    theirs = diffusers.DPMSolverMultistepScheduler(**MULTISTEP)
    theirs.set_timesteps(steps)
    model = FlowSigmas(3.0, rule="truncate")
    ours = make_schedule("flow_match", steps, model, grid="below_one")
    np.testing.assert_allclose(ours.sigmas, theirs.sigmas.numpy(), rtol=BAR, atol=0)
    np.testing.assert_array_equal(ours.timesteps, theirs.timesteps.numpy())


@pytest.mark.parity
@pytest.mark.parametrize("steps", STEPS)
def test_flow_sigmas_of_unipc_are_sgm_uniform_a_millionth_below_one(steps: int):
    diffusers = pytest.importorskip("diffusers")
    theirs = diffusers.UniPCMultistepScheduler(**MULTISTEP)
    theirs.set_timesteps(steps)
    ours = make_schedule("sgm_uniform", steps, FlowSigmas(3.0, rule="truncate"))
    assert ours.sigmas[0] == 1
    assert float(theirs.sigmas[0]) == pytest.approx(1 - 1e-6, abs=6e-8)
    np.testing.assert_allclose(ours.sigmas[1:], theirs.sigmas.numpy()[1:], rtol=BAR, atol=0)
    np.testing.assert_array_equal(ours.timesteps[1:], theirs.timesteps.numpy()[1:])


@pytest.mark.parity
def test_the_tokens_of_flux():
    pytest.importorskip("diffusers")
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    for tokens in (64, 256, 1024, 4096, 4299, 4300, 4301, 16384):
        assert mu_of_tokens(tokens) == pytest.approx(calculate_shift(tokens), rel=1e-12)
        for steps in (1, 4, 10, 28, 50, 200, 500):
            theirs = compute_empirical_mu(tokens, steps)
            assert flux2_mu(tokens, steps) == pytest.approx(theirs, rel=1e-12)


def test_the_levels_are_comfyuis():
    sd3, flux = FlowSigmas(3.0).levels[49::50], FlowSigmas(math.exp(1.15), 10_000).levels[49::50]
    np.testing.assert_allclose(sd3, GOLDEN["comfyui/levels/sd3"], rtol=2e-7, atol=0)
    np.testing.assert_allclose(flux, GOLDEN["comfyui/levels/flux"], rtol=2e-7, atol=0)


def test_the_line_of_flux_goes_through_its_two_points():
    assert mu_of_tokens(256) == pytest.approx(0.5)
    assert mu_of_tokens(4096) == pytest.approx(1.15)
    assert shift_of_mu(1.15) == pytest.approx(3.158, abs=1e-3)


def test_a_stretch_keeps_one_and_reaches_the_terminal():
    sigmas = stretch_to_terminal(np.array([1.0, 0.7, 0.2]), 0.05)
    assert sigmas[0] == 1
    assert sigmas[-1] == pytest.approx(0.05, rel=1e-14)
    assert sigmas[1] == pytest.approx(1 - 0.3 * 0.95 / 0.8, rel=1e-14)


def test_one_step_with_a_terminal_is_one_step():
    for grid in ("trained", "even"):
        ours = make_schedule("flow_match", 1, FlowSigmas(3.0), terminal=0.02, grid=grid)
        assert ours.sigmas.tolist() == [1, 0]


def test_shift_is_its_formula_and_leaves_the_ends():
    assert shift_sigmas(0.5, 3.0) == 0.75
    assert shift_sigmas(1.0, 7.3) == 1
    assert shift_sigmas(0.0, 7.3) == 0


def test_what_the_network_is_told():
    assert FlowSigmas(3.0).timestep_of(0.25) == 250
    assert FlowSigmas(3.0, 10_000).timestep_of(0.25) == 250
    assert FlowSigmas(3.0, full=1.0).timestep_of(0.25) == 0.25
    assert FlowSigmas(3.0, rule="truncate").timestep_of(0.2509) == 250
    assert FlowSigmas(3.0, rule="round").timestep_of(0.2509) == 251
