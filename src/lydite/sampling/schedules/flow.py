"""Schedules of flow models: even steps from 1 down, then shifted towards the noise.

References: Esser et al. (2024), arXiv 2403.03206, eq. 23; diffusers 0.42.1,
schedulers/scheduling_flow_match_euler_discrete.py and the FLUX, FLUX.2 and SD3 pipelines.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np

from lydite.core.errors import InputError
from lydite.sampling.registry import ScheduleKind
from lydite.sampling.sampler_types import FLOW, NoiseModel
from lydite.sampling.schedules.curves import beta_between, exponential_between, karras_between
from lydite.sampling.schedules.schedule import (
    Floats,
    ModelSigmas,
    Points,
    Rule,
    check_count,
    check_positive,
    round_timestep,
)

Grid = Literal["trained", "even", "open", "below_one"]
Curve = Literal["karras", "exponential", "beta"]
U = TypeVar("U", float, Floats)


def shift_sigmas(u: U, shift: float) -> U:
    """s·u / (1 + (s − 1)·u), written so that 1 stays exactly 1."""
    return shift * u / (shift * u + (1 - u))


def shift_of_mu(mu: float, kind: Literal["exponential", "linear"] = "exponential") -> float:
    """The shift s that a model means by mu: exp(mu), or mu itself for `linear`."""
    if kind == "linear":
        check_positive("mu", mu)
    return math.exp(mu) if kind == "exponential" else mu


def mu_of_tokens(
    tokens: int,
    *,
    base_tokens: int = 256,
    max_tokens: int = 4096,
    base_mu: float = 0.5,
    max_mu: float = 1.15,
) -> float:
    """FLUX's mu for an image of so many tokens: a line through two points, and beyond them."""
    slope = (max_mu - base_mu) / (max_tokens - base_tokens)
    return base_mu + slope * (tokens - base_tokens)


def flux2_mu(tokens: int, steps: int) -> float:
    """FLUX.2's fit: one line in tokens at 10 steps, one at 200, blended by the steps between."""
    many = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return many
    few = 8.73809524e-05 * tokens + 1.89833333
    return many + (few - many) * (200 - steps) / 190


def stretch_to_terminal(sigmas: Floats, terminal: float) -> Floats:
    """Widened from 1 down so that the last sigma is `terminal`, as LTX and Qwen-Image ask."""
    if not 0 < terminal < 1:
        raise InputError(f"terminal is {terminal}; expected a number between 0 and 1.")
    if sigmas[-1] == 1:  # one step: nothing to stretch
        return sigmas
    return 1 - (1 - sigmas) * ((1 - terminal) / (1 - sigmas[-1]))


@dataclass(frozen=True)
class FlowSigmas:
    """T levels u = 1/T … 1, shifted once; the timestep is σ times `full`."""

    shift: float = 1.0  # `shift_of_mu(mu)` for a model that gives mu: FLUX, Qwen-Image
    train: int = 1000
    full: float = 1000.0
    rule: Rule = "interpolate"
    noise_model: NoiseModel = FLOW
    levels: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("num_train_timesteps", self.train, 2**20)
        check_positive("shift", self.shift)
        levels = self.sigma_at(np.arange(self.train, dtype=np.float64))
        object.__setattr__(self, "levels", levels)

    def sigma_at(self, index: Floats) -> Floats:
        return shift_sigmas((index + 1) / self.train, self.shift)

    def index_of(self, sigma: float) -> float:
        return sigma * self.train - 1

    def timestep_of(self, sigma: float) -> float:
        return round_timestep(sigma * self.full, self.rule)


