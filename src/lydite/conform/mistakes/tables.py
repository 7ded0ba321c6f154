"""Mistakes in the sigmas themselves, and in where a run starts."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from lydite.conform.mistakes.mistake import Mistake
from lydite.conform.problem import Array, Problem
from lydite.conform.replay import CallTime, Plan, timestep_of

Respace = Callable[[Array, Problem], Array | None]  # the right sigmas -> the wrong ones


def respaced(change: Respace) -> Callable[[Plan], Plan | None]:
    """Other sigmas, with timesteps and a start that follow them as they should."""

    def apply(plan: Plan) -> Plan | None:
        problem = plan.problem
        sigmas = change(np.array(plan.sigmas), problem)
        if sigmas is None or len(sigmas) < 2 or not np.isfinite(sigmas).all():
            return None
        right = plan.timestep
        known = dict(zip(problem.sigmas, problem.timesteps, strict=False))

        def timestep(time: CallTime) -> float:
            if time.sigma in known:
                return right(time)
            return timestep_of(problem, time.sigma)

        return replace(plan, sigmas=tuple(float(sigma) for sigma in sigmas), timestep=timestep)

    return apply


def shifted(sigmas: Array, shift: float) -> Array:
    """s·u / (1 + (s − 1)·u)."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def _shift(problem: Problem) -> float | None:
    """The shift of the problem's schedule, as a factor."""
    shift, mu = problem.settings.get("shift"), problem.settings.get("mu")
    if problem.noise_model != "flow":
        return None
    if isinstance(shift, int | float) and shift > 0:
        return float(shift)
    return math.exp(mu) if isinstance(mu, int | float) and abs(mu) < 50 else None


def shift_again(sigmas: Array, problem: Problem) -> Array | None:
    shift = _shift(problem)
    return None if shift is None else shifted(sigmas, shift)


def no_shift(sigmas: Array, problem: Problem) -> Array | None:
    shift = _shift(problem)
    return None if shift is None else shifted(sigmas, 1 / shift)


def shift_as_mu(sigmas: Array, problem: Problem) -> Array | None:
    """exp(shift) where the shift itself was meant."""
    shift = _shift(problem)
    if shift is None or shift > 20:
        return None
    return shifted(shifted(sigmas, 1 / shift), math.exp(shift))


def mu_as_shift(sigmas: Array, problem: Problem) -> Array | None:
    """mu where exp(mu) was meant."""
    shift = _shift(problem)
    if shift is None or shift <= 1:
        return None
    return shifted(shifted(sigmas, 1 / shift), math.log(shift))


def one_fewer(sigmas: Array, problem: Problem) -> Array | None:
    return sigmas[:-1] if sigmas[-1] == 0 and len(sigmas) > 2 else None


def penultimate_dropped(sigmas: Array, problem: Problem) -> Array | None:
    return np.delete(sigmas, -2) if len(sigmas) > 2 else None


def last_repeated(sigmas: Array, problem: Problem) -> Array | None:
    """The end is the last sigma again instead of 0, so the last step does nothing."""
    return np.append(sigmas[:-1], sigmas[-2]) if sigmas[-1] == 0 else None


def first_dropped(sigmas: Array, problem: Problem) -> Array | None:
    return sigmas[1:] if len(sigmas) > 2 else None


def _ends(sigmas: Array, problem: Problem) -> tuple[float, float, float] | None:
    """The largest sigma, the smallest above 0, and rho, where the schedule is Karras'."""
    if problem.schedule is None or "karras" not in problem.schedule or len(sigmas) < 3:
        return None
    rho = problem.settings.get("rho", 7.0)
    if not isinstance(rho, int | float) or not 0 < rho < 100:
        return None
    return float(sigmas[0]), float(sigmas[-2]), float(rho)


def karras(count: int, largest: float, smallest: float, rho: float) -> Array:
    """`count` sigmas, even in their rho-th root."""
    return np.linspace(largest ** (1 / rho), smallest ** (1 / rho), count) ** rho


