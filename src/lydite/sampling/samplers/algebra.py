"""Shared algebra of the samplers: slopes, steps in λ, noise taken away and put back.

λ = ln(α/σ) is the half log-SNR and h its growth over a step. Exponential integrators solve the
linear part of a step in λ exactly: Hochbruck and Ostermann (2010) for the φ functions; with data
prediction and noise, Gonzalez et al. (2023), arXiv 2305.14267.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal

from lydite.sampling.sampler_types import FLOW, A, Denoise, Noise, NoiseModel

NEAR_ONE = 0.9999  # ComfyUI's middle of a step from pure noise, where λ has no end
FEW = 15  # steps; below this number diffusers' solvers lower their order towards the end
Kind = Literal["data", "noise"]  # what a solver integrates over λ


# Steps on dx/dσ


def slope(x: A, denoised: A, sigma: float) -> A:
    """dx/dσ of the ODE, the same under both noise models."""
    return (x - denoised) / sigma


def heun_step(denoise: Denoise[A], x: A, sigma: float, sigma_next: float) -> tuple[A, A]:
    """x at `sigma_next` by the mean of the slopes at both ends, and the first denoised."""
    denoised = denoise(x, sigma)
    first, width = slope(x, denoised, sigma), sigma_next - sigma
    there = x + first * width
    if sigma_next == 0:
        return there, denoised
    second = slope(there, denoise(there, sigma_next), sigma_next)
    return x + (first + second) * (width / 2), denoised


def midpoint_step(denoise: Denoise[A], x: A, sigma: float, sigma_next: float) -> tuple[A, A]:
    """x at `sigma_next` by the slope at the geometric mean, and the first denoised."""
    denoised = denoise(x, sigma)
    first = slope(x, denoised, sigma)
    if sigma_next == 0:
        return x + first * (sigma_next - sigma), denoised
    middle = math.sqrt(sigma * sigma_next)
    halfway = x + first * (middle - sigma)
    second = slope(halfway, denoise(halfway, middle), middle)
    return x + second * (sigma_next - sigma), denoised


def adams_weights(nodes: Sequence[float], end: float) -> list[float]:
    """∫ from nodes[0] to `end` of each Lagrange polynomial on `nodes`, exactly.

    In units of the step and from its start, so that close nodes cost no digits.
    """
    width = end - nodes[0]
    if width == 0:
        return [0.0] * len(nodes)
    places = [(node - nodes[0]) / width for node in nodes]
    result = []
    for own in places:
        powers = [1.0]  # coefficients, lowest first
        for other in places:
            if other != own:
                shifted, scaled = [0.0, *powers], [*powers, 0.0]
                pairs = zip(shifted, scaled, strict=True)
                powers = [(up - other * same) / (own - other) for up, same in pairs]
        result.append(width * sum(power / (degree + 1) for degree, power in enumerate(powers)))
    return result


# Steps in λ


def step_in_lambda(model: NoiseModel, sigma: float, sigma_next: float) -> float:
    """h, the growth of the half log-SNR."""
    return model.half_log_snr(sigma_next) - model.half_log_snr(sigma)


def sigma_between(
    model: NoiseModel, sigma: float, sigma_next: float, share: float, near_one: float
) -> float:
    """The sigma that lies `share` of the way in λ; from pure noise, `near_one`."""
    start, end = model.half_log_snr(sigma), model.half_log_snr(sigma_next)
    return near_one if start == -math.inf else model.sigma_at(start + share * (end - start))


def ddim_step(
    model: NoiseModel, x: A, denoised: A, sigma: float, sigma_to: float, eta: float = 0.0
) -> A:
    """x at `sigma_to` if `denoised` were constant: DDIM. With `eta`, the SDE's drift."""
    keep = sigma_to / sigma
    if eta:
        keep *= exp_minus_h(model, sigma, sigma_to) ** eta
    return x * keep + denoised * (model.alpha(sigma_to) - model.alpha(sigma) * keep)


