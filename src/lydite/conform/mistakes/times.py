"""Mistakes in the timestep that the network gets."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from lydite.conform.mistakes.mistake import Mistake
from lydite.conform.problem import Array, Problem
from lydite.conform.replay import CallTime, Plan, place_of

Change = Callable[[float, CallTime, Problem], float | None]  # (right timestep, …) -> the wrong one


def wrong_timestep(change: Change) -> Callable[[Plan], Plan | None]:
    """The right timestep made into a wrong one."""

    def apply(plan: Plan) -> Plan | None:
        problem, right = plan.problem, plan.timestep
        if problem.prediction == "denoised":
            return None

        def timestep(time: CallTime) -> float:
            wrong = change(right(time), time, problem)
            return right(time) if wrong is None else wrong

        return replace(plan, timestep=timestep)

    return apply


def spaced(grid: Callable[[int, int], Array]) -> Callable[[Plan], Plan | None]:
    """Timesteps of another spacing, one for each step, whatever the sigmas."""

    def apply(plan: Plan) -> Plan | None:
        problem = plan.problem
        if problem.prediction == "denoised":
            return None
        even = grid(problem.steps, problem.training_steps)
        if len(even) != problem.steps:
            return None
        sigmas = np.array(problem.sigmas[: problem.steps])

        def timestep(time: CallTime) -> float:
            # between two sigmas of the table, as far between their two timesteps
            return float(np.interp(-time.sigma, -sigmas, even))

        return replace(plan, timestep=timestep)

    return apply


def _next(right: float, time: CallTime, problem: Problem) -> float | None:
    if time.sigma not in problem.sigmas[:-1]:
        return None
    at = problem.sigmas.index(time.sigma)
    return (*problem.timesteps, 0.0)[at + 1]


def _rounded(dtype: Any) -> Callable[[float, CallTime, Problem], float]:
    return lambda right, time, problem: float(dtype(right))


def _by_rule(whole: Callable[[float], float]) -> Callable[[float, CallTime, Problem], float]:
    """The place of the sigma in the table, made whole in some way or in none."""
    return lambda right, time, problem: whole(place_of(problem, time.sigma))


STALE = "has evenly spaced timesteps under respaced sigmas"
FIX_STALE = (
    "Derive each timestep from its own sigma, after the respacing (Karras, exponential, shift)."
)
FIX_WHOLE = "Interpolate in log sigma and keep the fraction, or record the rounding you mean."
FIX_CACHE = "Give the network the timestep of the sigma it is called at, each time."

TIMES = (
    Mistake(
        "sigma-for-timestep",
        "gives the network sigma where it expects a timestep",
        "Convert: the timestep of a sigma is its place in the noise table (eps, v), or "
        "1000·sigma (flow).",
        wrong_timestep(lambda right, time, problem: time.sigma),
    ),
    Mistake(
        "timestep-not-scaled",
        "gives the network a timestep from 0 to 1",
        "Multiply by the number of training steps.",
        wrong_timestep(lambda right, time, problem: right / problem.training_steps),
    ),
    Mistake(
        "stale-timesteps",
        f"{STALE}: T − 1 down to 0",
        FIX_STALE,
        spaced(lambda n, T: np.linspace(T - 1, 0, n)),
    ),
    Mistake(
        "stale-timesteps",
        f"{STALE}: T − 1 down, without 0",
        FIX_STALE,
        spaced(lambda n, T: np.linspace(T - 1, 0, n + 1)[:-1]),
    ),
    Mistake(
        "stale-timesteps",
        f"{STALE}: every T/n-th, from the end",
        FIX_STALE,
        spaced(lambda n, T: np.round(np.arange(T, 0, -T / n)) - 1),
    ),
    Mistake(
        "stale-timesteps",
        f"{STALE}: every (T // n)-th, from 0",
        FIX_STALE,
        spaced(lambda n, T: (np.arange(n) * (T // n))[::-1]),
    ),
    Mistake(
        "stale-timesteps",
        f"{STALE}: every (T // n)-th, from 1",
        FIX_STALE,
        spaced(lambda n, T: (np.arange(n) * (T // n))[::-1] + 1),
    ),
    Mistake(
        "stale-timesteps",
        f"{STALE}: T down to 1",
        FIX_STALE,
        spaced(lambda n, T: np.linspace(T, 1, n)),
    ),
    Mistake(
        "stale-timesteps",
        f"{STALE}: T down to T/n",
        FIX_STALE,
        spaced(lambda n, T: np.linspace(T, T / n, n)),
    ),
    Mistake(
        "first-timestep-kept",
        "gives the network the first timestep at every step",
        FIX_CACHE + " Something was cached before the loop.",
        wrong_timestep(lambda right, time, problem: problem.timesteps[0]),
    ),
    Mistake(
        "timestep-of-next-step",
        "gives the network the timestep of the next step",
        FIX_CACHE,
        wrong_timestep(_next),
    ),
    Mistake(
        "timestep-of-first-call",
        "gives the network the step's first timestep at every call of the step",
        FIX_CACHE + " The second call of a step is at another sigma.",
        wrong_timestep(
            lambda right, time, problem: (
                dict(zip(problem.sigmas, problem.timesteps, strict=False)).get(time.step_sigma)
                if time.call
                else None
            )
        ),
    ),
    Mistake(
        "timestep-reversed",
        "counts time from the image to the noise: T − t",
        "The largest timestep is pure noise.",
        wrong_timestep(lambda right, time, problem: problem.training_steps - right),
    ),
    Mistake(
        "timestep-truncated",
        "cuts timesteps to whole numbers",
        FIX_WHOLE,
        wrong_timestep(_by_rule(lambda place: float(math.floor(place + 1e-9)))),
    ),
    Mistake(
        "timestep-nearest",
        "rounds timesteps to the nearest entry",
        FIX_WHOLE,
        wrong_timestep(_by_rule(lambda place: float(round(place)))),
    ),
    Mistake(
        "timestep-interpolated",
        "interpolates timesteps in log sigma where whole ones are meant",
        "Round as the problem's timesteps are rounded.",
        wrong_timestep(_by_rule(lambda place: place)),
    ),
    Mistake(
        "timestep-one-more",
        "gives the network t + 1",
        "Timesteps count from 0: the first entry of the table is t = 0.",
        wrong_timestep(lambda right, time, problem: right + 1),
    ),
    Mistake(
        "timestep-one-less",
        "gives the network t − 1",
        "Timesteps count from 0: the first entry of the table is t = 0.",
        wrong_timestep(lambda right, time, problem: right - 1),
    ),
    Mistake(
        "timestep-in-bf16",
        "rounds timesteps to bfloat16",
        "Keep timesteps in float32 up to the embedding: bfloat16 is off by up to 2 at 1000.",
        wrong_timestep(_rounded(ml_dtypes.bfloat16)),
    ),
    Mistake(
        "timestep-in-f16",
        "rounds timesteps to float16",
        "Keep timesteps in float32 up to the embedding: float16 is off by up to 0.25 at 1000.",
        wrong_timestep(_rounded(np.float16)),
    ),
)
