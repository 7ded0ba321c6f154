"""ComfyUI's samplers are never called wrong, from the numbers that tools/record_comfyui.py kept."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.conform.judge import judge
from lydite.conform.problem import Denoiser, Guidance, Problem
from lydite.conform.replay import plan_for, run
from lydite.conform.result import Verdict
from lydite.sampling.registry import SAMPLERS

from .planted import written

GOLDEN = Path(__file__).parents[1] / "sampling" / "golden"
FACTS: dict[str, Any] = json.loads((GOLDEN / "comfyui.json").read_text())
THEIRS: dict[str, np.ndarray] = dict(np.load(GOLDEN / "comfyui.npz"))
SCHEDULES = ("1", "2", "3", "4", "7", "20", "part")
RANDOM_FLOWS = ("dpmpp_sde", "dpmpp_2m_sde", "dpmpp_2m_sde_heun", "dpmpp_3m_sde")
OPTIONS: dict[str, dict[str, Any]] = {  # where ComfyUI's way is an option of ours
    "lms": {"euler_at_end": True},
    "ipndm": {"end": "denoised"},
}
LAST = ("ipndm", "ipndm_v", "deis")  # ComfyUI's callback there is late: only the end is the end
NAMES = {"deis": "deis_tab"}  # ours, where it is another
TAU = "its tau goes by the end of a step, and a function is no option of a problem"
RESCALED = "it ends at 0.001, and rescales x there"
NOT_FED = {
    "sa_solver/ve": TAU,
    "sa_solver/flow": TAU,
    "sa_solver_pece/ve": TAU,
    "sa_solver_pece/flow": TAU,
    "uni_pc/ve": RESCALED,
    "uni_pc/flow": RESCALED,
    "uni_pc_bh2/ve": RESCALED,
    "uni_pc_bh2/flow": RESCALED,
    "dpmpp_2m/flow": "it takes a flow model for one of the noise model ve",
}
FED = [key for key in FACTS["rows"] if key not in NOT_FED]


def posed(name: str, noise_model: Any, schedule: str) -> Problem:
    sigmas = THEIRS[f"sigmas/{noise_model}/{schedule}"].tolist()
    start = THEIRS["start"] * sigmas[0]
    if (
        noise_model == "flow" and name in RANDOM_FLOWS
    ):  # ComfyUI's 1, where the logarithm has an end
        sigmas = [0.9999 if sigma == 1 else sigma for sigma in sigmas]
    cond, uncond = FACTS["denoiser"]["cond"], FACTS["denoiser"]["uncond"]
    pair = Guidance(
        FACTS["denoiser"]["cfg"], Denoiser("gaussian", (uncond["mean"],), uncond["spread"])
    )
    return Problem(
        NAMES.get(name, name),
        noise_model,
        "denoised",
        tuple(sigmas),
        (0.0,) * (len(sigmas) - 1),
        start.shape,
        tuple(THEIRS["start"].ravel().tolist()),
        tuple(start.ravel().tolist()),
        Denoiser("mixture", tuple(cond["means"]), cond["spread"]),
        options=OPTIONS.get(name, {}),
        guidance=pair if SAMPLERS[NAMES.get(name, name)].pair else None,
        normals=tuple(tuple(each.ravel().tolist()) for each in THEIRS["noise"]),
    )


def judged(problem: Problem, theirs: np.ndarray) -> Verdict:
    """On their steps, or on their last after ours where the record has no more."""
    ours = run(plan_for(problem), np.float32)
    before = [ours.x(step) for step in range(ours.steps - len(theirs))]
    return judge(problem, written([*before, *(x.reshape(problem.shape) for x in theirs)]))


@pytest.mark.parametrize("key", FED)
def test_comfyui(key: str) -> None:
    name, noise_model = key.split("/")
    for schedule in SCHEDULES:
        start, stop = FACTS["rows"][key][schedule]
        if name in LAST:
            start = stop - 1
        verdict = judged(posed(name, noise_model, schedule), THEIRS[key][start:stop])
        assert verdict.verdict == "conforms", f"{schedule} steps: {verdict.sentence}"


def test_every_name_of_the_record_is_accounted_for() -> None:
    assert set(NOT_FED) <= set(FACTS["rows"])
    assert len(FED) == 64
