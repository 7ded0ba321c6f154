"""Make a problem: names in, every number and formula out."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lydite.conform.problem import MOST_NORMALS, TABLED, Denoiser, Guidance, Problem, check
from lydite.conform.replay import CannotReplay, plan_for, run
from lydite.core.errors import InputError
from lydite.sampling.denoiser import EDM
from lydite.sampling.named_models import default_prediction, default_schedule, find_model
from lydite.sampling.noise import TorchGenerator
from lydite.sampling.program_conventions import (
    find_convention,
    has_unit_variance,
    plan_schedule,
    schedule_name,
    with_timestep_rule,
)
from lydite.sampling.registry import find_sampler, find_schedule
from lydite.sampling.schedules.flow import FlowSigmas
from lydite.sampling.schedules.schedule import ModelSigmas
from lydite.sampling.schedules.table import NoiseTable

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
class ProblemSpec:
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


def make_problem(spec: ProblemSpec, model: ModelSigmas | None = None) -> Problem:
    """The problem, tried once; for `model` instead of the one that is named."""
    convention = find_convention(spec.convention or "lydite")
    model = model or with_timestep_rule(find_model(spec.model), convention)
    name = schedule_name(convention, spec.schedule or default_schedule(model), spec.sampler or "")
    kind = find_schedule(name)
    schedule = (
        plan_schedule(
            convention,
            sampler=spec.sampler or "",
            schedule=name,
            steps=spec.steps,
            model=model,
            **spec.settings,
        )
        if spec.convention
        else kind.make(spec.steps, model, **spec.settings)
    )
    chosen = {key: value for key, value in kind.options.items() if key not in kind.needs}
    settings = {**chosen, **convention.options.get(name, {}), **spec.settings}
    if isinstance(model, FlowSigmas):
        settings["shift"] = model.shift
    prediction = spec.prediction or default_prediction(model)
    if prediction in TABLED and not isinstance(model, NoiseTable):
        raise InputError(f"prediction {prediction} needs a model with a noise table, as sd15 has.")
    if prediction in ("edm", "cosmos") and getattr(model, "timestep_formula", None) != prediction:
        raise InputError(f"prediction {prediction} needs the model {prediction}.")
    generator = TorchGenerator(spec.seed)

    def normals() -> tuple[float, ...]:
        return tuple(round(float(value), 6) for value in generator.randn(SHAPE).reshape(-1))

    noise, first = normals(), float(schedule.sigmas[0])
    if model.noise_model.name == "ve" and has_unit_variance(convention, schedule, model):
        first = math.sqrt(1 + first**2)
    problem = Problem(
        sampler=spec.sampler,
        noise_model=model.noise_model.name,
        prediction=prediction,  # pyright: ignore[reportArgumentType]  # `check` below
        sigmas=tuple(schedule.sigmas.tolist()),
        timesteps=tuple(schedule.timesteps.tolist()),
        shape=SHAPE,
        noise=noise,
        x=tuple(value * first for value in noise),
        denoiser=_denoiser(spec.denoiser),
        options=dict(spec.options),
        schedule=kind.name,
        settings={key: value for key, value in settings.items() if value is not None},
        table=tuple(model.levels.tolist()) if isinstance(model, NoiseTable) else (),
        training_steps=len(model.levels),
        rule=getattr(model, "rule", "interpolate"),
        sigma_data=EDM.sigma_data if prediction == "edm" else 1.0,
        guidance=_guidance(spec),
    )
    problem = _checked(problem)
    if spec.sampler is not None and find_sampler(spec.sampler).noise != "none":
        problem = _with_noise(problem, normals)
    _try(problem)
    return msgspec.structs.replace(problem, explanations=explanations(problem))


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


def _guidance(spec: ProblemSpec) -> Guidance | None:
    scale = spec.guidance
    if scale is None:
        if spec.sampler is None or not find_sampler(spec.sampler).pair:
            return None
        scale = PAIR_SCALE
    if spec.denoiser not in UNGUIDED:
        raise InputError(
            f"guidance on denoiser {spec.denoiser} changes nothing; use {', '.join(UNGUIDED)}."
        )
    if not math.isfinite(scale):
        raise InputError(f"guidance is {scale}; expected a finite number.")
    return Guidance(scale, UNGUIDED[spec.denoiser])


def explanations(problem: Problem) -> dict[str, str]:
    """Every formula a candidate has to write, in words that fit any language."""
    noise = "ve" if problem.noise_model == "ve" else "flow"
    alpha = "1" if noise == "ve" else "1 - sigma"
    texts = {
        "x": f"start from x, which is noise * {_start(problem)}",
        "denoiser": DENOISER_TEXT[problem.denoiser.name].format(alpha=alpha),
        "answer": 'write {"x": [...]} with the values of x after each step as one list, or a trace '
        "with x after step i as event sampler/x, step i (0 is the first); see docs/conform.md",
    }
    if problem.prediction != "denoised":
        texts["network"] = NETWORK_TEXT[problem.prediction].format(T=problem.training_steps)
        texts["network"] = texts["network"].replace("sigma_data", f"{problem.sigma_data:g}")
        between = TIMESTEP_TEXT[problem.prediction].format(T=problem.training_steps)
        texts["timestep"] = (
            f"the network gets timesteps[i] at sigmas[i]; between them {between}"
            f"{RULE_TEXT[problem.rule] if problem.table or problem.noise_model == 'flow' else ''}"
        )
    if problem.guidance:
        texts["guidance"] = (
            "F = uncond + scale * (cond - uncond); cond is F of the network with `denoiser`, "
            "uncond that of the one with guidance.uncond"
        )
    for (sampler, option), meant in OPTION_TEXT.items():
        if problem.sampler == sampler and option in problem.options:
            texts[option] = meant
    if problem.normals:
        texts["normals"] = "the k-th time noise is needed it is normals[k], counted from 0"
    return texts


def _start(problem: Problem) -> str:
    pairs = zip(problem.x, problem.noise, strict=True)
    narrow = all(math.isclose(x, noise * problem.sigmas[0], rel_tol=1e-9) for x, noise in pairs)
    return "sigmas[0]" if narrow else "sqrt(1 + sigmas[0]^2)"


RULE_TEXT = {
    "interpolate": ", fraction and all",
    "nearest": ", rounded",
    "round": ", rounded",
    "truncate": ", cut to a whole number",
}
DENOISER_TEXT = {
    "zero": "D(x, sigma) = 0",
    "identity": "D(x, sigma) = x",
    "gaussian": "m = means[0], s = spread, a = {alpha}: "
    "D(x, sigma) = (s^2 a x + sigma^2 m) / (s^2 a^2 + sigma^2)",
    "mixture": "s = spread, a = {alpha}, w = s^2 a^2 + sigma^2; for each m of means: "
    "p = exp(-(x - a m)^2 / (2 w)), d = (s^2 a x + sigma^2 m) / w; "
    "D(x, sigma) = sum(p d) / sum(p), each value of x for itself; subtract the largest exponent "
    "first, or every p may be 0",
}
OPTION_TEXT = {
    ("pndm", "middle"): "the sigma halfway in a Runge-Kutta step is that of the timestep halfway",
    ("tcd", "below"): "a step goes down to the sigma of timestep floor((1 - gamma) t), t that of "
    "the step's end; the last step goes to its end",
}
_TABLE = "the t with exp(interp(t, log(table))) = sigma"
TIMESTEP_TEXT = {
    "eps": _TABLE,
    "v": _TABLE,
    "x0": _TABLE,
    "edm": "t = ln(sigma) / 4",
    "cosmos": "t = sigma / (sigma + 1)",
    "flow": "t = {T} * sigma",
}
_SIGMA = (
    "F(u, t): sigma = exp(interp(t, log(table))), t clamped to the table; x = u sqrt(sigma^2 + 1); "
)
_INPUT = "Its input u is x / sqrt(sigma^2 + 1), and "
NETWORK_TEXT = {
    "eps": _SIGMA + "F = (x - D(x, sigma)) / sigma. " + _INPUT + "x - sigma F is the denoised",
    "v": _SIGMA
    + "F = (x / (sigma^2 + 1) - D(x, sigma)) sqrt(sigma^2 + 1) / sigma. "
    + _INPUT
    + "x / (sigma^2 + 1) - F sigma / sqrt(sigma^2 + 1) is the denoised",
    "x0": _SIGMA + "F = D(x, sigma). " + _INPUT + "F is the denoised",
    "edm": "F(u, t): s = sigma_data, sigma = exp(4 t), t clamped to -3 ... 3; "
    "w = sqrt(sigma^2 + s^2), x = u w; "
    "F = (D(x, sigma) - x s^2 / w^2) w / (sigma s). "
    "Its input u is x / w, and x s^2 / w^2 + F sigma s / w is the denoised",
    "cosmos": "F(u, t): sigma = t / (1 - t), t clamped to 0.0001 ... 0.9999; x = u (sigma + 1); "
    "F = (x / (sigma + 1) - D(x, sigma)) (sigma + 1) / sigma. "
    "Its input u is x / (sigma + 1), and (x - sigma F) / (sigma + 1) is the denoised",
    "flow": "F(x, t): sigma = max(t / {T}, 0.0001); F = (x - D(x, sigma)) / sigma. "
    "Its input is x as it is, and x - sigma F is the denoised",
}
