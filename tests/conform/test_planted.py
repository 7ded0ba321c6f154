"""Every mistake planted in a port that was written by hand is named."""

from pathlib import Path

import pytest

from lydite.conform.make_problem import ProblemSpec
from lydite.conform.mistakes import PLANTED

from .planted import named

SD15 = ProblemSpec("euler", guidance=3.0)
V = ProblemSpec("euler", prediction="v", guidance=3.0)
X0 = ProblemSpec("euler", prediction="x0", guidance=3.0)
EDM = ProblemSpec("euler", model="edm", guidance=3.0)
COSMOS = ProblemSpec("euler", model="cosmos", guidance=3.0)
SD3 = ProblemSpec("euler", model="sd3", guidance=3.0)
HEUN, TWO = ProblemSpec("heun", guidance=3.0), ProblemSpec("dpmpp_2m", guidance=3.0)
ANCESTRAL, DPM = ProblemSpec("euler_ancestral", guidance=3.0), ProblemSpec("dpm_2", guidance=3.0)
FLOW_TWO = ProblemSpec("dpmpp_2m", model="sd3", guidance=3.0)
USUAL = (SD15, V, X0, EDM, COSMOS, SD3, HEUN, DPM, TWO, FLOW_TWO, ANCESTRAL)
EVERYWHERE = (
    "denoised-as-derivative",
    "broadcast",
    "sigma-for-timestep",
    "first-timestep-kept",  # modulation cached for another step
    "cond-uncond-swapped",
    "guidance-one-more",
    "guidance-one-less",
    "sign-flipped",
    "stale-timesteps",  # patchy pictures
    "timestep-truncated",
    "timestep-one-more",
    "timestep-one-less",
    "timestep-in-bf16",
    "timestep-in-f16",
    "timestep-reversed",
    "timestep-of-next-step",
    "prediction-as-denoised",
    "guidance-ignored",
    "uncond-alone",
    "penultimate-dropped",
    "first-step-dropped",
    "last-step-dropped",
    "last-step-idle",
)
SCALED = (
    "no-c-in",  # blurry pictures
    "scaled-latent-in-denoised",  # grey pictures
    "c-in-in-place",
    "c-in-inverted",
    "timestep-not-scaled",
    "timestep-nearest",
    "karras-to-zero",
    "karras-without-rho",
    "karras-one-more",
    "is-schedule-exponential",
    "start-not-scaled",
    "start-scaled-otherwise",
)
WHEREVER = (  # for every prediction with a c_in
    "denoised-as-derivative",
    "no-c-in",
    "c-in-in-place",
    "c-in-inverted",
    "sign-flipped",
    "sigma-for-timestep",
    "first-timestep-kept",
    "cond-uncond-swapped",
    "last-step-dropped",
)
CASES = [
    *((X0, bug) for bug in (*WHEREVER, "stale-timesteps", "x0-taken-for-v")),
    *((asked, "scaled-latent-in-denoised") for asked in (EDM, COSMOS)),
    *((asked, bug) for asked in (EDM, COSMOS) for bug in (*WHEREVER, "prediction-as-denoised")),
    *((SD15, bug) for bug in (*EVERYWHERE, *SCALED)),
    *((SD15, bug) for bug in ("eps-taken-for-v", "denoised-without-sigma")),
    *((V, bug) for bug in (*EVERYWHERE, *SCALED, "v-taken-for-eps")),
    *((SD3, bug) for bug in EVERYWHERE),
    *((SD3, bug) for bug in ("shifted-twice", "not-shifted", "shift-as-mu", "mu-as-shift")),
    *((SD3, bug) for bug in ("c-in-on-flow", "denoised-without-sigma")),
    (FLOW_TWO, "ve-form-on-flow"),
    (ProblemSpec("euler_ancestral", model="sd3", guidance=3.0), "ve-form-on-flow"),
    (ProblemSpec("euler_ancestral", model="flux"), "ve-form-on-flow"),
    *((HEUN, bug) for bug in ("is-euler", "slopes-not-averaged", "second-slope-alone")),
    (HEUN, "second-call-at-first-sigma"),
    *((HEUN, bug) for bug in ("no-c-in", "sigma-for-timestep", "timestep-of-first-call")),
    *(
        (TWO, bug)
        for bug in (
            "history-dropped",
            "history-not-updated",
            "history-swapped",
            "history-sign",
            "step-ratio-inverted",
            "step-ratio-not-halved",
            "step-ratio-left-out",
            "step-ratio-in-sigma",
            "no-c-in",
            "scaled-latent-in-denoised",
        )
    ),
    *(
        (ANCESTRAL, bug)
        for bug in (
            "up-and-down-swapped",
            "variance-for-deviation",
            "noise-not-scaled",
            "noise-of-sigma-next",
            "noise-of-sigma",
            "noise-negated",
            "starting-noise-again",
            "noise-left-out",
            "noise-repeated",
            "cond-uncond-swapped",
        )
    ),
]


@pytest.mark.parametrize("asked", USUAL, ids=str)
def test_without_a_mistake_the_port_conforms(asked: ProblemSpec, tmp_path: Path) -> None:
    verdict = named(asked, "", tmp_path)
    assert verdict.verdict == "conforms" and not verdict.findings, verdict.sentence


@pytest.mark.parametrize(
    ("asked", "bug"), CASES, ids=[f"{a.model}-{a.sampler}-{a.prediction}-{b}" for a, b in CASES]
)
def test_planted(asked: ProblemSpec, bug: str, tmp_path: Path) -> None:
    verdict = named(asked, bug, tmp_path)
    assert verdict.verdict == "deviates"
    assert [finding.cause for finding in verdict.findings][:1] == [bug], verdict.sentence
    assert verdict.findings[0].fix and verdict.findings[0].evidence.startswith("The candidate")


def test_no_mistake_is_known_that_was_not_planted() -> None:
    elsewhere = {"timestep-interpolated"}  # test_explain: it takes a problem with whole timesteps
    assert {mistake.cause for mistake in PLANTED} <= {bug for _, bug in CASES} | elsewhere


def test_the_documentation_lists_every_cause() -> None:
    text = (Path(__file__).parents[2] / "docs/conform.md").read_text()
    assert [each.cause for each in PLANTED if f"`{each.cause}`" not in text] == []
