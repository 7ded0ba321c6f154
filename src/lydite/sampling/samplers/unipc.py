"""UniPC: a predictor, and a corrector that costs no call, because it uses the next step's.

Zhao et al. (2023), arXiv 2302.04867, multistep with B(h) = h or B(h) = exp(h) − 1, in the form of
diffusers' UniPCMultistepScheduler.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np

from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import A, Denoise, Step
from lydite.sampling.samplers.algebra import (
    Call,
    Kind,
    bend_scale,
    first_order_step,
    make_call,
    psi_2,
)

Variant = Literal["bh1", "bh2"]


def sample_uni_pc(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    order: int = 2,
    variant: Variant = "bh1",
    kind: Kind = "data",
    lower_order_final: bool = True,
    disable_corrector: Collection[int] = (),
) -> Iterator[Step[A]]:
    """UniP of `order`, each step but the last corrected by UniC as soon as its end was seen.

    A step's x is the predicted one. `disable_corrector` lists steps that stay as predicted, as does
    a step from pure noise, where λ has no end. A step to 0 is always of order 1.
    """
    levels, model = [float(sigma) for sigma in sigmas], denoise.noise_model
    past: list[Call[A]] = []  # newest first
    start, used = x, 0  # of the step before
    for index, (sigma, sigma_next) in enumerate(pairwise(levels)):
        denoised = denoise(x, sigma)
        here = make_call(kind, model, x, denoised, sigma)
        if past and index - 1 not in disable_corrector and past[0].half_log_snr > -math.inf:
            h = here.half_log_snr - past[0].half_log_snr
            scale, g = bend_scale(kind, model, sigma, h)
            bend = _correction([here, *past[:used]], h, g, variant)
            x = first_order_step(kind, model, start, past[0], sigma) - bend * scale
        past = [here, *past][:order]
        left = len(levels) - 1 - index
        used = min(left if lower_order_final else order, len(past))
        if sigma_next == 0:
            used = 1
        start = x
        x = first_order_step(kind, model, x, here, sigma_next)
        if used > 1:
            h = model.half_log_snr(sigma_next) - here.half_log_snr
            scale, g = bend_scale(kind, model, sigma_next, h)
            bend = _prediction(past[:used], h, g, variant)
            x = x if bend is None else x - bend * scale
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def _prediction(past: Sequence[Call[A]], h: float, g: float, variant: Variant) -> A | None:
    """UniP: how the values before `past[0]` bend a step; None where they carry no weight."""
    here, seen = past[0], _in_sight(past)
    if not seen:
        return None
    places = [(call.half_log_snr - here.half_log_snr) / h for call in seen]
    rho = [0.5] if len(past) == 2 else _solved(places, g, variant)
    return _mixed(here, seen, places, rho, g, variant)


def _correction(past: Sequence[Call[A]], h: float, g: float, variant: Variant) -> A:
    """UniC: the same with the value at the end of the step, `past[0]`, known as well."""
    end, here = past[0], past[1]
    seen = [*_in_sight(past[1:]), end]
    places = [(call.half_log_snr - here.half_log_snr) / h for call in seen]
    rho = [0.5] if len(past) == 2 else _solved(places, g, variant)
    return _mixed(here, seen, places, rho, g, variant)


def _in_sight(past: Sequence[Call[A]]) -> list[Call[A]]:
    """The calls before `past[0]` that lie at a finite λ; pure noise is infinitely far away."""
    return [call for call in past[1:] if call.half_log_snr > -math.inf]


def _solved(places: Sequence[float], g: float, variant: Variant) -> list[float]:
    """The ρ of the paper: Σ ρ·r^(k−1) = b_k for as many k as there are places r."""
    wanted, phi, factorial = [], psi_2(g), 1.0
    for k in range(1, len(places) + 1):
        wanted.append(phi * factorial / _b(g, variant))
        factorial *= k + 1
        phi = phi / g - 1 / factorial
    powers = np.vander(places, increasing=True).T
    return np.linalg.solve(powers, np.array(wanted)).tolist()


def _mixed(
    here: Call[A],
    seen: Sequence[Call[A]],
    places: Sequence[float],
    rho: Sequence[float],
    g: float,
    variant: Variant,
) -> A:
    first, *others = (
        (call.value - here.value) * (_b(g, variant) * weight / place)
        for call, place, weight in zip(seen, places, rho, strict=True)
    )
    for other in others:
        first = first + other
    return first


def _b(g: float, variant: Variant) -> float:
    return g if variant == "bh1" else math.expm1(g)


_LONG_STEP = (
    "with fewer than about 25 steps use the schedule sgm_uniform; the step before the last of "
    "sd3_diffusers and flow_shift is too long for it, in diffusers too"
)
METHODS = (
    Sampler(
        "uni_pc",
        partial(sample_uni_pc, variant="bh1"),
        "a predictor and a corrector on the denoised image, with B(h) = h",
        "Zhao et al. (2023), arXiv 2302.04867",
        proofs=("diffusers UniPCMultistepScheduler", "identity", "order"),
        order=2,
        note=_LONG_STEP,
    ),
    Sampler(
        "uni_pc_bh2",
        partial(sample_uni_pc, variant="bh2"),
        "a predictor and a corrector on the denoised image, with B(h) = exp(h) − 1",
        "Zhao et al. (2023), arXiv 2302.04867",
        proofs=("diffusers UniPCMultistepScheduler", "identity", "order"),
        order=2,
        note=_LONG_STEP,
    ),
)
