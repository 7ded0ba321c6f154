"""DEIS: a polynomial through the last noises, in a variable of its own, integrated over sigma.

Zhang and Chen (2022), arXiv 2204.13902. Two programs mean two variables by the name: diffusers the
log of ρ = σ/α (`deis`), ComfyUI the time of a VP diffusion (`deis_tab`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import A, Denoise, Step
from lydite.sampling.samplers.algebra import (
    Call,
    exponential_weights,
    final_order,
    first_order_step,
    make_call,
    slope,
)

POINTS, SHARES = np.polynomial.legendre.leggauss(40)
VP_ENDS = (0.002, 80.0, 1e-3)  # the VP diffusion of `deis_tab`: least and most sigma, least time


def sample_deis(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    order: int = 2,
    lower_order_final: bool = True,
) -> Iterator[Step[A]]:
    """ρAB-DEIS in log ρ with up to `order` noises; a step to 0 is of order 1.

    `lower_order_final` lowers the order towards the end in runs of fewer than 15 steps.
    """
    levels, model = [float(sigma) for sigma in sigmas], denoise.noise_model
    past: list[Call[A]] = []  # newest first
    for index, (sigma, sigma_next) in enumerate(pairwise(levels)):
        denoised = denoise(x, sigma)
        past = [make_call("noise", model, x, denoised, sigma), *past][:order]
        allowed = final_order(levels, index, order, lower_order_final)
        seen = [call for call in past[:allowed] if call.half_log_snr > -math.inf]
        if len(seen) < 2:
            x = first_order_step("noise", model, x, past[0], sigma_next)
        else:
            end = model.half_log_snr(sigma_next)
            nodes = [call.half_log_snr - end for call in seen]
            x = x * (model.alpha(sigma_next) / model.alpha(sigma))
            for call, weight in zip(seen, exponential_weights(nodes, -nodes[0], -1.0), strict=True):
                x = x - call.value * (sigma_next * weight)
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_deis_tab(
    denoise: Denoise[A], x: A, sigmas: Iterable[float], *, order: int = 3
) -> Iterator[Step[A]]:
    """tAB-DEIS on dx/dσ, the variable being the time of a VP diffusion under either noise model.

    A step to 0 is of order 1. ComfyUI sums the integral over ten thousand rectangles and is off by
    up to 4e-5 for it; here it is exact.
    """
    seen: list[float] = []  # newest first, as the slopes
    slopes: list[A] = []
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        denoised = denoise(x, sigma)
        seen = [sigma, *seen][:order]
        slopes = [slope(x, denoised, sigma), *slopes][:order]
        used = seen if sigma_next > 0 else seen[:1]
        for each, weight in zip(slopes, _in_time(used, sigma_next), strict=False):
            x = x + each * weight
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def _in_time(nodes: Sequence[float], end: float) -> list[float]:
    """∫ from nodes[0] to `end` over sigma of each Lagrange polynomial in time on `nodes`."""
    points, shares = POINTS, SHARES
    half = (end - nodes[0]) / 2
    times, places = vp_time(nodes[0] + half * (1 + points)), vp_time(np.array(nodes))
    result = []
    for own, place in enumerate(places):
        others = np.delete(places, own)
        values = np.prod((times[:, None] - others) / (place - others), axis=1)
        result.append(float(half * (shares @ values)))
    return result


def vp_time(sigma: NDArray[np.float64]) -> NDArray[np.float64]:
    """The t at which a VP diffusion has this much noise: ln(1 + σ²) = b·t + a·t²/2."""
    least, most, start = VP_ENDS
    at_start, at_one = math.log1p(least**2) / start, math.log1p(most**2)
    a = 2 * (at_one - at_start) / (1 - start)
    b = at_one - a / 2
    return (np.sqrt(b * b + 2 * a * np.log1p(sigma**2)) - b) / a


METHODS = (
    Sampler(
        "deis",
        sample_deis,
        "a polynomial in the log of sigma through the last noises",
        "Zhang and Chen (2022), arXiv 2204.13902, in log ρ as in diffusers",
        proofs=("diffusers DEISMultistepScheduler", "identity", "order"),
        order=2,
    ),
    Sampler(
        "deis_tab",
        sample_deis_tab,
        "a polynomial in VP time through the last slopes: what ComfyUI calls deis",
        "Zhang and Chen (2022), arXiv 2204.13902, tAB as in ComfyUI",
        proofs=("ComfyUI", "order"),
        order=3,
    ),
)
