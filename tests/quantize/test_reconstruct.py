"""Learned rounding: its algebra, its recipe, and what it gains on rows it has not seen."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from lydite.core.errors import InputError, NotFiniteError
from lydite.models.layers import Linear, gelu_tanh
from lydite.quantize.blocks import KEPT_SCORES, KEPT_VALUES, Rows, _join
from lydite.quantize.blocks import TIMES as BLOCK_TIMES
from lydite.quantize.grid import fit_grid
from lydite.quantize.input_ranges import InputRange, plain_range, time_aware_range
from lydite.quantize.methods import reconstruct as method
from lydite.quantize.methods.reconstruct import (
    Learned,
    Problem,
    Recipe,
    Target,
    TrialLinear,
    inverse_rounding,
    reconstruct,
    round_input,
    rounding,
)

SAMPLES, TOKENS, WIDTH = 160, 4, 32
SHORT = Recipe(iterations=300, batch=16, rounding_rate=5e-2, range_rate=1e-3, balance=1.0)


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class MLP(nn.Module):
    """Two linears around a GELU, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Linear(WIDTH, 2 * WIDTH), Linear(2 * WIDTH, WIDTH)
        self.first.bias, self.second.bias = mx.zeros(2 * WIDTH), mx.zeros(WIDTH)
        self.first.weight = mx.array(normal(2 * WIDTH, WIDTH, seed=1) / WIDTH**0.5)
        self.second.weight = mx.array(normal(WIDTH, 2 * WIDTH, seed=2) / WIDTH**0.5)

    def __call__(self, x: mx.array) -> mx.array:
        return self.second(gelu_tanh(self.first(x)))


def inputs() -> Any:
    """Correlated channels, as activations are."""
    mixed = normal(SAMPLES, TOKENS, 8, seed=3) @ normal(8, WIDTH, seed=4)
    return (0.5 * mixed + 0.5 * normal(SAMPLES, TOKENS, WIDTH, seed=5)).astype(np.float32)


def problem_of(bits: int, act_bits: int | None) -> Problem:
    mlp, x = MLP(), mx.array(inputs())
    layers: dict[str, Any] = {"first": mlp.first, "second": mlp.second}
    hidden = gelu_tanh(mlp.first(x))
    ranges: dict[str, InputRange] = {}
    if act_bits:
        values = {"first": np.array(x), "second": np.array(hidden)}
        ranges = {name: plain_range(values[name], act_bits) for name in layers}
    targets = {
        name: Target(
            np.array(layer.weight),
            np.array(layer.bias),
            fit_grid(np.array(layer.weight), bits, None),
            name if act_bits else None,
        )
        for name, layer in layers.items()
    }
    rows = Rows(list(range(SAMPLES)), {}, {}, {"args.0": x}, {"args.0": x})
    outputs = [rows.forward(mlp, rows.full)]

    def install(new: Mapping[str, nn.Module]) -> None:
        for name, layer in new.items():
            mlp[name] = layer

    return Problem(mlp, install, targets, ranges, [rows], outputs)


LOWEST = (700.0, 300.0, 0.0)  # timesteps of groups of steps


def problem_of_steps(act_bits: int, *, groups: bool) -> Problem:
    """The same, where inputs grow from step to step."""
    problem = problem_of(8, act_bits)
    (rows,) = problem.rows
    step = np.arange(SAMPLES) % len(LOWEST)
    x = inputs() * np.array([1, 4, 16], np.float32)[step][:, None, None]
    times = mx.array(np.array(LOWEST, np.float32)[step] + 100)
    full = {"args.0": mx.array(x)}
    problem.rows = [Rows(rows.samples, {}, {BLOCK_TIMES: times}, full, full)]
    problem.outputs = [problem.rows[0].forward(problem.module, full)]
    values = {"first": x, "second": np.array(gelu_tanh(problem.module.first(full["args.0"])))}
    ranges = {name: plain_range(each, act_bits) for name, each in values.items()}
    if groups:
        ranges = {
            name: each.for_groups(
                (lowest, values[name][step == number]) for number, lowest in enumerate(LOWEST)
            )
            for name, each in ranges.items()
        }
    problem.ranges = ranges
    return problem


