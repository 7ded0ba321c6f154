"""Every schedule by its name, and a schedule for a model."""

from typing import Any

from lydite.sampling.registry import find_method
from lydite.sampling.schedules import align, curves, flow, spaced
from lydite.sampling.schedules.flow import FlowSigmas
from lydite.sampling.schedules.schedule import Final, ModelSigmas, Schedule, ScheduleKind, from_step
from lydite.sampling.schedules.table import STABLE_DIFFUSION, ContinuousSigmas, NoiseTable

FAMILIES = (spaced, curves, align, flow)
SCHEDULES = {kind.name: kind for family in FAMILIES for kind in family.FAMILY}

__all__ = [
    "SCHEDULES",
    "STABLE_DIFFUSION",
    "ContinuousSigmas",
    "FlowSigmas",
    "ModelSigmas",
    "NoiseTable",
    "Schedule",
    "ScheduleKind",
    "find_schedule",
    "from_step",
    "make_schedule",
]


def find_schedule(name: str) -> ScheduleKind:
    """The schedule called `name`."""
    return find_method(SCHEDULES, name, "schedule")


def make_schedule(
    name: str, steps: int, model: ModelSigmas, *, final: Final = "zero", **options: Any
) -> Schedule:
    """The schedule called `name` in `steps` steps for one model, float64."""
    return find_schedule(name).make(steps, model, final=final, **options)
