"""Schedules that choose among the levels a model was trained at, by their index.

References: k-diffusion 0.1.1, external.py (normal); diffusers 0.42.1, scheduling_euler_discrete.py
and scheduling_dpmsolver_multistep.py (linspace, leading, trailing); ComfyUI, by its numbers.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.sampling.registry import ScheduleKind
from lydite.sampling.schedules.beta_quantile import beta_quantile
from lydite.sampling.schedules.schedule import ModelSigmas, Points
from lydite.sampling.schedules.table import NoiseTable


def normal(model: ModelSigmas, steps: int, *, double_shift: bool = False) -> Points:
    """Even steps from the last level to the first, then to 0."""
    return Points(model.sigma_at(np.linspace(_top(model), _low(model, double_shift), steps)))


def sgm_uniform(model: ModelSigmas, steps: int, *, double_shift: bool = False) -> Points:
    """Even steps from the last level, of which the one to the first level is left out."""
    even = np.linspace(_top(model), _low(model, double_shift), steps + 1)
    return Points(model.sigma_at(even[:-1]))


def simple(model: ModelSigmas, steps: int) -> Points:
    """Every T/n-th level from the last one down, the index truncated."""
    count = len(model.levels)
    chosen = [int(step * (count / steps)) for step in range(steps)]
    return Points(model.levels[::-1][chosen])


def ddim_uniform(model: ModelSigmas, steps: int) -> Points:
    """Every T//n-th level from the second upwards; what is left over makes more steps."""
    stride = max(len(model.levels) // steps, 1)
    return Points(model.levels[1::stride][::-1])


def linspace(model: ModelSigmas, steps: int, *, whole: bool = False) -> Points:
    """As `normal`, with sigma interpolated in place of log sigma: diffusers' Euler.

    One step starts at the lowest level there, and so here. `whole` rounds the index: its DDPM.
    """
    indices = np.linspace(0, _top(model), steps)[::-1]
    return _at_indices(model, indices.round() if whole else indices)


def linspace_dpm(model: ModelSigmas, steps: int) -> Points:
    """As `sgm_uniform`, the index rounded: `linspace` of diffusers' DPM-Solver, DEIS and UniPC."""
    return _at_indices(model, np.linspace(0, _top(model), steps + 1).round()[:0:-1])


def leading(model: ModelSigmas, steps: int, *, offset: int = 1) -> Points:
    """Every T//n-th level from `offset` upwards; the checkpoints of SD 1.5 and SDXL say 1."""
    stride = max(len(model.levels) // steps, 1)
    return _at_indices(model, np.arange(steps)[::-1] * float(stride) + offset)


def leading_dpm(model: ModelSigmas, steps: int, *, offset: int = 1) -> Points:
    """As `leading` with T//(n + 1), the lowest left out: diffusers' DPM-Solver, DEIS and UniPC."""
    stride = max(len(model.levels) // (steps + 1), 1)
    return _at_indices(model, np.arange(1, steps + 1)[::-1] * float(stride) + offset)


def trailing(model: ModelSigmas, steps: int) -> Points:
    """Every T/n-th level from the last one down, the index rounded (Lin et al. 2023)."""
    count = len(model.levels)
    return _at_indices(model, (count - np.arange(steps) * (count / steps)).round() - 1)


def lcm_timesteps(model: ModelSigmas, steps: int, *, original_steps: int = 50) -> Points:
    """Even choices from the timesteps that an LCM was distilled on, from the top.

    More steps than those are chosen from as many timesteps; diffusers refuses them.
    """
    original = max(original_steps, steps)
    stride = max(len(model.levels) // original, 1)
    chosen = np.floor(np.linspace(0, original, steps, endpoint=False))
    return _at_indices(model, (original - chosen) * stride - 1)


def beta_timesteps(
    model: ModelSigmas, steps: int, *, alpha: float = 0.6, beta: float = 0.6
) -> Points:
    """Levels whose indices are quantiles of a Beta distribution: ComfyUI's `beta`."""
    shares = 1 - np.linspace(0, 1, steps, endpoint=False)
    quantiles = np.array([beta_quantile(share, alpha, beta) for share in shares.tolist()])
    return Points(model.levels[np.rint(quantiles * _top(model)).astype(int)])


def _top(model: ModelSigmas) -> int:
    return len(model.levels) - 1


def _low(model: ModelSigmas, double_shift: bool) -> float:
    """The index to end at: the first level, or where it seems to lie when shifted already."""
    return model.index_of(float(model.levels[0])) if double_shift else 0.0


def _at_indices(model: ModelSigmas, indices: NDArray[np.floating[Any]]) -> Points:
    """Levels by index, and the index as the timestep where the model has a table."""
    indices = np.clip(indices, 0, _top(model)).astype(np.float64)
    if not isinstance(model, NoiseTable):
        return Points(model.sigma_at(indices))
    return Points(model.linear_sigma_at(indices), indices)


_EULER = "diffusers EulerDiscreteScheduler"
_DPM = "diffusers DPMSolverMultistepScheduler"
_FEWER = "n, or fewer where two indices are rounded to one"
_LIN = "Lin et al. (2023), table 2"
METHODS = (
    ScheduleKind(
        "normal",
        normal,
        "even steps in the timestep, the lowest included",
        "Karras's k-diffusion; A1111 calls it uniform",
        ("k-diffusion", "ComfyUI", "A1111"),
    ),
    ScheduleKind(
        "sgm_uniform",
        sgm_uniform,
        "even steps in the timestep, the lowest left out",
        "Stability AI's generative-models",
        ("ComfyUI", "A1111", "diffusers UniPCMultistepScheduler"),
    ),
    ScheduleKind(
        "simple",
        simple,
        "every T/n-th trained level, from the top",
        "ComfyUI",
        ("ComfyUI", "A1111"),
        count=_FEWER,
    ),
    ScheduleKind(
        "ddim_uniform",
        ddim_uniform,
        "every T//n-th trained level, from the bottom",
        "Song et al. (2021), as in CompVis' latent-diffusion",
        ("ComfyUI", "A1111"),
        count="(T − 1)/(T//n), rounded up: 7 gives 8, 300 gives 333",
    ),
    ScheduleKind(
        "linspace",
        linspace,
        "even steps in the timestep, sigma interpolated",
        f"{_LIN}; diffusers, its Euler, Heun and LMS",
        (_EULER,),
    ),
    ScheduleKind(
        "linspace_dpm",
        linspace_dpm,
        "even whole timesteps, the lowest left out",
        f"{_LIN}; diffusers, its multistep solvers",
        (_DPM,),
        count=_FEWER,
    ),
    ScheduleKind(
        "leading",
        leading,
        "every T//n-th timestep, from the bottom",
        f"{_LIN}; diffusers, its Euler, DDIM and PNDM",
        (_EULER,),
        count="n, or one fewer where the offset leaves the table",
    ),
    ScheduleKind(
        "leading_dpm",
        leading_dpm,
        "every T//(n + 1)-th timestep, the lowest left out",
        f"{_LIN}; diffusers, its multistep solvers",
        (_DPM,),
        count="n, or fewer where indices leave the table",
    ),
    ScheduleKind(
        "trailing",
        trailing,
        "every T/n-th timestep, from the top",
        _LIN,
        (_EULER, _DPM),
        count=_FEWER,
    ),
    ScheduleKind(
        "lcm_timesteps",
        lcm_timesteps,
        "even choices from the timesteps of a consistency distillation",
        "Luo et al. (2023), arXiv 2310.04378",
        ("diffusers LCMScheduler",),
    ),
    ScheduleKind(
        "beta_timesteps",
        beta_timesteps,
        "timesteps at quantiles of Beta(0.6, 0.6)",
        "Lee et al. (2024), arXiv 2407.12173, as in ComfyUI",
        ("ComfyUI",),
        count="n, or fewer where two quantiles are rounded to one: 200 gives 199",
    ),
)
