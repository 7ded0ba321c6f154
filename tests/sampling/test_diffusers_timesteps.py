"""Samplers against those schedulers of diffusers that step from timestep to timestep of a table."""

from typing import Any

import numpy as np
import pytest

from lydite.sampling.sampler_types import VE
from support.denoisers import FunctionDenoiser
from support.schedulers import SD, STEPS, Scheduler, denoised, distance, drawn, noise, ours, size

pytestmark = pytest.mark.parity

PRECISIONS = (("float32", 1e-5), ("float64", 1e-9))
OFFSET = SD | {"steps_offset": 1}
UNCLIPPED = OFFSET | {"clip_sample": False, "timestep_spacing": "leading"}


def levels(scheduler: Scheduler) -> list[float]:
    return [scheduler.table[timestep] for timestep in scheduler.timesteps.tolist()]


@pytest.mark.parametrize(("precision", "bar"), PRECISIONS)
@pytest.mark.parametrize("to_zero", (True, False))
@pytest.mark.parametrize("eta", (0.0, 0.5, 1.0))
def test_ddim(eta: float, to_zero: bool, precision: str, bar: float):
    for steps in STEPS:
        config = UNCLIPPED | {"set_alpha_to_one": to_zero}
        scheduler = Scheduler("DDIMScheduler", steps, precision, config)
        sigmas = [*levels(scheduler), 0.0 if to_zero else scheduler.table[0]]
        theirs = scheduler.noises(sigmas[:-1], eta=eta)
        mine = ours("ddim", VE, sigmas, precision, eta=eta, noise=noise(sigmas, precision))
        assert distance(mine, theirs) < bar


@pytest.mark.parametrize(("precision", "bar"), PRECISIONS)
def test_ddpm(precision: str, bar: float):
    for steps in STEPS:
        scheduler = Scheduler("DDPMScheduler", steps, precision, UNCLIPPED)
        sigmas = [*levels(scheduler), 0.0]
        theirs = scheduler.noises(sigmas[:-1])
        mine = ours("ddpm", VE, sigmas, precision, noise=noise(sigmas, precision))
        assert distance(mine, theirs) < bar


@pytest.mark.parametrize(("precision", "bar"), PRECISIONS)
@pytest.mark.parametrize("from_zero", (True, False))
def test_ddim_inverse(from_zero: bool, precision: str, bar: float):
    for steps in STEPS:
        config = UNCLIPPED | {"set_alpha_to_one": from_zero}
        scheduler = Scheduler("DDIMInverseScheduler", steps, precision, config)
        sigmas = [0.0 if from_zero else scheduler.table[0], *levels(scheduler)]
        # its network is told of the step's far end
        mine = ours("ddim_inverse", VE, sigmas, precision)
        assert distance(mine, scheduler.noises(sigmas[1:])) < bar


@pytest.mark.parametrize(("precision", "bar"), PRECISIONS)
def test_plms(precision: str, bar: float):
    for steps in STEPS:
        config = OFFSET | {"skip_prk_steps": True}
        scheduler = Scheduler("PNDMScheduler", steps, precision, config)
        theirs = scheduler.noises(levels(scheduler))
        if steps > 1:  # it visits the second timestep twice, and the first time to look only
            theirs = theirs[1:]
        sigmas = [scheduler.table[int(t)] for t in scheduler.inner._timesteps[::-1]]
        mine = ours("plms", VE, [*sigmas, scheduler.table[0]], precision)
        assert distance(mine, theirs) < bar


@pytest.mark.parametrize(("precision", "bar"), PRECISIONS)
def test_pndm(precision: str, bar: float):
    for steps in STEPS:
        if steps < 4:
            continue  # PNDMScheduler needs three steps for its start
        scheduler = Scheduler("PNDMScheduler", steps, precision, OFFSET)
        states = scheduler.noises(levels(scheduler))
        theirs = [*states[3:12:4], *states[12:]]
        told = [int(timestep) for timestep in scheduler.inner._timesteps[::-1]]
        sigmas = [*(scheduler.table[timestep] for timestep in told), scheduler.table[0]]
        halfway = {
            sigmas[index]: scheduler.table[told[index + 1] + 1000 // steps // 2]
            for index in range(3)
        }
        mine = ours("pndm", VE, sigmas, precision, middle=lambda sigma, _, at=halfway: at[sigma])
        assert distance(mine, theirs) < bar


@pytest.mark.parametrize(("precision", "bar"), PRECISIONS)
def test_ipndm(precision: str, bar: float):
    """Its own table starts at σ = ∞, so it is given ours. Its network predicts a velocity."""
    for steps in STEPS:
        sigmas = [*np.geomspace(14.6, 0.03, steps).tolist(), 0.0]
        betas = [sigma / size(VE, sigma) for sigma in sigmas]
        scheduler = Scheduler("IPNDMScheduler", steps, precision, {"trained_betas": betas})
        inner, x, theirs = scheduler.inner, drawn(-1, precision), []
        inner.betas = drawn(0, precision).new_tensor(betas)
        inner.alphas = (1 - inner.betas**2).sqrt()
        for index, sigma in enumerate(sigmas[:-1]):
            ours_x, alpha = x * size(VE, sigma), 1 / size(VE, sigma)
            seen = (ours_x - denoised(ours_x, sigma)) / sigma
            x = scheduler.step((seen - x * betas[index]) / alpha, index, x)
            theirs.append(x)
        assert distance(ours("ipndm", VE, sigmas, precision), theirs) < bar


@pytest.mark.parametrize(("precision", "bar"), PRECISIONS)
def test_lcm(precision: str, bar: float):
    for steps in STEPS:
        config = SD | {"clip_sample": False}
        scheduler = Scheduler("LCMScheduler", steps, precision, config)
        sigmas = [*levels(scheduler), 0.0]
        told = dict(zip(sigmas, scheduler.timesteps, strict=False))

        def consistent(x: Any, sigma: float, told: Any = told, inner: Any = scheduler.inner) -> Any:
            skip, out = inner.get_scalings_for_boundary_condition_discrete(told[sigma])
            return denoised(x, sigma) * out + x * (skip / size(VE, sigma))

        mine = ours(
            "lcm",
            VE,
            sigmas,
            precision,
            noise=noise(sigmas, precision),
            denoise=FunctionDenoiser(consistent),
        )
        assert distance(mine, scheduler.noises(sigmas[:-1])) < bar


@pytest.mark.parametrize(("precision", "bar"), PRECISIONS)
@pytest.mark.parametrize("gamma", (0.0, 0.3, 1.0))
def test_tcd(gamma: float, precision: str, bar: float):
    for steps in STEPS:
        config = SD | {"clip_sample": False}
        scheduler = Scheduler("TCDScheduler", steps, precision, config)
        sigmas, table = [*levels(scheduler), scheduler.table[0]], scheduler.table
        told = dict(zip(sigmas, scheduler.timesteps.tolist(), strict=False))

        def below(sigma: float, told: Any = told, table: Any = table) -> float:
            return table[int(np.floor(np.float32(1 - gamma) * np.float32(told[sigma])))]

        options: dict[str, Any] = {"gamma": gamma, "below": below}
        mine = ours("tcd", VE, sigmas, precision, noise=noise(sigmas, precision), **options)
        assert distance(mine, scheduler.noises(sigmas[:-1], eta=gamma)) < bar