def flow_match(
    model: ModelSigmas,
    steps: int,
    *,
    grid: Grid = "trained",
    double_shift: bool = False,
    terminal: float | None = None,
    curve: Curve | None = None,
    first: float | None = None,
) -> Points:
    """diffusers' FlowMatchEulerDiscreteScheduler: a grid, shifted, stretched, bent to a curve.

    `grid`: from 1 to 1/T (SD3); from 1 to 1/n (FLUX); from 1 to 1/T with 1/T left out (UniPC with
    `use_flow_sigmas`); or from 1 − 1/T evenly to 0 (DPM-Solver with it). `double_shift` ends the
    first at its lowest sigma as stored, which is shifted already, and shifts it again. `first`
    replaces a first sigma of 1.
    """
    if not isinstance(model, FlowSigmas):
        raise InputError("flow_match is for models described by FlowSigmas.")
    last = 1 / model.train
    if grid == "trained":
        even = np.linspace(1.0, shift_sigmas(last, model.shift) if double_shift else last, steps)
    elif grid == "even":
        even = np.linspace(1.0, 1 / steps, steps)
    elif grid == "open":
        even = np.linspace(1.0, last, steps + 1)[:-1]
    elif grid == "below_one":
        even = np.linspace(1 - last, 0, steps + 1)[:-1]
    else:
        raise InputError(f"grid is {grid!r}; expected trained, even, open or below_one.")
    sigmas = shift_sigmas(even, model.shift)
    if terminal is not None:
        sigmas = stretch_to_terminal(sigmas, terminal)
    if first is not None and sigmas[0] == 1:
        sigmas[0] = first
    return Points(sigmas if curve is None else _bent(sigmas, curve))


def _bent(sigmas: Floats, curve: Curve) -> Floats:
    """Another curve between the same ends."""
    if len(sigmas) == 1:
        return sigmas
    high, low = float(sigmas[0]), float(sigmas[-1])
    if curve == "karras":
        return karras_between(high, low, len(sigmas))
    if curve == "exponential":
        return exponential_between(high, low, len(sigmas))
    if curve == "beta":
        return beta_between(high, low, len(sigmas))
    raise InputError(f"curve is {curve!r}; expected karras, exponential or beta.")


def flow_shift(model: ModelSigmas, steps: int, *, terminal: float | None = None) -> Points:
    """Even steps from 1 to 1/T, shifted once, as in the paper."""
    return flow_match(model, steps, terminal=terminal)


def sd3_diffusers(model: ModelSigmas, steps: int) -> Points:
    """What diffusers runs for SD3: its smallest sigma is stored shifted, then shifted again.

    At shift 3 the last step starts from 0.00893 instead of 0.00299 (diffusers issue 13243).
    """
    return flow_match(model, steps, double_shift=True)


def flux(model: ModelSigmas, steps: int, *, terminal: float | None = None) -> Points:
    """Even steps from 1 to 1/n, shifted once."""
    return flow_match(model, steps, grid="even", terminal=terminal)


_DIFFUSERS = ("diffusers FlowMatchEulerDiscreteScheduler",)
METHODS = (
    ScheduleKind(
        "flow_shift",
        flow_shift,
        "even steps from 1 to 1/T, shifted once",
        "Esser et al. (2024), arXiv 2403.03206, eq. 23",
        _DIFFUSERS,
        noise_models=("flow",),
    ),
    ScheduleKind(
        "sd3_diffusers",
        sd3_diffusers,
        "even steps from 1, shifted twice at the low end, as diffusers and ComfyUI do",
        "diffusers, issue 13243",
        (*_DIFFUSERS, "ComfyUI normal"),
        noise_models=("flow",),
    ),
    ScheduleKind(
        "flux",
        flux,
        "even steps from 1 to 1/n, shifted once",
        "Black Forest Labs, FLUX.1",
        (*_DIFFUSERS, "diffusers FluxPipeline"),
        noise_models=("flow",),
    ),
    ScheduleKind(
        "flow_match",
        flow_match,
        "a grid of choice, shifted, stretched to a terminal sigma, bent to a curve",
        "diffusers FlowMatchEulerDiscreteScheduler",
        (*_DIFFUSERS, "diffusers DPMSolverMultistepScheduler"),
        noise_models=("flow",),
    ),
)
