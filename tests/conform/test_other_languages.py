"""The examples in Rust and JavaScript through the same door."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lydite.conform.judge import judge_path, judge_trace
from lydite.conform.make_problem import ProblemSpec, make_problem
from lydite.conform.problem import write_problem

EXAMPLES = Path(__file__).parents[2] / "examples"
RUST = EXAMPLES / "rust"


@pytest.mark.skipif(not shutil.which("rustc"), reason="no rustc")
def test_the_rust_example_conforms(tmp_path: Path) -> None:
    program = tmp_path / "sampler"
    command = ["rustc", "--edition", "2021", "-D", "warnings", "-o", program, RUST / "sampler.rs"]
    subprocess.run(command, check=True, timeout=300)
    for asked in (
        ProblemSpec(),
        ProblemSpec(denoiser="gaussian"),
        ProblemSpec(model="sd3", steps=20),
    ):
        problem, folder = make_problem(asked), tmp_path / f"{asked.model}-{asked.denoiser}"
        write_problem(tmp_path / "problem.json", problem, overwrite=True)
        subprocess.run(
            [program, tmp_path / "problem.json"],
            check=True,
            timeout=60,
            env=os.environ | {"LYDITE_TRACE": str(folder)},
        )
        verdict = judge_trace(problem, folder)
        assert verdict.verdict == "conforms", verdict.sentence


@pytest.mark.skipif(not shutil.which("node"), reason="no node")
@pytest.mark.parametrize(
    "asked",
    [
        ProblemSpec(guidance=3.0),
        ProblemSpec(prediction="v", denoiser="gaussian"),
        ProblemSpec(model="sd3", steps=20),
    ],
)
def test_the_javascript_example_conforms(asked: ProblemSpec, tmp_path: Path) -> None:
    problem, path, answer = make_problem(asked), tmp_path / "problem.json", tmp_path / "answer.json"
    write_problem(path, problem)
    program = EXAMPLES / "sampler_candidate.js"
    subprocess.run(["node", program, path, answer], check=True, timeout=60)
    verdict = judge_path(problem, answer)
    assert verdict.verdict == "conforms", verdict.sentence