def karras_one_more(sigmas: Array, problem: Problem) -> Array | None:
    """linspace over n + 1 with the last set to 0, instead of n and a 0 after them."""
    if (ends := _ends(sigmas, problem)) is None:
        return None
    largest, smallest, rho = ends
    return np.append(karras(len(sigmas), largest, smallest, rho)[:-1], 0.0)


def karras_to_zero(sigmas: Array, problem: Problem) -> Array | None:
    """Even in the root all the way to 0."""
    if (ends := _ends(sigmas, problem)) is None:
        return None
    largest, _, rho = ends
    return karras(len(sigmas), largest, 0.0, rho)


def karras_without_rho(sigmas: Array, problem: Problem) -> Array | None:
    if (ends := _ends(sigmas, problem)) is None:
        return None
    return np.append(karras(len(sigmas) - 1, ends[0], ends[1], 1.0), 0.0)


def unscaled_start(plan: Plan) -> Plan | None:
    if plan.problem.noise_model != "ve":
        return None
    return replace(plan, start=np.array(plan.problem.noise).reshape(plan.problem.shape))


def wider_start(plan: Plan) -> Plan | None:
    """√(1 + σ²)·noise where σ·noise was meant, or the other way round."""
    if plan.problem.noise_model != "ve":
        return None
    noise, sigma = np.array(plan.problem.noise).reshape(plan.problem.shape), plan.problem.sigmas[0]
    narrow = noise * sigma
    whole = noise * math.sqrt(1 + sigma**2)
    return replace(plan, start=whole if np.allclose(plan.start, narrow, rtol=1e-6) else narrow)


FIX_KARRAS = "n sigmas from largest to smallest, even in their rho-th root, and then a 0."
FIX_SHIFT = "Shift the even grid exactly once: s·u / (1 + (s − 1)·u)."

TABLES = (
    Mistake("shifted-twice", "shifts the sigmas twice", FIX_SHIFT, respaced(shift_again)),
    Mistake("not-shifted", "leaves the sigmas unshifted", FIX_SHIFT, respaced(no_shift)),
    Mistake(
        "shift-as-mu",
        "takes the shift for its logarithm: exp(shift)",
        FIX_SHIFT + " A mu of tokens is log(s); a shift of 3.0 is s itself.",
        respaced(shift_as_mu),
    ),
    Mistake(
        "mu-as-shift",
        "takes mu for the shift itself",
        "The shift is exp(mu).",
        respaced(mu_as_shift),
    ),
    Mistake(
        "last-step-dropped",
        "stops one step early, at the smallest sigma above 0",
        "n steps need n + 1 sigmas, the last of them 0; loop over pairs.",
        respaced(one_fewer),
    ),
    Mistake(
        "last-step-idle",
        "ends at the smallest sigma twice instead of at 0",
        "Append 0 to the sigmas, not the last sigma again.",
        respaced(last_repeated),
    ),
    Mistake(
        "penultimate-dropped",
        "leaves out the smallest sigma above 0",
        "Use all sigmas; a tool that discards the last but one asks for n + 1 first.",
        respaced(penultimate_dropped),
    ),
    Mistake(
        "first-step-dropped",
        "starts at the second sigma",
        "The first step goes from sigmas[0] to sigmas[1].",
        respaced(first_dropped),
    ),
    Mistake(
        "karras-one-more",
        "spaces Karras' sigmas over n + 1 and zeroes the last",
        FIX_KARRAS,
        respaced(karras_one_more),
    ),
    Mistake(
        "karras-to-zero", "lets Karras' spacing run to 0", FIX_KARRAS, respaced(karras_to_zero)
    ),
    Mistake(
        "karras-without-rho",
        "spaces sigmas evenly: rho is 1",
        FIX_KARRAS,
        respaced(karras_without_rho),
    ),
    Mistake(
        "start-not-scaled",
        "starts from the noise as drawn, without sigmas[0]",
        "Start from noise × sigmas[0].",
        unscaled_start,
    ),
    Mistake(
        "start-scaled-otherwise",
        "confuses the two starts, noise × σ and noise × √(1 + σ²)",
        "Start from the given x. k-diffusion takes noise × σ; ComfyUI from the largest sigma, and "
        "diffusers for `leading`, noise × √(1 + σ²).",
        wider_start,
    ),
)
