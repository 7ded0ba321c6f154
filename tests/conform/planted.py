"""Problems for the port written by hand, and what the judge says of it."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lydite.conform.answers import Candidate
from lydite.conform.judge import judge
from lydite.conform.make_problem import ProblemSpec, make_problem
from lydite.conform.problem import Problem, write_problem
from lydite.conform.result import Verdict

from .port import Port


def plain(problem: Problem, folder: Path) -> dict[str, Any]:
    write_problem(folder / "problem.json", problem, overwrite=True)
    return json.loads((folder / "problem.json").read_text())


def candidate(port: Port, *, timesteps: bool = False) -> Candidate:
    shape = tuple(port.p["shape"])
    right = all(x.shape == shape for x in port.xs)
    values = {("x", step, 0): x.astype(np.float64) for step, x in enumerate(port.xs) if right}
    if timesteps:
        told = enumerate(port.timesteps)
        values |= {("timestep", step, 0): np.array(t) for step, t in told}
    shapes = () if right else (port.xs[0].shape,)
    return Candidate(values, {}, "f32", complete=True, shapes=shapes)


def named(asked: ProblemSpec, bug: str, folder: Path) -> Verdict:
    problem = make_problem(asked)
    return judge(problem, candidate(Port(plain(problem, folder), bug).run()))


def written(xs: "list[np.ndarray]", dtype: str = "f32") -> Candidate:
    """What a candidate left that wrote x after each step, and nothing else."""
    values = {("x", step, 0): np.asarray(x, np.float64) for step, x in enumerate(xs)}
    return Candidate(values, {}, dtype, complete=True)


def margin(verdict: Verdict) -> float:
    """The largest share of what is allowed."""
    return max((row.error or 0.0) / row.limit for row in verdict.rows if row.name == "x")
