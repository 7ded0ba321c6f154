"""Mixed precision: the greedy choice is the optimum, up to one step of one layer."""

from itertools import product

import numpy as np
import pytest
from scipy.optimize import LinearConstraint, milp

from lydite.core.errors import InputError
from lydite.quantize.mixed import Choice, choose, expected_error, lower_hull, mixed_plan
from lydite.quantize.plan import LayerPlan, Plan
from lydite.quantize.sensitivity import Sensitivity
from lydite.weights.quantized_format import BITS

SHAPES = {
    "blocks.0.norm1.linear.weight": (384, 64),
    "blocks.0.attn.to_q.weight": (64, 64),
    "blocks.0.ff.weight": (256, 64),
    "blocks.1.ff.weight": (256, 64),
    "proj_out.weight": (16, 64),
}
MEASURED = Sensitivity(
    "",
    64,
    16,
    {
        "blocks.0.norm1.linear": {4: 0.6},
        "blocks.0.attn.to_q": {4: 0.01},
        "blocks.0.ff": {4: 0.1},
        "blocks.1.ff": {4: 0.1},
        "proj_out": {4: 0.1},
    },
)


def random_choices(generator: np.random.Generator, layers: int) -> dict[str, list[Choice]]:
    """Layers of many sizes; the errors fall with the bits, not always convexly."""
    found: dict[str, list[Choice]] = {}
    for number in range(layers):
        weights, scale = int(generator.integers(1, 9)) * 64, float(generator.lognormal(0, 2))
        found[str(number)] = [
            Choice(
                LayerPlan(bits),
                weights * (bits + 0.5),
                scale * weights * 4.0**-bits * float(generator.uniform(0.5, 2)),
            )
            for bits in BITS
        ]
    return found


def totals(chosen: list[Choice]) -> tuple[float, float]:
    return sum(each.stored for each in chosen), sum(each.error for each in chosen)


def largest_step(choices: dict[str, list[Choice]], chosen: dict[str, Choice]) -> float:
    """What the best step that was not taken would have saved: more than the optimum can."""
    saved = [0.0]
    for path, each in choices.items():
        hull = lower_hull(each)
        if (number := hull.index(chosen[path]) + 1) < len(hull):
            saved.append(hull[number - 1].error - hull[number].error)
    return max(saved)


@pytest.mark.parametrize("seed", range(12))
def test_no_combination_is_better_by_more_than_one_step(seed: int) -> None:
    generator = np.random.default_rng(seed)
    choices = random_choices(generator, 4)
    combinations = [totals(list(each)) for each in product(*choices.values())]
    least, most = min(combinations)[0], max(combinations)[0]
    for budget in np.linspace(least, most, 15):
        chosen = choose(choices, budget)
        stored, error = totals(list(chosen.values()))
        assert stored <= budget
        optimum = min(error for stored, error in combinations if stored <= budget)
        assert optimum <= error * (1 + 1e-9)
        assert error - optimum <= largest_step(choices, chosen) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_an_integer_programme_finds_nothing_better_at_the_budget_that_is_used(seed: int) -> None:
    choices = random_choices(np.random.default_rng(seed), 40)
    # the exact optimum wherever the greedy stops between two steps
    budgets = [4.5, 3.3, 6]
    weights = sum(each[0].stored for each in choices.values()) / (BITS[0] + 0.5)
    for bits in budgets:
        chosen = choose(choices, bits * weights)
        _, error = totals(list(chosen.values()))
        flat = [each for layer in choices.values() for each in layer]
        one_each = np.kron(np.eye(len(choices)), np.ones(len(BITS)))
        scale = max(each.error for each in flat)
        solved = milp(
            np.array([each.error for each in flat]) / scale,
            integrality=np.ones(len(flat)),
            bounds=(0, 1),
            constraints=[
                LinearConstraint(one_each, 1, 1),
                LinearConstraint(np.array([[e.stored for e in flat]]), -np.inf, bits * weights),
            ],
            options={"mip_rel_gap": 1e-6},
        )
        optimum = solved.fun * scale
        assert optimum <= error * (1 + 1e-5)
        assert error - optimum <= largest_step(choices, chosen) + 1e-5 * error
        assert error <= 1.05 * optimum


