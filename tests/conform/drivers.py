"""How each kind of scheduler of diffusers is driven: its sigmas, its calls, its latents."""

import math
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from lydite.sampling.registry import make_schedule
from lydite.sampling.sampler_types import FLOW, VE
from lydite.sampling.samplers.algebra import ancestral_down
from lydite.sampling.schedules.flow import FlowSigmas

from .foreign import (
    Driven,
    Foreign,
    downhill,
    drawing,
    eps_of_vp,
    made,
    one,
    respaced,
    slope,
    table,
    two_calls,
    vp,
)

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def on_sigmas(name: str, config: Any, steps: int, denoiser: str) -> Driven:
    """Schedulers with a table of sigmas, VP or flow latents, and a network that gives the image."""
    noise_model = FLOW if "use_flow_sigmas" in config else VE
    scheduler = respaced(made(name, **SD, **{"prediction_type": "sample"} | config), steps)
    sigmas = scheduler.sigmas.tolist()
    run = Foreign(scheduler, denoiser, noise_model, vp if noise_model == VE else one).drive(
        sigmas, scheduler.timesteps
    )
    if name.startswith("SASolver"):  # it draws, and multiplies by 0, where its tau is 0
        pairs = zip(run.normals, scheduler.timesteps, strict=True)
        run.normals = [normals for normals, t in pairs if scheduler.tau_func(t)]
    return run


def on_timesteps(name: str, config: Any, steps: int, denoiser: str, **asked: Any) -> Driven:
    """Those that step from timestep to timestep of a noise table, with a network that gives eps."""
    scheduler = respaced(made(name, **config), steps)
    levels = table(scheduler)
    to_zero = config.get("set_alpha_to_one", name != "TCDScheduler")
    sigmas = [*(levels[t] for t in scheduler.timesteps), 0.0 if to_zero else levels[0]]
    run = Foreign(scheduler, denoiser, output=eps_of_vp).drive(sigmas, scheduler.timesteps, **asked)
    run.table = tuple(levels)
    return run


def ddim_eta(name: str, config: Any, steps: int, denoiser: str) -> Driven:
    return on_timesteps(name, config, steps, denoiser, eta=1.0)


def repaint(name: str, config: Any, steps: int, denoiser: str) -> Driven:
    """Without jumps, and with nothing to keep of the picture."""
    scheduler = made(name, **config)
    scheduler.set_timesteps(steps, jump_n_sample=1)
    levels, zero = table(scheduler), pytest.importorskip("torch").zeros(())
    sigmas = [*(levels[t] for t in scheduler.timesteps), 0.0]
    foreign = Foreign(scheduler, denoiser, output=eps_of_vp)
    kept = {"original_image": zero, "mask": zero}
    return foreign.drive(sigmas, scheduler.timesteps, **kept)


def unclip(name: str, config: Any, steps: int, denoiser: str) -> Driven:
    """It has to be told where each step leads.

    Its tables are made anew in float64: in float32 its last step takes 1 − ᾱ = 4e-5 for a number of
    three digits, and x is off by 1.6e-4.
    """
    scheduler = respaced(made(name, **config), steps)
    scheduler.betas = scheduler.betas.double()
    scheduler.alphas = 1 - scheduler.betas
    scheduler.alphas_cumprod = scheduler.alphas.cumprod(0)
    levels, told = table(scheduler), scheduler.timesteps.tolist()
    after = dict(zip(told, [*told[1:], None], strict=True))

    def step(output: Any, timestep: int, sample: Any) -> Any:
        return scheduler.step(output, timestep, sample, prev_timestep=after[timestep])

    sigmas = [*(levels[t] for t in told), 0.0]
    return Foreign(scheduler, denoiser).drive(sigmas, told, step=step)


def cogvideox_dpm(name: str, config: Any, steps: int, denoiser: str) -> Driven:
    """It is handed what it saw a step before."""
    scheduler = respaced(made(name, **SD, **config), steps)
    levels, seen = table(scheduler), []

    def step(output: Any, timestep: Any, sample: Any) -> Any:
        old, back = seen[-1] if seen else (None, None)
        found = scheduler.step(output, old, timestep, back, sample, return_dict=False)
        seen.append((found[1], timestep))
        return found[0]

    sigmas = [*(levels[t] for t in scheduler.timesteps), 0.0]
    foreign = Foreign(scheduler, denoiser, output=eps_of_vp)
    return foreign.drive(sigmas, scheduler.timesteps, step=step)


