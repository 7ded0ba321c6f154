"""An answer as one JSON file, for programs that would rather not write a trace."""

from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from lydite.conform.candidate import SCALARS, Candidate
from lydite.conform.problem import Array, Problem
from lydite.core.errors import InputError, at

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
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{at(path)}: cannot be read ({error.strerror or error}).") from error
    if len(data) > MOST_BYTES:
        raise InputError(f"{at(path)}: more than {MOST_BYTES} bytes of JSON.")
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
