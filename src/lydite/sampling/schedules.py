"""Noise schedules in float64 NumPy: which sigmas a sampler visits, and what the network is told.

Reference: Esser et al. (2024), arXiv 2403.03206, eq. 23; diffusers 0.42.1,
schedulers/scheduling_flow_match_euler_discrete.py and the SD3 img2img pipeline.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from lydite.core.config import Size, read_config
from lydite.core.errors import InputError

MOST_STEPS = 10_000
FLOW_MATCH_IGNORED = frozenset(  # read by diffusers only when use_dynamic_shifting is true
    {"base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len", "time_shift_type"}
)
FLOW_MATCH_FIXED = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "use_dynamic_shifting": False,
    "invert_sigmas": False,
    "shift_terminal": None,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "stochastic_sampling": False,
}


@dataclass(frozen=True)
class FlowMatchConfig:
    """`scheduler/scheduler_config.json` of a model with one constant shift."""

    num_train_timesteps: Size
    shift: Annotated[float, Meta(gt=0, le=1000)]


@dataclass(frozen=True, eq=False)
class Schedule:
    """`n` steps from `sigmas[i]` to `sigmas[i + 1]`; `timesteps[i]` is what the network is told."""

    name: str
    sigmas: NDArray[np.float64]  # (n + 1), falling, ends in 0
    timesteps: NDArray[np.float64]  # (n)


def read_flow_config(raw: Mapping[str, Any], *, where: object) -> FlowMatchConfig:
    """The config of diffusers' FlowMatchEulerDiscreteScheduler, every key accounted for."""
    return read_config(
        FlowMatchConfig, raw, where=where, ignored=FLOW_MATCH_IGNORED, fixed=FLOW_MATCH_FIXED
    )


def flow_schedule(config: FlowMatchConfig, steps: int, name: str = "sd3_diffusers") -> Schedule:
    """The schedule called `name`, with the checkpoint's own numbers."""
    if name not in FLOW_SCHEDULES:
        raise InputError(f"schedule is {name!r}; expected one of {', '.join(FLOW_SCHEDULES)}.")
    return FLOW_SCHEDULES[name](steps, config.shift, config.num_train_timesteps)


def flow_shift(steps: int, shift: float, num_train_timesteps: int = 1000) -> Schedule:
    """Even steps from 1 to 1/T, shifted once, as in the paper."""
    _check(steps, shift, num_train_timesteps)
    even = np.linspace(1.0, 1 / num_train_timesteps, steps)
    return _schedule("flow_shift", _shifted(even, shift), num_train_timesteps)


def sd3_diffusers(steps: int, shift: float, num_train_timesteps: int = 1000) -> Schedule:
    """What diffusers runs for SD3: its smallest sigma is stored shifted, then shifted again.

    At shift 3 the last step starts from 0.00893 instead of 0.00299 (diffusers issue 13243).
    """
    _check(steps, shift, num_train_timesteps)
    even = np.linspace(1.0, _shifted(1 / num_train_timesteps, shift), steps)
    return _schedule("sd3_diffusers", _shifted(even, shift), num_train_timesteps)


FLOW_SCHEDULES = {"sd3_diffusers": sd3_diffusers, "flow_shift": flow_shift}


def tail(schedule: Schedule, strength: float) -> Schedule:
    """The steps img2img runs after noising its image to `sigmas[0]` of the result.

    SD3 in diffusers rounds the steps left out downwards, so 28 steps at strength 0.6 leave 17,
    where its SD 1.5 pipeline would run int(16.8) = 16.
    """
    if not 0 < strength <= 1:
        raise InputError(f"strength is {strength}; expected a number above 0 and at most 1.")
    steps = len(schedule.timesteps)
    start = int(steps - steps * strength)
    if start == steps:  # strength is below the rounding of float64
        raise InputError(
            f"strength {strength} leaves none of the {steps} steps; {0.5 / steps:.3g} leaves one."
        )
    return Schedule(schedule.name, schedule.sigmas[start:], schedule.timesteps[start:])


def _check(steps: int, shift: float, num_train_timesteps: int) -> None:
    limits = (("steps", steps, MOST_STEPS), ("num_train_timesteps", num_train_timesteps, 2**20))
    for name, count, most in limits:
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= most:
            raise InputError(f"{name} is {count!r}; expected a whole number from 1 to {most}.")
    if not 0 < shift < math.inf:
        raise InputError(f"shift is {shift}; expected a finite number above 0.")


U = TypeVar("U", float, NDArray[np.float64])


def _shifted(u: U, shift: float) -> U:
    # s·u / (1 + (s − 1)·u), written so that 1 stays exactly 1
    return shift * u / (shift * u + (1 - u))


def _schedule(name: str, sigmas: NDArray[np.float64], num_train_timesteps: int) -> Schedule:
    timesteps = sigmas * num_train_timesteps
    sigmas = np.append(sigmas, 0.0)
    for values in (sigmas, timesteps):
        values.setflags(write=False)
    return Schedule(name, sigmas, timesteps)