def wuerstchen(name: str, config: Any, steps: int, denoiser: str) -> Driven:
    """A cosine without a table, which ends a little above 0 and adds no noise there."""
    scheduler = respaced(made(name, **config), steps)
    kept = scheduler._alpha_cumprod(scheduler.timesteps, "cpu").double()
    sigmas = ((1 - kept) / kept).sqrt().tolist()
    timesteps = [t.reshape(1) for t in scheduler.timesteps[:-1]]
    run = Foreign(scheduler, denoiser, output=eps_of_vp).drive(sigmas, timesteps)
    run.normals[-1] = np.zeros_like(run.normals[-1])
    return run


def scm(name: str, config: Any, steps: int, denoiser: str) -> Driven:
    """TrigFlow: cos t of the image and sin t of noise of deviation ½."""
    scheduler = made(name, **config)
    angles = np.linspace(1.5, 0, steps + 1, dtype=np.float32)
    respaced(
        scheduler, steps, timesteps=angles.tolist(), max_timesteps=None, intermediate_timesteps=None
    )
    sigmas = [0.5 * math.tan(angle) for angle in angles.tolist()]

    def unit(sigma: float) -> float:
        return math.hypot(1, 2 * sigma)  # 1/cos t

    def output(sample: Any, denoised: Any, sigma: float) -> Any:
        return (sample / unit(sigma) - denoised) * unit(sigma) / (2 * sigma)

    foreign = Foreign(scheduler, denoiser, unit=unit, output=output)
    return foreign.drive(sigmas, scheduler.timesteps[:-1])


def plms(name: str, config: Any, steps: int, denoiser: str) -> Driven:
    """It visits the second timestep twice, and the first time to look only."""
    scheduler = respaced(made(name, **config), steps)
    levels, told = table(scheduler), [int(t) for t in scheduler._timesteps[::-1]]
    sigmas = [*(levels[t] for t in told), levels[0]]
    ends = [None, *range(steps)] if steps > 1 else [0]
    calls = [(levels[t], end) for t, end in zip(scheduler.timesteps, ends, strict=True)]
    # the look ahead is a step from the first sigma, so its x is where the second call is
    return Foreign(scheduler, denoiser, output=eps_of_vp).drive(sigmas, scheduler.timesteps, calls)


def pndm(name: str, config: Any, steps: int, denoiser: str) -> Driven:
    """Three steps of four calls, then one each."""
    scheduler = respaced(made(name, **config), steps)
    levels, told = table(scheduler), [int(t) for t in scheduler._timesteps[::-1]]
    sigmas = [*(levels[t] for t in told), levels[0]]
    ends = [end for step in range(3) for end in (None, None, None, step)] + list(range(3, steps))
    calls = [(levels[t], end) for t, end in zip(scheduler.timesteps, ends, strict=True)]
    foreign = Foreign(scheduler, denoiser, output=eps_of_vp)
    run = foreign.drive(sigmas, scheduler.timesteps, calls)
    run.table = tuple(levels)
    return run


def ipndm(name: str, config: Any, steps: int, denoiser: str) -> Driven:
    """Its own table starts at σ = ∞, so it is given another. Its network predicts a velocity."""
    sigmas = [*np.geomspace(14.6, 0.03, steps).tolist(), 0.0]
    betas = [sigma / vp(sigma) for sigma in sigmas]
    scheduler = respaced(made(name, trained_betas=betas, **config), steps)
    scheduler.betas = scheduler.betas.double().new_tensor(betas)
    scheduler.alphas = (1 - scheduler.betas**2).sqrt()

    def output(sample: Any, denoised: Any, sigma: float) -> Any:
        return eps_of_vp(sample, denoised, sigma) * vp(sigma) - sample * sigma

    return Foreign(scheduler, denoiser, output=output).drive(sigmas, scheduler.timesteps)


def upwards(name: str, config: Any, steps: int, denoiser: str) -> Driven:
    """DDIMInverse: the network is asked at the far end of each step."""
    scheduler = respaced(made(name, **config), steps)
    levels = table(scheduler)
    sigmas = [levels[0], *(levels[t] for t in scheduler.timesteps)]
    calls = [(sigma, index) for index, sigma in enumerate(sigmas[1:])]
    return Foreign(scheduler, denoiser, output=eps_of_vp).drive(sigmas, scheduler.timesteps, calls)