def some_range(values: Any, *, moved: bool) -> InputRange:
    """Of 16 bits, with any shift and divisor."""
    if not moved:
        return plain_range(values, 16)
    shift = normal(WIDTH, seed=6)
    divisor = np.random.default_rng(7).integers(1, 6, WIDTH).astype(np.float32)
    return replace(plain_range((values - shift) / divisor, 16), shift=shift, divisor=divisor)


@pytest.mark.parametrize("moved", [False, True])
def test_sixteen_bits_leave_the_output_as_it_is(moved: bool) -> None:
    x, weight, bias = inputs(), normal(8, WIDTH), normal(8, seed=1)
    # the least error may cut the largest values off; here none should be
    found = some_range(np.concatenate([x, -x]) * 1.5, moved=moved)
    scaled = found.scaled(weight)
    layer = TrialLinear(Target(scaled, bias, fit_grid(weight, 8, None)), found)
    folded = method._folded(mx.array(bias), mx.array(scaled), found)
    assert folded is not None
    layer.bias = folded
    output = np.array(layer(mx.array(x)))
    # each input is off by half a step at most
    most = found.scale / 2 * np.abs(scaled).sum(axis=1) + 1e-4
    assert (np.abs(output - (x @ weight.T + bias)) < most).all() and most.max() < 0.05
    assert moved == (np.abs(np.array(folded) - bias).max() > 0.5)  # the shift is given back


def test_the_folded_bias_is_the_unfolded_form() -> None:
    x = np.array(gelu_tanh(mx.array(3 * inputs())))
    found = time_aware_range(x, 8)
    assert found.shift is not None and found.divisor is not None
    weight, bias = normal(8, WIDTH), normal(8, seed=1)
    scaled = found.scaled(weight)
    target = Target(scaled, bias, fit_grid(scaled, 4, None), "in")
    layers: dict[str, Any] = {}
    rows = Rows([0, 1], {}, {}, {"args.0": mx.array(x)}, {"args.0": mx.array(x)})
    problem = Problem(
        lambda x: layers["it"](x), layers.update, {"it": target}, {"in": found}, [rows],
        [[mx.array(x @ weight.T + bias)]],
    )  # fmt: skip
    finished = reconstruct(problem, Recipe(iterations=0)).weights["it"]
    u = (x - found.shift) / found.divisor
    u = (np.clip(np.rint(u / found.scale) + found.zero, 0, 255) - found.zero) * found.scale
    unfolded = (u + found.shift / found.divisor) @ finished.values().T + bias
    output = np.array(finished.layer()(mx.array(x)))  # pyright: ignore[reportCallIssue]
    np.testing.assert_allclose(output, unfolded, rtol=1e-4, atol=2e-4)
    np.testing.assert_array_equal(finished.integers, target.grid.round(scaled))


def test_rounding_starts_at_the_weights_themselves() -> None:
    share = np.linspace(0, 1, 101, dtype=np.float32)
    found = np.array(rounding(mx.array(inverse_rounding(share))))
    np.testing.assert_allclose(found, share, atol=1e-6)
    for bits in (2, 4, 8):
        problem = problem_of(bits, None)
        floors, params = method._start(problem, Recipe())
        for name, target in problem.targets.items():
            steps = floors[name] + rounding(params["alpha"][name])
            weight = np.array(method._weight(target, steps, params, name))
            # a float16 scale may leave the ends of the range outside by its own rounding
            np.testing.assert_allclose(weight, target.weight, atol=3e-3)
            inner = np.abs(weight - target.weight) < 1e-5
            assert inner.mean() > 0.95


def test_the_recipe_over_the_iterations() -> None:
    recipe = Recipe()
    found = [
        (recipe.sharpness(step), recipe.balance_at(step), recipe.range_rate_at(step) / 4e-5)
        for step in (0, 3999, 4000, 10_000, 20_000)
    ]
    np.testing.assert_allclose(
        found,
        [
            (20, 0, 1),
            (20, 0, 0.90460),
            (20, 0.01, (1 + np.cos(0.2 * np.pi)) / 2),
            (13.25, 0.01, 0.5),
            (2, 0.01, 0),
        ],
        atol=1e-4,
    )
    assert (recipe.batch, recipe.rounding_rate, recipe.keep, recipe.mix) == (32, 1e-3, 0.5, 0.5)


