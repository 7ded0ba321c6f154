"""Another method than the one named: any of the registry, or the same with other options."""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lydite.conform.mistakes.mistake import Mistake
from lydite.conform.models import model_of
from lydite.conform.problem import Problem
from lydite.conform.replay import Plan, method_of
from lydite.core.errors import InputError
from lydite.sampling.samplers import SAMPLERS, find_sampler
from lydite.sampling.schedules import SCHEDULES, ScheduleKind

HIDDEN = {"denoise", "x", "sigmas", "noise"}
NUMBERS: dict[str, tuple[float, ...]] = {
    "eta": (0.0, 1.0),
    "s_noise": (1.0,),
    "order": (1, 2, 3, 4),
}


def other_samplers(problem: Problem) -> Iterator[Mistake]:
    """Every registered sampler that fits the law, and wants no more than the problem has."""
    for sampler in SAMPLERS.values():
        fits = problem.law in sampler.laws and (sampler.noise == "none" or problem.normals)
        if sampler.name != problem.sampler and fits and (problem.guidance or not sampler.pair):
            yield Mistake(
                f"is-{sampler.name}",
                f"is {sampler.name}, not {problem.sampler}",
                f"{problem.sampler}: {SAMPLERS[problem.sampler].about}."
                if problem.sampler in SAMPLERS
                else "",
                _by(sampler.name, {}),
            )


def other_options(problem: Problem) -> Iterator[Mistake]:
    """The same sampler with one option at another of its values."""
    if problem.sampler is None:
        return
    given = {**options_of(problem.sampler), **problem.options}
    for name, value in given.items():
        for other in _alternatives(name, value):
            yield Mistake(
                "other-option",
                f"runs {problem.sampler} with {name} = {other} instead of {value}",
                f"Set {name} to {value}.",
                _by(problem.sampler, {**problem.options, name: other}),
            )


def other_schedules(problem: Problem) -> Iterator[Mistake]:
    """Every registered schedule of the same model, from the given x and from its own sigma."""
    model = model_of(problem)
    for kind in SCHEDULES.values() if model else ():
        if kind.name == problem.schedule or problem.law not in kind.laws or kind.needs:
            continue
        for own_start in (False, True):
            yield Mistake(
                f"is-schedule-{kind.name}",
                f"uses the schedule {kind.name}, not {problem.schedule}"
                + (", and starts from noise × its first sigma" if own_start else ""),
                f"{problem.schedule}: {SCHEDULES[problem.schedule].about}."
                if problem.schedule in SCHEDULES
                else "",
                _on(kind, model, own_start),
            )


def _on(kind: ScheduleKind, model: Any, own_start: bool) -> Callable[[Plan], Plan | None]:
    def apply(plan: Plan) -> Plan | None:
        problem = plan.problem
        try:
            schedule = kind.make(problem.steps, model)
        except InputError:
            return None
        first = float(schedule.sigmas[0])
        if own_start and abs(first / problem.sigmas[0] - 1) < 1e-6:
            return None
        start = np.array(problem.noise).reshape(problem.shape) * first
        return replace(
            plan,
            sigmas=tuple(schedule.sigmas.tolist()),
            timestep=lambda moment: schedule.timestep_of(moment.sigma),
            start=start if own_start else plan.start,
        )

    return apply


def options_of(sampler: str) -> dict[str, Any]:
    """A sampler's options and their defaults."""
    parameters = inspect.signature(find_sampler(sampler).sample).parameters.values()
    return {
        each.name: each.default
        for each in parameters
        if each.kind is each.KEYWORD_ONLY and each.name not in HIDDEN
    }


def check_options(sampler: str, options: dict[str, Any]) -> None:
    """An error that names the options there are, when one is none of them."""
    known = options_of(sampler)
    for name in options:
        if name not in known:
            raise InputError(
                f"sampler {sampler} has no option {name!r:.60}; it has "
                f"{', '.join(known) or 'none'}."
            )


def _by(name: str, options: dict[str, Any]) -> Callable[[Plan], Plan | None]:
    return lambda plan: replace(plan, method=method_of(name, options))


def _alternatives(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int | float) and math.isfinite(value):
        return tuple(other for other in NUMBERS.get(name, ()) if other != value)
    if isinstance(value, str):
        return tuple(other for other in WORDS.get(value, ()) if other != value)
    return ()


_SOLVERS = ("midpoint", "heun")
WORDS: dict[str, tuple[str, ...]] = {word: _SOLVERS for word in _SOLVERS}
