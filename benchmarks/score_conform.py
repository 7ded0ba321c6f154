"""How often `lydite sampler conform` names a planted mistake: eight of them, wherever they can be.

    .venv/bin/python benchmarks/score_conform.py                  every combination, in minutes
    .venv/bin/python benchmarks/score_conform.py --steps 4        half of them
    .venv/bin/python benchmarks/score_conform.py --list           also each that was not named

The mistakes are made by the port of tests/conform, which was written by hand and in float32. A
combination where a mistake changes nothing (it is within what rounding may do) is counted apart.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from conform.planted import candidate, plain
from conform.port import Port
from lydite.conform.judge import judge
from lydite.conform.make_problem import ProblemSpec, make_problem
from lydite.conform.measure import distance
from lydite.conform.problem import Problem

SETTINGS = (  # model, prediction, schedule
    ("sd15", "eps", "karras"),
    ("sd15", "v", "exponential"),
    ("sd15", "x0", "karras"),
    ("edm", "edm", "karras"),
    ("cosmos", "cosmos", "exponential"),
    ("sd3", "flow", "flow_shift"),
    ("flux", "flow", "flux"),
)
SAMPLERS = ("euler", "heun", "dpm_2", "dpmpp_2m", "euler_ancestral")
DENOISERS = ("zero", "identity", "gaussian", "mixture")
MISTAKES = (
    "denoised-as-derivative",
    "no-c-in",
    "scaled-latent-in-denoised",
    "sigma-for-timestep",
    "stale-timesteps",
    "shifted-twice",
    "last-step-dropped",
    "cond-uncond-swapped",
)
COLUMNS = ("named", "named second", "named otherwise", "no name", "not noticed", "no effect")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 20])
    parser.add_argument("--samplers", nargs="+", default=SAMPLERS, choices=SAMPLERS)
    parser.add_argument("--list", action="store_true", help="each combination that is not named")
    given = parser.parse_args()
    counts = {mistake: Counter[str]() for mistake in MISTAKES}
    with tempfile.TemporaryDirectory() as folder:
        for asked in problems(given.steps, given.samplers):
            problem = make_problem(asked)
            read = plain(problem, Path(folder))
            for mistake in MISTAKES:
                if possible(mistake, asked):
                    answer, said = outcome(problem, read, mistake)
                    counts[mistake][answer] += 1
                    if given.list and answer != "named" and answer != "no effect":
                        print(f"{answer:16} {mistake:26} {shown(asked)}  {said}", flush=True)
    print("| mistake | combinations | " + " | ".join(COLUMNS) + " |")
    print("|---|---:|" + "---:|" * len(COLUMNS))
    for mistake, found in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        cells = " | ".join(str(found[column]) for column in COLUMNS)
        print(f"| {mistake} | {found.total()} | {cells} |")


def problems(counts: list[int], samplers: list[str]) -> Iterator[ProblemSpec]:
    for model, prediction, schedule in SETTINGS:
        for sampler in samplers:
            if sampler == "euler_ancestral" and prediction == "flow":
                continue  # the port has the form of the noise model ve alone
            for denoiser in DENOISERS:
                guidance = 3.0 if denoiser in ("gaussian", "mixture") else None
                for steps in counts:
                    yield ProblemSpec(
                        sampler, schedule, steps, model, prediction, denoiser, guidance
                    )


def possible(mistake: str, asked: ProblemSpec) -> bool:
    """Whether a program for this problem could make the mistake."""
    flow, told = asked.prediction == "flow", asked.prediction in ("edm", "cosmos")
    return {
        "denoised-as-derivative": asked.sampler != "dpmpp_2m",  # which has no derivative
        "no-c-in": not flow,
        "scaled-latent-in-denoised": not flow and asked.prediction != "x0",  # where D has no x
        "stale-timesteps": not told,
        "shifted-twice": flow,
        "cond-uncond-swapped": asked.guidance is not None,
    }.get(mistake, True)


def outcome(problem: Problem, read: dict[str, Any], mistake: str) -> tuple[str, str]:
    with np.errstate(all="ignore"):  # some overflow
        right, wrong = Port(read).run(), Port(read, mistake).run()
    verdict = judge(problem, candidate(wrong))
    causes = [finding.cause for finding in verdict.findings]
    if verdict.verdict == "conforms":
        pairs = zip(right.xs, wrong.xs, strict=False)
        apart = max(distance(a.astype(float), b.astype(float)) for a, b in pairs)
        return ("no effect" if apart < 2e-5 else "not noticed"), f"{apart:.1e}"
    if causes[:1] == [mistake]:
        return "named", ""
    if mistake in causes:
        return "named second", ", ".join(causes)
    return ("named otherwise" if causes else "no name"), ", ".join(causes)


def shown(asked: ProblemSpec) -> str:
    return (
        f"{asked.model} {asked.prediction} {asked.schedule} {asked.sampler} {asked.denoiser} "
        f"{asked.steps} steps"
    )


if __name__ == "__main__":
    main()