@pytest.fixture(scope="module")
def joint() -> Learned:
    return reconstruct(problem_of(3, 3), SHORT)


@pytest.fixture(scope="module")
def weights_only() -> Learned:
    return reconstruct(problem_of(3, None), SHORT)


def test_rounding_is_decided_at_the_end(joint: Learned, weights_only: Learned) -> None:
    assert weights_only.undecided == 0 and joint.undecided < 5e-3
    assert reconstruct(problem_of(3, None), replace(SHORT, iterations=10)).undecided > 0.5


def test_joint_is_better_than_weights_only_and_that_than_nearest(
    joint: Learned, weights_only: Learned
) -> None:
    assert weights_only.after < 0.6 * weights_only.before
    problem = problem_of(3, 3)
    problem.install(
        {
            name: replace(weight, extras=problem.ranges[name].extras()).layer()
            for name, weight in weights_only.weights.items()
        }
    )
    assert joint.after < 0.95 * problem.error() < 0.9 * joint.before


def test_finished_layers_have_the_error_that_was_reported(joint: Learned) -> None:
    problem = problem_of(3, 3)
    problem.install({name: weight.layer() for name, weight in joint.weights.items()})
    assert problem.error() == pytest.approx(joint.after, rel=1e-3)


def test_each_group_of_steps_learns_its_own_range() -> None:
    recipe = replace(SHORT, iterations=60, range_rate=1e-2)
    one, many = (reconstruct(problem_of_steps(4, groups=each), recipe) for each in (False, True))
    assert many.after < 0.9 * one.after and many.after < many.before
    start = problem_of_steps(4, groups=True)
    for name, weight in many.weights.items():
        before, after = start.ranges[name].extras(), weight.extras
        assert after["input_times"].tolist() == list(LOWEST)
        assert after["input_range"].shape == (3, 3)
        learned = np.abs(after["input_range"][:, 0] / before["input_range"][:, 0] - 1)
        assert (learned > 1e-3).all()
        np.testing.assert_array_equal(after["input_range"][:, 1:], before["input_range"][:, 1:])
    start.install({name: weight.layer() for name, weight in many.weights.items()})
    assert start.error() == pytest.approx(many.after, rel=1e-3)


def test_the_same_seed_gives_the_same_integers() -> None:
    recipe = replace(SHORT, iterations=60)
    first, again, other = (
        reconstruct(problem_of(3, 3), replace(recipe, seed=seed)).weights for seed in (0, 0, 1)
    )
    for name, weight in first.items():
        np.testing.assert_array_equal(weight.integers, again[name].integers)
        found, wanted = (each[name].extras["input_range"] for each in (first, again))
        np.testing.assert_array_equal(found, wanted)
    assert any((weight.integers != other[name].integers).any() for name, weight in first.items())


def test_the_loss_does_not_depend_on_the_number_of_tokens() -> None:
    losses: list[float] = []
    for repeats in (1, 4):
        problem = problem_of(3, None)
        (rows,) = problem.rows
        many = {"args.0": mx.tile(rows.full["args.0"], (1, repeats, 1))}
        problem.rows = [Rows(rows.samples, {}, {}, many, many)]
        problem.outputs = [[mx.tile(problem.outputs[0][0], (1, repeats, 1))]]
        found: list[float] = []
        recipe = Recipe(iterations=1, warm_up=0.0)
        reconstruct(problem, recipe, tick=lambda _, loss, found=found: found.append(loss))
        losses += found
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_batch_in_pieces_gives_the_same_losses() -> None:
    recipe = replace(SHORT, iterations=20, rounding_rate=1e-3, keep=0.0, mix=0.0)
    found: dict[int, list[float]] = {}
    for rows in (64, 5):  # of a call; the batch of 16 is whole, or in pieces of 4
        problem, losses = problem_of(3, 8), found.setdefault(rows, [])
        problem.rows[0].at_once = rows
        reconstruct(problem, recipe, tick=lambda _, loss, losses=losses: losses.append(loss))
    assert found[5] == pytest.approx(found[64], rel=3e-3)  # Adam magnifies rounding


