"""Grids of weights: MLX's own layout, exact inverses, and ranges with the least error."""

from copy import deepcopy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.device import GPU_BRANCHES
from lydite.core.errors import InputError
from lydite.models.layers import Conv2d, HalvingConv2d
from lydite.quantize.grid import Grid, ScaleDtype, fit_grid, float_grid, pack, stored, unpack
from lydite.quantize.quantized_weight import QuantizedWeight
from lydite.quantize.range_search import range_search, rounding_error
from lydite.weights.quantized_format import BITS, FORMATS, GROUPS, Mode


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
def test_packing_is_that_of_mlx(bits: int, group: int) -> None:
    weight = normal(5, 256, seed=bits)
    words, scales, biases = (
        np.array(x) for x in mx.quantize(mx.array(weight), group_size=group, bits=bits)
    )
    integers = unpack(words, bits)
    assert integers.shape == weight.shape and integers.max() == 2**bits - 1
    np.testing.assert_array_equal(pack(integers, bits), words)
    own = np.random.default_rng(bits).integers(0, 2**bits, weight.shape).astype(np.uint8)
    np.testing.assert_array_equal(unpack(pack(own, bits), bits), own)
    # and what the integers stand for is what MLX reads in them
    values = mx.dequantize(
        mx.array(words), mx.array(scales), mx.array(biases), group_size=group, bits=bits
    )
    ours = Grid(scales, biases, bits).values(integers)
    np.testing.assert_allclose(ours, np.array(values), rtol=0, atol=1e-6)


def test_integers_that_fill_no_whole_words_are_refused() -> None:
    with pytest.raises(InputError, match="33 inputs in 3 bits"):
        pack(np.zeros((1, 33), np.uint8), 3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [32, None])
def test_rounding_is_the_inverse_of_values(bits: int, group: int | None) -> None:
    grid = fit_grid(normal(4, 64), bits, group)
    integers = np.random.default_rng(1).integers(0, 2**bits, (4, 64)).astype(np.uint8)
    np.testing.assert_array_equal(grid.round(grid.values(integers)), integers)


@pytest.mark.parametrize("store", ["float16", "bfloat16", "float32"])
def test_no_weight_is_further_than_half_a_step_from_its_value(store: ScaleDtype) -> None:
    weight = normal(4, 64)
    grid = fit_grid(weight, 4, 32, store=store)
    error = np.abs(grid.grouped(weight - grid.values(grid.round(weight))))
    # a scale that was rounded for storage misses the ends of the range by up to 15 times its error
    lost = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 1e-6}[store]
    most = grid.scales * (0.5 + 15 * lost) + np.abs(grid.offsets) * lost
    assert (error <= most[..., None]).all()
    np.testing.assert_array_equal(grid.scales, stored(grid.scales, store))


@pytest.mark.parametrize("level", [0.25, 0.0, -3.0])
def test_equal_weights_are_exact(level: float) -> None:
    weight = np.full((2, 32), level, np.float32)
    grid = fit_grid(weight, 2, 32)
    np.testing.assert_array_equal(grid.values(grid.round(weight)), weight)


@pytest.mark.parametrize("bits", BITS)
def test_a_grid_reaches_from_the_smallest_to_the_largest_weight_of_its_group(bits: int) -> None:
    steps = 2**bits - 1
    weight = np.concatenate([np.linspace(-1, 2, 32), np.linspace(5, 5.5, 32)])[None]
    rows = np.concatenate([weight, -weight]).astype(np.float32)
    grid = fit_grid(rows, bits, 32, store="float32")
    np.testing.assert_allclose(grid.scales, np.array([[3, 0.5], [3, 0.5]]) / steps, rtol=1e-5)
    np.testing.assert_allclose(grid.offsets, [[-1, 5], [-2, -5.5]], rtol=1e-5)
    integers = grid.round(rows).reshape(2, 2, 32)
    assert integers[..., [0, -1]].tolist() == [[[0, steps]] * 2, [[steps, 0]] * 2]
    whole = fit_grid(rows, bits, None, store="float32")
    np.testing.assert_allclose(whole.scales, np.full((2, 1), 6.5) / steps, rtol=1e-5)


