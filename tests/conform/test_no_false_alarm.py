"""Right samplers are never called wrong: ours and k-diffusion's own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.conform.candidate import DTYPES, Candidate
from lydite.conform.judge import judge
from lydite.conform.pose import DENOISERS, Asked, pose
from lydite.conform.problem import Problem
from lydite.conform.replay import plan_for, run
from lydite.sampling.samplers import SAMPLERS
from lydite.sampling.schedules import SCHEDULES

from .planted import margin, written

GOLDEN = Path(__file__).parents[1] / "sampling" / "golden"
MODELS = ("sd15", "sd3")
LAW = {"sd15": "ve", "sd3": "flow"}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_ours_in_float32(name: str, model: str) -> None:
    sampler = SAMPLERS[name]
    if LAW[model] not in sampler.laws:
        pytest.skip("not of this law")
    for steps in (1, 2, 7):
        problem = pose(Asked(name, model=model, steps=steps, guidance=3.0, seed=steps))
        ours = run(plan_for(problem), np.float32)
        verdict = judge(problem, written([ours.x(step) for step in range(ours.steps)]))
        assert verdict.verdict == "conforms", verdict.sentence


@pytest.mark.parametrize("name", SCHEDULES)
def test_ours_on_every_schedule(name: str) -> None:
    for model in MODELS:
        if LAW[model] in SCHEDULES[name].laws and not SCHEDULES[name].needs:
            problem = pose(Asked(schedule=name, model=model, steps=5))
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
    before = sum(n + 1 for n in FACTS["steps"][: FACTS["steps"].index(FACTS["path_steps"])])
    sigmas = THEIRS["sigmas/karras"][before : before + FACTS["path_steps"] + 1]
    start = THEIRS["start"].astype(np.float64)
    problem = Problem(
        name,
        "ve",
        "denoised",
        tuple(sigmas.astype(np.float64).tolist()),
        (0.0,) * FACTS["path_steps"],
        start.shape,
        tuple((start / sigmas[0]).ravel().tolist()),
        tuple(start.ravel().tolist()),
        DENOISERS[kind],
        normals=tuple(tuple(each.ravel().tolist()) for each in THEIRS["noise"].astype(np.float64)),
    )
    verdict = judge(problem, written(list(path[1:])))
    assert verdict.verdict == "conforms", verdict.sentence
    assert margin(verdict) < 0.5
    assert judge(problem, written(list(path))).verdict == "conforms"  # the start first, as written


def test_a_float64_candidate_is_judged_as_a_float32_one() -> None:
    problem = pose(Asked("heun", guidance=3.0))
    ours = run(plan_for(problem))
    xs = [ours.x(step).astype(np.float32) for step in range(ours.steps)]
    assert judge(problem, written(xs, "f64")).verdict == "conforms"


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_narrow_candidates_have_a_wider_floor(dtype: str) -> None:
    problem = pose(Asked("euler", denoiser="gaussian"))
    ours = run(plan_for(problem), DTYPES[dtype])
    xs = [ours.x(step) for step in range(ours.steps)]
    assert judge(problem, written(xs, dtype)).verdict == "conforms"
    assert judge(problem, written(xs, "f32")).verdict == "deviates"
