"""The noise levels of eps and v models: a table of T of them, and the way between two entries.

References: Ho et al. (2020), linear betas; Rombach et al. (2022), scaled linear; Nichol and
Dhariwal (2021), cosine; Lin et al. (2023), arXiv 2305.08891, algorithm 1, the rescaling.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lydite.core.errors import InputError
from lydite.sampling.sampler_types import VE, NoiseModel
from lydite.sampling.schedules.schedule import (
    Floats,
    Rule,
    check_count,
    check_positive,
    round_timestep,
)

BetaKind = Literal["scaled_linear", "linear", "squaredcos_cap_v2"]
TimestepFormula = Literal["edm", "v", "cosmos"]

# The last ᾱ after the zero-terminal-SNR rescale, where 0 would be a sigma without end.
DIFFUSERS_CLAMP = 2.0**-24  # sigma 4096
COMFYUI_CLAMP = 4.8973451890853435e-08  # sigma 4518.8


def betas(kind: BetaKind, start: float, end: float, count: int = 1000) -> Floats:
    """The variance added at each training step; `squaredcos_cap_v2` has no start and end."""
    check_count("num_train_timesteps", count, 2**20)
    if kind == "linear":
        return np.linspace(start, end, count)
    if kind == "scaled_linear":
        return np.linspace(math.sqrt(start), math.sqrt(end), count) ** 2
    if kind == "squaredcos_cap_v2":
        kept = np.cos((np.arange(count + 1) / count + 0.008) / 1.008 * math.pi / 2) ** 2
        return np.minimum(1 - kept[1:] / kept[:-1], 0.999)
    raise InputError(
        f"beta_schedule is {kind!r}; expected scaled_linear, linear or squaredcos_cap_v2."
    )


def alphas_cumprod(betas: Floats, *, float32: bool = False) -> Floats:
    """ᾱ. With `float32` rounded where diffusers rounds, which moves sigma_min by 2e-5 of itself."""
    if float32:
        kept: NDArray[np.float32] = np.float32(1) - betas.astype(np.float32)
        return np.cumprod(kept, dtype=np.float64).astype(np.float32).astype(np.float64)
    return np.cumprod(1 - betas, dtype=np.float64)


def zero_terminal_snr(alphas_cumprod: Floats, clamp: float = DIFFUSERS_CLAMP) -> Floats:
    """ᾱ rescaled so that the last level is nothing but noise, or `clamp` short of it."""
    root = np.sqrt(alphas_cumprod)
    root = (root - root[-1]) * (root[0] / (root[0] - root[-1]))
    rescaled = root**2
    rescaled[-1] = clamp
    return rescaled


@dataclass(frozen=True, eq=False)
class NoiseTable:
    """T levels indexed by the timestep; σ = √((1 − ᾱ)/ᾱ)."""

    levels: Floats  # (T), rising, above 0
    rule: Rule = "interpolate"
    noise_model: NoiseModel = VE

    def __post_init__(self) -> None:
        levels = self.levels
        if len(levels) < 2 or levels[0] <= 0 or not np.all(np.diff(levels) > 0):
            raise InputError("a noise table needs two sigmas or more, rising and above 0.")
        levels.setflags(write=False)

    @cached_property
    def logs(self) -> Floats:
        return np.log(self.levels)

    def sigma_at(self, index: Floats) -> Floats:
        """Log sigma is interpolated, as in k-diffusion and ComfyUI."""
        return np.exp(np.interp(index, np.arange(len(self.levels)), self.logs))

    def linear_sigma_at(self, index: Floats) -> Floats:
        """Sigma itself is interpolated, as in diffusers."""
        return np.interp(index, np.arange(len(self.levels)), self.levels)

    def index_of(self, sigma: float) -> float:
        return float(np.interp(math.log(sigma), self.logs, np.arange(len(self.levels))))

    def timestep_of(self, sigma: float) -> float:
        if sigma <= 0:
            return 0.0
        return round_timestep(self.index_of(sigma), self.rule)


def noise_table(
    alphas_cumprod: Floats, *, clamp: float | None = None, rule: Rule = "interpolate"
) -> NoiseTable:
    """The table of ᾱ, rescaled to zero terminal SNR where a `clamp` is given."""
    if clamp is not None:
        alphas_cumprod = zero_terminal_snr(alphas_cumprod, clamp)
    return NoiseTable(np.sqrt((1 - alphas_cumprod) / alphas_cumprod), rule)


# SD 1.5, 2.1 and SDXL: sigma from 0.0291672 to 14.6146.
STABLE_DIFFUSION = noise_table(alphas_cumprod(betas("scaled_linear", 0.00085, 0.012)))


@dataclass(frozen=True)
class ContinuousSigmas:
    """A range of sigmas without a table, the timestep a formula: EDM, v-diffusion, Cosmos.

    `levels` and `sigma_at` go in even steps of the timestep.
    """

    sigma_min: float = 0.002
    sigma_max: float = 80.0
    timestep_formula: TimestepFormula = "edm"
    count: int = 1000
    noise_model: NoiseModel = VE
    levels: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_positive("sigma_min", self.sigma_min)
        check_positive("sigma_max", self.sigma_max)
        check_count("count", self.count, 2**20)
        if self.sigma_min >= self.sigma_max or self.count < 2:
            raise InputError("a range of sigmas needs sigma_min below sigma_max and two levels.")
        levels = self.sigma_at(np.arange(self.count, dtype=np.float64))
        object.__setattr__(self, "levels", levels)

    def sigma_at(self, index: Floats) -> Floats:
        low, high = self.timestep_of(self.sigma_min), self.timestep_of(self.sigma_max)
        timestep = low + (high - low) * np.clip(index / (self.count - 1), 0, 1)
        if self.timestep_formula == "edm":
            sigma = np.exp(4 * timestep)
        elif self.timestep_formula == "v":
            sigma = np.tan(timestep * math.pi / 2)
        else:
            sigma = timestep / (1 - timestep)
        return np.clip(sigma, self.sigma_min, self.sigma_max)

    def index_of(self, sigma: float) -> float:
        low, high = self.timestep_of(self.sigma_min), self.timestep_of(self.sigma_max)
        return (self.timestep_of(sigma) - low) / (high - low) * (self.count - 1)

    def timestep_of(self, sigma: float) -> float:
        """¼·ln σ of Karras et al. (2022); 2/π·atan σ of v-diffusion; σ/(σ + 1) of Cosmos."""
        sigma = sigma or self.sigma_min  # at 0 as at the lowest: inverse DDIM asks there
        if self.timestep_formula == "edm":
            return 0.25 * math.log(sigma)
        return (
            math.atan(sigma) * 2 / math.pi if self.timestep_formula == "v" else sigma / (sigma + 1)
        )
