"""Answers as JSON: read as a trace would be, and refused in one line."""

import json
from itertools import permutations
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from lydite.conform.answers import DTYPES
from lydite.conform.judge import UNFINISHED, judge_path
from lydite.conform.make_problem import ProblemSpec, make_problem
from lydite.conform.problem import Problem
from lydite.conform.replay import plan_for, run
from lydite.core.errors import InputError
from lydite.trace.events import Header
from lydite.trace.writer import TraceWriter


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(ProblemSpec("heun", guidance=2.0, steps=4))


def written(folder: Path, **answer: object) -> Path:
    path = folder / "answer.json"
    path.write_text(json.dumps(answer))
    return path


def right(problem: Problem) -> "list[np.ndarray]":
    ours = run(plan_for(problem), np.float32)
    return [ours.x(step) for step in range(ours.steps)]


def test_a_right_answer_in_flat_lists_and_in_shape(problem: Problem, tmp_path: Path) -> None:
    for xs in ([x.ravel().tolist() for x in right(problem)], [x.tolist() for x in right(problem)]):
        verdict = judge_path(problem, written(tmp_path, x=xs))
        assert verdict.verdict == "conforms" and not verdict.remarks, verdict.sentence
    batch = judge_path(problem, written(tmp_path, x=[[x.tolist()] for x in right(problem)]))
    shape = (1, *problem.shape)
    assert batch.verdict == "conforms"
    assert batch.remarks == (f"x has shape {shape}, read as {problem.shape}",)


def test_values_of_calls_and_steps_that_ours_has_not_are_no_rows(
    problem: Problem, tmp_path: Path
) -> None:
    ours = run(plan_for(problem))
    sigma = [float(ours.values["sigma", step, 0]) for step in range(4)]
    xs = [x.tolist() for x in right(problem)]
    verdict = judge_path(problem, written(tmp_path, x=xs, sigma=[*sigma, 0.5, 0.25]))
    assert [row.step for row in verdict.rows if row.name == "sigma"] == [0, 1, 2, 3]
    verdict = judge_path(problem, written(tmp_path, x=[*xs, xs[-1]]))
    assert [row.step for row in verdict.rows if row.name == "x"] == [0, 1, 2, 3, 4]


def test_every_field_is_read(problem: Problem, tmp_path: Path) -> None:
    ours = run(plan_for(problem))
    fields = {
        name: [ours.values[name, step, 0].tolist() for step in range(4)]
        for name in ("sigma", "timestep", "model_input", "prediction", "denoised", "x")
    }
    tables = {"sigmas": problem.sigmas, "timesteps": problem.timesteps, "dtype": "f64"}
    verdict = judge_path(problem, written(tmp_path, **fields, **tables))
    assert verdict.verdict == "conforms" and not verdict.remarks
    assert {row.name for row in verdict.rows} == set(fields)


def test_a_trace_is_judged_in_the_coarsest_precision_of_its_x(tmp_path: Path) -> None:
    problem = make_problem(ProblemSpec("euler", denoiser="gaussian"))
    ours = run(plan_for(problem), np.float16)
    for complete in (True, False):
        writer = TraceWriter(tmp_path / f"complete-{complete}", Header())
        for step in range(ours.steps):
            writer.add("sampler/sigma", np.array(problem.sigmas[step]), step=step)
            writer.add("sampler/x", ours.x(step).astype(np.float16), step=step)
        writer.close(complete=complete)
        verdict = judge_path(problem, writer.folder)
        assert verdict.verdict == "conforms", verdict.sentence
        assert verdict.remarks == (() if complete else (UNFINISHED,))


