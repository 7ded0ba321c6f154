"""Ranges of activations: shift and migration behind a GELU, balance of channels, steps' weights."""

from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.models import layers
from lydite.models.layers import QuantizedLinear, at_timestep, rounded_to_format
from lydite.quantize.input_ranges import (
    BINS,
    InputRange,
    _channel_scales,  # pyright: ignore[reportPrivateUsage]
    _histogram,  # pyright: ignore[reportPrivateUsage]
    balance,
    group_times,
    is_behind_gelu,
    migration,
    momentum_shift,
    plain_range,
    rank_correlation,
    time_aware_range,
)


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def behind_gelu() -> Any:
    """(rows, tokens, channels): one with large values all over, one with large values at times."""
    x = normal(40, 8, 16) * np.array([2, 5, *[1] * 14], np.float32)
    x[..., 0] += 30
    return (x / (1 + np.exp(-1.702 * x))).astype(np.float32)


def rounded(values: Any, found: InputRange) -> Any:
    """What the layer's product takes, back in the units of the input."""
    shift = 0 if found.shift is None else found.shift
    divisor = 1 if found.divisor is None else found.divisor
    steps = np.rint((values - shift) / divisor / found.scale) + found.zero
    return (np.clip(steps, 0, found.most) - found.zero) * found.scale * divisor + shift


