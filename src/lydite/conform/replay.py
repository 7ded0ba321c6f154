"""Run a problem: as it is meant, or with whatever a mistake would change.

The network is a formula: it takes a scaled latent and a timestep, as a real one does, and believes
both. A wrong scale or a wrong timestep gives a wrong prediction, so that c_in, timestep and
denoised are the candidate's own work.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from lydite.conform.problem import Array, Denoiser, Problem, noise_model_of
from lydite.core.errors import InputError
from lydite.sampling.denoiser import Prediction, find_prediction
from lydite.sampling.registry import find_sampler
from lydite.sampling.sampler_types import Noise, NoiseModel, Step

LEAST = 1e-4  # the network never divides by less


def prediction_of(problem: Problem) -> Prediction:
    """The scalings of the problem's prediction type; not for `denoised`, which has none."""
    return Prediction(find_prediction(problem.prediction).name, problem.sigma_data)


def predict(problem: Problem, denoiser: Denoiser, model_input: Any, timestep: float) -> Any:
    """F(model_input, timestep) of the problem's prediction type."""
    sigma, kind = sigma_of(problem, timestep), prediction_of(problem)
    x = model_input / kind.c_in(sigma)
    denoised = denoiser.under(noise_model_of(problem))(x, sigma)
    return (denoised - x * kind.c_skip(sigma)) / kind.c_out(sigma)


def c_in(problem: Problem, sigma: float) -> float:
    """What a latent is multiplied with before it goes into the network."""
    return prediction_of(problem).c_in(sigma)


def denoised_from(problem: Problem, x: Any, prediction: Any, sigma: float) -> Any:
    """The image that a prediction points at; `x` is the latent without c_in."""
    return prediction_of(problem).denoised(x, prediction, sigma)


def sigma_of(problem: Problem, timestep: float) -> float:
    """The sigma the network understands a timestep as."""
    if problem.table:
        return math.exp(float(np.interp(timestep, *_logs(problem.table))))
    if problem.prediction == "edm":
        return math.exp(4 * min(max(timestep, -3.0), 3.0))
    if problem.prediction == "cosmos":
        timestep = min(max(timestep, LEAST), 1 - LEAST)
        return timestep / (1 - timestep)
    return max(timestep / problem.training_steps, LEAST)


def timestep_of(problem: Problem, sigma: float) -> float:
    """The timestep of a sigma that is none of the problem's, by its rule."""
    place = place_of(problem, sigma)
    if problem.rule == "interpolate":
        return place
    return float(math.floor(place) if problem.rule == "truncate" else round(place))


def place_of(problem: Problem, sigma: float) -> float:
    """The timestep of a sigma, fraction and all: the inverse of `sigma_of`."""
    if problem.table:
        places, logs = _logs(problem.table)
        return float(np.interp(math.log(sigma), logs, places)) if sigma > 0 else 0.0
    if problem.prediction == "edm":
        return math.log(max(sigma, LEAST)) / 4
    if problem.prediction == "cosmos":
        return sigma / (sigma + 1)
    return sigma * problem.training_steps


@lru_cache(maxsize=8)
def _logs(table: tuple[float, ...]) -> tuple[Array, Array]:
    """(t, log sigma); a run asks for it hundreds of times."""
    return np.arange(len(table)), np.log(table)


# (denoise, x, sigmas, noise) -> steps
Method = Callable[[Any, Any, Sequence[float], Noise[Any]], Iterator[Step[Any]]]

# Measured: the weights of diffusers' DEIS are differences of logarithms, divided by steps in them.
# In float32 that costs 2.2e-7 n over n steps in order 2 and 2.4e-9 n³ in order 3; twice that here.
# ComfyUI's deis, deis_tab here, integrates by ten thousand rectangles, and is off by 5e-5.
ROUGH = {("deis", 2): (5e-7, 1), ("deis", 3): (5e-9, 3), ("deis_tab", 3): (1e-4, 0)}
LOOKED_UP = ("middle", "below")  # options of pndm and tcd that are functions,
BY_TIMESTEP = "timestep"  # and their value for one that looks its sigma up in the table


