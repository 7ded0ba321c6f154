"""Pseudo linear multistep: Adams and Bashforth's weights for even steps, on any steps.

Liu et al. (2022), arXiv 2202.09778, transfer x by the mean of the last noises. In VE coordinates
their transfer is a straight line in sigma, so that these are Adams–Bashforth on dx/dσ, under either
noise model. The samplers differ in how the first steps get their past.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal

from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import A, Denoise, Step
from lydite.sampling.samplers.algebra import adams_weights, heun_step, slope

EVEN = ((1.0,), (3 / 2, -1 / 2), (23 / 12, -16 / 12, 5 / 12), (55 / 24, -59 / 24, 37 / 24, -9 / 24))
End = Literal["adams", "denoised"]  # a step to 0: like any other, or to the denoised image


def sample_plms(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    skips_second: bool = False,
    before: float | None = None,
) -> Iterator[Step[A]]:
    """S-PNDM's start, one Heun step, then Adams–Bashforth: latent-diffusion's PLMS.

    The options are what diffusers' img2img does with it, see `SchedulerConfig.start_late`. With
    `skips_second` nothing is done in the second step but to take the latents of the first for those
    of the next level. `before`, the level before the first, makes the first step another one.
    """
    levels = [float(sigma) for sigma in sigmas]
    slopes: list[A] = []  # newest first
    denoised = x
    for index, (sigma, sigma_next) in enumerate(pairwise(levels)):
        if index == 0 and before is not None:
            first = denoise(x, sigma)
            slopes = [slope(x, first, sigma)]
            predicted = relabel(x + slopes[0] * (sigma_next - sigma), sigma_next, sigma)
            denoised = denoise(predicted, sigma)
            mean = (slopes[0] + slope(predicted, denoised, sigma)) / 2.0
            x = relabel(x, sigma, before) + mean * (sigma - before)
            x = relabel(x, sigma, sigma_next)
        elif index == 1 and skips_second:
            x = relabel(x, sigma, sigma_next)
        elif index == 0 and len(levels) > 2:
            begin = x
            x, denoised = heun_step(denoise, x, sigma, sigma_next)
            slopes = [slope(begin, denoised, sigma)]
        else:
            denoised = denoise(x, sigma)
            slopes = [slope(x, denoised, sigma), *slopes][:4]
            x = x + _mean(slopes, EVEN[len(slopes) - 1]) * (sigma_next - sigma)
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_pndm(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    middle: Callable[[float, float], float] = lambda sigma, sigma_next: (sigma + sigma_next) / 2,
) -> Iterator[Step[A]]:
    """F-PNDM: three Runge–Kutta steps of four calls, then Adams–Bashforth of order 4.

    `middle` is the sigma halfway; the paper and diffusers take the one of the timestep halfway. A
    Runge–Kutta step to 0 is Euler's.
    """
    slopes: list[A] = []
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        denoised = denoise(x, sigma)
        slopes = [slope(x, denoised, sigma), *slopes][:4]
        if index >= 3:
            mean = _mean(slopes, EVEN[3])
        elif sigma_next > 0:
            mean = _runge_kutta(denoise, x, slopes[0], sigma, middle(sigma, sigma_next), sigma_next)
        else:
            mean = slopes[0]
        x = x + mean * (sigma_next - sigma)
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_ipndm(
    denoise: Denoise[A], x: A, sigmas: Iterable[float], *, order: int = 4, end: End = "adams"
) -> Iterator[Step[A]]:
    """The same with a start of rising order: Zhang and Chen (2022), iPNDM.

    `end` is "adams" in diffusers' IPNDMScheduler, "denoised" in ComfyUI.
    """
    slopes: list[A] = []
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        denoised = denoise(x, sigma)
        slopes = [slope(x, denoised, sigma), *slopes][:order]
        x = x + _mean(slopes, EVEN[len(slopes) - 1]) * (sigma_next - sigma)
        if sigma_next == 0 and end == "denoised":
            x = denoised
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_ipndm_v(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    order: int = 4,
    exact: bool = False,
    end: End = "denoised",
) -> Iterator[Step[A]]:
    """iPNDM with weights that follow the steps' widths.

    The weights are those of diff-sampler, where the name is from, and of ComfyUI. From order 3 on
    they differ from Adams and Bashforth's, which `exact` takes (then this is `lms`), and in order 4
    they do not add up to the step unless it is as wide as those before.
    """
    seen: list[float] = []  # newest first, as the slopes
    slopes: list[A] = []
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        denoised = denoise(x, sigma)
        seen = [sigma, *seen][:order]
        slopes = [slope(x, denoised, sigma), *slopes][:order]
        if sigma_next == 0 and end == "denoised":
            x = denoised
        else:
            shares = adams_weights(seen, sigma_next) if exact else _newton_weights(seen, sigma_next)
            x = x + _mean(slopes, shares)
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def relabel(x: A, sigma: float, other: float) -> A:
    """Latents at `sigma` whose VP form, x/√(1 + σ²), is taken for one at another sigma."""
    return x * (math.hypot(1, other) / math.hypot(1, sigma))


def _mean(slopes: Sequence[A], shares: Sequence[float]) -> A:
    mean = slopes[0] * shares[0]
    for each, share in zip(slopes[1:], shares[1:], strict=True):
        mean = mean + each * share
    return mean


def _runge_kutta(
    denoise: Denoise[A], x: A, first: A, sigma: float, middle: float, sigma_next: float
) -> A:
    """The mean slope of the classical method of order 4."""

    def at(there: A, level: float) -> A:
        return slope(there, denoise(there, level), level)

    second = at(x + first * (middle - sigma), middle)
    third = at(x + second * (middle - sigma), middle)
    last = at(x + third * (sigma_next - sigma), sigma_next)
    return (first + second * 2.0 + third * 2.0 + last) / 6.0


def _newton_weights(nodes: Sequence[float], end: float) -> list[float]:
    """diff-sampler's weights of the slopes at `nodes`, newest first.

    Newton's polynomial through the slopes, taken over a step of width h after steps of the widths
    h₁, h₂ and h₃, is the newest slope and so much of its first, second and third difference:

        h / 2h₁,  h(2h + 3h₁) / 6h₁(h₁ + h₂),
        h(3h² + 4h(2h₁ + h₂) + 6h₁(h₁ + h₂)) / 12h₁(h₁ + h₂)(h₁ + h₂ + h₃).

    That is `lms.weights`. Here the last two are others. They agree in the second on even steps; the
    third is 11/24 there instead of 9/24. And the oldest slope counts in its difference by h₁/h₂
    where h₂/h₃ belongs.
    """
    h = end - nodes[0]
    gaps = [nodes[i] - nodes[i + 1] for i in range(len(nodes) - 1)]
    differences, shares = [[1.0]], [1.0]  # each as weights of the slopes, and how much it counts
    if gaps:
        differences.append([1.0, -1.0])
        shares.append(h / (2 * gaps[0]))
    if len(gaps) > 1:
        h1, h2 = gaps[:2]
        differences.append([1.0, -1 - h1 / h2, h1 / h2])
        shares.append(1 / 2 - h * h / (6 * h1 * (h1 + h2)))
    if len(gaps) > 2:
        h1, h2, h3 = gaps
        turn = h1 * (h1 + h2) / (h2 * (h2 + h3))
        newer, older = -1 - h1 / h2 - turn, h1 / h2 + turn * (1 + h2 / h3)
        differences.append([1.0, newer, older, -turn * h1 / h2])
        two, three = h + h1, h + h1 + h2
        whole = 2 * three * (3 * two - h) + h * (2 * two - h)
        shares.append(h * whole / (12 * h1 * (h1 + h2) * (h1 + h2 + h3)))
    sums = [0.0] * len(nodes)
    for share, difference in zip(shares, differences, strict=True):
        for place, weight in enumerate(difference):
            sums[place] += share * weight
    return [h * each for each in sums]


METHODS = (
    Sampler(
        "plms",
        sample_plms,
        "Adams–Bashforth with weights for even steps, after one Heun step",
        "Liu et al. (2022), arXiv 2202.09778, as in latent-diffusion",
        proofs=("diffusers PNDMScheduler", "identity", "order"),
        order=2,
    ),
    Sampler(
        "pndm",
        sample_pndm,
        "Adams–Bashforth with weights for even steps, after three Runge–Kutta steps",
        "Liu et al. (2022), arXiv 2202.09778",
        proofs=("diffusers PNDMScheduler", "order"),
        order=4,  # on even steps; on uneven ones 2, as the others
    ),
    Sampler(
        "ipndm",
        sample_ipndm,
        "Adams–Bashforth with weights for even steps, from the first step on",
        "Zhang and Chen (2022), arXiv 2204.13902",
        proofs=("diffusers IPNDMScheduler", "ComfyUI", "order"),
        order=2,
    ),
    Sampler(
        "ipndm_v",
        sample_ipndm_v,
        "ipndm with weights that follow the steps' widths, if not exactly: `exact` has those",
        "diff-sampler, whose name and weights these are; ComfyUI has the same",
        proofs=("ComfyUI", "identity", "order"),
        order=2,
    ),
)