def test_a_range_covers_what_has_least_error() -> None:
    values = normal(4000)
    for bits in (4, 8):
        found = plain_range(values, bits)
        assert 0 < found.zero < found.most and found.zero == int(found.zero)
        step = (values.max() - values.min()) / found.most
        whole = InputRange(bits, step, float(np.rint(-values.min() / step)))
        error, all_error = (
            np.abs(values - rounded(values, each)).mean() for each in (found, whole)
        )
        assert error <= all_error
    assert plain_range(np.abs(values), 8).zero == 0
    assert rounded(np.zeros(4), plain_range(np.zeros(4, np.float32), 8)).tolist() == [0] * 4


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("zero", [0, 2, 7])
@pytest.mark.parametrize("count", [1, BINS + 256])  # few values, and a histogram of many
def test_values_that_lie_on_a_grid_are_given_that_grid(bits: int, zero: int, count: int) -> None:
    steps = (np.arange(2**bits) - zero) * 0.25
    values = np.repeat(steps, -(-count // 2**bits)).astype(np.float32)
    found = plain_range(values, bits)
    assert (found.bits, found.most, found.zero) == (bits, 2**bits - 1, zero)
    assert found.scale == pytest.approx(0.25, rel=1e-6)
    both = np.stack([values, 2 * values], axis=1)
    np.testing.assert_allclose(_channel_scales(both, bits), [0.25, 0.5], rtol=1e-5)


def test_a_histogram_of_many_values_gives_the_range_of_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few outliers, more on one side: the best range leaves them out."""
    values = normal(2 * BINS)
    values[:6] = (9, 10, 11, -6, -7, 12)
    counted = plain_range(values, 4)
    monkeypatch.setattr("lydite.quantize.input_ranges.BINS", values.size)
    exact = plain_range(values, 4)
    assert counted.zero == exact.zero and counted.scale == pytest.approx(exact.scale, rel=0.05)
    assert exact.scale < 0.7 * (12 + 7) / 15
    both = np.stack([values, 3 * values], axis=1)
    first, second = _channel_scales(both, 4)
    assert second == pytest.approx(3 * first, rel=1e-3) and first < 0.7 * (12 + 7) / 15


@pytest.mark.parametrize(("low", "high"), [(1.0, 3.0), (-3.0, -1.0)])
def test_a_range_always_holds_zero(low: float, high: float) -> None:
    """Padding is 0, and a product of integers needs a zero point among them."""
    values = np.linspace(low, high, 256).astype(np.float32)
    found = plain_range(values, 8)
    assert found.zero == (0 if low > 0 else 255)
    assert rounded(np.zeros(1), found) == 0
    assert np.abs(rounded(values, found) - values).max() < 0.05


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("divided", [False, True])
def test_what_the_input_loses_weight_and_bias_give_back(shifted: bool, divided: bool) -> None:
    shift = normal(16, seed=1) if shifted else None
    divisor = np.exp(normal(16, seed=2)) if divided else None
    x, weight = normal(5, 16, seed=3), normal(4, 16, seed=4)
    found = InputRange(8, 0.5, 3.0, shift, divisor)
    scaled, folded = found.scaled(weight), found.folded()
    assert (folded is None) == (not shifted)
    output = found.moved(x) @ scaled.T + (0 if folded is None else scaled @ folded)
    np.testing.assert_allclose(output, x @ weight.T, rtol=1e-4, atol=1e-4)
    names = {"input_range"} | ({"input_shift"} if shifted else set())
    assert set(found.extras()) == names | ({"input_divisor"} if divided else set())
    groups = found.for_groups([(500.0, x), (0.0, 4 * x)])
    assert groups.times is not None and groups.times.tolist() == [500, 0]
    for number, values in enumerate((x, 4 * x)):
        own = plain_range(found.moved(values), 8)
        ranges = groups.extras()["input_range"]
        assert ranges[number].tolist() == pytest.approx([own.scale, own.zero, 255])
    assert (groups.shift is shift) and (groups.divisor is divisor)


def test_a_search_sees_every_channel_and_the_largest_values() -> None:
    """A sample of every sixth value is of some channels only, and any sample lacks the largest."""
    values = normal(64, 64, 192) * np.where(np.arange(192) % 6 == 5, 20, 1).astype(np.float32)
    values[0, :20, 0] = 200
    found = plain_range(values, 8)
    errors = {
        share: (np.abs(values - rounded(values, replace(found, scale=share * found.scale))) ** 2.4)
        for share in (0.7, 0.85, 1, 1.15, 1.4)
    }
    assert min(errors, key=lambda share: errors[share].mean()) == 1


def test_a_search_on_the_gpu_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = time_aware_range(behind_gelu(), 8)
    monkeypatch.setattr("lydite.quantize.range_search.on_cpu", lambda: False)
    on_gpu = time_aware_range(behind_gelu(), 8)
    assert on_gpu.zero == on_cpu.zero
    assert on_gpu.scale == pytest.approx(on_cpu.scale, rel=1e-6)
    assert np.array_equal(on_gpu.divisor, on_cpu.divisor)  # pyright: ignore[reportArgumentType]
    assert on_gpu.shift is not None and on_cpu.shift is not None
    np.testing.assert_allclose(on_gpu.shift, on_cpu.shift, rtol=1e-6)


def test_a_histogram_on_the_gpu_counts_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.append(normal(30_000), np.array([-9, 9], np.float32))
    counts, edges = _histogram(values, -9.0, 9.0)
    monkeypatch.setattr("lydite.quantize.input_ranges.on_cpu", lambda: False)
    monkeypatch.setattr("lydite.quantize.input_ranges.AT_ONCE", 7_000)
    on_gpu, same_edges = _histogram(values, -9.0, 9.0)
    assert on_gpu.sum() == counts.sum() == len(values)
    assert on_gpu[0] == on_gpu[-1] == 1
    assert np.abs(np.cumsum(on_gpu) - np.cumsum(counts)).max() <= 5  # next to an edge: float32
    np.testing.assert_allclose(same_edges, edges)


def test_only_outputs_of_a_gelu_are_taken_for_them() -> None:
    values = behind_gelu()
    assert is_behind_gelu(values).all()
    values[..., 3] -= 1
    assert np.flatnonzero(~is_behind_gelu(values)).tolist() == [3]
    assert not is_behind_gelu(normal(40, 8, 16)).any()


def test_the_shift_is_the_middle_of_each_channel_over_batches() -> None:
    values = np.tile(behind_gelu()[:1], (40, 1, 1))  # all batches are the same
    middle = (values.min(axis=(0, 1)) + values.max(axis=(0, 1))) / 2
    np.testing.assert_allclose(momentum_shift(values), middle, rtol=1e-5)
    values = behind_gelu()
    rising = np.arange(1.0, 41)[:, None, None] * np.array([[[0.0], [1.0]]])  # row r: from 0 to r
    (middle,) = momentum_shift(rising.astype(np.float32))
    assert 0.9 * 20 < middle <= 20  # of batches of 32 rows, nearly always with a large one
    assert not np.array_equal(momentum_shift(values, 0), momentum_shift(values, 1))
    np.testing.assert_array_equal(momentum_shift(values, 1), momentum_shift(values, 1))


def test_outlier_channels_are_divided_by_integers() -> None:
    centred = normal(500, 16) * np.array([6, 3, *[1] * 14], np.float32)
    found = migration(centred, 8)
    assert found[:2].tolist() == pytest.approx([6, 3], abs=1) and (found[2:] == 1).all()
    assert (found == np.rint(found)).all()
    assert (migration(normal(500, 16), 8) == 1).all()


def test_shift_and_migration_make_the_error_smaller() -> None:
    values = behind_gelu()
    plain, migrated, both = (
        plain_range(values, 4),
        time_aware_range(values, 4, shift=False),
        time_aware_range(values, 4),
    )
    assert migrated.shift is None and migrated.divisor is not None
    errors = [((values - rounded(values, each)) ** 2).mean() for each in (plain, migrated, both)]
    assert errors[2] < errors[1] < errors[0]
    small = np.s_[..., 2:]  # the usual channels, which outliers cost most of their steps
    lost = [((values - rounded(values, each))[small] ** 2).mean() for each in (plain, both)]
    assert lost[1] < 0.5 * lost[0]


def test_other_channels_are_neither_moved_nor_divided() -> None:
    values = behind_gelu()
    values[..., 4] = 20 * normal(40, 8)
    found = time_aware_range(values, 8)
    assert found.shift is not None and found.divisor is not None
    assert found.shift[4] == 0 and found.divisor[4] == 1 and found.shift[0] > 1


def test_what_a_layer_stores_of_a_range() -> None:
    found = time_aware_range(behind_gelu(), 8)
    extras = replace(found, scale=0.5).extras()
    assert extras["input_range"].tolist() == [0.5, found.zero, 255]
    assert set(extras) == {"input_range", "input_shift", "input_divisor"}
    assert set(plain_range(behind_gelu(), 8).extras()) == {"input_range"}


def test_balance_is_that_of_smoothquant() -> None:
    values, weight = normal(50, 8) * np.arange(1, 9, dtype=np.float32), normal(4, 8, seed=1)
    found = balance(values, [weight], power=0.5)
    wanted = np.sqrt(np.abs(values).max(axis=0) / np.abs(weight).max(axis=0))
    np.testing.assert_allclose(found / found[0], wanted / wanted[0], rtol=1e-5)
    np.testing.assert_allclose(np.log(found).mean(), 0, atol=1e-6)  # no change of the whole
    other = 3 * normal(6, 8, seed=2)  # a second linear of the same input
    largest = np.maximum(np.abs(weight).max(axis=0), np.abs(other).max(axis=0))
    for power in (0.5, 0.8):
        found = balance(values, [weight, other], power=power)
        wanted = np.abs(values).max(axis=0) ** power / largest ** (1 - power)
        np.testing.assert_allclose(found / found[0], wanted / wanted[0], rtol=1e-5)
    values[:, 3] = 0
    weight[:, 4] = 0
    found = balance(values, [weight])
    assert np.isfinite(found).all() and (found > 0).all()


def test_steps_are_grouped_from_the_first_on() -> None:
    times = np.array([1000, 750, 500, 250, 1000, 10], np.float32)
    assert group_times(times, 2) == [500, 10]  # three steps and two
    assert group_times(times, 5) == group_times(times, 99) == [1000, 750, 500, 250, 10]


def test_each_row_is_rounded_by_the_range_of_its_step() -> None:
    lowest, scales, zeros = (
        np.array(each, np.float32) for each in ((600, 300, 0), (0.5, 0.25, 2), (4, 7, 0))
    )
    found = InputRange(4, scales, zeros, times=lowest)
    layer = QuantizedLinear(64, 8, bias=False)
    x = mx.array(normal(6, 5, 64, seed=3))
    times = mx.array([1000.0, 600.0, 599.0, 300.0, 299.0, 0.0])
    for name, array in found.extras().items():
        layer[name] = mx.array(array)
    with at_timestep(times):
        together = layer(x)
    del layer["input_times"]
    for row, number in enumerate((0, 0, 1, 1, 2, 2)):
        layer["input_range"] = mx.array([float(scales[number]), float(zeros[number]), 15])
        alone = layer(x[row : row + 1])
        np.testing.assert_allclose(np.array(together[row]), np.array(alone[0]), rtol=1e-5)
        layer["input_range"], layer["input_times"] = (
            mx.array(found.extras()[name]) for name in ("input_range", "input_times")
        )
        with at_timestep(float(times[row])):
            np.testing.assert_allclose(np.array(layer(x[row])), np.array(alone[0]), rtol=1e-5)
        del layer["input_times"]


@pytest.mark.parametrize("mode", layers.FLOAT_PRODUCTS)
def test_inputs_in_the_format_of_the_weight(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU MLX has no such product. One that is right is used, one that is wrong is not."""
    layer = QuantizedLinear(64, 8, mode=mode, group_size=None, bits=None)  # pyright: ignore[reportArgumentType]
    layer.quantize_input = True
    x = mx.array(normal(3, 40, 64))
    weight = mx.dequantize(layer.weight, layer.scales, mode=mode, dtype=mx.float32)
    wanted = np.array(rounded_to_format(x, mode) @ weight.T + layer.bias)
    calls: list[int] = []

    def product(x: mx.array, weight: Any, scales: Any, error: float = 0, **options: Any) -> Any:
        calls.append(len(x))
        unpacked = mx.dequantize(weight, scales, mode=mode, dtype=x.dtype)
        return (1 + error) * rounded_to_format(x, mode) @ unpacked.T

    for own, used in ((product, True), (partial(product, error=0.1), False), (None, False)):
        layers.has_quantized_product.cache_clear()
        monkeypatch.setattr(mx, "qqmm", own or _no_product)
        calls.clear()
        np.testing.assert_allclose(np.array(layer(x)), wanted, rtol=1e-4, atol=1e-4)
        assert (120 in calls) == used
    layers.has_quantized_product.cache_clear()


def _no_product(*args: Any, **options: Any) -> Any:
    raise RuntimeError("[QQMatmul] NYI for the general case")


def test_ranks_correlate_as_in_scipy() -> None:
    spearmanr: Any = pytest.importorskip("scipy.stats").spearmanr
    one, other = normal(30), normal(30, seed=1)
    other[::3] = other[0]  # ties
    wanted = spearmanr(one, other).statistic
    assert rank_correlation(one, other) == pytest.approx(wanted, abs=1e-6)
    assert rank_correlation(one, np.ones_like(one)) == 0


def test_steps_whose_channels_are_not_those_of_the_weights_count_more() -> None:
    """PTQ4DiT's weights of steps, as its paper writes them."""
    values, weight = np.abs(normal(6, 3, 8)), np.abs(normal(4, 8, seed=1))
    times = np.array([900, 900, 500, 500, 100, 100], np.float32)
    own = {t: values[times == t].reshape(-1, 8).max(axis=0) for t in (100, 500, 900)}
    rho = {t: rank_correlation(x, weight.max(axis=0)) for t, x in own.items()}
    total = sum(np.exp(-r) for r in rho.values())
    salience = sum(np.exp(-rho[t]) / total * x for t, x in own.items())
    wanted = np.sqrt(salience / weight.max(axis=0))
    found = balance(values, [weight], times=times)
    np.testing.assert_allclose(found / found[0], wanted / wanted[0], rtol=1e-5)
