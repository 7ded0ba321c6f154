"""How far two values are apart, and how far rounding alone may take them.

A correct candidate computes in another order and in its own precision. The floor of a value is the
largest difference between our run in float64 and a few that round to float32: one in float32
throughout, and some in which every call of the network is off by a unit. Precision is linear in it,
so float16 and bfloat16 get the same floor, times their unit over that of float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from lydite.conform.problem import Array, Problem
from lydite.conform.replay import BoundSampler, CannotReplay, Plan, Run, run

UNIT = {"f64": 2.0**-24, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
# A value is wrong beyond so many floors, and never below LEAST. Measured: diffusers' schedulers
# stay below 7 floors where they compute in other coordinates, but reach 8.5e-6 where their
# coefficients are differences of logarithms in float32 (DEIS, 50 steps); tests/conform has them.
SLACK, LEAST = 16.0, 2e-5
SIGMA, TIMESTEP = 5e-6, 2e-3  # relative; absolute, of 1000
JITTERS = (1, 2, 3)

Key = tuple[str, int, int]


@dataclass(frozen=True)
class Bound:
    """What rounding may do to one value, and from where on it is no rounding."""

    floor: float
    limit: float


def distance(candidate: Array, ours: Array) -> float:
    """The largest difference, in units of the largest value where that is above 1."""
    if candidate.shape != ours.shape or not np.isfinite(candidate).all():
        return float("inf")
    size = max(1.0, float(np.abs(ours).max(initial=0.0)))
    return float(np.abs(candidate - ours).max(initial=0.0)) / size


def error_of(name: str, candidate: Array, ours: Array) -> float:
    """The error of an event: relative for a sigma, in timesteps for a timestep."""
    if name == "sigma":
        return table_error(candidate.reshape(1), ours.reshape(1))
    if name == "timestep":
        return float(abs(candidate - ours)) if np.isfinite(candidate) else float("inf")
    return distance(candidate, ours)


def table_error(candidate: Array, ours: Array) -> float:
    """The largest relative difference of two tables; a 0 has to be a 0."""
    if candidate.shape != ours.shape or not np.isfinite(candidate).all():
        return float("inf")
    size = np.maximum(np.abs(ours), 1e-9)
    return float((np.abs(candidate - ours) / size).max(initial=0.0))


def timestep_limit(problem: Problem) -> float:
    """Of timesteps to 1000; those of edm and cosmos are about 1."""
    return TIMESTEP / 1000 if problem.prediction in ("edm", "cosmos") else TIMESTEP


def bounds(plan: Plan, exact: Run, dtype: str, most: int | None = None) -> dict[Key, Bound]:
    """A bound for every value of a run."""
    coarse = UNIT[dtype] / UNIT["f32"]
    least = LEAST
    if isinstance(plan.method, BoundSampler):
        least = max(least, plan.method.roughness)
    floors = dict.fromkeys(exact.values, UNIT["f32"])
    for other in _rounded_runs(plan, most):
        for key in floors.keys() & other.values.keys():
            apart = distance(np.asarray(other.values[key], np.float64), exact.values[key])
            floors[key] = max(floors[key], apart)
    result = {}
    for (name, step, call), floor in floors.items():
        if name == "sigma":
            result[name, step, call] = Bound(UNIT["f32"], SIGMA * coarse)
        elif name == "timestep":
            result[name, step, call] = Bound(UNIT["f32"] * 1000, timestep_limit(plan.problem))
        else:
            result[name, step, call] = Bound(floor * coarse, max(floor * coarse * SLACK, least))
    return result


def within(values: Mapping[Key, Array], exact: Run, limits: Mapping[Key, Bound]) -> bool:
    """Whether every one of the values is that of the run, to within rounding."""
    return all(
        key in exact.values and error_of(key[0], value, exact.values[key]) <= limits[key].limit
        for key, value in values.items()
    )


def _rounded_runs(plan: Plan, most: int | None) -> list[Run]:
    runs = []
    for dtype, jitter in ((np.float32, None), *((np.float64, seed) for seed in JITTERS)):
        try:
            runs.append(run(plan, dtype, jitter=jitter, most=most))
        except CannotReplay:
            continue
    for method in plan.method.with_eta_rounded() if isinstance(plan.method, BoundSampler) else ():
        try:
            runs.append(run(replace(plan, method=method), most=most))
        except CannotReplay:
            continue
    return runs
