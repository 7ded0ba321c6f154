"""Where each known mistake can be made at all, and that it changes something there."""

import math
import re
from functools import cache
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import msgspec
import numpy as np
import pytest

from lydite.conform.explain import Fit, _findings, _remembers_nothing
from lydite.conform.make_problem import ProblemSpec, make_problem
from lydite.conform.measure import UNIT, distance, table_error
from lydite.conform.mistakes import PLANTED, tables
from lydite.conform.mistakes.mistake import Mistake
from lydite.conform.mistakes.other_method import (
    BY_TIMESTEP,
    LOOKED_UP,
    _alternatives,
    model_of,
    other_settings,
)
from lydite.conform.problem import Problem
from lydite.conform.replay import CannotReplay, Plan, plan_for, run
from lydite.core.errors import InputError
from lydite.sampling.registry import SAMPLERS

from .planted import written
from .test_planted import USUAL

FEW = (
    ProblemSpec("euler"),
    ProblemSpec("euler", steps=1),
    ProblemSpec("euler", steps=2, guidance=3.0),
    ProblemSpec("euler", steps=2, model="sd3"),
    ProblemSpec("euler", schedule="exponential"),
    ProblemSpec("euler", steps=2, prediction="x0"),
)
NO_SECOND_CALL = {"timestep-of-first-call", "timestep-interpolated", "history-dropped"}


def possible(cause: str, problem: Problem) -> bool:
    """Whether a problem has what the mistake is made with."""
    flow, sampler = problem.noise_model == "flow", problem.sampler
    if taken := re.fullmatch(r"(\w+)-taken-for-\w+", cause):
        return problem.prediction == taken[1]
    if cause.startswith(("cond-", "guidance-", "uncond-")):
        return problem.guidance is not None
    if cause.startswith("karras-"):
        return problem.schedule == "karras" and problem.steps > 1
    if cause.endswith(("-on-flow", "shifted-twice", "not-shifted", "shift-as-mu", "mu-as-shift")):
        return flow
    if cause in ("last-step-dropped", "penultimate-dropped", "first-step-dropped"):
        return problem.steps > 1
    if cause.startswith(("slopes-", "second-")):
        return sampler == "heun"
    if cause.startswith(("history-", "step-ratio-")) and cause != "history-dropped":
        return sampler == "dpmpp_2m"
    if cause.startswith(("noise-", "variance-", "up-and-down", "starting-noise")):
        return sampler == "euler_ancestral"
    if cause == "prediction-as-denoised":
        return problem.prediction != "x0"
    if cause == "denoised-without-sigma":
        return problem.prediction in ("eps", "flow")
    if cause == "scaled-latent-in-denoised":
        return not flow and problem.prediction != "x0"
    if "c-in" in cause or cause.startswith("start-"):
        return not flow
    return True


@cache
def planned(spec: str) -> Plan:
    return plan_for(make_problem(SPECS[spec]))


SPECS = {str(spec): spec for spec in (*USUAL, *FEW)}


@pytest.mark.parametrize("spec", SPECS)
def test_a_mistake_is_tried_where_it_can_be_made_and_nowhere_else(spec: str) -> None:
    plan = planned(spec)
    applied = {each.cause for each in PLANTED if each.applied_to(plan) is not None}
    causes = {each.cause for each in PLANTED}
    assert applied == {cause for cause in causes if possible(cause, plan.problem)}


@pytest.mark.parametrize("spec", [str(spec) for spec in USUAL])
def test_a_mistake_that_is_tried_changes_the_run(spec: str) -> None:
    plan = planned(spec)
    right = run(plan).values
    without = set(NO_SECOND_CALL)
    if plan.problem.sampler == "euler":
        without.add("ve-form-on-flow")
    for mistake in PLANTED:
        wrong = mistake.applied_to(plan)
        without = NO_SECOND_CALL | (
            {"ve-form-on-flow"} if plan.problem.sampler == "euler" else set()
        )
        if wrong is None or mistake.cause in without:
            continue
        try:
            other = run(wrong).values
        except CannotReplay:
            continue
        same = other.keys() == right.keys() and all(
            np.array_equal(value, other[key]) for key, value in right.items()
        )
        assert not same, mistake.says


def test_the_unit_of_a_dtype_is_half_of_its_eps() -> None:
    for name, dtype in (("f32", np.float32), ("f16", np.float16), ("bf16", ml_dtypes.bfloat16)):
        assert UNIT[name] == float(ml_dtypes.finfo(dtype).eps) / 2
    assert UNIT["f64"] == UNIT["f32"]  # our own run is in float32


@pytest.mark.parametrize(
    ("steps", "until", "words"),
    [
        (3, None, "all 3 steps come"),
        (2, None, "all 2 steps come"),
        (1, None, "the step come"),
        (3, 2, "the 2 steps before it overflows come"),
        (3, 1, "the first step come"),
    ],
)
def test_a_finding_says_how_many_steps_it_explains(
    steps: int, until: int | None, words: str
) -> None:
    mistake = Mistake("cause", "does it wrong", "Do it right.", lambda plan: plan)
    candidate = written([np.zeros(3)] * steps)
    (finding,) = _findings([Fit(mistake, 2e-7, 1e-7, 0)], candidate, until)
    assert finding.cause == "cause" and finding.fix == "Do it right."
    expected = (
        f"The candidate does it wrong. Replayed so, {words} out as it wrote them, to 2.0e-07."
    )
    assert finding.evidence == expected