def exp_minus_h(model: NoiseModel, sigma: float, sigma_to: float) -> float:
    """exp(−h): 0 from pure noise and to no noise, where h has no end."""
    return sigma_to * model.alpha(sigma) / (sigma * model.alpha(sigma_to))


def slope_weight(h: float) -> float:
    """h·φ₂(−h) = 1 − φ₁(−h): what the slope of the denoised counts over a step of length h."""
    if h < 1e-5:  # the difference would lose half of its digits
        return h / 2 - h * h / 6
    return 1 + math.expm1(-h) / h


def finite_start(model: NoiseModel, sigmas: Iterable[float], near_one: float) -> list[float]:
    """The sigmas, with `near_one` for the pure noise a flow starts from: its λ is −∞.

    x is left as it is. ComfyUI's value is what the model's shift s makes of 0.9999: with u for it,
    s·u / (1 + (s − 1)·u).
    """
    levels = [float(sigma) for sigma in sigmas]
    if levels and model.alpha(levels[0]) <= 0:
        levels[0] = near_one
    return levels


@dataclass(frozen=True)
class Call(Generic[A]):
    """A call of the network that later steps look back at."""

    sigma: float
    half_log_snr: float
    denoised: A
    value: A  # what is integrated: `denoised`, or the noise


def make_call(kind: Kind, model: NoiseModel, x: A, denoised: A, sigma: float) -> Call[A]:
    value = denoised if kind == "data" else (x - denoised * model.alpha(sigma)) / sigma
    return Call(sigma, model.half_log_snr(sigma), denoised, value)


def first_order_step(kind: Kind, model: NoiseModel, x: A, call: Call[A], sigma_next: float) -> A:
    """x at `sigma_next` if the value of `call` stayed: order 1. x may have been corrected since."""
    alpha = model.alpha(call.sigma)
    if kind == "data" or alpha == 0:
        return ddim_step(model, x, call.denoised, call.sigma, sigma_next)
    keep = model.alpha(sigma_next) / alpha
    return x * keep + call.value * (sigma_next - keep * call.sigma)


def bend_scale(kind: Kind, model: NoiseModel, sigma_next: float, h: float) -> tuple[float, float]:
    """(scale, g): a value that changes by d over the step bends it by −scale·d·psi_2(g)."""
    return (model.alpha(sigma_next), -h) if kind == "data" else (sigma_next, h)


def psi_2(g: float) -> float:
    """g·∫exp(g(1−u))·u du from 0 to 1: the weight of a slope."""
    return math.expm1(g) / g - 1 if g else 0.0


def psi_3(g: float) -> float:
    """g·∫exp(g(1−u))·u²/2 du from 0 to 1: the weight of a second derivative."""
    return psi_2(g) / g - 0.5 if g else 0.0


def exponential_weights(nodes: Sequence[float], h: float, rate: float) -> list[float]:
    """∫exp(rate·v)·L(v) dv from −h to 0 for each Lagrange polynomial L on `nodes`, exactly.

    v is λ counted from the end of the step; inside, it is counted in steps, which costs no digits.
    """
    if h == 0:  # diffusers repeats the last of some schedules
        return [0.0] * len(nodes)
    places = [node / h for node in nodes]
    result = []
    for own in range(len(places)):
        powers = [1.0]  # coefficients, lowest first
        for other, place in enumerate(places):
            if other != own:
                pairs = zip([0.0, *powers], [*powers, 0.0], strict=True)
                powers = [(up - place * same) / (places[own] - place) for up, same in pairs]
        moments = (power * _moment(degree, rate * h) for degree, power in enumerate(powers))
        result.append(h * sum(moments))
    return result


