"""Problems and traces of strangers: one clear error, or a verdict, never a crash."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.conform import answers
from lydite.conform.judge import judge_trace
from lydite.conform.make_problem import ProblemSpec, make_problem
from lydite.conform.problem import Problem, read_problem, write_problem
from lydite.conform.replay import plan_for, run
from lydite.core.errors import InputError, LyditeError
from lydite.trace.events import Header
from lydite.trace.writer import TraceWriter


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(ProblemSpec("euler_ancestral", guidance=2.0, steps=4))


def changed(problem: Problem, folder: Path, **fields: Any) -> Path:
    path = folder / "problem.json"
    write_problem(path, problem)
    raw = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "gone"}))
    return path


def test_a_problem_comes_back_as_it_was_written(problem: Problem, tmp_path: Path) -> None:
    assert read_problem(changed(problem, tmp_path)) == problem


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"format": "png"}, "not a sampler problem"),
        ({"version": 2}, "version"),
        ({"x": "gone"}, "`x`"),
        ({"x": [1.0]}, "x has 1 values; shape [2, 3, 4] needs 24"),
        ({"x": [1e300] * 24}, "x"),
        ({"normals": [[0.0]]}, "normals[0] has 1 values"),
        ({"shape": [2, 3, 5]}, "needs 30"),
        ({"shape": []}, "shape"),
        ({"shape": [1] * 9}, "shape"),
        ({"sigmas": [1.0]}, "sigmas"),
        ({"sigmas": [0.0, 1.0, 1.0, 1.0, 0.0]}, "the first above 0"),
        ({"sigmas": [-1.0, 1.0, 1.0, 1.0, 0.0]}, "from 0 to"),
        ({"sigmas": [1.0] * 2000}, "sigmas"),
        ({"timesteps": [1.0]}, "there are 1 timesteps for 5 sigmas"),
        ({"timesteps": [1.0] * 6}, "there are 6 timesteps for 5 sigmas"),
        ({"timesteps": [1e300] * 4}, "timesteps"),
        ({"prediction": "x1"}, "prediction"),
        ({"prediction": "edm"}, "goes without a table"),
        ({"sigma_data": 0}, "sigma_data"),
        ({"prediction": "flow"}, "does not go with noise model ve"),
        ({"law": "vp"}, "law"),
        ({"table": []}, "table is not a rising list"),
        ({"table": [1.0, 0.5]}, "table is not a rising list"),
        ({"denoiser": {"name": "gaussian"}}, "needs `means` and `spread`"),
        ({"denoiser": {"name": "gaussian", "means": [0, 1], "spread": 1}}, "needs `means`"),
        ({"denoiser": {"name": "mixture", "means": [0, 1], "spread": 0}}, "spread"),
        ({"guidance": {"scale": 2.0, "uncond": {"name": "mixture"}}}, "needs `means`"),
        ({"denoiser": {"name": "mixture", "means": [0], "spread": 1}}, "needs `means`"),
        ({"denoiser": {"name": "mixture", "means": [0] * 17, "spread": 1}}, "length <= 16"),
        ({"denoiser": {"name": "gaussian", "means": [1e7], "spread": 1}}, "means"),
        ({"law": "flow", "prediction": "flow", "sigmas": [1.01, 0.7, 0.5, 0.3, 0]}, "0 to 1,"),
        ({"sigmas": [1.01e6, 3.0, 2.0, 1.0, 0.0]}, "from 0 to 1e+06"),
        ({"table": [1.0]}, "table is not a rising list"),
        ({"table": [1.0, 1.0]}, "table is not a rising list"),
        ({"table": [0.0, 1.0]}, "table"),
        ({"training_steps": 0}, "training_steps"),
        ({"training_steps": 100_001}, "training_steps"),
        ({"shape": [0, 3, 4]}, "shape"),
        ({"noise": [0.0]}, "noise has 1 values"),
        ({"denoiser": {"name": "zero", "surprise": 1}}, "surprise"),
        ({"guidance": {"scale": 2.0, "uncond": {"name": "zero"}, "surprise": 1}}, "surprise"),
        ({"guidance": {"scale": 2e6, "uncond": {"name": "zero"}}}, "scale"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_what_is_wrong_with_a_problem_is_said(
    problem: Problem, tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError) as error:
        read_problem(changed(problem, tmp_path, **fields))
    text = str(error.value)
    assert "problem.json" in text and said in text and "\n" not in text and len(text) < 400


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": NaN}', "\x00", '{"a":' * 5000])
def test_files_that_are_no_problem(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(LyditeError) as error:
        read_problem(path)
    assert "p.json" in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"options": {"eta": "much"}},
        {"options": {"surprise": 1}},
        {"options": {"middle": "first"}, "sampler": "pndm"},
        {"options": {"below": "timestep", "gamma": 7}, "sampler": "tcd"},
        {"normals": []},
        {"sigmas": [5.0, 5.0, 5.0, 5.0, 5.0], "sampler": "dpmpp_2m"},
        {"sigmas": [1e6, 1e5, 1e-300, 1e-308, 0.0], "sampler": "lms"},
    ],
)
def test_a_problem_that_cannot_be_run_is_judged_or_refused(
    problem: Problem, tmp_path: Path, fields: dict[str, Any]
) -> None:
    odd = read_problem(changed(problem, tmp_path, **fields))
    verdict = judge_trace(odd, traced(tmp_path / "run", [np.zeros((2, 3, 4))] * 4))
    assert verdict.verdict in ("cannot-judge", "deviates") and verdict.exit_code > 0


def test_an_unknown_sampler_is_an_error(problem: Problem, tmp_path: Path) -> None:
    odd = read_problem(changed(problem, tmp_path, sampler="nobody"))
    with pytest.raises(InputError, match="no sampler 'nobody'"):
        judge_trace(odd, traced(tmp_path / "run", [np.zeros((2, 3, 4))] * 4))


def traced(folder: Path, xs: "list[np.ndarray]", name: str = "sampler/x") -> Path:
    with TraceWriter(folder, Header()) as writer:
        for step, x in enumerate(xs):
            writer.add(name, np.asarray(x, np.float32), step=step)
    return folder


def right(problem: Problem) -> "list[np.ndarray]":
    ours = run(plan_for(problem))
    return [ours.x(step) for step in range(ours.steps)]


def test_a_right_trace_conforms(problem: Problem, tmp_path: Path) -> None:
    assert judge_trace(problem, traced(tmp_path / "run", right(problem))).verdict == "conforms"


@pytest.mark.parametrize("shape", [(24,), (1, 2, 3, 4), (6, 4)])
def test_another_shape_of_as_many_values_is_read_with_a_note(
    problem: Problem, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    xs = [x.reshape(shape) for x in right(problem)]
    verdict = judge_trace(problem, traced(tmp_path / "run", xs))
    assert verdict.verdict == "conforms" and "shape" in verdict.remarks[0]


def test_traces_that_say_nothing(problem: Problem, tmp_path: Path) -> None:
    xs = right(problem)
    other = judge_trace(problem, traced(tmp_path / "other", xs, "model/latent"))
    assert other.verdict == "cannot-judge" and "model/latent" in other.sentence
    inside = judge_trace(problem, traced(tmp_path / "inside", xs, "sampler/denoised"))
    assert inside.verdict == "cannot-judge" and "sampler/x" in inside.sentence
    empty = judge_trace(problem, traced(tmp_path / "empty", []))
    assert empty.verdict == "cannot-judge" and empty.exit_code == 2


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_values_that_are_none(problem: Problem, tmp_path: Path, value: float) -> None:
    xs = [x.copy() for x in right(problem)]
    xs[2][0, 0, 0] = value
    verdict = judge_trace(problem, traced(tmp_path / "run", xs))
    assert verdict.verdict == "deviates" and verdict.step == 2


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("sampler/x", np.ones((2, 3, 4), np.complex64), "24 values of c64; not a sampler's"),
        ("sampler/sigma", np.array([1.0, 2.0]), "sampler/sigma, step 0: expected one number"),
        ("sampler/timestep", np.array([]), "sampler/timestep, step 0: expected one number"),
        ("schedule/sigmas", np.zeros(2**20 + 1, np.float32), "not a sampler's"),
    ],
)
def test_values_of_no_sampler(
    problem: Problem, tmp_path: Path, name: str, value: Any, said: str
) -> None:
    with TraceWriter(tmp_path / "run", Header()) as writer:
        writer.add(name, value)
    verdict = judge_trace(problem, tmp_path / "run")
    assert verdict.verdict == "cannot-judge" and said in verdict.sentence


def test_a_trace_of_too_many_events_is_not_read(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = traced(tmp_path / "run", right(problem))
    monkeypatch.setattr(answers, "MOST_EVENTS", 3)
    assert "has 4 events, more than 3" in judge_trace(problem, folder).sentence


@pytest.mark.parametrize(
    ("shape", "cause"), [((2, 2, 3, 4), "broadcast"), ((2, 3, 3), "other-shape")]
)
def test_another_number_of_values_in_a_trace(
    problem: Problem, tmp_path: Path, shape: tuple[int, ...], cause: str
) -> None:
    xs = [np.zeros(shape), *right(problem)[1:]]
    verdict = judge_trace(problem, traced(tmp_path / "run", xs))
    assert verdict.verdict == "deviates" and verdict.step == 0
    assert verdict.findings[0].cause == cause and "missing or of another shape" in verdict.sentence


@pytest.mark.parametrize(
    ("changes", "verdict", "said"),
    [
        ({}, "cannot-judge", "the answer has no x. Its sigmas and timesteps are right"),
        ({"sigmas": lambda x: 2 * x}, "deviates", "Every sigma is 2 times the right one"),
        ({"sigmas": lambda x: x[::-1]}, "deviates", "the right one, backwards"),
        ({"sigmas": lambda x: x[1:-1]}, "deviates", "has 3 sigmas; 4 steps have 5"),
        ({"sigmas": lambda x: np.append(x, 0.0)}, "deviates", "has 6 sigmas; 4 steps have 5"),
        ({"timesteps": lambda x: x[1:]}, "deviates", "There are 3 timesteps for 4 steps"),
    ],
)
def test_tables_alone(
    problem: Problem, tmp_path: Path, changes: dict[str, Any], verdict: str, said: str
) -> None:
    with TraceWriter(tmp_path / "run", Header()) as writer:
        for name in ("sigmas", "timesteps"):
            table = np.array(getattr(problem, name))
            writer.add(f"schedule/{name}", changes.get(name, lambda x: x)(table), kind="schedule")
    found = judge_trace(problem, tmp_path / "run")
    assert found.verdict == verdict and said in found.sentence


@pytest.mark.parametrize("name", ["sigmas", "timesteps"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_tables_with_values_that_are_none(
    problem: Problem, tmp_path: Path, name: str, value: float
) -> None:
    tables = {"sigmas": list(problem.sigmas), "timesteps": list(problem.timesteps)}
    tables[name][1] = value
    with TraceWriter(tmp_path / "run", Header()) as writer:
        for each, table in tables.items():
            writer.add(f"schedule/{each}", np.array(table), kind="schedule")
        for step, x in enumerate(right(problem)):
            writer.add("sampler/x", x.astype(np.float32), step=step)
    verdict = judge_trace(problem, tmp_path / "run")
    assert verdict.verdict == "deviates" and verdict.step == 1 and "not finite" in verdict.sentence
    assert not verdict.findings and "No mistake known here" in verdict.sentence


def test_missing_and_surplus_steps(problem: Problem, tmp_path: Path) -> None:
    xs = right(problem)
    short = judge_trace(problem, traced(tmp_path / "short", xs[:2]))
    assert short.verdict == "deviates" and short.step == 2
    assert short.findings[-1].cause == "fewer-steps"
    long = judge_trace(problem, traced(tmp_path / "long", [*xs, xs[-1]]))
    assert long.verdict == "deviates" and long.step == 4
    assert long.findings[-1].cause == "more-steps"


def test_a_folder_that_is_no_trace(problem: Problem, tmp_path: Path) -> None:
    with pytest.raises(LyditeError, match="no trace\\.json"):
        judge_trace(problem, tmp_path)
