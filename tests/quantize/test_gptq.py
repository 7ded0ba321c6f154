"""GPTQ and HQQ against all combinations and against rounding to nearest."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from lydite.quantize.grid import Grid, fit_grid, float_grid
from lydite.quantize.methods.gptq import DAMPING, gptq, prepare_inputs
from lydite.quantize.methods.hqq import POWER, hqq_grid


def correlated(rows: int, inputs: int, generator: np.random.Generator, strength: float) -> Any:
    """Inputs with a common part."""
    common = generator.standard_normal((rows, max(inputs // 8, 1)))
    mixed = common @ generator.standard_normal((common.shape[1], inputs))
    return strength * mixed + generator.standard_normal((rows, inputs))


def test_gptq_comes_close_to_the_best_of_all_combinations() -> None:
    ratios: list[tuple[float, float]] = []
    for seed in range(12):
        generator = np.random.default_rng(seed)
        x = correlated(64, 6, generator, 3.0)
        weight = generator.standard_normal((2, 6)).astype(np.float32)
        grid = fit_grid(weight, 2, None)
        hessian = x.T @ x
        choices = np.array(list(product(range(4), repeat=6)), np.uint8)
        best = 0.0
        for row in range(2):
            values = grid.scales[row] * choices + grid.offsets[row]
            changes = values - weight[row]
            best += np.einsum("ni,ij,nj->n", changes, hessian, changes).min()
        integers, _ = gptq(weight, prepare_inputs(hessian), grid)
        nearest = output_error(x, weight, grid.values(grid.round(weight)))
        ratios.append((output_error(x, weight, grid.values(integers)) / best, nearest / best))
    found, nearest = np.mean(ratios, axis=0)
    assert all(ratio >= 1 - 1e-6 for ratio, _ in ratios)  # or the best would not be the best
    assert found < 1.2 and nearest > 2


@pytest.mark.parametrize(
    "fit",
    [
        *(partial(fit_grid, bits=bits, group=group) for bits in (2, 4) for group in (32, None)),
        *(partial(float_grid, mode=mode) for mode in ("mxfp4", "mxfp8", "nvfp4")),
    ],
)
def test_gptq_halves_the_error_of_correlated_inputs(fit: Callable[[Any], Grid]) -> None:
    generator = np.random.default_rng(0)
    inputs = correlated(1024, 160, generator, 1.0)  # more columns than are updated at once
    x, unseen = inputs[:512], inputs[512:]
    weight = generator.standard_normal((16, 160)).astype(np.float32)
    grid = fit(weight)
    integers, made_up = gptq(weight, prepare_inputs(x.T @ x), grid)
    nearest = output_error(unseen, weight, grid.values(grid.round(weight)))
    assert output_error(unseen, weight, grid.values(integers)) < 0.5 * nearest
    np.testing.assert_array_equal(grid.round(made_up), integers)


def test_columns_that_are_updated_together_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    x = correlated(256, 96, generator, 1.0)
    weight = generator.standard_normal((8, 96)).astype(np.float32)
    grid = fit_grid(weight, 3, 32)
    found: list[Any] = []
    for columns in (1, 7, 32, 96):
        monkeypatch.setattr("lydite.quantize.methods.gptq.COLUMNS", columns)
        found.append(gptq(weight, prepare_inputs(x.T @ x), grid)[0])
    for each in found[1:]:
        np.testing.assert_array_equal(each, found[0])


@pytest.mark.parametrize("size", [5, 128, 300])
def test_the_factor_is_that_of_the_damped_inverse_largest_inputs_first(size: int) -> None:
    x = correlated(2 * size, size, np.random.default_rng(size), 1.0)
    x[:, 3] = 0  # never occurs
    hessian = x.T @ x
    known = prepare_inputs(hessian)
    sizes = np.diag(hessian)[known.order]
    assert sorted(known.order) == list(range(size)) and (np.diff(sizes) <= 0).all()
    damped = hessian[np.ix_(known.order, known.order)]
    damped[-1, -1] = 1
    damped += DAMPING * np.diag(damped).mean() * np.eye(size)
    np.testing.assert_allclose(known.factor, np.triu(known.factor), atol=1e-12)
    product = known.factor.T @ known.factor @ damped
    np.testing.assert_allclose(product, np.eye(size), atol=1e-6)


def test_gptq_of_independent_inputs_is_rounding_to_nearest() -> None:
    weight = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    grid = fit_grid(weight, 3, 32)
    integers, _ = gptq(weight, prepare_inputs(np.eye(32)), grid)
    np.testing.assert_array_equal(integers, grid.round(weight))


def test_gptq_takes_inputs_that_never_occur() -> None:
    generator = np.random.default_rng(0)
    x = correlated(64, 32, generator, 1.0)
    x[:, 5] = 0
    weight = generator.standard_normal((4, 32)).astype(np.float32)
    grid = fit_grid(weight, 4, 32)
    integers, _ = gptq(weight, prepare_inputs(x.T @ x), grid)
    np.testing.assert_array_equal(integers[:, 5], grid.round(weight)[:, 5])


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [64, None])
def test_errors_of_hqq_are_not_larger_than_those_of_the_whole_range(
    bits: int, group: int | None
) -> None:
    weight = np.random.default_rng(0).standard_t(4, (32, 256)).astype(np.float32)
    plain, found = fit_grid(weight, bits, group), hqq_grid(weight, bits, group)
    before, after = (
        (np.abs(weight - grid.values(grid.round(weight))) ** POWER).mean()
        for grid in (plain, found)
    )
    assert after < before
    np.testing.assert_array_equal(found.scales, plain.scales)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_hqq_stops_before_the_error_grows(seed: int, bits: int) -> None:
    """In a group of a few weights the offsets of a step may be worse than those before."""
    weight = np.random.default_rng(seed).standard_normal((1, 32)).astype(np.float32)
    grids = (make(weight, bits, 32, store="float32") for make in (fit_grid, hqq_grid))
    before, after = (np.abs(weight - grid.values(grid.round(weight))).mean() for grid in grids)
    assert after <= before * (1 + 1e-6)


def test_hqq_takes_weights_that_are_exact() -> None:
    weight = np.tile(np.arange(4, dtype=np.float32), (2, 16))
    grid = hqq_grid(weight, 2, 32)
    np.testing.assert_array_equal(grid.values(grid.round(weight)), weight)


def output_error(x: Any, weight: Any, values: Any) -> float:
    return float((((weight - values) @ x.T) ** 2).sum())