def test_of_many_fits_the_near_ones_with_the_most_matches_are_findings() -> None:
    def fit(cause: str, error: float, matches: int = 0) -> Fit:
        return Fit(Mistake(cause, f"says {cause}", "fix", lambda plan: plan), error, 1e-7, matches)

    def found(*fits: Fit) -> list[Any]:
        return [each.cause for each in _findings(list(fits), written([np.zeros(3)]), None)]

    assert found(fit("a", 1e-6), fit("b", 9.9e-6), fit("c", 1.1e-5)) == ["a", "b"]
    assert found(fit("a", 0.0), fit("b", 0.99e-6), fit("c", 1.1e-6)) == ["a", "b"]  # ten floors
    assert found(fit("a", 1e-7), fit("b", 1e-7, 2), fit("c", 1e-7, 1)) == ["b"]
    assert found(fit("a", 1e-7), fit("a", 2e-7)) == ["a"]
    names = [f"is-{letter}" for letter in "stuvw"]
    first, *rest = _findings([fit(n, 1e-7) for n in names], written([np.zeros(3)]), None)
    assert not rest and first.cause == "is-s"
    assert "(or t, u, v: the same on this problem)" in first.evidence
    assert len(found(*(fit(letter, 1e-7) for letter in "abcdefghij"))) < 10


def test_a_table_with_one_value_that_is_no_number_is_infinitely_far() -> None:
    right = np.array([3.0, 2.0, 1.0])
    for measure in (table_error, distance):
        assert measure(right, right) == 0
        for wrong in (np.array([3.0, np.nan, 1.0]), np.array([np.inf, 2.0, 1.0]), right[:2]):
            assert measure(wrong, right) == np.inf


def test_an_option_that_a_sampler_lacks_makes_no_problem() -> None:
    with pytest.raises(InputError, match="heun has no option 's_noise'"):
        make_problem(ProblemSpec("heun", options={"s_noise": 1.5}))


@pytest.mark.parametrize("spec", [str(spec) for spec in USUAL])
def test_a_method_with_a_history_is_not_restarted_at_each_step(spec: str) -> None:
    plan = planned(spec)
    assert _remembers_nothing(plan) == (plan.problem.sampler != "dpmpp_2m")


def test_a_mistake_that_fails_on_a_plan_is_not_made_there() -> None:
    for error in (ValueError("a"), InputError("b"), ZeroDivisionError(), OverflowError()):
        mistake = Mistake("cause", "says", "fix", Mock(side_effect=error))
        assert mistake.applied_to(planned(str(FEW[0]))) is None


def test_shifts_and_rho_of_a_schedule_are_numbers_in_a_range() -> None:
    flow = planned(str(FEW[3])).problem
    for settings, shift in (
        ({"shift": 3.0}, 3.0), ({"shift": 0}, None), ({"mu": 1.0}, math.e), ({"mu": 50}, None),
        ({"mu": -49.0}, math.exp(-49)), ({"mu": "1"}, None), ({}, None),
    ):  # fmt: skip
        assert tables._shift(msgspec.structs.replace(flow, settings=settings)) == shift
    usual = planned(str(FEW[0])).problem
    assert tables._shift(msgspec.structs.replace(usual, settings={"shift": 3.0})) is None
    karras = msgspec.structs.replace(usual, schedule="karras")
    sigmas = np.array([9.0, 4.0, 1.0, 0.0])
    for settings, ends in (
        ({}, (9.0, 1.0, 7.0)), ({"rho": 3}, (9.0, 1.0, 3.0)), ({"rho": 0}, None),
        ({"rho": 100}, None), ({"rho": "7"}, None),
    ):  # fmt: skip
        assert tables._ends(sigmas, msgspec.structs.replace(karras, settings=settings)) == ends
    assert tables._ends(sigmas[1:], msgspec.structs.replace(karras, settings={})) is not None
    assert tables._ends(sigmas[2:], msgspec.structs.replace(karras, settings={})) is None


def test_a_model_is_made_of_what_a_problem_says() -> None:
    flow = planned(str(FEW[3])).problem
    for shift, known in ((3.0, True), (0, False), (1e6, False), ("3", False), (-1, False)):
        model = model_of(msgspec.structs.replace(flow, settings={"shift": shift}))
        assert (model is not None) == known
    usual = planned(str(FEW[0])).problem
    for length, known in ((0, False), (1, False), (2, True)):
        changed = msgspec.structs.replace(usual, table=usual.table[:length])
        assert (model_of(changed) is not None) == known
    assert not list(other_settings(msgspec.structs.replace(usual, table=())))
    assert not list(other_settings(msgspec.structs.replace(usual, schedule=None)))


def test_other_values_of_an_option() -> None:
    assert _alternatives("euler", "any", True) == (False,)
    assert _alternatives("euler", "any", float("nan")) == ()
    for name in LOOKED_UP:
        for sampler in (each for each in SAMPLERS.values() if name in each.options):
            own = sampler.options[name]
            assert _alternatives(sampler.name, name, BY_TIMESTEP) == (own,)
            assert _alternatives(sampler.name, name, own) == (BY_TIMESTEP,)
