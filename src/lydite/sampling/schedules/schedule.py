"""What a schedule is, and what it needs of a model."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from lydite.core.errors import InputError
from lydite.sampling.sampler_types import NoiseModel

MOST_STEPS = 10_000
Floats = NDArray[np.float64]

# How a sigma becomes a timestep of the network. `nearest` and `round` are the same but
# for ties: between two levels log sigma is taken as linear in the index.
Rule = Literal["interpolate", "nearest", "round", "truncate"]
Final = Literal["zero", "sigma_min"]


class ModelSigmas(Protocol):
    """The noise levels that a model was trained at, and the timestep of each."""

    @property
    def noise_model(self) -> NoiseModel: ...
    @property
    def levels(self) -> Floats:
        """(T), rising."""
        ...

    def sigma_at(self, index: Floats) -> Floats:
        """The sigma at an index into `levels`, or between two of them."""
        ...

    def index_of(self, sigma: float) -> float:
        """Where a sigma lies. On a flow model with a shift this is not `sigma_at` inverted but
        σ·T − 1, the shift forgotten: diffusers and ComfyUI go by it, and so shift twice."""
        ...

    def timestep_of(self, sigma: float) -> float:
        """The timestep of any sigma above 0."""
        ...


@dataclass(frozen=True, eq=False)
class Schedule:
    """`n` steps from `sigmas[i]` to `sigmas[i + 1]`; `timesteps[i]` is the network's."""

    name: str
    sigmas: Floats  # (n + 1), falling; almost all end in 0
    timesteps: Floats  # (n)
    timestep_between: Callable[[float], float] | None = (
        None  # the timestep of a sigma that is no grid point
    )

    def timestep_of(self, sigma: float) -> float:
        """The timestep of any sigma: heun and dpm_2 call it between grid points."""
        at = np.flatnonzero(self.sigmas[:-1] == sigma)
        if at.size:
            return float(self.timesteps[at[0]])
        if self.timestep_between is not None:
            return self.timestep_between(sigma)
        return float(np.interp(sigma, self.sigmas[-2::-1], self.timesteps[::-1]))


@dataclass(frozen=True, eq=False)
class Points:
    """The sigmas of a schedule in the making, falling, before its last 0."""

    sigmas: Floats
    timesteps: Floats | None = None  # where the schedule itself says them
    complete: bool = False  # no 0 is to follow


def finish_schedule(
    name: str, points: Points, model: ModelSigmas, final: Final = "zero"
) -> Schedule:
    """Ended as `final` says, sigmas that repeat dropped, timesteps filled in, nothing writable."""
    sigmas, timesteps = points.sigmas, points.timesteps
    if not points.complete:
        sigmas = np.append(sigmas, 0.0 if final == "zero" else model.levels[0])
    fresh = np.append(True, np.diff(sigmas) != 0)
    sigmas = sigmas[fresh]
    if len(sigmas) < 2 or not np.all(np.isfinite(sigmas)) or np.any(np.diff(sigmas) >= 0):
        raise InputError(f"schedule {name}: its sigmas do not fall: {_few(sigmas)}.")
    if sigmas[-1] < 0 or (model.noise_model.name == "flow" and sigmas[0] > 1):
        raise InputError(f"schedule {name}: sigmas outside what the model knows: {_few(sigmas)}.")
    if timesteps is None:
        timesteps = np.array([model.timestep_of(float(sigma)) for sigma in sigmas[:-1]])
    else:
        timesteps = timesteps[fresh[: len(timesteps)]][: len(sigmas) - 1]
    return read_only_schedule(name, sigmas, timesteps, model.timestep_of)


def read_only_schedule(
    name: str,
    sigmas: Floats,
    timesteps: Floats,
    timestep_between: Callable[[float], float] | None = None,
) -> Schedule:
    """A schedule whose arrays cannot be written into."""
    for values in (sigmas, timesteps):
        values.setflags(write=False)
    return Schedule(name, sigmas, timesteps, timestep_between)


def from_step(schedule: Schedule, start: int) -> Schedule:
    """The schedule without its first `start` steps."""
    return Schedule(
        schedule.name,
        schedule.sigmas[start:],
        schedule.timesteps[start:],
        schedule.timestep_between,
    )


def check_count(name: str, count: object, most: int) -> None:
    """`count` is a whole number from 1 to `most`, and no bool."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= most:
        raise InputError(f"{name} is {count!r}; expected a whole number from 1 to {most}.")


def check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InputError(f"{name} is {value}; expected a finite number above 0.")


def round_timestep(index: float, rule: Rule) -> float:
    """An index between two levels made into a timestep."""
    if rule == "interpolate":
        return index
    return float(math.floor(index) if rule == "truncate" else round(index))


def _few(sigmas: Floats) -> str:
    listed = ", ".join(f"{sigma:.6g}" for sigma in sigmas[:4])
    return listed + (", …" if len(sigmas) > 4 else "")
