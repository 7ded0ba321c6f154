"""Make a problem: names in, every number out."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lydite.conform.models import default_prediction, default_schedule, find_model
from lydite.conform.network import words
from lydite.conform.problem import MOST_NORMALS, TABLED, Denoiser, Guidance, Problem, check
from lydite.conform.replay import CannotReplay, plan_for, run
from lydite.core.errors import InputError
from lydite.sampling.conventions import (
    find_convention,
    has_unit_variance,
    plan_schedule,
    schedule_name,
    with_timestep_rule,
)
from lydite.sampling.noise import TorchGenerator
from lydite.sampling.prediction import EDM
from lydite.sampling.samplers import find_sampler
from lydite.sampling.schedules import FlowSigmas, ModelSigmas, NoiseTable, find_schedule

DENOISERS = {
    "zero": Denoiser("zero"),
    "identity": Denoiser("identity"),
    "gaussian": Denoiser("gaussian", (0.3,), 0.5),
    "mixture": Denoiser("mixture", (-0.8, 0.6), 0.1),
}
UNGUIDED = {
    "gaussian": Denoiser("gaussian", (-0.2,), 0.5),
    "mixture": Denoiser("mixture", (-0.4, 0.9), 0.1),
}
SHAPE = (2, 3, 4)
PAIR_SCALE = 2.0  # for samplers that need guidance, when none is asked for


@dataclass(frozen=True)
class Asked:
    """What a problem is made from."""

    sampler: str | None = "euler"
    schedule: str | None = None  # the model's usual one
    steps: int = 8
    model: str = "sd15"
    prediction: str | None = None  # the model's usual one
    denoiser: str = "mixture"
    guidance: float | None = None
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the sampler
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the schedule
    convention: str | None = None  # whose timesteps, start and extra steps


def pose(asked: Asked, model: ModelSigmas | None = None) -> Problem:
    """The problem, tried once; for `model` instead of the one that is named."""
    convention = find_convention(asked.convention or "lydite")
    model = model or with_timestep_rule(find_model(asked.model), convention)
    name = schedule_name(convention, asked.schedule or default_schedule(model), asked.sampler or "")
    kind = find_schedule(name)
    schedule = (
        plan_schedule(
            convention,
            sampler=asked.sampler or "",
            schedule=name,
            steps=asked.steps,
            model=model,
            **asked.settings,
        )
        if asked.convention
        else kind.make(asked.steps, model, **asked.settings)
    )
    chosen = {key: value for key, value in kind.options.items() if key not in kind.needs}
    settings = {**chosen, **convention.options.get(name, {}), **asked.settings}
    if isinstance(model, FlowSigmas):
        settings["shift"] = model.shift
    prediction = asked.prediction or default_prediction(model)
    if prediction in TABLED and not isinstance(model, NoiseTable):
        raise InputError(f"prediction {prediction} needs a model with a noise table, as sd15 has.")
    if prediction in ("edm", "cosmos") and getattr(model, "timestep_formula", None) != prediction:
        raise InputError(f"prediction {prediction} needs the model {prediction}.")
    generator = TorchGenerator(asked.seed)

    def normals() -> tuple[float, ...]:
        return tuple(round(float(value), 6) for value in generator.randn(SHAPE).reshape(-1))

    noise, first = normals(), float(schedule.sigmas[0])
    if model.noise_model.name == "ve" and has_unit_variance(convention, schedule, model):
        first = math.sqrt(1 + first**2)
    problem = Problem(
        sampler=asked.sampler,
        noise_model=model.noise_model.name,
        prediction=prediction,  # pyright: ignore[reportArgumentType]  # `check` below
        sigmas=tuple(schedule.sigmas.tolist()),
        timesteps=tuple(schedule.timesteps.tolist()),
        shape=SHAPE,
        noise=noise,
        x=tuple(value * first for value in noise),
        denoiser=_denoiser(asked.denoiser),
        options=dict(asked.options),
        schedule=kind.name,
        settings={key: value for key, value in settings.items() if value is not None},
        table=tuple(model.levels.tolist()) if isinstance(model, NoiseTable) else (),
        training_steps=len(model.levels),
        rule=getattr(model, "rule", "interpolate"),
        sigma_data=EDM.sigma_data if prediction == "edm" else 1.0,
        guidance=_guidance(asked),
    )
    problem = _checked(problem)
    if asked.sampler is not None and find_sampler(asked.sampler).noise != "none":
        problem = _with_noise(problem, normals)
    _try(problem)
    return msgspec.structs.replace(problem, words=words(problem))


def _checked(problem: Problem) -> Problem:
    """As it would be read from a file."""
    try:
        problem = msgspec.convert(msgspec.to_builtins(problem), Problem)
    except msgspec.ValidationError as error:
        raise InputError(f"this makes no problem: {error}.") from error
    check(problem)
    if problem.sampler is not None:
        find_sampler(problem.sampler).check_options(problem.options)
    return problem


def _with_noise(problem: Problem, normals: Any) -> Problem:
    """As many normals as our run uses."""
    drawn: list[tuple[float, ...]] = []
    count = 2 * problem.steps + 4
    while count <= MOST_NORMALS:
        drawn += [normals() for _ in range(count - len(drawn))]
        tried = msgspec.structs.replace(problem, normals=tuple(drawn))
        try:
            used = run(plan_for(tried)).normals
        except CannotReplay:
            count *= 2
            continue
        return msgspec.structs.replace(problem, normals=tuple(drawn[: max(used, 1)]))
    return problem


def _try(problem: Problem) -> None:
    try:
        run(plan_for(problem))
    except CannotReplay as error:
        raise InputError(f"{problem.sampler} cannot run on this problem: {error}.") from error


def _denoiser(name: str) -> Denoiser:
    if name not in DENOISERS:
        raise InputError(f"denoiser is {name!r:.60}; expected one of {', '.join(DENOISERS)}.")
    return DENOISERS[name]


def _guidance(asked: Asked) -> Guidance | None:
    scale = asked.guidance
    if scale is None:
        if asked.sampler is None or not find_sampler(asked.sampler).pair:
            return None
        scale = PAIR_SCALE
    if asked.denoiser not in UNGUIDED:
        raise InputError(
            f"guidance on denoiser {asked.denoiser} changes nothing; use {', '.join(UNGUIDED)}."
        )
    if not math.isfinite(scale):
        raise InputError(f"guidance is {scale}; expected a finite number.")
    return Guidance(scale, UNGUIDED[asked.denoiser])
