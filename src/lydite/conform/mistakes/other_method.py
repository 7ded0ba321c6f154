"""Another method than the one named: any of the registry, or the same with other options."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lydite.conform.mistakes.mistake import Mistake
from lydite.conform.problem import Problem
from lydite.conform.replay import BY_TIMESTEP, LOOKED_UP, BoundSampler, Plan
from lydite.core.errors import InputError
from lydite.sampling.registry import SAMPLERS, SCHEDULES, ScheduleKind, find_sampler
from lydite.sampling.schedules.flow import FlowSigmas
from lydite.sampling.schedules.schedule import ModelSigmas
from lydite.sampling.schedules.table import ContinuousSigmas, NoiseTable

SETTINGS: dict[str, tuple[Any, ...]] = {
    "offset": (0, 1),
    "rho": (7.0, 5.0, 3.0),
    "double_shift": (False, True),
    "family": ("sd15", "sdxl", "svd"),
}
NUMBERS: dict[str, tuple[float, ...]] = {
    "eta": (0.0, 1.0),
    "s_noise": (1.0,),
    "order": (1, 2, 3, 4),
}


def other_samplers(problem: Problem) -> Iterator[Mistake]:
    """Every registered sampler that fits the noise model and needs no more than the problem has."""
    for sampler in SAMPLERS.values():
        fits = problem.noise_model in sampler.noise_models and (
            sampler.noise == "none" or problem.normals
        )
        if sampler.name != problem.sampler and fits and (problem.guidance or not sampler.pair):
            yield Mistake(
                f"is-{sampler.name}",
                f"is {sampler.name}, not {problem.sampler}",
                f"{problem.sampler}: {SAMPLERS[problem.sampler].about}."
                if problem.sampler and problem.sampler in SAMPLERS
                else "",
                _by(sampler.name, {}),
            )


def other_options(problem: Problem) -> Iterator[Mistake]:
    """The same sampler with one option at another of its values."""
    if problem.sampler is None:
        return
    given = {**find_sampler(problem.sampler).options, **problem.options}
    for name, value in given.items():
        for other in _alternatives(problem.sampler, name, value):
            yield Mistake(
                "other-option",
                f"runs {problem.sampler} with {name} = {_shown(other)} instead of {_shown(value)}",
                f"Set {name} to {_shown(value)}.",
                _by(problem.sampler, {**problem.options, name: other}),
            )


def other_schedules(problem: Problem) -> Iterator[Mistake]:
    """Every registered schedule of the same model, from the given x and from its own sigma."""
    model = model_of(problem)
    for kind in SCHEDULES.values() if model else ():
        if (
            kind.name == problem.schedule
            or problem.noise_model not in kind.noise_models
            or kind.needs
        ):
            continue
        for own_start in (False, True):
            yield Mistake(
                f"is-schedule-{kind.name}",
                f"uses the schedule {kind.name}, not {problem.schedule}"
                + (", and starts from noise × its first sigma" if own_start else ""),
                f"{problem.schedule}: {SCHEDULES[problem.schedule].about}."
                if problem.schedule and problem.schedule in SCHEDULES
                else "",
                _on(kind, model, own_start),
            )


def other_settings(problem: Problem) -> Iterator[Mistake]:
    """The same schedule with one option at another of its usual values."""
    kind, model = SCHEDULES.get(problem.schedule or ""), model_of(problem)
    if kind is None or model is None or kind.needs:
        return
    given = {name: problem.settings.get(name, value) for name, value in kind.options.items()}
    for name, value in given.items():
        for other in SETTINGS.get(name, ()):
            if other != value:
                yield Mistake(
                    "other-setting",
                    f"uses the schedule {kind.name} with {name} = {other} instead of {value}",
                    f"Set {name} to {value}.",
                    _on(kind, model, False, {**given, name: other}),
                )


def _on(
    kind: ScheduleKind, model: Any, own_start: bool, settings: dict[str, Any] | None = None
) -> Callable[[Plan], Plan | None]:
    def apply(plan: Plan) -> Plan | None:
        problem = plan.problem
        try:
            schedule = kind.make(problem.steps, model, **settings or {})
        except InputError:
            return None
        first = float(schedule.sigmas[0])
        if own_start and abs(first / problem.sigmas[0] - 1) < 1e-6:
            return None
        start = np.array(problem.noise).reshape(problem.shape) * first
        return replace(
            plan,
            sigmas=tuple(schedule.sigmas.tolist()),
            timestep=lambda time: schedule.timestep_of(time.sigma),
            start=start if own_start else plan.start,
        )

    return apply


def _by(name: str, options: dict[str, Any]) -> Callable[[Plan], Plan | None]:
    return lambda plan: replace(plan, method=BoundSampler(plan.problem, name, options))


def _shown(value: Any) -> str:
    return "its default" if value is None or callable(value) else str(value)


def _alternatives(sampler: str, name: str, value: Any) -> tuple[Any, ...]:
    if name in LOOKED_UP:
        return (find_sampler(sampler).options[name] if value == BY_TIMESTEP else BY_TIMESTEP,)
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int | float) and math.isfinite(value):
        return tuple(other for other in NUMBERS.get(name, ()) if other != value)
    if isinstance(value, str):
        return tuple(other for other in WORDS.get(value, ()) if other != value)
    return ()


WORDS: dict[str, tuple[str, ...]] = {
    word: pair
    for pair in (
        ("midpoint", "heun"),
        ("bh1", "bh2"),
        ("data", "noise"),
        ("adams", "denoised"),
        ("phi_1", "phi_2"),
    )
    for word in pair
}


def model_of(problem: Problem) -> ModelSigmas | None:
    """The model a problem was made for, where the problem has enough of it."""
    if problem.noise_model == "flow":
        shift, train = problem.settings.get("shift", 1.0), problem.training_steps
        if not isinstance(shift, int | float) or not 0 < shift < 1e6:
            return None
        return FlowSigmas(float(shift), train, float(train), problem.rule)
    if problem.prediction in ("edm", "cosmos"):
        return ContinuousSigmas(timestep_formula=problem.prediction)
    if len(problem.table) < 2:
        return None
    return NoiseTable(np.array(problem.table), problem.rule)
