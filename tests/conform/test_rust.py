"""The Rust example through the same door."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lydite.conform.judge import judge_trace
from lydite.conform.pose import Asked, pose
from lydite.conform.problem import write_problem

RUST = Path(__file__).parents[2] / "examples/rust"


@pytest.mark.skipif(not shutil.which("rustc"), reason="no rustc")
def test_the_rust_example_conforms(tmp_path: Path) -> None:
    program = tmp_path / "sampler"
    command = ["rustc", "--edition", "2021", "-D", "warnings", "-o", program, RUST / "sampler.rs"]
    subprocess.run(command, check=True, timeout=300)
    for asked in (Asked(), Asked(denoiser="gaussian"), Asked(model="sd3", steps=20)):
        problem, folder = pose(asked), tmp_path / f"{asked.model}-{asked.denoiser}"
        write_problem(tmp_path / "problem.json", problem)
        subprocess.run(
            [program, tmp_path / "problem.json"],
            check=True,
            timeout=60,
            env=os.environ | {"LYDITE_TRACE": str(folder)},
        )
        verdict = judge_trace(problem, folder)
        assert verdict.verdict == "conforms", verdict.sentence
