"""A problem: one JSON file with everything a sampler needs to run without a network.

The format is docs/conform.md. Files are not trusted: every field is bounded and checked.
"""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from lydite.core.config import read_json
from lydite.core.errors import InputError, at
from lydite.core.outputs import write_output
from lydite.sampling.analytic import Gaussian, Identity, Mixture, Zero
from lydite.sampling.sampler_types import FLOW, VE, NoiseModel

FORMAT, VERSION = "lydite-sampler-problem", 1
MOST_STEPS, MOST_VALUES, MOST_NORMALS, MOST_TABLE = 1000, 4096, 4000, 100_000
PREDICTIONS = ("denoised", "eps", "v", "x0", "edm", "cosmos", "flow")
TABLED = ("eps", "v", "x0")  # their timestep is a place in the noise table

Array = NDArray[Any]
Word = Annotated[str, Meta(max_length=100)]
Positive = Annotated[float, Meta(gt=0, le=1e6)]
Number = Annotated[float, Meta(ge=-1e6, le=1e6)]
Values = Annotated[tuple[Number, ...], Meta(min_length=1, max_length=MOST_VALUES)]
Option = None | bool | int | float | Word | list[float]


class Denoiser(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A denoiser that is known exactly; see lydite.sampling.analytic."""

    name: Literal["zero", "identity", "gaussian", "mixture"]
    means: Annotated[tuple[Number, ...], Meta(max_length=16)] = ()
    spread: Positive | None = None

    def under(self, noise_model: NoiseModel) -> Any:
        """The denoiser as a function of (x, sigma)."""
        if self.name == "zero":
            return Zero(noise_model)
        if self.name == "identity":
            return Identity(noise_model)
        assert self.spread is not None  # by `check`
        if self.name == "gaussian":
            return Gaussian(self.means[0], self.spread, noise_model)
        return Mixture(self.means, self.spread, noise_model)


class Guidance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """uncond + scale·(cond − uncond); the problem's `denoiser` is cond."""

    scale: Number
    uncond: Denoiser


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a candidate reads."""

    sampler: Word | None  # None: only the schedule is asked for
    noise_model: Literal["ve", "flow"] = msgspec.field(name="law")  # the name in version 1
    prediction: Literal["denoised", "eps", "v", "x0", "edm", "cosmos", "flow"]
    sigmas: Annotated[tuple[float, ...], Meta(min_length=2, max_length=MOST_STEPS + 1)]
    timesteps: tuple[Number, ...]
    shape: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1, max_length=8)]
    noise: Values  # standard normals
    x: Values  # where to start: noise × sigmas[0]
    denoiser: Denoiser
    format: Literal["lydite-sampler-problem"] = FORMAT
    version: Literal[1] = VERSION
    options: dict[Word, Option] = {}
    schedule: Word | None = None
    settings: dict[Word, Option] = {}
    table: Annotated[tuple[Positive, ...], Meta(max_length=MOST_TABLE)] = ()  # sigma of timestep t
    training_steps: Annotated[int, Meta(ge=1, le=MOST_TABLE)] = 1000
    rule: Literal["interpolate", "nearest", "round", "truncate"] = "interpolate"  # sigma -> t
    sigma_data: Positive = 1.0  # of prediction `edm`
    guidance: Guidance | None = None
    normals: Annotated[tuple[Values, ...], Meta(max_length=MOST_NORMALS)] = ()
    explanations: dict[str, str] = msgspec.field(default_factory=dict, name="words")  # for people

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    def start(self) -> Array:
        return np.array(self.x).reshape(self.shape)


def noise_model_of(problem: Problem) -> NoiseModel:
    return VE if problem.noise_model == "ve" else FLOW


def read_problem(path: Path) -> Problem:
    """The problem in a file, checked."""
    raw = read_json(path)
    if raw.get("format") != FORMAT:
        raise InputError(
            f"{at(path)}: not a sampler problem: `format` is {raw.get('format')!r:.60}, expected "
            f"{FORMAT!r}. `lydite sampler conform --write` makes one."
        )
    try:
        problem = msgspec.convert(raw, Problem)
        check(problem)
    except msgspec.ValidationError as error:
        raise InputError(f"{at(path)}: {error}.") from error
    except InputError as error:
        raise InputError(f"{at(path)}: {error}") from error
    return problem


def write_problem(path: Path, problem: Problem, *, overwrite: bool = False) -> None:
    """The problem as JSON, a field a line."""
    fields = msgspec.to_builtins(problem)
    raw = {"format": fields.pop("format"), "version": fields.pop("version"), **fields}
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in raw.items())
    write_output(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode(), overwrite=overwrite)


def check(problem: Problem) -> None:
    """What the types cannot say."""
    count = math.prod(problem.shape)
    for name, values in (
        ("x", problem.x),
        ("noise", problem.noise),
        *((f"normals[{i}]", each) for i, each in enumerate(problem.normals)),
    ):
        if len(values) != count:
            raise InputError(
                f"{name} has {len(values)} values; shape {list(problem.shape)} needs {count}."
            )
    if len(problem.timesteps) != problem.steps:
        raise InputError(
            f"there are {len(problem.timesteps)} timesteps for {len(problem.sigmas)} sigmas; "
            f"expected one for each but the last, {problem.steps}."
        )
    largest = 1.0 if problem.noise_model == "flow" else 1e6
    if any(not 0 <= sigma <= largest for sigma in problem.sigmas) or problem.sigmas[0] == 0:
        raise InputError(f"sigmas are not all from 0 to {largest:g}, the first above 0.")
    if (problem.prediction == "flow") != (problem.noise_model == "flow") and (
        problem.prediction != "denoised"
    ):
        raise InputError(
            f"prediction {problem.prediction} does not go with noise model {problem.noise_model}."
        )
    rising = len(problem.table) > 1 and all(a < b for a, b in pairwise(problem.table))
    if not rising and (problem.table or problem.prediction in TABLED):
        raise InputError("table is not a rising list of sigmas; eps, v and x0 need one.")
    if problem.table and problem.prediction in ("edm", "cosmos"):
        raise InputError(f"prediction {problem.prediction} goes without a table.")
    for denoiser in (problem.denoiser, *([problem.guidance.uncond] if problem.guidance else [])):
        needs = {"gaussian": 1, "mixture": 2}.get(denoiser.name, 0)
        right = len(denoiser.means) == 1 if needs == 1 else len(denoiser.means) >= needs
        if needs and (not right or denoiser.spread is None):
            raise InputError(f"denoiser {denoiser.name} needs `means` and `spread`.")