SECOND = {  # where a method of two calls looks again
    "Heun": lambda sigma, after: after,
    "KDPM2Discrete": lambda sigma, after: math.sqrt(sigma * after),
    "DPMSolverSDE": lambda sigma, after: math.sqrt(sigma * after),
    "KDPM2Ancestral": lambda sigma, after: math.sqrt(sigma * ancestral_down(VE, sigma, after, 1.0)),
}


def in_k_coordinates(name: str, config: Any, steps: int, denoiser: str) -> Driven:
    """Those with latents like ours; some look twice in a step."""
    second = next((found for part, found in SECOND.items() if part in name), None)
    scheduler = respaced(made(name, **config), steps)
    sigmas = [sigma for sigma, _ in groupby(scheduler.sigmas.tolist())]
    noise_model = FLOW if "FlowM" in name or "Helios" in name else VE
    calls = list(two_calls(sigmas, second)) if second else None
    return Foreign(scheduler, denoiser, noise_model, one, slope).drive(
        sigmas, scheduler.timesteps, calls
    )


def ltx(name: str, config: Any, steps: int, denoiser: str) -> Driven:
    sigmas = make_schedule("flow_shift", steps, FlowSigmas(3.0)).sigmas.tolist()
    scheduler = respaced(made(name, **config), sigmas=sigmas)
    foreign = Foreign(scheduler, denoiser, FLOW, one, slope)
    return foreign.drive(scheduler.sigmas.tolist(), scheduler.timesteps[:-1])


def minimax(name: str, config: Any, steps: int, denoiser: str) -> Driven:
    """It counts sigmas, not steps, and its velocity leads to the image."""
    scheduler = respaced(made(name, **config), steps + 1)
    foreign = Foreign(scheduler, denoiser, FLOW, one, downhill)
    return foreign.drive(scheduler.sigmas.tolist(), scheduler.timesteps)


def helios_dmd(name: str, config: Any, steps: int, denoiser: str) -> Driven:
    """Videos have five axes, and the noise to add is handed to it."""
    scheduler = made(name, **config)
    scheduler.set_timesteps(steps)
    sigmas, told, at = scheduler.sigmas, scheduler.timesteps, iter(range(steps))
    draw = drawing().draw
    normals: list[Any] = []

    def step(output: Any, timestep: Any, sample: Any) -> Any:
        normals.append(draw())
        return scheduler.step(
            output[None, None],
            timestep,
            sample[None, None],
            cur_sampling_step=next(at),
            dmd_noisy_tensor=normals[-1][None, None],
            dmd_sigmas=sigmas[:-1],
            dmd_timesteps=told,
            all_timesteps=told,
        ).prev_sample[0, 0]

    foreign = Foreign(scheduler, denoiser, FLOW, one, slope)
    run = foreign.drive(sigmas.tolist(), told, step=step)
    run.normals = [each.double().numpy() for each in normals]
    return run


def edm(name: str, config: Any, steps: int, denoiser: str) -> Driven:
    """A network with EDM's scalings."""

    def output(sample: Any, denoised: Any, sigma: float) -> Any:
        width = math.hypot(sigma, 0.5)
        return (denoised - sample * (0.5 / width) ** 2) * width / (sigma * 0.5)

    scheduler = respaced(made(name, **config), steps)
    foreign = Foreign(scheduler, denoiser, unit=one, output=output)
    return foreign.drive(scheduler.sigmas.tolist(), scheduler.timesteps)


def karras_ve(name: str, config: Any, steps: int, denoiser: str) -> Driven:
    """Two calls of different names; sigma and derivative are handed from one to the other."""
    scheduler = respaced(made(name, **config), steps)
    sigmas = [*scheduler.schedule.tolist()[::-1], 0.0]
    first: list[Any] = []

    def step(output: Any, at: int, sample: Any) -> Any:
        sigma, after = sigmas[at], sigmas[at + 1]
        if first:
            begin, slopes = first.pop()
            return scheduler.step_correct(output, sigma, after, begin, sample, slopes)
        found = scheduler.step(output, sigma, after, sample)
        first.extend([(sample, found.derivative)] if after else [])
        return found

    calls = list(two_calls(sigmas, SECOND["Heun"]))
    places = [at for at in range(steps) for _ in range(2)][:-1]
    foreign = Foreign(scheduler, denoiser, unit=one, output=downhill)
    return foreign.drive(sigmas, places, calls, step)