def test_scales_are_stored_with_the_digits_of_their_dtype() -> None:
    values = np.array([1 + 2**-7, 1 + 2**-8 + 2**-10, 1 + 2**-12, 1e-6, 3e38], np.float32)
    assert stored(values, "float32").tolist() == values.tolist()
    half, brain = stored(values[:4], "float16"), stored(values, "bfloat16")
    assert half[:3].tolist() == [1 + 2**-7, 1 + 2**-8 + 2**-10, 1]
    assert brain[:3].tolist() == [1 + 2**-7, 1 + 2**-7, 1]
    assert half[3] == np.float32(np.float16(1e-6)) and 2.9e38 < brain[4] < np.inf
    assert half.dtype == brain.dtype == np.float32


def test_a_grid_per_channel_is_stored_by_repeating_its_scales() -> None:
    weight = normal(3, 192)
    grid = fit_grid(weight, 4, None)
    integers = grid.round(weight)
    repeated = grid.regrouped(192, 64)
    assert repeated.scales.shape == (3, 3)
    np.testing.assert_array_equal(repeated.values(integers), grid.values(integers))
    np.testing.assert_array_equal(repeated.round(weight), integers)
    with pytest.raises(InputError, match="groups of 128"):
        grid.regrouped(192, 128)
    with pytest.raises(InputError, match="groups of 64"):
        fit_grid(normal(3, 192), 4, 96).regrouped(192, 64)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [*GROUPS, None])
@pytest.mark.parametrize("rows", [3, 40])  # the two products of a layer
def test_a_quantized_product_is_the_dequantized_one(
    bits: int, group: int | None, rows: int
) -> None:
    weight, bias, x = normal(8, 256), normal(8, seed=1), normal(rows, 256, seed=2)
    grid = fit_grid(weight, bits, group, store="float32")
    rounded = QuantizedWeight(grid.round(weight), grid, bias)
    found = np.array(rounded.layer()(mx.array(x)))  # pyright: ignore[reportCallIssue]
    np.testing.assert_allclose(found, x @ rounded.values().T + bias, rtol=1e-4, atol=1e-4)
    assert rounded.format.bits == bits and rounded.format.group == (group or 128)


