"""Restart: go down, throw the noise back on, go down again. Xu et al. (2023), arXiv 2306.14878."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lydite.core.errors import InputError
from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import A, Denoise, Noise, NoiseModel, Step
from lydite.sampling.samplers.algebra import add_noise, heun_step

RHO = 7.0  # of the Karras spacing that a way down again takes


@dataclass(frozen=True)
class Restart:
    """At the sigma nearest to `low`: up to `high` and down again in `steps`, `times` over."""

    low: float
    high: float
    steps: int
    times: int

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high or self.steps < 1 or self.times < 1:
            raise InputError(f"{self}: expected 0 < low < high, and at least 1 step and 1 time.")


def sample_restart(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    restarts: Sequence[Restart] | None = None,
    s_noise: float = 1.0,
) -> Iterator[Step[A]]:
    """Heun steps with restarts: Xu et al. (2023), with Heun's method for their ODE.

    Without `restarts` the choice is A1111's, which takes their steps out of the number asked for.
    """
    model = denoise.noise_model
    levels = [float(sigma) for sigma in sigmas]
    if restarts is None:
        levels, restarts = a1111_plan(model, levels)
    index = 0
    for sigma, sigma_next in _with_restarts(levels, restarts):
        if sigma_next > sigma:
            x = add_noise(model, x, sigma, sigma_next, noise(sigma, sigma_next) * s_noise)
            continue
        x, denoised = heun_step(denoise, x, sigma, sigma_next)
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x
        index += 1


def a1111_plan(
    model: NoiseModel, sigmas: Sequence[float]
) -> tuple[list[float], tuple[Restart, ...]]:
    """The sigmas and restarts that A1111 makes of the sigmas of n steps, n steps in all.

    Below 20 steps there is no restart, below 36 one of 9 steps, from there on two, each a quarter
    of all. They go between the sigmas nearest to 0.1 and to 2 (of a flow model: nearest to the same
    signal-to-noise ratios). The rest are Karras sigmas between the same two ends.
    """
    n = len(sigmas) - 1
    if n < 20:
        return list(sigmas), ()
    steps, times = (9, 1) if n < 36 else (n // 4, 2)
    positive = sigmas[:-1] if sigmas[-1] == 0 else sigmas
    levels = _karras(positive[0], positive[-1], len(positive) - steps * times)
    low, high = (_nearest(levels, model.sigma_at(-math.log(ratio))) for ratio in (0.1, 2.0))
    restarts = (Restart(low, high, steps, times),) if low < high else ()
    return [*levels, 0.0] if sigmas[-1] == 0 else levels, restarts


def _with_restarts(
    levels: Sequence[float], restarts: Sequence[Restart]
) -> Iterator[tuple[float, float]]:
    """(from, to) of every step down and every leap up."""
    due = {_nearest(levels[1:], restart.low): restart for restart in restarts}
    for sigma, sigma_next in pairwise(levels):
        yield sigma, sigma_next
        restart = due.get(sigma_next)
        if restart is not None and 0 < sigma_next < restart.high:
            for _ in range(restart.times):
                yield sigma_next, restart.high
                yield from pairwise(_karras(restart.high, sigma_next, restart.steps + 1))


def _nearest(levels: Sequence[float], sigma: float) -> float:
    return min(levels, key=lambda level: abs(level - sigma))


def _karras(first: float, last: float, count: int) -> list[float]:
    """Sigmas evenly spaced in their RHO-th root."""
    top, bottom = first ** (1 / RHO), last ** (1 / RHO)
    inner = (top + (bottom - top) * step / (count - 1) for step in range(1, count - 1))
    return [first, *(root**RHO for root in inner), last]


METHODS = (
    Sampler(
        "restart",
        sample_restart,
        "Heun with leaps back to more noise",
        "Xu et al. (2023), arXiv 2306.14878; A1111's choice of restarts",
        proofs=("identity", "paper", "stationarity"),
        calls=2,
        noise="stream",
    ),
)
