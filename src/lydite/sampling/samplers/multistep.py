"""What DPM-Solver, UniPC, DEIS and SA-Solver share: integrals over λ of what earlier calls saw.

From one sigma to the next, x is scaled by a known factor and an integral over λ is added, of the
image ("data") or of the noise ("noise") as it changes on the way. A step that takes it for constant
is DDIM's; the others bend that step by how it has been changing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal

from lydite.sampling.noise_model import NoiseModel
from lydite.sampling.samplers.ancestral import toward
from lydite.sampling.steps import A

Kind = Literal["data", "noise"]
FEW = 15  # steps; below this number diffusers' solvers lower their order towards the end


@dataclass(frozen=True)
class Call(Generic[A]):
    """A call of the network that later steps look back at."""

    sigma: float
    half_log_snr: float
    denoised: A
    value: A  # what is integrated: `denoised`, or the noise


def called(kind: Kind, model: NoiseModel, x: A, denoised: A, sigma: float) -> Call[A]:
    value = denoised if kind == "data" else (x - denoised * model.alpha(sigma)) / sigma
    return Call(sigma, model.half_log_snr(sigma), denoised, value)


def straight(kind: Kind, model: NoiseModel, x: A, call: Call[A], sigma_next: float) -> A:
    """x at `sigma_next` if the value of `call` stayed: order 1. x may have been corrected since."""
    alpha = model.alpha(call.sigma)
    if kind == "data" or alpha == 0:
        return toward(model, x, call.denoised, call.sigma, sigma_next)
    keep = model.alpha(sigma_next) / alpha
    return x * keep + call.value * (sigma_next - keep * call.sigma)


def frame(kind: Kind, model: NoiseModel, sigma_next: float, h: float) -> tuple[float, float]:
    """(scale, g): a value that changes by d over the step bends it by −scale·d·psi_2(g)."""
    return (model.alpha(sigma_next), -h) if kind == "data" else (sigma_next, h)


def psi_2(g: float) -> float:
    """g·∫exp(g(1−u))·u du from 0 to 1: the weight of a slope."""
    return math.expm1(g) / g - 1 if g else 0.0


def psi_3(g: float) -> float:
    """g·∫exp(g(1−u))·u²/2 du from 0 to 1: the weight of a second derivative."""
    return psi_2(g) / g - 0.5 if g else 0.0


def weights(nodes: Sequence[float], h: float, rate: float) -> list[float]:
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
