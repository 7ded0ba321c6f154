"""Errors of values and tables, their limits, and runs without noise."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from lydite.conform import measure
from lydite.conform.answers import DTYPES
from lydite.conform.convergence import WithPair, denoiser_for, errors, exact, quiet_options
from lydite.conform.make_problem import ProblemSpec, make_problem
from lydite.conform.measure import (
    LEAST,
    SIGMA,
    SLACK,
    TIMESTEP,
    UNIT,
    _rounded_runs,
    bounds,
    distance,
    error_of,
    table_error,
    timestep_limit,
    within,
)
from lydite.conform.replay import (
    BoundSampler,
    CannotReplay,
    place_of,
    plan_for,
    right_timestep,
    run,
    sigma_by_timestep,
    sigma_of,
    timestep_of,
)
from lydite.conform.result import Row, Verdict
from lydite.core.errors import InputError
from lydite.sampling.named_models import find_model
from lydite.sampling.registry import SAMPLERS, find_sampler


def test_the_error_of_a_small_sigma_is_relative() -> None:
    sigmas = np.array([14.6, 1.0, 1e-3, 0.0])
    wrong = sigmas * [1, 1, 1.001, 1]
    assert table_error(wrong, sigmas) == pytest.approx(1e-3)
    assert table_error(np.add(sigmas, [0, 0, 0, 1e-6]), sigmas) > 1


def test_quiet_options_switch_the_noise_off() -> None:
    quiet = 0
    for name in SAMPLERS:
        sampler = find_sampler(name)
        try:
            options = quiet_options(name)
        except InputError:
            assert sampler.noise != "none" and "eta" not in sampler.options
            continue
        assert sampler.noise == "none" or options["eta"] == 0
        quiet += sampler.noise != "none"
    assert quiet > 5


def test_a_distance_is_in_units_of_the_largest_value_above_1() -> None:
    small, large = np.array([0.5, -0.2]), np.array([3.0, -40.0])
    assert distance(np.add(small, [0, 0.1]), small) == pytest.approx(0.1)
    assert distance(np.add(large, [2, 0]), large) == pytest.approx(2 / 40)
    for odd in (np.array([0.5]), np.array([0.5, math.nan]), np.array([0.5, math.inf])):
        assert distance(odd, small) == math.inf
    assert error_of("sigma", np.array(2.02), np.array(2.0)) == pytest.approx(0.01)
    assert error_of("timestep", np.array(2.5), np.array(2.0)) == 0.5
    assert error_of("timestep", np.array(math.nan), np.array(2.0)) == math.inf
    assert error_of("x", np.add(large, [2, 0]), large) == pytest.approx(2 / 40)


def test_a_value_at_its_limit_is_right() -> None:
    for error, wrong in ((1.0, False), (1.0001, True), (None, True), (math.nan, True)):
        assert Row("x", 0, 0, error, 0.1, 1.0, True).wrong == wrong
    words = ("conforms", "deviates", "cannot-judge")
    assert [Verdict(word, "").exit_code for word in words] == [0, 1, 2]


def test_limits_are_those_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "conform.md").read_text()
    stated = (
        f"wrong when it is {SLACK:.0f} times as far off as that, and by more than {LEAST:.0e}",
        f"Tables of sigmas may be off by {SIGMA:.0e} of themselves, timesteps by "
        f"{TIMESTEP:g} (2e-6",
    )
    words = " ".join(page.split()).replace("e-05", "e-5").replace("e-06", "e-6")
    for text in stated:
        assert text.replace("e-05", "e-5").replace("e-06", "e-6") in words
    halves = {name: float(ml_dtypes.finfo(kind).eps) / 2 for name, kind in DTYPES.items()}
    assert halves | {"f64": halves["f32"]} == UNIT  # half a unit in the last place


def test_rounding_is_looked_for_in_several_runs() -> None:
    plan = plan_for(make_problem(ProblemSpec("euler_ancestral", steps=3)))
    assert len(_rounded_runs(plan, None)) == 1 + 3 + 2  # in float32, jittered, with eta rounded
    assert {run.steps for run in _rounded_runs(plan, 2)} == {2}
    ours = run(plan)
    for other in _rounded_runs(plan, None):
        apart = distance(np.asarray(other.x(2), np.float64), ours.x(2))
        assert 0 < apart < 1e-5


def test_limits_grow_with_the_unit_of_the_dtype() -> None:
    plan = plan_for(make_problem(ProblemSpec("heun", steps=4)))
    ours = run(plan)
    fine, coarse = (bounds(plan, ours, dtype) for dtype in ("f32", "bf16"))
    assert fine.keys() == ours.values.keys() == coarse.keys()
    for key, bound in fine.items():
        times = UNIT["bf16"] / UNIT["f32"]
        if key[0] == "sigma":
            assert (bound.limit, coarse[key].limit) == (SIGMA, SIGMA * times)
        elif key[0] == "timestep":
            assert bound.limit == coarse[key].limit == TIMESTEP
        else:
            assert bound.floor >= UNIT["f32"] and coarse[key].floor == bound.floor * times
            assert bound.limit == max(SLACK * bound.floor, LEAST)
            assert coarse[key].limit == max(SLACK * coarse[key].floor, LEAST) > bound.limit
    assert within(ours.values, ours, fine) and not within({("x", 9, 0): np.zeros(1)}, ours, fine)
    key = ("x", 2, 0)
    size = max(1.0, float(np.abs(ours.values[key]).max()))
    for share, right in ((0.9, True), (1.1, False)):
        moved = ours.values[key] + share * fine[key].limit * size
        assert within({key: moved}, ours, fine) == right
        assert within({**ours.values, key: moved}, ours, fine) == right


@pytest.mark.parametrize(("model", "share"), [("sd15", 1), ("edm", 1000), ("cosmos", 1000)])
def test_timesteps_about_1_have_a_smaller_limit(model: str, share: float) -> None:
    problem = make_problem(ProblemSpec(None, model=model, steps=3))
    assert timestep_limit(problem) == pytest.approx(TIMESTEP / share)


@pytest.mark.parametrize("last", [0.0, 0.1])
def test_many_steps_of_heun_stand_for_a_formula(last: float) -> None:
    """Where the denoiser has a formula both are known; elsewhere only the steps are."""
    known = denoiser_for("gaussian", find_model("sd15"))

    class WithoutFormula:
        noise_model = known.noise_model

        def __call__(self, x: np.ndarray, sigma: float) -> np.ndarray:
            return known(x, sigma)

    x, way = np.array([3.0, -5.0]), (10.0, last)
    steps = exact(WithPair(WithoutFormula()), x, way)
    np.testing.assert_allclose(steps, exact(known, x, way), atol=2e-4)


@pytest.mark.parametrize(("sampler", "calls"), [("euler", 1), ("heun", 2)])
def test_errors_are_of_as_many_steps_as_are_asked_for(
    sampler: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def counted(denoise: WithPair, x: np.ndarray, sigma: float) -> np.ndarray:
        seen.append(sigma)
        return denoise.inner(x, sigma)

    monkeypatch.setattr(WithPair, "__call__", counted)
    for count in (1, 2, 7):
        seen.clear()
        errors(sampler, "karras", find_model("sd15"), "gaussian", [count], np.array([1.0]))
        assert len(seen) == calls * count


def test_errors_fall_with_the_order_of_the_sampler() -> None:
    counts, model = (8, 16, 32), find_model("sd15")
    for name, order in (("euler", 1), ("heun", 2)):
        found = errors(name, "karras", model, "gaussian", counts, np.array([1.0, -0.5]))
        slopes = -np.diff(np.log2(found))
        assert len(found) == 3 and slopes[-1] == pytest.approx(order, abs=0.4)
    moving = errors("heun", "sgm_uniform", model, "gaussian", counts, np.array([1.0]))
    assert sorted(moving, reverse=True) == moving  # its last sigma above 0 is another each time
    same = [
        errors(name, "karras", model, "gaussian", (4,), np.array([1.0]))
        for name in ("euler", "euler_ancestral")
    ]
    assert same[0] == pytest.approx(same[1])  # which adds noise, but with eta 0 none
    with pytest.raises(InputError, match="expected one of"):
        denoiser_for("nothing", model)


@pytest.mark.parametrize(
    ("model", "timesteps"),
    [
        ("edm", {0.0: 1.0, 0.5: math.exp(2), 5.0: math.exp(12), -5.0: math.exp(-12)}),
        ("cosmos", {0.5: 1.0, 0.75: 3.0, 0.0: 1e-4 / (1 - 1e-4), 1.0: (1 - 1e-4) / 1e-4}),
        ("flow", {1000.0: 1.0, 250.0: 0.25, 0.0: 1e-4}),
    ],
)
def test_what_the_network_takes_a_timestep_for(model: str, timesteps: dict[float, float]) -> None:
    problem = make_problem(ProblemSpec(None, model=model, steps=3))
    for timestep, sigma in timesteps.items():
        assert sigma_of(problem, timestep) == pytest.approx(sigma)
    for sigma in (0.01, 0.3, 0.9):
        assert sigma_of(problem, place_of(problem, sigma)) == pytest.approx(sigma)


def test_timesteps_between_the_entries_of_a_table() -> None:
    problem = make_problem(ProblemSpec(None, model="sd15", steps=3))
    first, last = problem.table[0], problem.table[-1]
    assert [sigma_of(problem, t) for t in (-1, 0, 999, 2000)] == pytest.approx(
        [first, first, last, last]
    )
    between = math.sqrt(problem.table[10] * problem.table[11])
    assert sigma_of(problem, 10.5) == pytest.approx(between)
    assert place_of(problem, between) == pytest.approx(10.5)
    assert [place_of(problem, sigma) for sigma in (0.0, 1e9)] == [0, 999]
    sigma = sigma_of(problem, 10.7)
    for rule, found in (("interpolate", 10.7), ("truncate", 10), ("nearest", 11), ("round", 11)):
        changed = msgspec.structs.replace(problem, rule=rule)
        assert timestep_of(changed, sigma) == pytest.approx(found)


def test_the_problems_own_timesteps_hold_at_its_own_sigmas() -> None:
    problem = make_problem(ProblemSpec(None, model="sd15", steps=3))
    odd = msgspec.structs.replace(problem, timesteps=(7.0, 8.0, 9.0))
    assert [right_timestep(odd, sigma) for sigma in odd.sigmas[:3]] == [7, 8, 9]
    near = odd.sigmas[1] * 1.0001
    assert right_timestep(odd, near) == timestep_of(odd, near) > 9


@pytest.mark.parametrize(
    ("sampler", "options", "roughness"),
    [
        ("euler", {}, 0.0),
        ("deis", {"order": 2}, 5e-7 * 10),
        ("deis", {"order": 3}, 5e-9 * 1000),
        ("deis", {"order": 1}, 0.0),
        ("deis_tab", {"order": 3}, 1e-4),
    ],
)
def test_coefficients_that_float32_makes_rough_widen_the_limits(
    sampler: str, options: dict[str, Any], roughness: float
) -> None:
    problem = make_problem(ProblemSpec(sampler, steps=10, options=options))
    plan = plan_for(problem)
    assert isinstance(plan.method, BoundSampler)
    assert plan.method.roughness == pytest.approx(roughness)
    limits = [bound.limit for key, bound in bounds(plan, run(plan), "f32").items() if key[0] == "x"]
    assert min(limits) >= max(LEAST, roughness)


def test_eta_is_rounded_by_a_unit_where_there_is_one() -> None:
    problem = make_problem(ProblemSpec("euler_ancestral", steps=3, options={"eta": 0.5}))
    less, more = BoundSampler(problem, "euler_ancestral", {"eta": 0.5}).with_eta_rounded()
    assert less.options["eta"] < 0.5 < more.options["eta"]
    assert more.options["eta"] - less.options["eta"] == pytest.approx(2.0**-23)
    assert BoundSampler(problem, "euler", {}).with_eta_rounded() == ()


def test_sigmas_that_are_found_by_their_timestep() -> None:
    problem = make_problem(ProblemSpec(None, model="sd15", steps=3))
    middle = sigma_by_timestep(problem, "pndm", "middle", {"middle": "timestep"})
    first, second = (sigma_of(problem, timestep) for timestep in (800, 401))
    assert place_of(problem, middle(first, second)) == pytest.approx(600.5)
    for options, found in (({"gamma": 0.25}, 600), ({"gamma": 0.0}, 800), ({}, None)):
        below = sigma_by_timestep(problem, "tcd", "below", {"below": "timestep", **options})
        gamma = find_sampler("tcd").options["gamma"]
        wanted = math.floor((1 - gamma) * 800) if found is None else found
        assert place_of(problem, below(first)) == pytest.approx(wanted)


def test_a_run_without_end_is_ended() -> None:
    plan = plan_for(make_problem(ProblemSpec("euler", steps=2)))

    def steps(denoise: Any, x: Any, sigmas: Any, draw: Any) -> Any:
        while True:
            yield SimpleNamespace(x=x, sigma=1.0)

    def calls(denoise: Any, x: Any, sigmas: Any, draw: Any) -> Any:
        while True:
            denoise(x, 1.0)
            yield from ()

    for method, message in ((steps, "too many steps"), (calls, "too many calls of the network")):
        with pytest.raises(CannotReplay, match=message):
            run(replace(plan, method=method))


def test_a_run_that_rounding_makes_impossible_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for(make_problem(ProblemSpec("euler_ancestral", steps=3)))
    usual, failed = measure.run, [0, 4]

    def some(*given: Any, **named: Any) -> Any:
        calls.append(given)
        if len(calls) - 1 in failed:
            raise CannotReplay("no")
        return usual(*given, **named)

    calls: list[Any] = []
    monkeypatch.setattr(measure, "run", some)
    assert len(_rounded_runs(plan, None)) == 1 + 3 + 2 - 2 and len(calls) == 6
