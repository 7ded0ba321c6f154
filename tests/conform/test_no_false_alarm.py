"""Right samplers are never called wrong: ours and k-diffusion's own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.conform.answers import DTYPES, Candidate
from lydite.conform.judge import judge
from lydite.conform.make_problem import DENOISERS, ProblemSpec, make_problem
from lydite.conform.problem import Problem
from lydite.conform.replay import plan_for, run
from lydite.conform.result import Verdict
from lydite.sampling.registry import SAMPLERS, SCHEDULES

from .planted import margin, written

GOLDEN = Path(__file__).parents[1] / "sampling" / "golden"
MODELS = ("sd15", "sd3")
NOISE_MODEL = {"sd15": "ve", "sd3": "flow"}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_ours_in_float32(name: str, model: str) -> None:
    sampler = SAMPLERS[name]
    if NOISE_MODEL[model] not in sampler.noise_models:
        pytest.skip("not of this noise model")
    for steps in (1, 2, 7):
        problem = make_problem(
            ProblemSpec(name, model=model, steps=steps, guidance=3.0, seed=steps)
        )
        ours = run(plan_for(problem), np.float32)
        verdict = judge(problem, written([ours.x(step) for step in range(ours.steps)]))
        assert verdict.verdict == "conforms", verdict.sentence


@pytest.mark.parametrize("name", SCHEDULES)
def test_ours_on_every_schedule(name: str) -> None:
    for model in MODELS:
        if NOISE_MODEL[model] in SCHEDULES[name].noise_models and not SCHEDULES[name].needs:
            problem = make_problem(ProblemSpec(None, name, model=model, steps=5))
            tables = {
                "sigmas": np.array(problem.sigmas, np.float32).astype(np.float64),
                "timesteps": np.array(problem.timesteps, np.float32).astype(np.float64),
            }
            assert judge(problem, Candidate({}, tables, "f32", True)).verdict == "conforms"


# --- k-diffusion, from the numbers it left

FACTS: dict[str, Any] = json.loads((GOLDEN / "k_diffusion.json").read_text())
THEIRS: dict[str, np.ndarray] = dict(np.load(GOLDEN / "k_diffusion.npz"))


@pytest.mark.parametrize("kind", FACTS["denoisers"])
@pytest.mark.parametrize("name", [key[5:] for key in THEIRS if key.startswith("path/")])
def test_k_diffusion(name: str, kind: str) -> None:
    path = THEIRS[f"path/{name}"][FACTS["denoisers"].index(kind)]  # before each step, and the end
    problem = k_problem(name, kind, k_sigmas("karras", FACTS["path_steps"]), {})
    verdict = judge(problem, written(list(path[1:])))
    assert verdict.verdict == "conforms", verdict.sentence
    assert margin(verdict) < 0.5
    assert judge(problem, written(list(path))).verdict == "conforms"  # the start first, as written


def k_problem(name: str, kind: str, sigmas: np.ndarray, options: dict[str, Any]) -> Problem:
    start = THEIRS["start"].astype(np.float64)
    return Problem(
        name,
        "ve",
        "denoised",
        tuple(sigmas.astype(np.float64).tolist()),
        (0.0,) * (len(sigmas) - 1),
        start.shape,
        tuple((start / sigmas[0]).ravel().tolist()),
        tuple(start.ravel().tolist()),
        DENOISERS[kind],
        options=options,
        normals=tuple(tuple(each.ravel().tolist()) for each in THEIRS["noise"].astype(np.float64)),
    )


def k_sigmas(spacing: str, steps: int) -> np.ndarray:
    before = sum(n + 1 for n in FACTS["steps"][: FACTS["steps"].index(steps)])
    return THEIRS[f"sigmas/{spacing}"][before : before + steps + 1]


def ending(problem: Problem, theirs: np.ndarray) -> Verdict:
    """On our run in float32 with its last x replaced by theirs: of these runs no more is known."""
    ours = run(plan_for(problem), np.float32)
    return judge(problem, written([*(ours.x(step) for step in range(ours.steps - 1)), theirs]))


@pytest.mark.parametrize("precision", ["single", "double"])
@pytest.mark.parametrize("name", [key[7:] for key in THEIRS if key.startswith("single/")])
def test_where_k_diffusion_ends(name: str, precision: str) -> None:
    ends = THEIRS[f"{precision}/{name}"]
    for row, kind in enumerate(FACTS["denoisers"]):
        for column, spacing in enumerate(FACTS["schedules"]):
            for place, steps in enumerate(FACTS["steps"]):
                if f"{name}/{steps}" in FACTS["fails"] or (name, steps) == ("dpm_fast", 1):
                    continue  # it crashes there, or returns its noise
                problem = k_problem(name, kind, k_sigmas(spacing, steps), {})
                verdict = ending(problem, ends[row, column, place])
                assert verdict.verdict == "conforms", f"{steps} steps: {verdict.sentence}"


@pytest.mark.parametrize(
    ("name", "label"),
    [(n, label) for n, labels in FACTS["options"].items() for label in labels if label != "churn"],
)
def test_where_k_diffusion_ends_with_options(name: str, label: str) -> None:
    options = FACTS["options"][name][label]
    if options.get("eta") and SAMPLERS[name].noise == "none":
        pytest.skip("noise is an option of it here, and a problem has none for it")
    problem = k_problem(name, "mixture", k_sigmas("karras", FACTS["path_steps"]), options)
    verdict = ending(problem, THEIRS[f"options/{name}/{label}"])
    assert verdict.verdict == "conforms", verdict.sentence


def test_a_float64_candidate_is_judged_as_a_float32_one() -> None:
    problem = make_problem(ProblemSpec("heun", guidance=3.0))
    ours = run(plan_for(problem))
    xs = [ours.x(step).astype(np.float32) for step in range(ours.steps)]
    assert judge(problem, written(xs, "f64")).verdict == "conforms"


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_narrow_candidates_have_a_wider_floor(dtype: str) -> None:
    problem = make_problem(ProblemSpec("euler", denoiser="gaussian"))
    ours = run(plan_for(problem), DTYPES[dtype])
    xs = [ours.x(step) for step in range(ours.steps)]
    assert judge(problem, written(xs, dtype)).verdict == "conforms"
    assert judge(problem, written(xs, "f32")).verdict == "deviates"