def test_a_call_takes_as_many_rows_as_fit() -> None:
    problem = problem_of(3, None)
    (rows,) = problem.rows
    row = 4 * KEPT_VALUES * TOKENS * (2 * WIDTH + WIDTH + WIDTH)  # of both linears and the module
    rows.fit(problem.module, 10 * row)
    assert rows.at_once == 10
    assert [part.stop - part.start for part in rows.batches(0, 25)] == [10, 10, 5]
    rows.fit(problem.module, 1)
    assert rows.at_once == 1
    problem.module.heads = 2
    rows.fit(problem.module, 10 * row + 10 * 4 * KEPT_SCORES * 2 * TOKENS**2)
    assert rows.at_once == 10


def test_learned_scales_are_those_of_the_finished_layers() -> None:
    recipe = replace(SHORT, iterations=30, scale_rate=3e-3)
    learned = reconstruct(problem_of(3, 3), recipe)
    problem = problem_of(3, 3)
    assert any(
        not np.allclose(weight.grid.scales, problem.targets[name].grid.scales)
        for name, weight in learned.weights.items()
    )
    problem.install({name: weight.layer() for name, weight in learned.weights.items()})
    assert problem.error() == pytest.approx(learned.after, rel=5e-3)  # scales are float16


def test_a_rounded_input_passes_gradients_as_lsq_does() -> None:
    """Esser et al. 2020, equations 3 and 5, and a gradient scale of 1 / sqrt(values * most)."""
    scale, zero, most = 0.25, 3.0, 7
    steps = np.array([-1.7, -0.6, 0.3, 1.6, 2.2, 9.3, -8.6], np.float32)  # two beyond the grid
    x, inside = mx.array(steps * scale), np.abs(steps) < 5
    wanted = np.clip(np.rint(steps) + zero, 0, most) - zero
    of_scale = np.where(inside, np.rint(steps) - steps, wanted).sum() / np.sqrt(steps.size * most)

    def total(x: mx.array, scale: mx.array) -> mx.array:
        return round_input(x, scale, zero, most).sum()

    found = round_input(x, mx.array(scale), zero, most)
    np.testing.assert_allclose(np.array(found), wanted * scale, atol=1e-6)
    for_x, for_scale = mx.grad(total, argnums=(0, 1))(x, mx.array(scale))
    np.testing.assert_allclose(np.array(for_x), inside, atol=1e-6)
    assert float(for_scale) == pytest.approx(of_scale, rel=1e-4)


def test_what_learning_made_worse_stays_rounded_to_nearest() -> None:
    problem = problem_of(3, 3)
    learned = reconstruct(problem, replace(SHORT, iterations=2, rounding_rate=5.0, range_rate=0.5))
    for name, target in problem.targets.items():
        nearest = target.grid.round(target.weight)
        assert np.array_equal(learned.weights[name].integers, nearest)
    assert learned.after == learned.before
    problem.install({name: weight.layer() for name, weight in learned.weights.items()})
    assert problem.error() == pytest.approx(learned.before, rel=1e-3)


def test_a_loss_that_is_not_finite_stops_it() -> None:
    problem = problem_of(3, None)
    problem.outputs = [[problem.outputs[0][0] * float("nan")]]
    with pytest.raises(NotFiniteError):
        reconstruct(problem, replace(SHORT, iterations=3))


def test_outputs_that_are_not_finite_are_refused() -> None:
    problem = problem_of(3, None)
    (rows,) = problem.rows
    with pytest.raises(NotFiniteError, match="a block returns"):
        rows.forward(problem.module, {"args.0": rows.full["args.0"] * float("inf")})


def test_inputs_of_samples_are_joined_or_the_same_for_all() -> None:
    def sample(number: int, **more: Any) -> dict[str, Any]:
        rows = mx.full((2, 3), number)
        return {"rows": rows, "table": mx.arange(5), "flag": True, "scale": mx.array(2.0)} | more

    fixed, arrays = _join([sample(0), sample(1)], 2)
    assert set(fixed) == {"table", "flag", "scale"} and set(arrays) == {"rows"}
    assert arrays["rows"][:, 0].tolist() == [0, 0, 1, 1]
    with pytest.raises(InputError, match="table of a block has no axis"):
        _join([sample(0), sample(1, table=mx.arange(5) + 1)], 2)