@dataclass(frozen=True)
class BoundSampler:
    """A method that is known by its name and options."""

    problem: Problem
    name: str
    options: dict[str, Any]

    def __post_init__(self) -> None:
        find_sampler(self.name)  # an error while the problem is read, not in the middle of a run

    def __call__(self, denoise: Any, x: Any, sigmas: Any, noise: Any) -> Iterator[Step[Any]]:
        sampler = find_sampler(self.name)
        given = noise if sampler.noise != "none" else None
        options = {
            key: sigma_by_timestep(self.problem, self.name, key, self.options)
            if key in LOOKED_UP and isinstance(value, str)
            else value
            for key, value in self.options.items()
        }
        return sampler.run(denoise, x, sigmas, noise=given, **options)

    @property
    def roughness(self) -> float:
        """How far float32 may take a right one beyond what replays show, where that is much."""
        order: Any = self.options.get("order", find_sampler(self.name).options.get("order"))
        factor, power = ROUGH.get((self.name, order), (0.0, 1))
        return factor * self.problem.steps**power

    def with_eta_rounded(self) -> tuple["BoundSampler", ...]:
        """With eta a unit of float32 more and less.

        An ancestral step goes down to √(σ_next² − up²). Where up is nearly σ_next, float32 leaves
        little of the difference, as if eta were off by a unit: k-diffusion and diffusers are off by
        3e-4 in the first of two Karras steps of dpm_2_ancestral.
        """
        known = find_sampler(self.name).options
        if "eta" not in known:
            return ()
        eta = self.options.get("eta", known["eta"])
        return tuple(
            BoundSampler(self.problem, self.name, {**self.options, "eta": eta * factor})
            for factor in (1 - 2.0**-23, 1 + 2.0**-23)
        )


def sigma_by_timestep(problem: Problem, sampler: str, option: str, options: dict[str, Any]) -> Any:
    """diffusers' way to find a sigma that no step begins or ends at: by its timestep."""
    if options[option] != BY_TIMESTEP:
        raise InputError(f"{option} is {options[option]!r:.60}; expected {BY_TIMESTEP!r}.")
    if not problem.table:
        raise InputError(f"{option} = {BY_TIMESTEP} needs a model with a noise table, as sd15 has.")
    if option == "middle":
        return lambda sigma, after: sigma_of(
            problem, (place_of(problem, sigma) + place_of(problem, after)) / 2
        )
    share = 1 - options.get("gamma", find_sampler(sampler).options["gamma"])
    return lambda sigma: sigma_of(problem, math.floor(share * place_of(problem, sigma) + 1e-6))


# What a sampler may raise on sigmas and options from a file.
UNUSABLE = (ArithmeticError, ValueError, LookupError, TypeError, AttributeError, InputError)
MOST_CALLS = 20_000  # of the network: an adaptive sampler may not end


@dataclass(frozen=True)
class CallTime:
    """When the network is called."""

    sigma: float
    step: int
    call: int  # within the step
    step_sigma: float  # of the step's first call


@dataclass(frozen=True)
class NetworkCall:
    """What the denoised is computed from."""

    x: Any
    model_input: Any
    prediction: Any
    sigma: float


@dataclass(frozen=True)
class Plan:
    """Everything a candidate does around its sampler; a mistake replaces a field or two."""

    problem: Problem
    method: Method
    sigmas: tuple[float, ...]
    start: Array
    model_input: Callable[[Any, float], Any]
    timestep: Callable[[CallTime], float]
    denoised: Callable[[NetworkCall], Any]
    to_sampler: Callable[[Any, Any, float], Any]  # (x, denoised, sigma) -> what the sampler gets
    guided: Callable[[Any, Any], Any]  # (cond, uncond)
    noise: Callable[[int, Array, float, float], Array]  # (index, normals, sigma, sigma_next)


@dataclass(frozen=True)
class Run:
    """What a run leaves: (event, step, call) -> value, and the sigmas it visited."""

    values: dict[tuple[str, int, int], Array]
    sigmas: tuple[float, ...]
    normals: int = 0  # used

    @property
    def steps(self) -> int:
        return sum(name == "x" for name, _, _ in self.values)

    def x(self, step: int) -> Array:
        return self.values["x", step, 0]


class CannotReplay(Exception):
    """A plan that leads nowhere: too little noise, overflow, a sampler that refuses."""


def plan_for(problem: Problem) -> Plan:
    """The problem as it is meant."""
    scale = problem.guidance.scale if problem.guidance else 1.0
    return Plan(
        problem,
        BoundSampler(problem, problem.sampler or "euler", dict(problem.options)),
        problem.sigmas,
        problem.start(),
        model_input=lambda x, sigma: x * c_in(problem, sigma),
        timestep=lambda time: right_timestep(problem, time.sigma),
        denoised=lambda call: denoised_from(problem, call.x, call.prediction, call.sigma),
        to_sampler=lambda x, denoised, sigma: denoised,
        guided=lambda cond, uncond: uncond + (cond - uncond) * scale,
        noise=lambda index, normals, sigma, sigma_next: normals,
    )


def right_timestep(problem: Problem, sigma: float) -> float:
    """The problem's own timestep at its own sigmas, and the one of the table between them."""
    for known, timestep in zip(problem.sigmas, problem.timesteps, strict=False):
        if sigma == known:
            return timestep
    return timestep_of(problem, sigma)


