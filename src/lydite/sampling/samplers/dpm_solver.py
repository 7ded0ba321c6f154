"""DPM-Solver and DPM-Solver++ of orders 2 and 3, in diffusers' forms.

Lu et al. (2022), arXiv 2206.00927, integrate the noise; Lu et al. (2022b), arXiv 2211.01095, the
image. Order 1 of both is `ddim`; order 2 on the image with `midpoint` is `dpmpp_2m`. A multistep
solver looks back at earlier steps; a singlestep one covers two or three sigmas in one group, of
which the first is reached with order 1, the next with order 2. Rising sigmas invert.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import A, Denoise, Noise, NoiseModel, Step
from lydite.sampling.samplers.algebra import (
    Call,
    Kind,
    bend_scale,
    final_order,
    first_order_step,
    make_call,
    psi_2,
    psi_3,
)

Solver = Literal["midpoint", "heun"]  # how a slope enters: as its middle value, or integrated


def sample_dpm_multistep(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    order: int = 2,
    kind: Kind = "data",
    solver: Solver = "midpoint",
    curvature: float = 0.5,
    lower_order_final: bool = True,
    euler_at_final: bool = False,
) -> Iterator[Step[A]]:
    """DPM-Solver-M or DPM-Solver++(M).

    A step to 0 is always of order 1. `lower_order_final` lowers the order towards the end in runs
    of fewer than 15 steps, `euler_at_final` makes the last step one of order 1 in any run. In order
    3 diffusers counts the second derivative by half, as k-diffusion's 3M does, which leaves the
    error of order 2; `curvature` 1 counts it whole.
    """
    levels, model = [float(sigma) for sigma in sigmas], denoise.noise_model
    past: list[Call[A]] = []  # newest first
    for index, (sigma, sigma_next) in enumerate(pairwise(levels)):
        denoised = denoise(x, sigma)
        past = [make_call(kind, model, x, denoised, sigma), *past][:order]
        allowed = final_order(levels, index, order, lower_order_final)
        if euler_at_final and index == len(levels) - 2:
            allowed = 1
        x = first_order_step(kind, model, x, past[0], sigma_next)
        if min(allowed, len(past)) > 1:
            h = model.half_log_snr(sigma_next) - past[0].half_log_snr
            scale, g = bend_scale(kind, model, sigma_next, h)
            x = x - _bend(past[:allowed], h, g, solver, curvature) * scale
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_sde_dpm_multistep(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    order: int = 2,
    solver: Solver = "midpoint",
    lower_order_final: bool = True,
    euler_at_final: bool = False,
) -> Iterator[Step[A]]:
    """SDE-DPM-Solver of order 1 or 2, on the noise: Lu et al. (2022b).

    On the image it is `ddpm` in order 1 and `dpmpp_2m_sde` in order 2. The step to 0 takes the
    denoised image: the formula would leave all of a step's fresh noise in it.
    """
    levels, model = [float(sigma) for sigma in sigmas], denoise.noise_model
    past: list[Call[A]] = []
    for index, (sigma, sigma_next) in enumerate(pairwise(levels)):
        denoised = denoise(x, sigma)
        past = [make_call("noise", model, x, denoised, sigma), *past][:order]
        allowed = final_order(levels, index, order, lower_order_final)
        if euler_at_final and index == len(levels) - 2:
            allowed = 1
        if sigma_next == 0:
            x = denoised
        else:
            h = model.half_log_snr(sigma_next) - past[0].half_log_snr
            keep, twice = model.alpha(sigma_next) / model.alpha(sigma), 2 * sigma_next
            x = x * keep - past[0].value * (twice * math.expm1(h))
            if min(allowed, len(past)) > 1:
                x = x - _bend(past[:2], h, h, solver) * twice
            spread = sigma_next * math.sqrt(math.expm1(2 * h))
            x = x + noise(sigma, sigma_next) * spread
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_dpm_singlestep(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    order: int = 2,
    kind: Kind = "data",
    solver: Solver = "midpoint",
    lower_order_final: bool = False,
) -> Iterator[Step[A]]:
    """DPM-Solver-S or DPM-Solver++(S): each group starts again from its own first x.

    A step to 0 is always of order 1, and so is the last of a whole group with `lower_order_final`.
    From pure noise, where λ has no end, the first step is a group of its own.
    """
    levels, model = [float(sigma) for sigma in sigmas], denoise.noise_model
    start, group = x, list[Call[A]]()  # oldest first
    places = _places(model, levels, order, lower_order_final)
    for index, (sigma, sigma_next) in enumerate(pairwise(levels)):
        denoised = denoise(x, sigma)
        if places[index] == 1:
            start, group = x, []
        group = [*group, make_call(kind, model, x, denoised, sigma)]
        x = first_order_step(kind, model, start, group[0], sigma_next)
        if len(group) > 1:
            h = model.half_log_snr(sigma_next) - group[0].half_log_snr
            scale, g = bend_scale(kind, model, sigma_next, h)
            x = x - _group_bend(group, h, g, solver) * scale
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def _bend(past: Sequence[Call[A]], h: float, g: float, solver: Solver, curvature: float = 0.5) -> A:
    """How the value's slope, and in order 3 its second derivative, bend a step."""
    here, before = past[0], past[1]
    gap = here.half_log_snr - before.half_log_snr  # ∞ after pure noise: no slope
    slope = (here.value - before.value) * (h / gap)
    if len(past) == 2:
        return slope * (math.expm1(g) / 2 if solver == "midpoint" else psi_2(g))
    gap_before = before.half_log_snr - past[2].half_log_snr
    turn = slope - (before.value - past[2].value) * (h / gap_before)
    slope = slope + turn * (gap / (gap + gap_before))
    second = turn * (2 * h / (gap + gap_before))
    return slope * psi_2(g) + second * (curvature * psi_3(g))


