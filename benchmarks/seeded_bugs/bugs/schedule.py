"""Schedules and timesteps, before the network: classes E of docs/bug-classes.md."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lydite.models import modulation
from lydite.pipelines import planning
from lydite.sampling.registry import make_schedule
from lydite.sampling.schedules.flow import FlowSigmas
from lydite.sampling.schedules.schedule import Schedule
from seeded_bugs.cases import Apply, Bug, inputs, outputs
from seeded_bugs.patches import attribute

TABLES = outputs("pipeline/sigmas", "pipeline/timesteps")  # one table in two units
ANGLES = inputs("transformer/time_text_embed.timestep_embedder.linear_1")


def scheduled(change: Callable[[Schedule], Schedule]) -> Apply:
    """Another schedule than the checkpoint asks for."""
    return attribute(
        planning, "plan_schedule", lambda original: lambda *a, **k: change(original(*a, **k))
    )


def table(sigmas: NDArray[np.float64]) -> Schedule:
    return Schedule("seeded", sigmas, sigmas[:-1] * 1000)


def once_shifted(schedule: Schedule) -> Schedule:
    return make_schedule("flow_shift", len(schedule.timesteps), FlowSigmas(3.0))


def unshifted(schedule: Schedule) -> Schedule:
    s = schedule.sigmas[:-1]
    return table(np.append(s / (3.0 - 2.0 * s), 0.0))


def exponential(schedule: Schedule) -> Schedule:
    even = unshifted(schedule).sigmas[:-1]
    mu = math.exp(3.0)
    return table(np.append(mu / (mu + (1 / even - 1)), 0.0))


def changed_timesteps(change: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> Apply:
    """The right sigmas, but other timesteps for the network."""
    return scheduled(lambda schedule: replace(schedule, timesteps=change(schedule.timesteps)))


def sinusoids(
    *, sine_first: bool = False, shift: float = 0.0, period: float = 10_000, factor: float = 1.0
) -> Apply:
    """The timestep embedding with another convention."""

    def new(timesteps: mx.array, channels: int, *, exact: bool = True) -> mx.array:
        half = channels // 2
        rates = mx.exp(-math.log(period) / (half - shift) * mx.arange(half, dtype=mx.float32))
        angles = (timesteps.astype(mx.float32) * factor)[..., None] * rates
        parts = [mx.cos(angles), mx.sin(angles)]
        return mx.concatenate(parts[::-1] if sine_first else parts, axis=-1)

    return attribute(modulation, "sinusoids", lambda original: new)


def bug(id: str, cause: str, bug_class: str, site: Any, apply: Apply, fix: str, **more: Any) -> Bug:
    return Bug(id=id, cause=cause, bug_class=bug_class, site=site, apply=apply, fix=fix, **more)


BUGS = (
    bug(
        "shift-missing",
        "schedule_shift",
        "E51",
        TABLES,
        scheduled(unshifted),
        "Shift the sigmas by 3, as scheduler_config.json says.",
    ),
    bug(
        "shifted-once",
        "schedule_shift",
        "E51",
        TABLES,
        scheduled(once_shifted),
        "diffusers shifts its smallest sigma twice; use the sd3_diffusers schedule.",
        severity="subtle",
    ),
    bug(
        "shift-exponential",
        "schedule_shift",
        "E51",
        TABLES,
        scheduled(exponential),
        "The shift is linear: s·u / (1 + (s − 1)·u).",
        held_out=True,
    ),
    bug(
        "last-step-dropped",
        "schedule_length",
        "E52",
        TABLES,
        scheduled(lambda s: table(np.append(s.sigmas[:-2], 0.0))),
        "The schedule is one step short.",
    ),
    bug(
        "final-sigma-not-zero",
        "final_sigma",
        "E52",
        outputs("pipeline/sigmas"),
        scheduled(lambda s: replace(s, sigmas=np.append(s.sigmas[:-1], s.sigmas[-2] / 2))),
        "The last sigma is 0.",
    ),
    bug(
        "sigmas-rising",
        "schedule_order",
        "E52",
        TABLES,
        scheduled(lambda s: table(np.append(s.sigmas[-2::-1], 0.0))),
        "Sigmas fall from 1.",
        severity="fatal",
        held_out=True,
    ),
    bug(
        "sigma-for-timestep",
        "timestep_unit",
        "E49",
        outputs("pipeline/timesteps"),
        changed_timesteps(lambda t: t / 1000),
        "The network takes 1000·σ, not σ.",
        severity="fatal",
    ),
    bug(
        "timesteps-truncated",
        "timestep_integer",
        "E49",
        outputs("pipeline/timesteps"),
        changed_timesteps(np.floor),
        "Timesteps are not whole numbers here.",
        severity="subtle",
        held_out=True,
    ),
    bug(
        "timestep-divided-in-network",
        "timestep_unit",
        "E49",
        ANGLES,
        sinusoids(factor=1e-3),
        "The timestep goes into the sinusoids as it is.",
        severity="fatal",
    ),
    bug(
        "sine-before-cosine",
        "sin_cos_order",
        "E53",
        ANGLES,
        sinusoids(sine_first=True),
        "Cosines come first (flip_sin_to_cos).",
    ),
    bug(
        "frequency-shift",
        "freq_shift",
        "E53",
        ANGLES,
        sinusoids(shift=1.0),
        "downscale_freq_shift is 0: divide by half, not by half − 1.",
        severity="subtle",
    ),
    bug(
        "max-period",
        "max_period",
        "E53",
        ANGLES,
        sinusoids(period=1000),
        "The longest period is 10 000.",
        held_out=True,
    ),
)