@pytest.mark.parametrize("pair", [*permutations(DTYPES, 2)])
def test_x_in_two_precisions_has_the_limits_of_the_coarser(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    problem = make_problem(ProblemSpec("euler", denoiser="gaussian", steps=4))
    ours = run(plan_for(problem))
    limits: dict[str, float] = {}
    for names in (pair, pair[:1], pair[1:]):
        with TraceWriter(tmp_path / "-".join(names), Header()) as writer:
            for step in range(ours.steps):
                dtype = DTYPES[names[step % len(names)]]
                writer.add("sampler/x", ours.x(step).astype(dtype), step=step)
        verdict = judge_path(problem, writer.folder)
        assert verdict.verdict == "conforms", verdict.sentence
        limits[writer.folder.name] = max(row.limit for row in verdict.rows)
    both = limits.pop("-".join(pair))
    assert both == max(limits.values())


def test_what_else_is_recorded_coarsely_widens_no_limit_of_x(tmp_path: Path) -> None:
    problem = make_problem(ProblemSpec("euler", denoiser="gaussian"))
    ours = run(plan_for(problem))
    timesteps = np.array(problem.timesteps, ml_dtypes.bfloat16)
    for off in (0.0, 1e-3):
        with TraceWriter(tmp_path / f"off-{off}", Header()) as writer:
            if off:
                writer.add("schedule/timesteps", timesteps, kind="schedule")
            for step in range(ours.steps):
                values = {"denoised": ours.values["denoised", step, 0], "x": ours.x(step) + off}
                for name, value in values.items():
                    coarse = np.float32 if name == "x" else ml_dtypes.bfloat16
                    writer.add(f"sampler/{name}", value.astype(coarse), step=step)
        verdict = judge_path(problem, writer.folder)
        assert verdict.verdict == ("deviates" if off else "conforms"), verdict.sentence
        limits = [row.limit for row in verdict.rows if row.name == "x"]
        assert max(limits) < 1e-4


@pytest.mark.parametrize(("model", "off"), [("sd15", 0.1), ("edm", 1e-4), ("cosmos", 1e-4)])
def test_a_wrong_timestep_is_seen_whatever_its_range(
    model: str, off: float, tmp_path: Path
) -> None:
    problem = make_problem(ProblemSpec(None, model=model, steps=4))
    for wrong, expected in ((0.0, "conforms"), (off, "deviates")):
        timesteps = [timestep + wrong for timestep in problem.timesteps]
        answer = written(tmp_path, sigmas=problem.sigmas, timesteps=timesteps)
        assert judge_path(problem, answer).verdict == expected


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
def test_an_error_counts_from_its_limit_on(dtype: str, tmp_path: Path) -> None:
    problem = make_problem(ProblemSpec("euler", denoiser="gaussian", steps=4))
    ours = run(plan_for(problem))
    xs = [ours.x(step) for step in range(4)]
    clean = judge_path(problem, written(tmp_path, x=[x.tolist() for x in xs], dtype=dtype))
    limit = {row.step: row.limit for row in clean.rows if row.name == "x"}[1]
    size = max(1.0, float(np.abs(xs[1]).max()))
    for share, verdict in ((0.9, "conforms"), (1.1, "deviates")):
        moved = [x + share * limit * size * (step == 1) for step, x in enumerate(xs)]
        answer = written(tmp_path, x=[x.tolist() for x in moved], dtype=dtype)
        found = judge_path(problem, answer)
        assert found.verdict == verdict and found.step == (1 if share > 1 else None)
        assert found.error == pytest.approx(share * limit, rel=0.01)  # the largest
        assert f"{found.error:.1e}" in found.sentence


def test_x_before_each_step_is_read_as_such(problem: Problem, tmp_path: Path) -> None:
    xs = [problem.start(), *right(problem)]
    verdict = judge_path(problem, written(tmp_path, x=[x.tolist() for x in xs]))
    assert verdict.verdict == "conforms" and "before each step" in verdict.remarks[0]
    for dtype in ("bf16", "f16"):
        xs[0] = problem.start().astype(DTYPES[dtype]).astype(float)
        answer = written(tmp_path, x=[x.tolist() for x in xs], dtype=dtype)
        verdict = judge_path(problem, answer)
        assert verdict.verdict == "conforms" and "before each step" in verdict.remarks[0]
    xs[0] = problem.start() * 1.01
    assert judge_path(problem, written(tmp_path, x=[x.tolist() for x in xs])).verdict == "deviates"


@pytest.mark.parametrize(("steps", "than"), [(3, "fewer"), (6, "more")])
def test_another_number_of_steps_is_said(
    problem: Problem, tmp_path: Path, steps: int, than: str
) -> None:
    xs = [x.tolist() for x in [*right(problem), *right(problem)][:steps]]
    findings = judge_path(problem, written(tmp_path, x=xs)).findings
    evidence = {finding.cause: finding.evidence for finding in findings}[f"{than}-steps"]
    assert f"wrote {steps} steps, {than} than the 4 of" in evidence


def test_a_value_on_the_way_is_a_remark_where_x_is_right(problem: Problem, tmp_path: Path) -> None:
    ours = run(plan_for(problem))
    inputs = [ours.values["model_input", step, 0] + 0.5 for step in range(4)]
    xs = [x.tolist() for x in right(problem)]
    verdict = judge_path(problem, written(tmp_path, x=xs, model_input=[x.tolist() for x in inputs]))
    assert verdict.verdict == "conforms" and "sampler/model_input of step 0" in verdict.remarks[0]
    for name, values in (("sigma", problem.sigmas), ("timestep", problem.timesteps)):
        wrong = [value * 1.01 for value in values[:4]]
        found = judge_path(problem, written(tmp_path, x=xs, **{name: wrong}))
        assert (found.verdict, found.step) == (
            "deviates",
            0,
        ) and f"{name} of step 0" in found.sentence


def test_a_wrong_answer_is_explained(problem: Problem, tmp_path: Path) -> None:
    xs = [x.tolist() for x in right(make_problem(ProblemSpec("euler", guidance=2.0, steps=4)))]
    verdict = judge_path(problem, written(tmp_path, x=xs))
    assert verdict.findings[0].cause == "is-euler" and verdict.exit_code == 1


def test_null_is_a_number_that_is_not_finite(problem: Problem, tmp_path: Path) -> None:
    xs = [x.ravel().tolist() for x in right(problem)]
    xs[2][5] = None
    verdict = judge_path(problem, written(tmp_path, x=xs))
    assert verdict.step == 2 and "x of step 2 is not finite" in verdict.sentence


@pytest.mark.parametrize(("count", "cause"), [(2, "other-shape"), (36, "other-shape"),
                                              (48, "broadcast")])  # fmt: skip
def test_another_number_of_values(problem: Problem, tmp_path: Path, count: int, cause: str) -> None:
    verdict = judge_path(problem, written(tmp_path, x=[[0.0] * count] * 4))
    assert verdict.findings[0].cause == cause and verdict.exit_code == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "truncated"),
        ("{", "truncated"),
        ("[]", "got `array`"),
        ('{"xs": []}', "unknown field `xs`"),
        ('{"x": []}', "nothing to judge"),
        ("{}", "nothing to judge"),
        ('{"x": ["a"]}', "x of step 0 is no list of numbers"),
        ('{"x": [[1, [2]]]}', "uneven lists"),
        ('{"x": [NaN]}', "null"),
        ('{"x": 1e999}', "out of range"),
        ('{"dtype": "f8"}', "dtype"),
        ('{"sigmas": [null]}', "sigmas"),
        ("\udcff", "answer.json"),
        ('{"x": ' + "[" * 100_000, "answer.json"),
    ],
)
def test_what_is_no_answer(problem: Problem, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "answer.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InputError) as error:
        judge_path(problem, path)
    message = str(error.value)
    assert "answer.json" in message and said in message and "\n" not in message


def test_nothing_there(problem: Problem, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not there\. Expected an answer"):
        judge_path(problem, tmp_path / "missing")
