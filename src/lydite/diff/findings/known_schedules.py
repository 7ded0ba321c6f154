"""Tables of timesteps and sigmas as schedulers make them, by their settings.

As in diffusers 0.42.1: DDIMScheduler, EulerDiscreteScheduler, DPMSolverMultistepScheduler.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.findings.evidence import Evidence
from lydite.diff.result import Finding
from lydite.sampling.schedules.curves import exponential_between, karras_between
from lydite.sampling.schedules.table import betas

Table = NDArray[Any]

STEPS = 1000  # of training
CLOSE = 5e-4  # tables are made in float32, and cumulated products differ
MAX_STEPS = 200
ROUNDED: dict[str, Callable[[Table], Table]] = {
    "rounded to the nearest": np.round,
    "not rounded": lambda t: t,
    "rounded down": np.floor,
}
SPACINGS: dict[str, Callable[[int], Table]] = {
    "linspace spacing of n points": lambda n: np.linspace(0, STEPS - 1, n)[::-1],
    "linspace spacing of n + 1 points without the last": lambda n: np.linspace(0, STEPS - 1, n + 1)[
        :0:-1
    ],
    "leading spacing": lambda n: (np.arange(n) * (STEPS // n))[::-1],
    "leading spacing of n + 1 points": lambda n: (np.arange(n + 1) * (STEPS // (n + 1)))[:0:-1],
    "leading spacing of n + 1 points without the first": lambda n: (
        np.arange(n) * (STEPS // (n + 1))
    )[::-1],
    "trailing spacing": lambda n: np.round(np.arange(STEPS, 0, -STEPS / n))[:n] - 1,
    "linspace spacing up to 1000": lambda n: np.linspace(0, STEPS, n + 1)[:0:-1],
    "linspace spacing up to 1000, cut at 999": lambda n: np.minimum(
        np.linspace(0, STEPS, n + 1)[:0:-1], STEPS - 1
    ),
}
OFFSETS = {"": 0, " and an offset of 1": 1, " and an offset of −1": -1}


@lru_cache
def _betas() -> dict[str, Table]:
    table = {"a squared cosine": betas("squaredcos_cap_v2", 0.0, 0.0)}
    for low, high in (
        (1e-4, 0.02),
        (8.5e-4, 0.012),
        (1e-4, 0.012),
        (8.5e-4, 0.02),
        (1.5e-3, 0.0195),
    ):
        table[f"linear betas from {low:g} to {high:g}"] = betas("linear", low, high)
        table[f"scaled linear betas from {low:g} to {high:g}"] = betas("scaled_linear", low, high)
    return table


LEVELS: dict[str, Callable[[Table], Table]] = {  # of the cumulated product of 1 − beta
    "√((1 − ᾱ)/ᾱ)": lambda kept: np.sqrt((1 - kept) / kept),
    "√(1 − ᾱ)": lambda kept: np.sqrt(1 - kept),
    "√ᾱ": np.sqrt,
    "ᾱ": lambda kept: kept,
}
LINES: dict[str, Callable[[Table], Table]] = {
    "at the timesteps": lambda s: s,
    "with Karras spacing": lambda s: karras_between(s[0], s[-1], s.size),
    "with exponential spacing": lambda s: exponential_between(s[0], s[-1], s.size),
}
ENDS: dict[str, Callable[[Table, Table], Table]] = {  # of the sigmas, and of all of training
    "0": lambda s, _: np.append(s, 0.0),
    "a sigma of the steps": lambda s, _: s,
    "the smallest sigma": lambda s, all_: np.append(s, all_[0]),
}


@dataclass(frozen=True)
class Settings:
    """What a table follows from; of timesteps, only how they are spaced and rounded."""

    spacing: str
    rounding: str
    betas: str = ""
    level: str = ""
    line: str = ""
    end: str = ""


Made = tuple[Settings, Table]
WORDS = {
    "spacing": ("timestep-spacing", "the timesteps have a {}"),
    "rounding": ("timestep-rounding", "the timesteps are {}"),
    "betas": ("other-betas", "the noise schedule has {}"),
    "level": ("other-noise-level", "a noise level is {}"),
    "line": ("other-sigma-spacing", "the sigmas lie {}"),
    "end": ("schedule-end", "the last entry is {}"),
}


def other_settings(e: Evidence) -> Finding | None:
    """Both tables follow from settings of a scheduler, but from other ones."""
    right, wrong = (v.reshape(-1).astype(np.float64) for v in (e.reference, e.port))
    if not (4 <= right.size <= MAX_STEPS and 4 <= wrong.size <= MAX_STEPS):
        return None
    if right.size == wrong.size and np.ptp(wrong - right) <= CLOSE * np.ptp(right):
        return None  # all entries differ by one number
    for tables in (_timesteps, _sigmas):
        theirs, ours = (_matching(table, tables) for table in (right, wrong))
        if theirs and ours:
            break
    else:
        return None
    names = [field.name for field in fields(Settings)]

    def differing(pair: tuple[Settings, Settings]) -> list[str]:
        return [name for name in names if getattr(pair[0], name) != getattr(pair[1], name)]

    expected, used = min(product(theirs, ours), key=lambda pair: len(differing(pair)))
    changed = differing((expected, used))
    if not changed or len(changed) > 2:
        return None
    theirs, ours = (
        " and ".join(WORDS[name][1].format(getattr(side, name)) for name in changed)
        for side in (expected, used)
    )
    return Finding(
        WORDS[changed[0]][0],
        f"{ours[0].upper()}{ours[1:]} in the port; {theirs} in the reference. All else agrees.",
        "Use the reference's settings of the scheduler.",
    )


def _matching(table: Table, tables: Callable[[int, float], Iterator[Made]]) -> list[Settings]:
    """The settings that a table follows from."""
    near = np.abs(table) * CLOSE + 1e-6 * np.abs(table).max()
    return [
        settings
        for count in (table.size, table.size - 1)
        for settings, made in tables(count, float(table[0]))
        if made.size == table.size and (np.abs(made - table) <= near).all()
    ]


@lru_cache(maxsize=8)
def _spaced(count: int) -> tuple[Made, ...]:
    found: list[Made] = []
    for (words, spacing), (more, offset), (how, rounded) in product(
        SPACINGS.items(), OFFSETS.items(), ROUNDED.items()
    ):
        table = np.clip(rounded(spacing(count) + offset), 0, None)
        if not offset or words.startswith(("leading", "trailing")):
            found.append((Settings(words + more, how), table))
    return tuple(found)


def _timesteps(count: int, _: float) -> Iterator[Made]:
    return iter(_spaced(count))


def _sigmas(count: int, first: float) -> Iterator[Made]:
    """Tables of noise levels that begin with about this one."""
    spaced = _spaced(count)
    starts = np.array([times[0] for _, times in spaced])
    for (words, beta), (level, function) in product(_betas().items(), LEVELS.items()):
        every = function(np.cumprod(1 - beta))
        begins = np.interp(starts, np.arange(STEPS), every)
        for at in np.flatnonzero(np.abs(begins - first) <= 2 * CLOSE * abs(first)):
            settings, times = spaced[at]
            plain = np.interp(times, np.arange(STEPS), every)
            for (line, lie), (end, ended) in product(LINES.items(), ENDS.items()):
                made = Settings(settings.spacing, settings.rounding, words, level, line, end)
                yield made, ended(lie(plain), every)
