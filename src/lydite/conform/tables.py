"""Schedules alone: whole tables of sigmas and timesteps, and what is wrong with them."""

from collections.abc import Callable

import numpy as np

from lydite.conform.candidate import Candidate
from lydite.conform.measure import SIGMA, UNIT, table_error, timestep_limit
from lydite.conform.mistakes import PLANTED, elsewhere
from lydite.conform.problem import Array, Problem
from lydite.conform.replay import Moment, Plan
from lydite.conform.result import Finding, Row


def table_rows(problem: Problem, candidate: Candidate) -> list[Row]:
    """Every entry of the candidate's tables against the problem's."""
    rows = []
    for name, right, limit in (
        ("sigma", np.array(problem.sigmas), SIGMA),
        ("timestep", np.array(problem.timesteps), timestep_limit(problem)),
    ):
        found = candidate.tables.get(f"{name}s")
        if found is None:
            continue
        for at in range(max(len(right), len(found))):
            error = None
            if at < len(right) and at < len(found):
                error = (
                    table_error(found[at : at + 1], right[at : at + 1])
                    if name == "sigma"
                    else float(np.nan_to_num(abs(found[at] - right[at]), nan=np.inf))
                )
            rows.append(Row(name, at, 0, error, UNIT["f32"], limit, judged=True))
    return rows


def explain_tables(plan: Plan, candidate: Candidate) -> tuple[Finding, ...]:
    """The mistakes that give the candidate's tables."""
    sigmas, timesteps = candidate.tables.get("sigmas"), candidate.tables.get("timesteps")
    # timesteps that are wrong with their sigmas are those of another schedule
    alone = sigmas is None or table_error(sigmas, np.array(plan.sigmas)) <= SIGMA
    result: dict[str, Finding] = {}
    for mistake in (*PLANTED, *elsewhere(plan.problem)):
        wrong = mistake.planted(plan)
        if wrong is None:
            continue
        if sigmas is not None and wrong.sigmas != plan.sigmas:
            error = table_error(sigmas, np.array(wrong.sigmas))
            if error <= 4 * SIGMA:
                says = f"The candidate {mistake.says}. Its sigmas are those, to {error:.1e}."
                result.setdefault(mistake.cause, Finding(mistake.cause, says, mistake.fix))
        elif alone and timesteps is not None and wrong.timestep is not plan.timestep:
            told = _told(wrong.timestep, plan.problem)
            most = timestep_limit(plan.problem)
            if len(told) == len(timesteps) and np.abs(told - timesteps).max() <= most:
                says = f"The candidate {mistake.says}. Its timesteps are those."
                result.setdefault(mistake.cause, Finding(mistake.cause, says, mistake.fix))
    return tuple(result.values())[:4] or _plain(plan.problem, sigmas, timesteps)


def _told(timestep: Callable[[Moment], float], problem: Problem) -> Array:
    moments = [Moment(sigma, at, 0, sigma) for at, sigma in enumerate(problem.sigmas[:-1])]
    return np.array([timestep(moment) for moment in moments])


def _plain(problem: Problem, sigmas: Array | None, timesteps: Array | None) -> tuple[Finding, ...]:
    """What can be said of a table that no known mistake makes."""
    right = np.array(problem.sigmas)
    if sigmas is not None and len(sigmas) == len(right):
        if table_error(sigmas[::-1], right) <= SIGMA:
            says = "The table is the right one, backwards."
            return (Finding("reversed", says, "Sigmas fall: the largest is first."),)
        with np.errstate(all="ignore"):
            factors = (sigmas / right)[right > 0]
        if np.ptp(factors) <= SIGMA * abs(factors[0]):
            says = f"Every sigma is {factors[0]:.6g} times the right one."
            return (Finding("scaled", says, "Look for a factor: a range, or a unit."),)
    if sigmas is not None and len(sigmas) != len(right):
        says = f"The table has {len(sigmas)} sigmas; {problem.steps} steps have {len(right)}."
        return (Finding("other-length", says, "n steps need n + 1 sigmas, the last of them 0."),)
    if timesteps is not None and len(timesteps) != problem.steps:
        says = f"There are {len(timesteps)} timesteps for {problem.steps} steps."
        return (Finding("other-length", says, "One timestep for each sigma but the last."),)
    return ()