def test_the_hull_leaves_out_what_costs_more_for_less() -> None:
    plan = LayerPlan(4)
    points = [(1, 10.0), (2, 9.0), (3, 2.0), (4, 3.0), (5, 1.0)]
    hull = lower_hull([Choice(plan, *each) for each in points])
    assert [each.stored for each in hull] == [1, 3, 5]
    for points, kept in (
        ([(1, 10.0), (2, 9.5), (3, 9.0), (4, 1.0)], [1, 4]),  # two are above one line
        ([(1, 10.0), (3, 4.0), (4, 1.0)], [1, 4]),  # on the line
        ([(1, 10.0), (3, 3.9), (4, 1.0)], [1, 3, 4]),
        ([(4, 1.0), (1, 10.0), (1, 8.0)], [1, 4]),
    ):
        hull = lower_hull([Choice(plan, *each) for each in points])
        assert [each.stored for each in hull] == kept
    assert hull[0].error == 8


def test_sensitive_layers_get_more_bits_within_the_target() -> None:
    plan = mixed_plan(SHAPES, MEASURED, 4.5)
    assert plan.bits_per_weight(SHAPES) <= 4.5
    bits = {path: layer.bits for path, layer in plan.layers.items()}
    assert bits["blocks.0.norm1.linear"] > bits["blocks.0.ff"] > bits["blocks.0.attn.to_q"]
    assert "proj_out" not in bits


def test_a_method_with_rows_leaves_more_bits_to_the_modulation() -> None:
    equal = Sensitivity("", 64, 16, {path: {4: 0.1} for path in MEASURED.errors})
    plain, learned = (mixed_plan(SHAPES, equal, 5.0, calibrated=each) for each in (False, True))
    assert mixed_plan(SHAPES, equal, 5.0) == plain
    (norm,) = (path for path in plain.layers if "norm" in path)
    assert learned.layers[norm].bits > plain.layers[norm].bits
    assert max(plain.bits_per_weight(SHAPES), learned.bits_per_weight(SHAPES)) <= 5.0


def test_limits_and_exceptions_hold() -> None:
    plan = mixed_plan(SHAPES, MEASURED, 6.5, modulation_bits=8, leave_out=["*attn*"])
    assert plan.layers["blocks.0.norm1.linear"].bits == 8
    assert "blocks.0.attn.to_q" not in plan.layers
    with pytest.raises(InputError, match="at least"):
        mixed_plan(SHAPES, MEASURED, 4.5, modulation_bits=8)
    with pytest.raises(InputError, match="left out"):
        mixed_plan(SHAPES, MEASURED, 4.5, leave_out=["*"])


def test_the_error_of_other_widths_follows_from_the_closest_measured_one() -> None:
    found = Sensitivity("", 64, 1, {"a": {2: 0.9, 4: 0.1}})
    assert found.squared("a", 2) == pytest.approx(0.81)
    assert found.squared("a", 3) == pytest.approx((0.1 * 15 / 7) ** 2)
    assert found.squared("a", 8) == pytest.approx((0.1 * 15 / 255) ** 2)
    both = Sensitivity("", 64, 1, {"a": {3: 0.9, 5: 0.1}})  # the more bits, the better the rule
    assert both.squared("a", 4) == pytest.approx((0.1 * 31 / 15) ** 2)


def test_squares_of_errors_add_up() -> None:
    layers = {"blocks.0.ff": LayerPlan(4), "blocks.1.ff": LayerPlan(4)}
    assert expected_error(Plan(layers), MEASURED) == pytest.approx(0.1 * 2**0.5)


def test_a_budget_that_is_just_met_and_a_layer_that_was_not_measured() -> None:
    choices = {"a": [Choice(LayerPlan(2), 10, 4.0), Choice(LayerPlan(4), 20, 1.0)]}
    for budget, stored in ((10, 10), (19, 10), (20, 20)):
        assert choose(choices, budget)["a"].stored == stored
    with pytest.raises(InputError, match="at least"):
        choose(choices, 9)
    same = [*choices["a"], Choice(LayerPlan(8), 30, 1.0)]  # more bits for nothing
    assert lower_hull(same) == choices["a"] == lower_hull(same[::-1])
    least = Plan({path: LayerPlan(2, 64) for path in mixed_plan(SHAPES, MEASURED, 8.5).layers})
    assert mixed_plan(SHAPES, MEASURED, least.bits_per_weight(SHAPES)) == least
    some = Sensitivity(
        "", 64, 16, {path: e for path, e in MEASURED.errors.items() if "attn" not in path}
    )
    with pytest.raises(InputError, match="not measured"):
        mixed_plan(SHAPES, some, 4.5)
