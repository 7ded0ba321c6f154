"""Ranges of activations: shift and migration behind a GELU, balance of channels, steps' weights."""

from typing import Any

import numpy as np
import pytest

from lydite.quantize.activations import (
    InputRange,
    balance,
    is_behind_gelu,
    migration,
    momentum_shift,
    plain_range,
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


def test_a_search_on_the_gpu_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = time_aware_range(behind_gelu(), 8)
    monkeypatch.setattr("lydite.quantize.observers.on_cpu", lambda: False)
    on_gpu = time_aware_range(behind_gelu(), 8)
    assert on_gpu.zero == on_cpu.zero
    assert on_gpu.scale == pytest.approx(on_cpu.scale, rel=1e-6)
    assert np.array_equal(on_gpu.divisor, on_cpu.divisor)  # pyright: ignore[reportArgumentType]
    assert on_gpu.shift is not None and on_cpu.shift is not None
    np.testing.assert_allclose(on_gpu.shift, on_cpu.shift, rtol=1e-6)


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
    extras = found.extras(0.5)
    assert extras["input_range"].tolist() == [0.5, found.zero, 255]
    assert set(extras) == {"input_range", "input_shift", "input_divisor"}
    assert set(plain_range(behind_gelu(), 8).extras()) == {"input_range"}


def test_balance_is_that_of_smoothquant() -> None:
    values, weight = normal(50, 8) * np.arange(1, 9, dtype=np.float32), normal(4, 8, seed=1)
    found = balance(values, [weight], power=0.5)
    wanted = np.sqrt(np.abs(values).max(axis=0) / np.abs(weight).max(axis=0))
    np.testing.assert_allclose(found / found[0], wanted / wanted[0], rtol=1e-5)
    np.testing.assert_allclose(np.log(found).mean(), 0, atol=1e-6)  # no change of the whole
