"""Run a problem: as it is meant, or with whatever a mistake would change."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from lydite.conform.methods import Method, Registered
from lydite.conform.network import c_in, denoised_from, predict, timestep_of
from lydite.conform.problem import Array, Denoiser, Problem, noise_model_of
from lydite.core.errors import InputError
from lydite.sampling.noise_model import NoiseModel
from lydite.sampling.steps import Step

# What a sampler may answer to sigmas and options that a stranger wrote.
UNUSABLE = (ArithmeticError, ValueError, LookupError, TypeError, AttributeError, InputError)
MOST_CALLS = 20_000  # of the network: an adaptive sampler may not end


@dataclass(frozen=True)
class Moment:
    """When the network is called."""

    sigma: float
    step: int
    call: int  # within the step
    step_sigma: float  # of the step's first call


@dataclass(frozen=True)
class Seen:
    """What is at hand when the denoised is computed."""

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
    timestep: Callable[[Moment], float]
    denoised: Callable[[Seen], Any]
    handed: Callable[[Any, Any, float], Any]  # (x, denoised, sigma) -> what the sampler gets
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
        Registered(problem, problem.sampler or "euler", dict(problem.options)),
        problem.sigmas,
        problem.start(),
        model_input=lambda x, sigma: x * c_in(problem, sigma),
        timestep=lambda moment: right_timestep(problem, moment.sigma),
        denoised=lambda seen: denoised_from(problem, seen.x, seen.prediction, seen.sigma),
        handed=lambda x, denoised, sigma: denoised,
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
        moment = Moment(float(sigma), self.step, self.call, self.step_sigma)
        if problem.prediction == "denoised":
            model_input, timestep = x, None
        else:
            model_input = plan.model_input(x, moment.sigma)
            wide = np.float64 if self.dtype is np.float64 else np.float32  # never in 16 bits
            timestep = float(wide(plan.timestep(moment)))
        cond = self._predict(problem.denoiser, model_input, moment.sigma, timestep)
        prediction, uncond = cond, cond
        if problem.guidance:
            uncond = self._predict(problem.guidance.uncond, model_input, moment.sigma, timestep)
            prediction = plan.guided(cond, uncond)
        denoised = self._denoised(x, model_input, prediction, moment.sigma)
        self._keep("model_input", model_input)
        self._keep("timestep", None if timestep is None else np.array(timestep))
        self._keep("prediction", prediction)
        self._keep("denoised", denoised)
        self.call += 1
        other = self._denoised(x, model_input, uncond, moment.sigma) if problem.guidance else None
        handed = plan.handed(x, denoised, moment.sigma)
        return self.rounded(handed), handed if other is None else self.rounded(other)

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
        return self.plan.denoised(Seen(x, model_input, prediction, sigma))

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
