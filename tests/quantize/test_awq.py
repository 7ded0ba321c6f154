"""AWQ: scales that are folded change no output, and make the error of rounding smaller."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.models.mmdit import JointBlock, MMDiTConfig
from lydite.quantize.grid import fit_grid
from lydite.quantize.methods.awq import (
    MOST_ROWS,
    RATIOS,
    _some,
    find_scales,
    fold_scales,
    value_pairs,
)
from lydite.quantize.watch_modules import watch_calls

CONFIG = MMDiTConfig(
    sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=32,
    num_attention_heads=2, joint_attention_dim=64, caption_projection_dim=64,
    pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8, dual_attention_layers=(0,),
)  # fmt: skip


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rounded(weight: Any) -> Any:
    grid = fit_grid(weight, 3, None)
    return grid.values(grid.round(weight))


def output_error(weight: Any, values: Any, x: Any) -> float:
    return float(np.square(x @ (weight - values).T).sum())


def test_scales_help_where_channels_are_outliers() -> None:
    x = normal(300, 64)
    x[:, [3, 17]] *= 15
    weight = normal(32, 64, seed=1)
    scales = find_scales([weight], [x], [rounded])
    assert scales[3] > 2 * np.median(scales)
    found = output_error(weight, rounded(weight * scales) / scales, x)
    assert found < 0.5 * output_error(weight, rounded(weight), x)


def test_no_scales_are_better_where_no_channel_is_an_outlier() -> None:
    scales = find_scales([normal(32, 64, seed=1)], [np.sign(normal(300, 64))], [rounded])
    np.testing.assert_array_equal(scales, np.ones(64))


def test_a_block_gives_the_same_before_rounding_and_less_error_after() -> None:
    mx.random.seed(0)
    block = JointBlock(CONFIG, 0)
    linears: dict[str, Any] = {
        path: module
        for path, module in block.named_modules()
        if "weight" in module and module.weight.ndim == 2
    }
    value: Any = linears["attn.to_v"]
    value.weight = value.weight * mx.where(mx.arange(64) % 16 == 3, 20, 1)[:, None]
    weights: dict[str, Any] = {path: np.array(module.weight) for path, module in linears.items()}
    pairs = {pair.giving[0]: pair for pair in value_pairs(weights)}
    assert set(pairs) == {"attn.to_v", "attn2.to_v"}
    assert pairs["attn.to_v"].giving == ("attn.to_v", "attn.add_v_proj")
    assert pairs["attn.to_v"].taking == ("attn.to_out.0", "attn.to_add_out")
    assert pairs["attn2.to_v"].taking == ("attn2.to_out.0",)
    arguments = [
        mx.array(normal(4, *shape, seed=seed))
        for seed, shape in enumerate([(5, 64), (16, 64), (9, 64), (6, 64)])
    ]
    inputs: dict[str, Any] = {}

    def keep(path: str, args: Any, kwargs: Any, output: Any) -> Any:
        inputs[path] = np.array(args[0])
        return output

    pair = pairs["attn.to_v"]
    with watch_calls({path: linears[path] for path in pair.taking}, keep):
        before = block(*arguments)
    biases: dict[str, Any] = {path: np.array(module.bias) for path, module in linears.items()}
    changed, changed_biases = fold_scales(
        pair, weights, biases, inputs, lambda name, weight: rounded(weight)
    )
    assert set(changed) == {*pair.giving, *pair.taking} and set(changed_biases) == set(pair.giving)

    def outputs(side: dict[str, Any], bias: dict[str, Any], *, rounding: bool) -> list[Any]:
        for path in changed:
            rounds = rounding and path in pair.taking
            linears[path].weight = mx.array(rounded(side[path]) if rounds else side[path])
            linears[path].bias = mx.array(bias.get(path, biases[path]))
        return [np.array(each) for each in block(*arguments)]

    for found, wanted in zip(outputs(changed, changed_biases, rounding=False), before, strict=True):
        np.testing.assert_allclose(found, np.array(wanted), rtol=1e-3, atol=1e-3)
    plain, scaled = (
        sum(
            float(np.square(found - np.array(wanted)).sum())
            for found, wanted in zip(outputs(*side, rounding=True), before, strict=True)
        )
        for side in ((weights, biases), (changed, changed_biases))
    )
    assert scaled < 0.7 * plain


def test_scales_of_two_linears_are_of_both_and_each_error_is_of_its_own_inputs() -> None:
    """The first linear's outputs are a thousand times as large: shares of each are added."""
    plain, outliers = np.sign(normal(300, 64)), normal(300, 64)
    outliers[:, [3, 17]] *= 15
    weight = normal(32, 64, seed=1)
    one = find_scales([1000 * weight, weight], [plain, outliers], [rounded] * 2)
    other = find_scales([weight, 1000 * weight], [outliers, plain], [rounded] * 2)
    np.testing.assert_allclose(one, other, rtol=1e-5)
    assert one[3] > 1.5 * np.median(one)
    exact = find_scales([weight], [outliers], [lambda values: values])
    np.testing.assert_array_equal(exact, np.ones(64))  # nothing is lost, nothing is scaled
    scaled = find_scales([weight], [outliers], [rounded])
    assert scaled.max() * scaled.min() == pytest.approx(1)


def test_only_rows_that_are_spread_over_all_are_looked_at() -> None:
    for count in (3, MOST_ROWS, 2 * MOST_ROWS - 1, 3 * MOST_ROWS + 5):
        rows = _some(np.arange(count, dtype=np.float32)[:, None])[:, 0]
        every = max(count // MOST_ROWS, 1)
        assert rows[0] == 0 and (np.diff(rows) == every).all() and count - rows[-1] <= every


def test_which_linears_make_a_pair() -> None:
    def shapes(**own: tuple[int, int]) -> Any:
        return {f"block.{name.replace('__', '.')}": np.zeros(shape) for name, shape in own.items()}

    whole = shapes(attn__to_v=(8, 4), attn__add_v_proj=(8, 4), attn__to_out__0=(4, 8))
    (pair,) = value_pairs(whole)
    assert pair.giving == ("block.attn.to_v", "block.attn.add_v_proj")
    assert pair.taking == ("block.attn.to_out.0",)
    assert value_pairs(shapes(attn__to_v=(8, 4))) == []
    assert value_pairs(shapes(attn__to_v=(8, 4), attn__to_out__0=(4, 16))) == []
    assert value_pairs(shapes(attn__into_v=(8, 4), attn__in__to_out__0=(4, 8))) == []


def test_ratios_are_those_of_the_paper() -> None:
    assert np.allclose(RATIOS, np.arange(20) / 19)  # from no scaling to all of it