def _group_bend(group: Sequence[Call[A]], h: float, g: float, solver: Solver) -> A:
    """The same within a group, which is oldest first; `h` is from its start."""
    first = group[0]
    shares = [(call.half_log_snr - first.half_log_snr) / h for call in group[1:]]
    slopes = [
        (call.value - first.value) / share for call, share in zip(group[1:], shares, strict=True)
    ]
    if len(group) == 2:
        return slopes[0] * (math.expm1(g) / 2 if solver == "midpoint" else psi_2(g))
    if solver == "midpoint":
        return slopes[1] * psi_2(g)
    near, far = shares
    slope = (slopes[0] * far - slopes[1] * near) / (far - near)
    second = (slopes[1] - slopes[0]) * (2 / (far - near))
    return slope * psi_2(g) + second * psi_3(g)


def _places(model: NoiseModel, levels: Sequence[float], order: int, lower: bool) -> list[int]:
    """For each step its place in its group, from 1."""
    alone = int(model.alpha(levels[0]) == 0)
    places = [1 + step % order for step in range(len(levels) - 1 - alone)]
    if places and (levels[-1] == 0 or (lower and places[-1] == order)):
        places[-1] = 1
    return [1] * alone + places


MULTISTEP, SINGLESTEP = "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler"
FIRST, SECOND = "Lu et al. (2022), arXiv 2206.00927", "Lu et al. (2022b), arXiv 2211.01095"


METHODS = (
    Sampler(
        "dpmsolver_2m",
        partial(sample_dpm_multistep, order=2, kind="noise"),
        "DPM-Solver with a straight line through the last two noises",
        FIRST,
        proofs=(f"diffusers {MULTISTEP}", "order"),
        order=2,
    ),
    Sampler(
        "dpmsolver_3m",
        partial(sample_dpm_multistep, order=3, kind="noise"),
        "DPM-Solver with a parabola through the last three noises",
        FIRST,
        proofs=(f"diffusers {MULTISTEP}", "order"),
        order=2,  # see `curvature`
    ),
    Sampler(
        "dpmsolverpp_3m",
        partial(sample_dpm_multistep, order=3, kind="data"),
        "DPM-Solver++ with a parabola through the last three denoised images",
        SECOND,
        proofs=(f"diffusers {MULTISTEP}", "diffusers EDMDPMSolverMultistepScheduler", "order"),
        order=2,
    ),
    Sampler(
        "dpmsolver_2s",
        partial(sample_dpm_singlestep, order=2, kind="noise"),
        "DPM-Solver in groups of two sigmas",
        FIRST,
        proofs=(f"diffusers {SINGLESTEP}", "order"),
        order=2,
    ),
    Sampler(
        "dpmsolver_3s",
        partial(sample_dpm_singlestep, order=3, kind="noise"),
        "DPM-Solver in groups of three sigmas",
        FIRST,
        proofs=(f"diffusers {SINGLESTEP}", "order"),
        order=3,
    ),
    Sampler(
        "dpmsolverpp_2s",
        partial(sample_dpm_singlestep, order=2, kind="data"),
        "DPM-Solver++ in groups of two sigmas",
        SECOND,
        proofs=(f"diffusers {SINGLESTEP}", "order"),
        order=2,
    ),
    Sampler(
        "dpmsolverpp_3s",
        partial(sample_dpm_singlestep, order=3, kind="data"),
        "DPM-Solver++ in groups of three sigmas",
        SECOND,
        proofs=(f"diffusers {SINGLESTEP}", "order"),
        order=3,
    ),
    Sampler(
        "sde_dpmsolver_1m",
        partial(sample_sde_dpm_multistep, order=1),
        "the SDE on the noise, with straight steps",
        SECOND,
        proofs=(f"diffusers {MULTISTEP} sde-dpmsolver", "stationarity"),
        noise="stream",
        noise_models=("ve",),
    ),
    Sampler(
        "sde_dpmsolver_2m",
        partial(sample_sde_dpm_multistep, order=2),
        "the SDE on the noise, with a straight line through the last two",
        SECOND,
        proofs=(f"diffusers {MULTISTEP} sde-dpmsolver", "stationarity"),
        noise="stream",
        noise_models=("ve",),
    ),
)
