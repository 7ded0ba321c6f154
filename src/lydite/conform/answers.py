"""What a candidate wrote: a trace or one JSON file, as values by event, step and call."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import msgspec
import numpy as np

from lydite.conform.problem import Array, Problem
from lydite.core.errors import InputError, LyditeError, at
from lydite.core.files import read_bounded
from lydite.trace.events import Event
from lydite.trace.reader import Trace

EVENTS = ("x", "sigma", "timestep", "model_input", "prediction", "denoised")
SCALARS = ("sigma", "timestep")
TABLES = {"schedule/sigmas": "sigmas", "schedule/timesteps": "timesteps"}
DTYPES: dict[str, Any] = {
    "f64": np.float64,
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}
MOST_EVENTS = 200_000


@dataclass(frozen=True)
class Candidate:
    """Values in float64; `dtype` is the coarsest any x was computed in."""

    values: dict[tuple[str, int, int], Array]
    tables: dict[str, Array]  # "sigmas", "timesteps": whole ones, by themselves
    dtype: str
    complete: bool
    shapes: tuple[tuple[int, ...], ...] = ()  # of x that could not be read as the problem's
    remarks: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        return sum(name == "x" for name, _, _ in self.values)


class CannotRead(Exception):
    """A trace that holds nothing to judge; the message says why."""


def read_candidate(trace: Trace, problem: Problem) -> Candidate:
    """The events of a sampler's trace. Other events are left alone."""
    values: dict[tuple[str, int, int], Array] = {}
    tables: dict[str, Array] = {}
    shapes: list[tuple[int, ...]] = []
    dtypes: set[str] = set()
    remarks: dict[str, None] = {}
    if len(trace.events) > MOST_EVENTS:
        raise CannotRead(f"the trace has {len(trace.events)} events, more than {MOST_EVENTS}")
    for event in trace.events:
        name = event.name.removeprefix("sampler/")
        if event.name in TABLES:
            tables[TABLES[event.name]] = _floats(trace, event).reshape(-1)
        elif event.name.startswith("sampler/") and name in EVENTS and event.slot == "out":
            value = _floats(trace, event)
            if name in SCALARS:
                value = _scalar(value, event)
            elif value.shape != problem.shape:
                if value.size != np.prod(problem.shape):
                    shapes.append(value.shape)
                    continue
                remarks[f"{event.name} has shape {value.shape}, read as {problem.shape}"] = None
                value = value.reshape(problem.shape)
            values[name, event.step, event.call] = value
            if name == "x":
                dtypes.add(event.dtype)
    if not values and not tables and not shapes:
        seen = ", ".join(dict.fromkeys(event.name for event in trace.events[:4])) or "none"
        raise CannotRead(
            f"the trace has no event of a sampler (its events: {seen}). Write x after each step as "
            "sampler/x, or a whole table as schedule/sigmas"
        )
    known = [name for name in ("bf16", "f16", "f32", "f64") if name in dtypes]
    return Candidate(
        values,
        tables,
        known[0] if known else "f32",
        trace.header.complete,
        tuple(shapes),
        tuple(remarks),
    )


def recorded_before(candidate: Candidate, problem: Problem, steps: int) -> Candidate | None:
    """The candidate with each x moved to the step it came from, when step 0 holds the start and
    the last x stands one step behind the last."""
    first = candidate.values.get(("x", 0, 0))
    if first is None or candidate.steps != steps + 1:
        return None
    if not np.allclose(first, problem.start(), rtol=1e-2 if candidate.dtype == "bf16" else 1e-3):
        return None
    values = {
        (name, step - (name == "x"), call): value
        for (name, step, call), value in candidate.values.items()
        if not (name == "x" and step == 0)
    }
    remark = "x is recorded before each step and once at the end; read so"
    return Candidate(
        values,
        candidate.tables,
        candidate.dtype,
        candidate.complete,
        candidate.shapes,
        (*candidate.remarks, remark),
    )


def _floats(trace: Trace, event: Event) -> Array:
    try:
        values = trace.read(event)
    except LyditeError as error:
        raise CannotRead(str(error).rstrip(".")) from error
    if values.dtype.kind == "c" or values.size > 2**20:
        raise CannotRead(f"{event.name}: {values.size} values of {event.dtype}; not a sampler's")
    return np.asarray(values, np.float64)


def _scalar(value: Array, event: Event) -> Array:
    if value.size == 0 or (value.reshape(-1) != value.reshape(-1)[0]).any():
        raise CannotRead(f"{event.name}, step {event.step}: expected one number, as one value")
    return value.reshape(-1)[0]


MOST_BYTES = 64 * 2**20
ONE_CALL = ("model_input", "prediction", "denoised")


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value for each step; null for a number that is not finite."""

    x: list[Any] = []
    sigma: list[float | None] = []
    timestep: list[float | None] = []
    model_input: list[Any] = []
    prediction: list[Any] = []
    denoised: list[Any] = []
    sigmas: list[float] = []  # whole tables, by themselves
    timesteps: list[float] = []
    dtype: Literal["f64", "f32", "f16", "bf16"] = "f32"  # what x was computed in


def read_answer(path: Path, problem: Problem) -> Candidate:
    """The candidate in a JSON file."""
    data = read_bounded(path, MOST_BYTES, "bytes of JSON")
    try:
        answer = msgspec.json.decode(data, type=Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        names = ", ".join(Answer.__struct_fields__)
        raise InputError(
            f"{at(path)}: {error}. An answer is a JSON object of {names}; a number that is not "
            "finite is null."
        ) from error
    values: dict[tuple[str, int, int], Array] = {}
    shapes: list[tuple[int, ...]] = []
    remarks: dict[str, None] = {}
    for name in ("x", *SCALARS, *ONE_CALL):
        for step, raw in enumerate(getattr(answer, name)):
            value = _array(raw, f"{at(path)}: {name} of step {step}")
            if name not in SCALARS and value.shape != problem.shape:
                if value.size != np.prod(problem.shape):
                    shapes.append(value.shape)
                    continue
                if value.ndim > 1:  # a flat list is the plain way
                    remarks[f"{name} has shape {value.shape}, read as {problem.shape}"] = None
                value = value.reshape(problem.shape)
            values[name, step, 0] = value
    tables = {
        name: np.array(table, np.float64)
        for name, table in (("sigmas", answer.sigmas), ("timesteps", answer.timesteps))
        if table
    }
    if not values and not tables and not shapes:
        raise InputError(f"{at(path)}: nothing to judge: write x after each step as a list `x`.")
    return Candidate(values, tables, answer.dtype, True, tuple(shapes), tuple(remarks))


def _array(raw: Any, what: str) -> Array:
    """Numbers in lists of lists; null is NaN."""
    try:
        value = np.array(raw, np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{what} is no list of numbers, or one of uneven lists.") from error
    return value
