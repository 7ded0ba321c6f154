"""What the judge says beyond one mistake in a whole run: two, in one step, in a table, unknown."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lydite.conform.answers import Candidate
from lydite.conform.judge import judge
from lydite.conform.make_problem import ProblemSpec, make_problem
from lydite.conform.mistakes import PLANTED
from lydite.conform.replay import plan_for, restarted, run
from lydite.sampling.registry import SAMPLERS
from lydite.sampling.schedules.table import alphas_cumprod, betas, noise_table

from .planted import candidate, named, plain, written
from .port import Port

STABLE_DIFFUSION_ALPHAS = alphas_cumprod(betas("scaled_linear", 0.00085, 0.012))
SD15, SD3 = ProblemSpec("euler", guidance=3.0), ProblemSpec("euler", model="sd3", guidance=3.0)


def test_a_fraction_where_whole_timesteps_are_meant(tmp_path: Path) -> None:
    problem = make_problem(SD15, noise_table(STABLE_DIFFUSION_ALPHAS, rule="round"))
    p = plain(problem, tmp_path)
    assert judge(problem, candidate(Port(p).run())).verdict == "conforms"
    verdict = judge(problem, candidate(Port(p, "timestep-interpolated").run()))
    assert verdict.findings[0].cause == "timestep-interpolated"


def test_another_option_is_named(tmp_path: Path) -> None:
    problem = make_problem(ProblemSpec("euler_ancestral", options={"eta": 0.0}))
    ours = make_problem(ProblemSpec("euler_ancestral"))
    port = Port(plain(ours, tmp_path)).run()
    verdict = judge(msgspec.structs.replace(problem, normals=ours.normals), candidate(port))
    assert verdict.findings[0].cause == "other-option"
    assert "eta = 1.0 instead of 0.0" in verdict.findings[0].evidence


SAME = {  # on these problems, and what is said first
    "ddpm": "is-euler_ancestral",
    "ddim_cfg_pp": "is-euler_cfg_pp",
    "res_multistep_ancestral": "is-dpmpp_2m_sde_heun",
    "restart": "is-heun",
}
EULER_TOO = ("euler", "ddim", "ddim_inverse")


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name not in EULER_TOO])
def test_another_sampler_of_the_registry_is_named(name: str) -> None:
    random = SAMPLERS[name].noise != "none"
    asked_for = "dpmpp_sde" if random else "euler"
    if name in ("dpmpp_sde", asked_for):
        return
    problem, other = (
        make_problem(ProblemSpec(asked_for, guidance=3.0)),
        make_problem(ProblemSpec(name, guidance=3.0)),
    )
    normals = max(problem.normals, other.normals, key=len)
    problem, other = (msgspec.structs.replace(each, normals=normals) for each in (problem, other))
    ran = run(plan_for(other), np.float32)
    verdict = judge(problem, written([ran.x(step) for step in range(ran.steps)]))
    assert verdict.findings[0].cause == SAME.get(name, f"is-{name}")
    assert name in verdict.findings[0].evidence


def test_a_method_that_forgets_may_have_a_name() -> None:
    problem = make_problem(ProblemSpec("dpmpp_2m_sde", guidance=3.0))
    ran = run(plan_for(msgspec.structs.replace(problem, sampler="ddpm")), np.float32)
    verdict = judge(problem, written([ran.x(step) for step in range(ran.steps)]))
    causes = [finding.cause for finding in verdict.findings]
    assert causes == ["history-dropped", "is-euler_ancestral"]
    assert "or ddpm" in verdict.findings[1].evidence


def test_what_overflows_is_explained_by_the_steps_before(tmp_path: Path) -> None:
    problem = make_problem(ProblemSpec("euler", steps=20, model="edm", denoiser="identity"))
    with np.errstate(all="ignore"):
        port = Port(plain(problem, tmp_path), "sigma-for-timestep").run()
    assert not np.isfinite(port.xs[-1]).all()
    verdict = judge(problem, candidate(port))
    assert verdict.findings[0].cause == "sigma-for-timestep"
    assert "before it overflows" in verdict.findings[0].evidence


def test_what_was_never_finite_is_called_so() -> None:
    problem = make_problem(SD15)
    verdict = judge(problem, written([np.full(problem.shape, np.nan)] * problem.steps))
    assert verdict.verdict == "deviates" and "x of step 0 is not finite" in verdict.sentence


@pytest.mark.parametrize("bug", ["no-c-in", "scaled-latent-in-denoised", "denoised-as-derivative"])
def test_other_denoisers_and_no_guidance(bug: str, tmp_path: Path) -> None:
    assert named(ProblemSpec("euler", denoiser="gaussian"), bug, tmp_path).findings[0].cause == bug
    assert named(ProblemSpec("euler", steps=2), bug, tmp_path).findings[0].cause == bug
    assert (
        named(ProblemSpec("euler", steps=30, guidance=7.5), bug, tmp_path).findings[0].cause == bug
    )


def test_two_mistakes_at_once_are_both_named(tmp_path: Path) -> None:
    problem = make_problem(SD15)
    p = plain(problem, tmp_path)

    class Both(Port):
        def timestep(self, sigma: float, step: int) -> float:
            return sigma

    verdict = judge(problem, candidate(Both(p, "no-c-in").run()))
    assert verdict.findings[0].cause == "no-c-in+sigma-for-timestep"


def test_a_mistake_in_one_step_is_found_there(tmp_path: Path) -> None:
    problem = make_problem(SD15)

    class Last(Port):
        def denoise(self, x: np.ndarray, sigma: float, step: int) -> np.ndarray:
            self.bug = "no-c-in" if step == 7 else ""
            return super().denoise(x, sigma, step)

    verdict = judge(problem, candidate(Last(plain(problem, tmp_path)).run()))
    assert verdict.step == 7 and verdict.findings[0].cause == "no-c-in"
    assert "step 7 alone" in verdict.findings[0].evidence
    says = {mistake.says for mistake in PLANTED if mistake.cause == "no-c-in"}
    assert any(f"The candidate {each}, in" in verdict.findings[0].evidence for each in says)


def test_a_mistake_nobody_knows_is_not_given_a_name(tmp_path: Path) -> None:
    problem = make_problem(SD15)

    class Odd(Port):
        def denoise(self, x: np.ndarray, sigma: float, step: int) -> np.ndarray:
            return super().denoise(x, sigma, step) * np.float32(1.01)

    verdict = judge(problem, candidate(Odd(plain(problem, tmp_path)).run()))
    assert verdict.verdict == "deviates" and verdict.step == 0 and not verdict.findings
    assert "No mistake known" in verdict.sentence


def test_timesteps_that_are_written_down_have_to_fit_too(tmp_path: Path) -> None:
    problem = make_problem(SD15)
    port = Port(plain(problem, tmp_path), "timestep-truncated").run()
    verdict = judge(problem, candidate(port, timesteps=True))
    assert verdict.findings[0].cause == "timestep-truncated"
    assert next(row for row in verdict.rows if row.wrong).name == "timestep"


@pytest.mark.parametrize("bug", ["karras-one-more", "last-step-dropped", "is-schedule-exponential"])
def test_a_table_alone_is_enough(bug: str, tmp_path: Path) -> None:
    problem = make_problem(SD15)
    table = np.array(Port(plain(problem, tmp_path), bug).sigmas())
    verdict = judge(problem, Candidate({}, {"sigmas": table}, "f32", complete=True))
    assert verdict.verdict == "deviates" and verdict.findings[0].cause == bug


@pytest.mark.parametrize("bug", ["shifted-twice", "not-shifted"])
def test_a_shift_in_a_table(bug: str, tmp_path: Path) -> None:
    problem = make_problem(SD3)
    table = np.array(Port(plain(problem, tmp_path), bug).sigmas())
    verdict = judge(problem, Candidate({}, {"sigmas": table}, "f32", complete=True))
    assert verdict.findings[0].cause == bug


@pytest.mark.parametrize("bug", ["stale-timesteps", "sigma-for-timestep", "timestep-truncated"])
def test_a_table_of_timesteps(bug: str, tmp_path: Path) -> None:
    problem = make_problem(SD15)
    port = Port(plain(problem, tmp_path), bug)
    told = [port.timestep(sigma, i) for i, sigma in enumerate(problem.sigmas[:-1])]
    verdict = judge(problem, Candidate({}, {"timesteps": np.array(told)}, "f32", complete=True))
    assert verdict.findings[0].cause == bug


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [("leading", {"offset": 0}), ("karras", {"rho": 5.0}), ("normal", {"double_shift": True})],
)
def test_another_setting_of_the_schedule_is_named(schedule: str, settings: Any) -> None:
    model = "sd3" if "double_shift" in settings else "sd15"
    problem = make_problem(ProblemSpec("euler", schedule, model=model, guidance=3.0))
    other = make_problem(
        ProblemSpec("euler", schedule, model=model, guidance=3.0, settings=settings)
    )
    ran = run(plan_for(msgspec.structs.replace(other, x=problem.x)), np.float32)
    tables = {"sigmas": np.array(other.sigmas), "timesteps": np.array(other.timesteps)}
    for found in (
        judge(problem, written([ran.x(step) for step in range(ran.steps)])),
        judge(problem, Candidate({}, tables, "f32", complete=True)),
    ):
        name, value = next(iter(settings.items()))
        assert found.findings[0].cause == "other-setting", found.sentence
        assert f"with {name} = {value} instead of" in found.sentence


def test_a_schedule_without_a_table_is_named(tmp_path: Path) -> None:
    problem = make_problem(ProblemSpec("euler", "karras", model="edm", guidance=3.0))
    other = make_problem(ProblemSpec("euler", "beta_sigmas", model="edm", guidance=3.0))
    verdict = judge(problem, candidate(Port(plain(other, tmp_path)).run()))
    assert verdict.findings[0].cause == "is-schedule-beta_sigmas"


def test_tables_backwards_and_scaled() -> None:
    problem = make_problem(SD15)
    right = np.array(problem.sigmas)
    for table, cause in (
        (right[::-1], "reversed"),
        (right * 2, "scaled"),
        (right[:4], "other-length"),
    ):
        verdict = judge(problem, Candidate({}, {"sigmas": table}, "f32", complete=True))
        assert verdict.findings[0].cause == cause


@pytest.mark.parametrize(
    ("sampler", "wrong", "says", "fix"),
    [
        ("euler", (0, 1, 2), "every step but the last", "what depends on the next sigma"),
        ("heun", (0, 1, 2), "every step but the last", "of their second call"),
        ("euler", (1,), "step 1 would", "the first or the last step, a branch"),
        ("heun", (0, 3), "steps 0, 3 would", "the first or the last step, a branch"),
    ],
)
def test_steps_that_are_wrong_by_themselves_are_listed(
    sampler: str, wrong: tuple[int, ...], says: str, fix: str
) -> None:
    problem = make_problem(ProblemSpec(sampler, denoiser="gaussian", steps=4))
    plan = plan_for(problem)
    xs = [problem.start()] * 4
    for step in range(4):  # each from the one before it, as the candidate has it
        moved = np.random.default_rng(step).uniform(0.01, 0.02, problem.shape)
        xs[step] = run(restarted(plan, xs)).x(step) + moved * (step in wrong)
    values = {("x", step, 0): x for step, x in enumerate(xs)}
    (finding,) = judge(problem, Candidate(values, {}, "f32", True)).findings
    assert finding.cause == "some-steps"
    assert says in finding.evidence and fix in finding.fix