def run(
    plan: Plan,
    dtype: Any = np.float64,
    *,
    jitter: int | None = None,
    go_on: Callable[[int, Array], bool] | None = None,
    most: int | None = None,
) -> Run:
    """The plan in a precision. `jitter`: a seed for rounding of one unit at each call, in float64,
    as another order of operations would have it. `go_on` is asked after each step; what comes after
    `most` steps is left out."""
    values: dict[tuple[str, int, int], Array] = {}
    session = _Session(plan, dtype, values, jitter)
    x = session.rounded(plan.start.astype(dtype))
    try:
        # NumPy warns of overflow on standard error; a wrong plan may well overflow
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in plan.method(session, x, plan.sigmas, session.draw):
                values["x", session.step, 0] = np.asarray(step.x)
                values["sigma", session.step, 0] = np.array(step.sigma)
                if go_on and not go_on(session.step, step.x):
                    raise CannotReplay("stopped")
                session.step += 1
                session.call = 0
                if session.step == most:
                    break
                if session.step > MOST_CALLS:
                    raise CannotReplay("too many steps")
    except UNUSABLE as error:
        raise CannotReplay(str(error).rstrip(".") or type(error).__name__) from error
    if any(not np.isfinite(each).all() for each in values.values()):
        raise CannotReplay("not finite")
    return Run(values, plan.sigmas, session.drawn)


@dataclass
class _Session:
    """The denoiser of one run; it writes down what it is asked and what it answers."""

    plan: Plan
    dtype: Any
    values: dict[tuple[str, int, int], Array]
    jitter: int | None
    step: int = 0
    call: int = 0
    drawn: int = 0
    step_sigma: float = 0.0

    @cached_property
    def _random(self) -> np.random.RandomState:
        return np.random.RandomState(self.jitter)

    @property
    def noise_model(self) -> NoiseModel:
        return noise_model_of(self.plan.problem)

    def __call__(self, x: Any, sigma: float) -> Any:
        return self.pair(x, sigma)[0]

    def pair(self, x: Any, sigma: float) -> tuple[Any, Any]:
        plan, problem = self.plan, self.plan.problem
        if self.step + self.call > MOST_CALLS:
            raise CannotReplay("too many calls of the network")
        if self.call == 0:
            self.step_sigma = sigma
        time = CallTime(float(sigma), self.step, self.call, self.step_sigma)
        if problem.prediction == "denoised":
            model_input, timestep = x, None
        else:
            model_input = plan.model_input(x, time.sigma)
            wide = np.float64 if self.dtype is np.float64 else np.float32  # never in 16 bits
            timestep = float(wide(plan.timestep(time)))
        cond = self._predict(problem.denoiser, model_input, time.sigma, timestep)
        prediction, uncond = cond, cond
        if problem.guidance:
            uncond = self._predict(problem.guidance.uncond, model_input, time.sigma, timestep)
            prediction = plan.guided(cond, uncond)
        denoised = self._denoised(x, model_input, prediction, time.sigma)
        self._keep("model_input", model_input)
        self._keep("timestep", None if timestep is None else np.array(timestep))
        self._keep("prediction", prediction)
        self._keep("denoised", denoised)
        self.call += 1
        other = self._denoised(x, model_input, uncond, time.sigma) if problem.guidance else None
        to_sampler = plan.to_sampler(x, denoised, time.sigma)
        return self.rounded(to_sampler), to_sampler if other is None else self.rounded(other)

    def draw(self, sigma: float, sigma_next: float) -> Array:
        """The next normals of the problem."""
        index, problem = self.drawn, self.plan.problem
        if index >= len(problem.normals):
            raise CannotReplay("more noise than the problem has")
        self.drawn += 1
        normals = np.array(problem.normals[index]).reshape(problem.shape).astype(self.dtype)
        return self.plan.noise(index, normals, float(sigma), float(sigma_next))

    def rounded(self, x: Any) -> Any:
        """With `jitter`, each value off by a unit of float32 or less."""
        if self.jitter is None:
            return x
        return x * (1 + 2.0**-24 * self._random.uniform(-1, 1, np.shape(x)))

    def _predict(
        self, denoiser: Denoiser, model_input: Any, sigma: float, timestep: float | None
    ) -> Any:
        if timestep is None:
            return denoiser.under(self.noise_model)(model_input, sigma)
        return predict(self.plan.problem, denoiser, model_input, timestep)

    def _denoised(self, x: Any, model_input: Any, prediction: Any, sigma: float) -> Any:
        if self.plan.problem.prediction == "denoised":
            return prediction
        return self.plan.denoised(NetworkCall(x, model_input, prediction, sigma))

    def _keep(self, name: str, value: Any) -> None:
        if value is not None:
            self.values[name, self.step, self.call] = np.asarray(value)


def restarted(plan: Plan, given: Sequence[Array] = ()) -> Plan:
    """Each step for itself: a method that remembers earlier steps forgets them.

    With `given`, step i + 1 starts from given[i], so that an error of one step stays its own.
    """

    def method(denoise: Any, x: Any, sigmas: Any, noise: Any) -> Iterator[Step[Any]]:
        for at in range(len(sigmas) - 1):
            if given and at:
                x = given[at - 1]
            for step in plan.method(denoise, x, sigmas[at : at + 2], noise):
                x = step.x
                yield replace(step, index=at)

    return replace(plan, method=method)
