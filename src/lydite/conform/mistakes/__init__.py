"""Every mistake that is known by its trajectory; adding knowledge means adding an entry."""

from lydite.conform.mistakes.history import HISTORY
from lydite.conform.mistakes.mistake import Mistake
from lydite.conform.mistakes.other_method import (
    other_options,
    other_samplers,
    other_schedules,
    other_settings,
)
from lydite.conform.mistakes.randomness import RANDOMNESS
from lydite.conform.mistakes.tables import TABLES
from lydite.conform.mistakes.times import TIMES
from lydite.conform.mistakes.wiring import WIRING
from lydite.conform.problem import Problem

PLANTED = (*WIRING, *TIMES, *TABLES, *RANDOMNESS, *HISTORY)


def other_methods(problem: Problem) -> tuple[Mistake, ...]:
    """Right in itself, but not what was asked for: another option, sampler or schedule."""
    return (
        *other_options(problem),
        *other_samplers(problem),
        *other_settings(problem),
        *other_schedules(problem),
    )
