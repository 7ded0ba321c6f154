"""Name what a candidate did: replay the problem with each known mistake, and see which one fits."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from lydite.conform.answers import Candidate
from lydite.conform.measure import (
    SIGMA,
    Key,
    bounds,
    distance,
    error_of,
    table_error,
    timestep_limit,
    within,
)
from lydite.conform.mistakes import PLANTED, other_methods
from lydite.conform.mistakes.mistake import Mistake
from lydite.conform.mistakes.other_method import other_samplers
from lydite.conform.mistakes.times import TIMES
from lydite.conform.mistakes.wiring import WIRING
from lydite.conform.problem import Array, Problem
from lydite.conform.replay import CallTime, CannotReplay, Plan, Run, restarted, run
from lydite.conform.result import Finding
from lydite.sampling.registry import find_sampler

NEAR = 1e-2  # a replay further off than this is another mistake; nearer, it is measured
JUDGED = ("x", "sigma", "timestep")
MOST_FINDINGS = 4


@dataclass(frozen=True)
class Fit:
    """A mistake that reproduces the candidate."""

    mistake: Mistake
    error: float  # the largest over x
    floor: float
    other_matches: int  # further events that fit: input, prediction, denoised


def explain(plan: Plan, candidate: Candidate) -> tuple[Finding, ...]:
    """What reproduces the whole run: a known mistake, another sampler, two mistakes at a time; or
    what is wrong with some steps alone."""
    problem = plan.problem
    until = _overflow(candidate)
    judged = {
        key: value
        for key, value in candidate.values.items()
        if key[0] in JUDGED and (until is None or key[1] < until)
    }
    if not any(key[0] == "x" for key in judged):
        return ()
    off = _off(run(plan), candidate)
    pairs = (both(a, b) for a, b in combinations((*WIRING, *TIMES), 2))
    for tried in (PLANTED, other_methods(problem), pairs):  # the next where the last had none
        fits = [fit for fit in _fits(plan, tried, judged, candidate) if fit.error < off / 4]
        if [fit.mistake.cause for fit in fits] == ["history-dropped"]:  # a method with a name?
            fits += _fits(plan, other_samplers(problem), judged, candidate)
        if fits:
            return _findings(fits, candidate, until)
    return _by_step(plan, candidate)


def _overflow(candidate: Candidate) -> int | None:
    """The first step whose x is not finite: from there on there is nothing to compare."""
    wild = [
        step
        for (name, step, _), value in candidate.values.items()
        if name == "x" and not np.isfinite(value).all()
    ]
    return min(wild, default=None)


def _off(right: Run, candidate: Candidate) -> float:
    """How far the candidate is from the right run; what explains it has to be nearer."""
    if right.steps != candidate.steps:
        return float("inf")
    pairs = ((key, value) for key, value in candidate.values.items() if key[0] in JUDGED)
    return max(
        error_of(key[0], value, right.values[key]) for key, value in pairs if key in right.values
    )


def both(one: Mistake, other: Mistake) -> Mistake:
    """Two mistakes at once."""

    def apply(plan: Plan) -> Plan | None:
        first = one.apply(plan)
        return None if first is None else other.apply(first)

    return Mistake(
        f"{one.cause}+{other.cause}",
        f"{one.says}, and {other.says}",
        f"{one.fix} {other.fix}",
        apply,
    )


def _fits(
    plan: Plan, tried: Iterable[Mistake], judged: dict[Key, Array], candidate: Candidate
) -> Iterator[Fit]:
    steps = {key[1] for key in judged if key[0] == "x"}
    most = len(steps) if len(steps) < candidate.steps else None

    def near(step: int, x: Array) -> bool:
        value = judged.get(("x", step, 0))
        return value is not None and distance(np.asarray(x), value) < NEAR

    for mistake in tried:
        wrong = mistake.applied_to(plan)
        if wrong is None:
            continue
        try:
            exact = run(wrong, go_on=near, most=most)
        except CannotReplay:
            continue
        if {key[1] for key in exact.values if key[0] == "x"} != steps:
            continue
        limits = bounds(wrong, exact, candidate.dtype, most)
        if within(judged, exact, limits):
            yield _fit(mistake, exact, candidate, max(limits[key].floor for key in limits))


def _fit(mistake: Mistake, exact: Run, candidate: Candidate, floor: float) -> Fit:
    errors = {
        key: error_of(key[0], value, exact.values[key])
        for key, value in candidate.values.items()
        if key in exact.values
    }
    matches = sum(error < NEAR for key, error in errors.items() if key[0] not in JUDGED)
    return Fit(mistake, max(e for key, e in errors.items() if key[0] == "x"), floor, matches)


def _findings(fits: list[Fit], candidate: Candidate, until: int | None) -> tuple[Finding, ...]:
    """One finding for each cause, the best first; the same sampler under two names is one."""
    nearest = min(fit.error for fit in fits)
    fits = [fit for fit in fits if fit.error <= 10 * max(nearest, fit.floor)]
    best = max(fit.other_matches for fit in fits)
    kept: dict[str, Fit] = {}
    for fit in fits:
        if fit.other_matches == best:
            kept.setdefault(fit.mistake.cause, fit)
    others = [fit for cause, fit in kept.items() if cause.startswith("is-")]
    result = []
    for cause, fit in kept.items():
        if cause.startswith("is-") and fit is not others[0]:
            continue
        same = [each.mistake.cause[3:] for each in others[1:4]] if fit in others else []
        also = f" (or {', '.join(same)}: the same on this problem)" if same else ""
        steps = f"all {candidate.steps} steps" if candidate.steps > 1 else "the step"
        if until is not None:
            steps = f"the {until} steps before it overflows" if until > 1 else "the first step"
        result.append(
            Finding(
                cause,
                f"The candidate {fit.mistake.says}{also}. Replayed so, {steps} come out as it "
                f"wrote them, to {fit.error:.1e}.",
                fit.mistake.fix,
            )
        )
    return tuple(result[:MOST_FINDINGS])


def _by_step(plan: Plan, candidate: Candidate) -> tuple[Finding, ...]:
    """Each step from the candidate's own x before it: which are wrong by themselves, and how."""
    if candidate.steps != plan.problem.steps or len(plan.problem.normals) > plan.problem.steps:
        return ()
    try:
        if not _remembers_nothing(plan):
            return ()
        given = [candidate.values["x", step, 0] for step in range(candidate.steps)]
        exact = run(restarted(plan, given))
    except (CannotReplay, KeyError):
        return ()
    limits = bounds(restarted(plan, given), exact, candidate.dtype)
    wrong = [
        step
        for step, x in enumerate(given)
        if distance(x, exact.x(step)) > limits["x", step, 0].limit
    ]
    if not wrong or len(wrong) == len(given):
        return ()
    listed = _listed(wrong)
    for mistake in (*PLANTED, *other_methods(plan.problem)):
        other = mistake.applied_to(plan)
        if other is None or other.sigmas != plan.sigmas:
            continue

        def fits(step: int, x: Array) -> bool:
            return step not in wrong or distance(given[step], x) <= limits["x", step, 0].limit

        try:
            replayed = run(restarted(other, given), go_on=fits)
        except CannotReplay:
            continue
        if replayed.steps == len(given):
            says = f"The candidate {mistake.says}, in {listed} alone. Started from its own x, "
            return (Finding(mistake.cause, says + "each other step is right.", mistake.fix),)
    fix = "Look at what is special there: the first or the last step, a branch, an index."
    if wrong == list(range(len(given) - 1)) and plan.problem.sigmas[-1] == 0:
        listed = "every step but the last"
        if find_sampler(plan.problem.sampler or "euler").calls > 1:
            fix = (
                "The last step has one call of the network, these have more: check x, sigma and "
                "timestep of their second call, and what is done with its result."
            )
        else:
            fix = "The last step goes to 0, these do not: check what depends on the next sigma."
    return (
        Finding("some-steps", f"Started from the candidate's own x, {listed} would be wrong.", fix),
    )


