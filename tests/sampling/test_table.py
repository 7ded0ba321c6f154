"""Noise tables: the numbers of known models, and the ways between sigma and timestep."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lydite.core.errors import InputError
from lydite.sampling.schedules.table import (
    COMFYUI_CLAMP,
    DIFFUSERS_CLAMP,
    STABLE_DIFFUSION,
    ContinuousSigmas,
    NoiseTable,
    alphas_cumprod,
    betas,
    noise_table,
)

GOLDEN = np.load(Path(__file__).with_name("golden") / "schedules.npz")
PROBES = (1e-4, 0.03, 0.05, 0.3, 1.0, 2.5, 9.9, 14.5, 200.0)  # as recorded
SD_ALPHAS = alphas_cumprod(betas("scaled_linear", 0.00085, 0.012))


def test_stable_diffusion_goes_from_0_029_to_14_6():
    assert len(STABLE_DIFFUSION.levels) == 1000
    assert STABLE_DIFFUSION.levels[0] == pytest.approx(0.0291672, rel=1e-5)
    assert STABLE_DIFFUSION.levels[-1] == pytest.approx(14.6146, rel=1e-5)


def test_the_levels_are_comfyuis():
    every_50th = STABLE_DIFFUSION.levels[49::50]
    np.testing.assert_allclose(every_50th, GOLDEN["comfyui/levels/eps"], rtol=2e-7, atol=0)
    rescaled = noise_table(SD_ALPHAS, clamp=COMFYUI_CLAMP)
    np.testing.assert_allclose(
        rescaled.levels[49::50], GOLDEN["comfyui/levels/ztsnr"], rtol=1e-6, atol=0
    )


def test_the_timesteps_are_those_of_k_diffusion_and_comfyui():
    for rule in ("interpolate", "nearest", "round"):
        table = dataclasses.replace(STABLE_DIFFUSION, rule=rule)
        ours = [table.timestep_of(sigma) for sigma in PROBES]
        theirs = "interpolate" if rule == "interpolate" else "nearest"
        np.testing.assert_allclose(ours, GOLDEN[f"k-diffusion/timesteps/{theirs}"], atol=1e-9)
        if rule == "nearest":
            np.testing.assert_array_equal(ours, GOLDEN["comfyui/timesteps/nearest"])


@given(sigma=st.floats(0.03, 14.6))
def test_rounding_rules_stay_beside_the_interpolated_timestep(sigma: float):
    told = {
        rule: dataclasses.replace(STABLE_DIFFUSION, rule=rule).timestep_of(sigma)
        for rule in ("interpolate", "nearest", "round", "truncate")
    }
    between = told["interpolate"]
    assert told["truncate"] == math.floor(between)
    assert abs(told["round"] - between) <= 0.5
    assert told["nearest"] == told["round"]
    levels = STABLE_DIFFUSION.levels
    nearest = np.argmin(np.abs(np.log(levels) - math.log(sigma)))
    assert abs(told["nearest"] - nearest) <= (abs(between % 1 - 0.5) < 1e-9)


@given(index=st.floats(0, 999))
def test_index_and_sigma_undo_each_other(index: float):
    for model in (STABLE_DIFFUSION, ContinuousSigmas(), ContinuousSigmas(0.01, 500, "v")):
        sigma = float(model.sigma_at(np.array(index)))
        assert model.index_of(sigma) == pytest.approx(index, abs=1e-6)


def test_outside_the_table_the_ends_are_told():
    assert STABLE_DIFFUSION.timestep_of(1e-9) == STABLE_DIFFUSION.timestep_of(0.0) == 0
    assert STABLE_DIFFUSION.timestep_of(700.0) == 999
    sigmas = STABLE_DIFFUSION.sigma_at(np.array([-5.0, 2000.0]))
    np.testing.assert_allclose(sigmas, STABLE_DIFFUSION.levels[[0, -1]], rtol=1e-12)


@pytest.mark.parity
@pytest.mark.parametrize("clamp", (None, DIFFUSERS_CLAMP))
@pytest.mark.parametrize("kind", ("scaled_linear", "linear", "squaredcos_cap_v2"))
def test_the_tables_of_diffusers(kind: Any, clamp: float | None):
    diffusers = pytest.importorskip("diffusers")
    config = {"beta_schedule": kind, "rescale_betas_zero_snr": clamp is not None}
    theirs = diffusers.EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, **config)
    sigmas = theirs.sigmas.numpy()[-2::-1].astype(np.float64)
    exact = noise_table(alphas_cumprod(betas(kind, 0.00085, 0.012)), clamp=clamp).levels
    if clamp is None:
        rounded = noise_table(alphas_cumprod(betas(kind, 0.00085, 0.012), float32=True)).levels
        np.testing.assert_allclose(rounded, sigmas, rtol=1e-6, atol=0)
        # without its roundings: the lowest sigmas lose five digits in 1 − ᾱ
        np.testing.assert_allclose(exact, sigmas, rtol=5e-4, atol=0)
    else:  # it goes through betas in float32 once more: the level before the last has lost most
        np.testing.assert_allclose(exact[:-2], sigmas[:-2], rtol=2e-3, atol=0)
    if clamp is not None:
        assert exact[-1] == pytest.approx(4096, rel=1e-6)
        assert sigmas[-1] == pytest.approx(4096, rel=1e-6)


@pytest.mark.parametrize("clamp", (DIFFUSERS_CLAMP, COMFYUI_CLAMP))
def test_the_rescale_keeps_the_first_level_and_sets_the_last(clamp: float):
    table = noise_table(SD_ALPHAS, clamp=clamp)
    assert table.levels[0] == pytest.approx(STABLE_DIFFUSION.levels[0], rel=1e-9)
    assert table.levels[-1] == pytest.approx(math.sqrt(1 / clamp - 1), rel=1e-12)
    assert np.all(table.levels[1:] > STABLE_DIFFUSION.levels[1:])


@pytest.mark.parametrize(
    ("formula", "sigma", "timestep"),
    (("edm", 1.0, 0.0), ("edm", math.e, 0.25), ("v", 1.0, 0.5), ("cosmos", 3.0, 0.75)),
)
def test_formulas_of_models_without_a_table(formula: Any, sigma: float, timestep: float):
    assert ContinuousSigmas(timestep_formula=formula).timestep_of(sigma) == pytest.approx(
        timestep, abs=1e-15
    )


@pytest.mark.parametrize("formula", ("edm", "v", "cosmos"))
def test_a_range_rises_evenly_in_its_timestep(formula: Any):
    model = ContinuousSigmas(0.01, 80, formula, count=11)
    np.testing.assert_allclose(model.levels[[0, -1]], [0.01, 80], rtol=1e-13)
    steps = np.diff([model.timestep_of(float(sigma)) for sigma in model.levels])
    np.testing.assert_allclose(steps, steps[0], rtol=1e-9)
    assert math.isfinite(model.timestep_of(0.0))


@pytest.mark.parametrize(
    "broken",
    (
        lambda: betas("cosine", 0.1, 0.2),  # pyright: ignore[reportArgumentType]
        lambda: betas("linear", 0.1, 0.2, 0),
        lambda: NoiseTable(np.array([1.0])),
        lambda: NoiseTable(np.array([2.0, 1.0])),
        lambda: NoiseTable(np.array([0.0, 1.0])),
        lambda: ContinuousSigmas(2.0, 1.0),
        lambda: ContinuousSigmas(0.0, 1.0),
        lambda: ContinuousSigmas(0.1, 1.0, count=1),
    ),
)
def test_tables_that_make_no_sense_are_refused(broken: Any):
    with pytest.raises(InputError):
        broken()


def test_a_table_cannot_be_written_into():
    with pytest.raises(ValueError, match="read-only"):
        STABLE_DIFFUSION.levels[0] = 1
