"""What the judge says beyond one mistake in a whole run: two, in one step, in a table, unknown."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from lydite.conform.candidate import Candidate
from lydite.conform.judge import judge
from lydite.conform.pose import Asked, pose
from lydite.sampling.schedules.table import alphas_cumprod, betas, noise_table

from .planted import Port, candidate, named, plain

STABLE_DIFFUSION_ALPHAS = alphas_cumprod(betas("scaled_linear", 0.00085, 0.012))
SD15, SD3 = Asked("euler", guidance=3.0), Asked("euler", model="sd3", guidance=3.0)


def test_a_fraction_where_whole_timesteps_are_meant(tmp_path: Path) -> None:
    problem = pose(SD15, noise_table(STABLE_DIFFUSION_ALPHAS, rule="round"))
    p = plain(problem, tmp_path)
    assert judge(problem, candidate(Port(p).run())).verdict == "conforms"
    verdict = judge(problem, candidate(Port(p, "timestep-interpolated").run()))
    assert verdict.findings[0].cause == "timestep-interpolated"


def test_another_option_is_named(tmp_path: Path) -> None:
    problem = pose(Asked("euler_ancestral", options={"eta": 0.0}))
    ours = pose(Asked("euler_ancestral"))
    port = Port(plain(ours, tmp_path)).run()
    verdict = judge(msgspec.structs.replace(problem, normals=ours.normals), candidate(port))
    assert verdict.findings[0].cause == "other-option"
    assert "eta = 1.0 instead of 0.0" in verdict.findings[0].evidence


@pytest.mark.parametrize("bug", ["no-c-in", "scaled-latent-in-denoised", "denoised-as-derivative"])
def test_other_denoisers_and_no_guidance(bug: str, tmp_path: Path) -> None:
    assert named(Asked("euler", denoiser="gaussian"), bug, tmp_path).findings[0].cause == bug
    assert named(Asked("euler", steps=2), bug, tmp_path).findings[0].cause == bug
    assert named(Asked("euler", steps=30, guidance=7.5), bug, tmp_path).findings[0].cause == bug


def test_two_mistakes_at_once_are_both_named(tmp_path: Path) -> None:
    problem = pose(SD15)
    p = plain(problem, tmp_path)

    class Both(Port):
        def timestep(self, sigma: float, step: int) -> float:
            return sigma

    verdict = judge(problem, candidate(Both(p, "no-c-in").run()))
    assert verdict.findings[0].cause == "no-c-in+sigma-for-timestep"


def test_a_mistake_in_one_step_is_found_there(tmp_path: Path) -> None:
    problem = pose(SD15)

    class Last(Port):
        def denoise(self, x: np.ndarray, sigma: float, step: int) -> np.ndarray:
            self.bug = "no-c-in" if step == 7 else ""
            return super().denoise(x, sigma, step)

    verdict = judge(problem, candidate(Last(plain(problem, tmp_path)).run()))
    assert verdict.step == 7 and verdict.findings[0].cause == "no-c-in"
    assert "step 7 alone" in verdict.findings[0].evidence


def test_a_mistake_nobody_knows_is_not_given_a_name(tmp_path: Path) -> None:
    problem = pose(SD15)

    class Odd(Port):
        def denoise(self, x: np.ndarray, sigma: float, step: int) -> np.ndarray:
            return super().denoise(x, sigma, step) * np.float32(1.01)

    verdict = judge(problem, candidate(Odd(plain(problem, tmp_path)).run()))
    assert verdict.verdict == "deviates" and verdict.step == 0 and not verdict.findings
    assert "No mistake known" in verdict.sentence


def test_timesteps_that_are_written_down_have_to_fit_too(tmp_path: Path) -> None:
    problem = pose(SD15)
    port = Port(plain(problem, tmp_path), "timestep-truncated").run()
    verdict = judge(problem, candidate(port, timesteps=True))
    assert verdict.findings[0].cause == "timestep-truncated"
    assert next(row for row in verdict.rows if row.wrong).name == "timestep"


@pytest.mark.parametrize("bug", ["karras-one-more", "last-step-dropped", "is-schedule-exponential"])
def test_a_table_alone_is_enough(bug: str, tmp_path: Path) -> None:
    problem = pose(SD15)
    table = np.array(Port(plain(problem, tmp_path), bug).sigmas())
    verdict = judge(problem, Candidate({}, {"sigmas": table}, "f32", complete=True))
    assert verdict.verdict == "deviates" and verdict.findings[0].cause == bug


@pytest.mark.parametrize("bug", ["shifted-twice", "not-shifted"])
def test_a_shift_in_a_table(bug: str, tmp_path: Path) -> None:
    problem = pose(SD3)
    table = np.array(Port(plain(problem, tmp_path), bug).sigmas())
    verdict = judge(problem, Candidate({}, {"sigmas": table}, "f32", complete=True))
    assert verdict.findings[0].cause == bug


@pytest.mark.parametrize("bug", ["stale-timesteps", "sigma-for-timestep", "timestep-truncated"])
def test_a_table_of_timesteps(bug: str, tmp_path: Path) -> None:
    problem = pose(SD15)
    port = Port(plain(problem, tmp_path), bug)
    told = [port.timestep(sigma, i) for i, sigma in enumerate(problem.sigmas[:-1])]
    verdict = judge(problem, Candidate({}, {"timesteps": np.array(told)}, "f32", complete=True))
    assert verdict.findings[0].cause == bug


def test_tables_backwards_and_scaled() -> None:
    problem = pose(SD15)
    right = np.array(problem.sigmas)
    for table, cause in (
        (right[::-1], "reversed"),
        (right * 2, "scaled"),
        (right[:4], "other-length"),
    ):
        verdict = judge(problem, Candidate({}, {"sigmas": table}, "f32", complete=True))
        assert verdict.findings[0].cause == cause