def _remembers_nothing(plan: Plan) -> bool:
    whole, alone = run(plan), run(restarted(plan))
    return whole.steps == alone.steps and all(
        distance(alone.x(step), whole.x(step)) < 1e-12 for step in range(whole.steps)
    )


def _listed(steps: list[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return "steps " + ", ".join(map(str, steps[:6])) + (" …" if len(steps) > 6 else "")


def explain_tables(plan: Plan, candidate: Candidate) -> tuple[Finding, ...]:
    """The mistakes that give the candidate's tables."""
    sigmas, timesteps = candidate.tables.get("sigmas"), candidate.tables.get("timesteps")
    # timesteps that are wrong with their sigmas are those of another schedule
    alone = sigmas is None or table_error(sigmas, np.array(plan.sigmas)) <= SIGMA
    result: dict[str, Finding] = {}
    for mistake in (*PLANTED, *other_methods(plan.problem)):
        wrong = mistake.applied_to(plan)
        if wrong is None:
            continue
        if sigmas is not None and wrong.sigmas != plan.sigmas:
            error = table_error(sigmas, np.array(wrong.sigmas))
            if error <= 4 * SIGMA:
                says = f"The candidate {mistake.says}. Its sigmas are those, to {error:.1e}."
                result.setdefault(mistake.cause, Finding(mistake.cause, says, mistake.fix))
        elif alone and timesteps is not None and wrong.timestep is not plan.timestep:
            replayed = _timesteps(wrong.timestep, plan.problem)
            most = timestep_limit(plan.problem)
            if len(replayed) == len(timesteps) and np.abs(replayed - timesteps).max() <= most:
                says = f"The candidate {mistake.says}. Its timesteps are those."
                result.setdefault(mistake.cause, Finding(mistake.cause, says, mistake.fix))
    return tuple(result.values())[:MOST_FINDINGS] or _table_findings(
        plan.problem, None if alone else sigmas, timesteps
    )


def _timesteps(timestep: Callable[[CallTime], float], problem: Problem) -> Array:
    times = [CallTime(sigma, at, 0, sigma) for at, sigma in enumerate(problem.sigmas[:-1])]
    return np.array([timestep(time) for time in times])


def _table_findings(
    problem: Problem, sigmas: Array | None, timesteps: Array | None
) -> tuple[Finding, ...]:
    """Findings about a table that no known mistake makes; without `sigmas` that are right."""
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
