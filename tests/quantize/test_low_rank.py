"""A low-rank branch: exact before rounding, less error after it, and the input it was made for."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.quantize.grid import Grid, fit_grid
from lydite.quantize.input_ranges import time_aware_range
from lydite.quantize.methods.low_rank import low_rank
from lydite.quantize.quantized_weight import QuantizedWeight


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def outliers(rows: int, inputs: int) -> Any:
    """A weight with a few strong directions."""
    strong = normal(rows, 3, seed=1) @ normal(3, inputs, seed=2)
    return 0.2 * strong + 0.05 * normal(rows, inputs, seed=3)


def three_bits(weight: Any) -> Grid:
    return fit_grid(weight, 3, 32)


def error(weight: Any, turns: int = 6, rank: int = 4) -> float:
    """Of the weight, as a share of that of rounding alone."""
    branch = low_rank(weight, three_bits, rank, turns=turns)
    alone, left = (
        w - (grid := three_bits(w)).values(grid.round(w)) for w in (weight, branch.residual)
    )
    return float(np.square(left).sum() / np.square(alone).sum())


@pytest.mark.parametrize("shape", [(96, 64), (64, 96)])
def test_the_branch_and_the_residual_are_the_weight(shape: tuple[int, int]) -> None:
    weight = outliers(*shape)
    down, up, residual = low_rank(weight, three_bits, 4)
    assert down.shape == (4, shape[1]) and up.shape == (shape[0], 4)
    np.testing.assert_allclose(up @ down + residual, weight, atol=1e-6)
    np.testing.assert_array_equal(up, up.astype(np.float16))  # as it is stored
    once = low_rank(weight, three_bits, 4, turns=1, store="float32")
    left, sizes, right = np.linalg.svd(weight, full_matrices=False)
    best = (left[:, :4] * sizes[:4]) @ right[:4]
    np.testing.assert_allclose(once.up @ once.down, best, atol=1e-4)


def test_it_takes_over_what_rounds_worst() -> None:
    weight = outliers(64, 96)
    assert error(weight) < 0.1
    assert error(weight) < error(weight, turns=1)
    assert error(weight, rank=8) < error(weight) < error(weight, rank=2)
    assert error(normal(64, 96)) < 0.9  # where there are no strong directions it gains little


@pytest.mark.parametrize("rank", [1, 64, 1000])
def test_any_rank_is_allowed(rank: int) -> None:
    down, up, _ = low_rank(outliers(64, 96), three_bits, rank)
    assert down.shape[0] == up.shape[1] == min(rank, 64)
    assert np.isfinite(down).all() and np.isfinite(up).all()


@pytest.mark.parametrize("rows", [3, 40])
def test_a_layer_adds_the_branch_of_the_input_before_it_is_rounded(rows: int) -> None:
    x = 2 * np.abs(normal(rows, 5, 64))
    x[..., 3] += 20  # shifted, and others divided
    x[..., 4] *= 8
    inputs = time_aware_range(x, 8)
    assert inputs.shift is not None and inputs.divisor is not None and inputs.divisor.max() > 1
    weight, bias = outliers(32, 64), normal(32, seed=5)
    branch = low_rank(inputs.scaled(weight), lambda w: fit_grid(w, 8, 32), 4)
    grid = fit_grid(branch.residual, 8, 32)
    integers, folded = grid.round(branch.residual), inputs.folded()
    assert folded is not None
    layer = QuantizedWeight(
        integers,
        grid,
        bias + grid.values(integers) @ folded,
        {**inputs.extras(), **branch.extras(inputs.divisor)},
    )
    assert layer.format.rank == 4
    found = np.array(layer.layer()(mx.array(x)))  # pyright: ignore[reportCallIssue]
    expected = x @ weight.T + bias
    assert np.abs(found - expected).max() < 0.01 * np.abs(expected).max()
