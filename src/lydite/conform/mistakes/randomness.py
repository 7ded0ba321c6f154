"""Mistakes in the noise a sampler adds."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lydite.conform.mistakes.mistake import Mistake
from lydite.conform.problem import Array, noise_model_of
from lydite.conform.replay import Plan
from lydite.sampling.analytic import Zero
from lydite.sampling.sampler_types import Step


def rescaled(change: Callable[[float, float, float], float]) -> Callable[[Plan], Plan | None]:
    """Each step's noise times a factor of (its right deviation, sigma, sigma_next)."""

    def apply(plan: Plan) -> Plan | None:
        if (deviations := _deviations(plan)) is None:
            return None

        def noise(index: int, normals: Array, sigma: float, sigma_next: float) -> Array:
            right = deviations.get(sigma, 0.0)
            return normals * change(right, sigma, sigma_next) if right else normals

        return replace(plan, noise=noise)

    return apply


def drawn_from(pick: Callable[[int], int | None]) -> Callable[[Plan], Plan | None]:
    """Other normals than the next ones; None is the noise the run started from."""

    def apply(plan: Plan) -> Plan | None:
        problem = plan.problem
        if not problem.normals:
            return None

        def noise(index: int, normals: Array, sigma: float, sigma_next: float) -> Array:
            chosen = pick(index)
            values = problem.noise if chosen is None else problem.normals[chosen]
            return np.array(values).reshape(problem.shape).astype(normals.dtype)

        return replace(plan, noise=noise)

    return apply


def swapped_up_and_down(plan: Plan) -> Plan | None:
    """An ancestral step down to the noise's deviation, with the noise of the step down."""
    if plan.problem.sampler != "euler_ancestral" or plan.problem.noise_model != "ve":
        return None
    if plan.problem.options.get("eta", 1.0) != 1.0:
        return None

    def method(denoise: Any, x: Any, sigmas: Any, noise: Any) -> Any:
        for at in range(len(sigmas) - 1):
            sigma, after = float(sigmas[at]), float(sigmas[at + 1])
            denoised = denoise(x, sigma)
            up = after * max(0.0, sigma**2 - after**2) ** 0.5 / sigma
            down = after**2 / sigma
            x = x + (x - denoised) / sigma * (up - sigma)
            if after > 0:
                x = x + noise(sigma, after) * down
            yield Step(at, sigma, after, x, denoised)

    return replace(plan, method=method)


@dataclass(frozen=True)
class _One:
    """Noise of one everywhere, counted."""

    calls: list[float]

    def __call__(self, sigma: float, sigma_next: float) -> Array:
        self.calls.append(sigma)
        return np.ones(())


def _deviations(plan: Plan) -> dict[float, float] | None:
    """The deviation of each step's noise: what x = 0 becomes under D = 0 and noise 1."""
    if not plan.problem.normals:
        return None
    found: dict[float, float] = {}
    for at in range(len(plan.sigmas) - 1):
        source = _One([])
        sigmas = plan.sigmas[at : at + 2]
        steps = list(plan.method(Zero(noise_model_of(plan.problem)), np.zeros(()), sigmas, source))
        if len(steps) != 1 or len(source.calls) > 1:
            return None  # two draws in one step: none of them is the step's deviation
        if source.calls:
            found[source.calls[0]] = float(steps[-1].x)
    return found


FIX_SCALE = "Add normals × the step's standard deviation (s_up in an ancestral step)."

RANDOMNESS = (
    Mistake(
        "noise-left-out", "adds no noise", FIX_SCALE, rescaled(lambda right, sigma, sigma_next: 0.0)
    ),
    Mistake(
        "variance-for-deviation",
        "scales the noise by its variance instead of its deviation",
        FIX_SCALE,
        rescaled(lambda right, sigma, sigma_next: right),
    ),
    Mistake(
        "noise-not-scaled",
        "adds the normals as they are",
        FIX_SCALE,
        rescaled(lambda right, sigma, sigma_next: 1 / right),
    ),
    Mistake(
        "noise-of-sigma-next",
        "scales the noise by sigma_next",
        FIX_SCALE,
        rescaled(lambda right, sigma, sigma_next: sigma_next / right),
    ),
    Mistake(
        "noise-of-sigma",
        "scales the noise by sigma",
        FIX_SCALE,
        rescaled(lambda right, sigma, sigma_next: sigma / right),
    ),
    Mistake(
        "noise-negated",
        "subtracts the noise",
        FIX_SCALE,
        rescaled(lambda right, sigma, sigma_next: -1.0),
    ),
    Mistake(
        "up-and-down-swapped",
        "steps down to s_up and adds noise of s_down",
        "Step down to s_down = σ_next²/σ, then add noise × s_up, s_up² = σ_next² − s_down².",
        swapped_up_and_down,
    ),
    Mistake(
        "noise-repeated",
        "adds the same normals at every step",
        "Draw anew at each step.",
        drawn_from(lambda index: 0),
    ),
    Mistake(
        "starting-noise-again",
        "adds the noise it started from as the first step's noise",
        "Use another stream, or go on with the one that made the starting noise.",
        drawn_from(lambda index: None if index == 0 else index - 1),
    ),
)