def _moment(degree: int, rate: float) -> float:
    """∫exp(rate·u)·u^degree du from −1 to 0."""
    if abs(rate) < 1:  # as a series: the closed form below would lose digits
        terms = (
            rate**n / math.factorial(n) * (-1) ** (degree + n) / (degree + n + 1) for n in range(20)
        )
        return sum(terms)
    value = -math.expm1(-rate) / rate
    for power in range(1, degree + 1):
        value = (-((-1) ** power) * math.exp(-rate) - power * value) / rate
    return value


def final_order(levels: Sequence[float], index: int, order: int, lower: bool) -> int:
    """The order of a multistep solver as the end nears, by diffusers' rule: 1 to sigma 0."""
    left = len(levels) - 1 - index
    if left == 1 and levels[-1] == 0:
        return 1
    return min(order, left) if lower and len(levels) - 1 < FEW else order


# Noise taken away beyond the next sigma, and put back


def ancestral_down(model: NoiseModel, sigma: float, sigma_next: float, eta: float) -> float:
    """The sigma an ancestral step solves down to before fresh noise lifts x to `sigma_next`.

    `ve`: eta = 1 leaves the noise of the diffusion's own reverse, as k-diffusion has it. `flow`: a
    straight share eta of the step again, as the `_RF` samplers of ComfyUI and diffusers'
    LTXEulerAncestralRF have it. eta = 0 is `sigma_next`: the ODE.
    """
    if model == FLOW:
        return max(0.0, sigma_next * (1 + eta * (sigma_next / sigma - 1)))
    return reverse_down(model, sigma, sigma_next, eta)


def reverse_down(model: NoiseModel, sigma: float, sigma_next: float, eta: float) -> float:
    """The same with the noise of the diffusion's own reverse, under either noise model."""
    if eta == 0 or sigma_next == 0:
        return sigma_next
    fresh = min(1.0, eta * math.sqrt(1 - exp_minus_h(model, sigma, sigma_next) ** 2))
    return scale_noise_ratio(model, sigma_next, math.sqrt(1 - fresh**2))


def scale_noise_ratio(model: NoiseModel, sigma: float, share: float) -> float:
    """The sigma whose noise-to-image ratio is `share` of that of `sigma`."""
    if share == 0:
        return 0.0
    return model.sigma_at(model.half_log_snr(sigma) - math.log(share))


def add_noise(model: NoiseModel, x: A, sigma: float, sigma_up: float, normals: A) -> A:
    """x at `sigma` with as much noise on top as makes it one at `sigma_up`."""
    keep = model.alpha(sigma_up) / model.alpha(sigma)
    return x * keep + normals * math.sqrt(max(0.0, sigma_up**2 - (sigma * keep) ** 2))


@dataclass(frozen=True)
class Churn(Generic[A]):
    """Noise added before each step between two sigmas: algorithm 2 of Karras et al. (2022).

    Names and numbers are the paper's. With noise model `flow` the noise-to-image ratio grows by
    the factor by which sigma grows in the paper, and x shrinks to match.
    """

    noise: Noise[A]
    s_churn: float
    s_tmin: float = 0.0
    s_tmax: float = math.inf
    s_noise: float = 1.0

    def add(self, model: NoiseModel, x: A, sigma: float, steps: int) -> tuple[A, float]:
        """x and sigma as the step starts from them; pure noise is left as it is."""
        gamma = min(self.s_churn / steps, math.sqrt(2) - 1)
        if gamma <= 0 or not self.s_tmin <= sigma <= self.s_tmax or model.alpha(sigma) == 0:
            return x, sigma
        sigma_up = scale_noise_ratio(model, sigma, 1 + gamma)
        return add_noise(
            model, x, sigma, sigma_up, self.noise(sigma, sigma_up) * self.s_noise
        ), sigma_up


def churned(
    churn: Churn[A] | None, model: NoiseModel, x: A, sigma: float, steps: int
) -> tuple[A, float]:
    return (x, sigma) if churn is None else churn.add(model, x, sigma, steps)