@pytest.mark.parametrize("mode", [mode for mode in FORMATS if mode != "affine"])
def test_floating_point_formats_are_those_of_mlx(mode: Mode) -> None:
    (bits,), (group,) = FORMATS[mode]
    weight = normal(8, 256) * np.exp(normal(8, 256, seed=1))
    weight[0, :64] = 0
    grid = float_grid(weight, mode)
    rounded = QuantizedWeight(grid.round(weight), grid)
    arrays, wanted = rounded.arrays(), mx.quantize(mx.array(weight), group, bits, mode)
    values = mx.dequantize(*wanted, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    np.testing.assert_array_equal(rounded.values(), np.array(values))  # -0 is 0 in MLX
    np.testing.assert_array_equal(arrays["scales"][1:], np.array(wanted[1])[1:])
    x = normal(40, 256, seed=2)
    found = np.array(rounded.layer()(mx.array(x)))  # pyright: ignore[reportCallIssue]
    np.testing.assert_allclose(found, x @ rounded.values().T, rtol=1e-4, atol=1e-4)
    assert rounded.format.mode == mode and "biases" not in arrays


def test_the_range_with_least_error_ignores_outliers() -> None:
    values = np.concatenate([normal(2, 1000), np.full((2, 1), 12, np.float32)], axis=1)
    full, found = range_search(values, 4, "minmax"), range_search(values, 4, "mse")
    assert (full[1] == 12).all() and (found[1] < 11).all()
    assert (rounding_error(values, *found, 4) < rounding_error(values, *full, 4)).all()
    low, high = range_search(values, 4, "percentile")
    for own, row in zip(zip(low, high, strict=True), values, strict=True):
        assert own == pytest.approx(tuple(np.percentile(row, (0.1, 99.9))), rel=1e-5)
    assert (low > full[0]).all() and (high < 12).all()


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_the_error_of_a_range_is_that_of_its_evenly_spaced_values(bits: int) -> None:
    values = normal(3, 50) + np.array([[5], [0], [-7]], np.float32)
    low, high = (np.array(ends, np.float32) for ends in ((3.5, -0.5, -9), (6, 1, -6)))
    found = rounding_error(values, low, high, bits)
    for own, row, ends in zip(found, values, zip(low, high, strict=True), strict=True):
        levels = np.linspace(*ends, 2**bits)
        apart = np.abs(row[:, None] - levels).min(axis=1)
        assert own == pytest.approx((apart**2.4).mean(), rel=1e-3)


def test_the_range_with_least_error_has_less_than_any_other_around_its_middle() -> None:
    values = normal(4, 300) ** 3 + np.array([[5], [0], [0], [-7]], np.float32)
    low, high = range_search(values, 3, "mse")
    least, most = values.min(axis=1), values.max(axis=1)
    np.testing.assert_allclose(low + high, least + most, rtol=1e-4, atol=1e-4)
    error = rounding_error(values, low, high, 3)
    for share in np.linspace(1, 0.3, 40):
        middle, half = (least + most) / 2, share * (most - least) / 2
        assert (error <= rounding_error(values, middle - half, middle + half, 3) * 1.0001).all()
    assert (high - low < 0.9 * (most - least)).any()


def test_the_range_with_least_error_is_never_worse_than_all_of_it() -> None:
    values = normal(50, 32)
    for bits in (2, 3, 4, 8):
        full = rounding_error(values, *range_search(values, bits), bits)
        found = rounding_error(values, *range_search(values, bits, "mse"), bits)
        assert (found <= 1.001 * full).all()  # all of the range, computed in another order


@pytest.mark.parametrize("branch", ["", "1"])
@pytest.mark.parametrize("layer", [Conv2d(32, 8, 3), HalvingConv2d(32, padding=1)])
def test_a_convolution_in_few_bits_is_one_with_its_unpacked_kernel(
    layer: Any, branch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPU_BRANCHES, branch)
    packed, plain = deepcopy(layer).to_quantized(32, 4), deepcopy(layer)
    assert packed.weight.dtype == mx.uint32 and packed.weight.ndim == 2
    plain.weight = packed.kernel()
    assert 0 < float(mx.abs(plain.weight - layer.weight).max()) < 0.05
    x = mx.random.normal((1, 6, 6, 32), key=mx.random.key(1))
    assert mx.array_equal(packed(x), plain(x)).item()


@pytest.mark.parametrize("bits", BITS)
def test_weights_beyond_the_range_get_the_nearest_integer_there_is(bits: int) -> None:
    """One more would be packed into the bits of its neighbour."""
    grid = Grid(np.full((1, 1), 0.5, np.float32), np.full((1, 1), -3.0, np.float32), bits)
    most = 2**bits - 1
    ends = np.array([[-9e9, -3.2, -3.0, most * 0.5 - 3, most * 0.5 - 2.6, 9e9]], np.float32)
    assert grid.most == most
    assert grid.round(ends).tolist() == [[0, 0, 0, most, most, most]]


@pytest.mark.parametrize(("mode", "most"), [("mxfp4", 6), ("nvfp4", 6), ("mxfp8", 448)])
def test_weights_beyond_a_floating_point_format_get_its_largest_number(
    mode: Mode, most: float
) -> None:
    """What makes up for the rounding of other columns may lie anywhere; a code may be NaN."""
    ((bits,), _), scale = FORMATS[mode], 0.5
    grid = Grid(np.full((1, 1), scale, np.float32), np.zeros((1, 1), np.float32), bits, mode)
    weight = np.array([[-9e9, -1.04 * most, -most, most / 2, most, 1.04 * most, 9e9]], np.float32)
    found = grid.values(grid.round(scale * weight))
    assert found.tolist() == [[scale * each for each in (-most,) * 3 + (most / 2,) + (most,) * 3]]
