"""The layers arranged for the CPU against MLX's own, and against float64 where those are off."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from lydite.models import cpu, layers
from support.distance import relative_l2

pytestmark = pytest.mark.usefixtures("on_the_cpu")

EXTREMES = mx.array([0.0, -0.0, 200.0, -200.0, 1e30, -1e30, float("inf")])


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32))


def test_powers_of_two_are_right_to_a_rounding_or_three() -> None:
    x = np.linspace(-126, 126, 100_001, dtype=np.float32)
    ratio = np.asarray(cpu.exp2(mx.array(x)), np.float64) / 2.0 ** x.astype(np.float64)
    assert np.abs(ratio - 1).max() < 2e-7
    whole = np.arange(-126.0, 127.0, dtype=np.float32)
    assert (np.asarray(cpu.exp2(mx.array(whole))) == 2.0**whole).all()


def test_powers_of_two_end_softly_and_pass_nan_on() -> None:
    low, lower, nan = np.asarray(cpu.exp2(mx.array([-1e30, -float("inf"), float("nan")])))
    assert 0 <= low < 2e-38 and 0 <= lower < 2e-38 and np.isnan(nan)


ACTIVATIONS = [(cpu.silu, nn.silu), (cpu.gelu, nn.gelu), (cpu.gelu_tanh, nn.gelu_approx)]


@pytest.mark.parametrize(("ours", "theirs"), ACTIVATIONS)
def test_activations_and_their_slopes(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    x = mx.linspace(-15, 15, 10_001)
    assert relative_l2(ours(x), theirs(x)) < 1e-6
    slope, expected = (mx.grad(lambda x, f=f: f(x).sum())(x) for f in (ours, theirs))
    assert relative_l2(slope, expected) < 1e-5
    assert np.allclose(ours(EXTREMES), theirs(EXTREMES), atol=1e-7)


def test_attention_and_its_gradient() -> None:
    arrays = [normal(2, 3, 20, 8, seed=seed) for seed in range(3)]
    arrays[0] = 20 * arrays[0]  # scores far apart

    def theirs(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3)

    def ours(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return cpu.attention(q, k, v, 0.3)

    assert relative_l2(ours(*arrays), theirs(*arrays)) < 1e-5
    for slope, expected in zip(gradient(ours, arrays), gradient(theirs, arrays), strict=True):
        assert relative_l2(slope, expected) < 1e-4


def test_attention_over_slices_of_q_sees_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [normal(1, 1, 20, 8, seed=seed) for seed in range(3)]
    whole = layers.sliced_attention(*arrays, scale=0.3)
    monkeypatch.setattr(layers, "WHOLE_ATTENTION", 12)
    assert relative_l2(layers.sliced_attention(*arrays, scale=0.3), whole) < 1e-6


SHAPES = [(1, 5, 7, 3), (2, 4, 4, 8), (1, 1, 1, 4), (3, 2, 1, 1), (2, 9, 12, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", [1, 3])
def test_convolution_and_its_gradient(shape: tuple[int, ...], kernel: int) -> None:
    arrays = [normal(*shape), normal(6, kernel, kernel, shape[-1], seed=1), normal(6, seed=2)]

    def theirs(x: mx.array, weight: mx.array, bias: mx.array) -> mx.array:
        return mx.conv2d(x, weight, padding=kernel // 2) + bias

    assert relative_l2(cpu.conv2d(*arrays), theirs(*arrays)) < 1e-6
    for slope, expected in zip(gradient(cpu.conv2d, arrays), gradient(theirs, arrays), strict=True):
        assert relative_l2(slope, expected) < 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_convolution_at_twice_the_size_and_its_gradient(shape: tuple[int, ...]) -> None:
    arrays = [normal(*shape), normal(6, 3, 3, shape[-1], seed=1), normal(6, seed=2)]

    def theirs(x: mx.array, weight: mx.array, bias: mx.array) -> mx.array:
        return mx.conv2d(layers.double_size(x), weight, padding=1) + bias

    assert relative_l2(cpu.conv2d_doubled(*arrays), theirs(*arrays)) < 1e-6
    slopes = gradient(cpu.conv2d_doubled, arrays), gradient(theirs, arrays)
    for slope, expected in zip(*slopes, strict=True):
        assert relative_l2(slope, expected) < 1e-5


@pytest.mark.parametrize("block", [1 << 17, 8 * 12 * 3, 1], ids=["whole", "rows", "a row"])
@pytest.mark.parametrize("threads", ["1", "3"])
def test_blocks_of_rows_on_streams_are_the_whole_picture(
    monkeypatch: pytest.MonkeyPatch, block: int, threads: str
) -> None:
    x, kernel = normal(2, 9, 12, 8), normal(6, 3, 3, 8, seed=1)
    norm, conv = layers.GroupNorm(2, 8, eps=1e-3), layers.Conv2d(8, 6, kernel_size=3)
    norm.update({"weight": normal(8, seed=2), "bias": normal(8, seed=3)})
    conv.update({"weight": kernel, "bias": normal(6, seed=4)})
    expected = conv.convolve(nn.silu(nn.GroupNorm.__call__(norm, x)))
    doubled = conv.convolve(layers.double_size(x))
    monkeypatch.setattr(cpu, "_BLOCK", block)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", threads)
    assert len(cpu.streams()) == int(threads)
    assert relative_l2(layers.norm_silu_conv(norm, conv, x), expected) < 1e-6
    assert relative_l2(layers.conv_doubled(conv, x), doubled) < 1e-6
    assert relative_l2(conv(x), conv.convolve(x)) < 1e-6


def test_a_call_has_its_share_of_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "5")
    every, shares = cpu.streams(), list[tuple[Any, ...]]()

    def call() -> mx.array:
        shares.append(cpu.streams())
        if len(shares) == 1:
            cpu.in_parallel([call])
        return mx.array(0)

    cpu.in_parallel([call, call])
    assert shares == [every[::2], every[::2], every[1::2]] and cpu.streams() == every
    del shares[:]
    cpu.in_parallel([call] * 6)
    assert [share for (share,) in shares[1:]] == [*every, every[0]]


def test_modulated_norm() -> None:
    x, shift, scale = normal(2, 5, 12) + 3, normal(2, 12, seed=1), normal(2, 12, seed=2)
    theirs = mx.fast.layer_norm(x, None, None, 1e-2) * (1 + scale[:, None]) + shift[:, None]
    assert relative_l2(cpu.norm_modulate(x, shift, scale, 1e-2), theirs) < 1e-6


@pytest.mark.parametrize("shape", [(1, 5, 7, 3), (2, 4, 6, 8), (1, 3, 3, 4)])
def test_convolution_of_stride_2_and_its_gradient(shape: tuple[int, ...]) -> None:
    arrays = [normal(*shape), normal(6, 3, 3, shape[-1], seed=1), normal(6, seed=2)]

    def theirs(x: mx.array, weight: mx.array, bias: mx.array) -> mx.array:
        return mx.conv2d(x, weight, stride=2) + bias

    assert relative_l2(cpu.conv2d_stride2(*arrays), theirs(*arrays)) < 1e-6
    slopes = gradient(cpu.conv2d_stride2, arrays), gradient(theirs, arrays)
    for slope, expected in zip(*slopes, strict=True):
        assert relative_l2(slope, expected) < 1e-5


def test_group_norm_of_a_large_picture_against_float64() -> None:
    x = normal(1, 256, 512, 16) + 0.5
    ours = cpu.group_norm(x, mx.ones(16), mx.zeros(16), groups=4, eps=1e-6)
    wide = np.asarray(x, np.float64).reshape(-1, 4, 4)  # (HW, groups, channels of a group)
    mean, variance = (f(wide, axis=(0, 2), keepdims=True) for f in (np.mean, np.var))
    expected = ((wide - mean) / np.sqrt(variance + 1e-6)).reshape(x.shape)
    assert relative_l2(ours, expected) < 1e-6  # MLX's own is off by 1e-4


def test_group_norm_groups_its_channels_and_batch_as_mlx_does() -> None:
    theirs = nn.GroupNorm(2, 6, eps=1e-3, pytorch_compatible=True)
    theirs.weight, theirs.bias = normal(6, seed=1), normal(6, seed=2)
    x = normal(3, 4, 5, 6) * mx.arange(1, 7)
    ours = cpu.group_norm(x, theirs.weight, theirs.bias, groups=2, eps=1e-3)
    assert relative_l2(ours, theirs(x)) < 1e-6


def gradient(function: Callable[..., mx.array], arrays: list[mx.array]) -> list[mx.array]:
    """With respect to each array, of a sum that tells the outputs apart."""
    outputs = function(*arrays)
    weights = normal(*outputs.shape, seed=9)

    def total(*arrays: mx.array) -> mx.array:
        return (function(*arrays) * weights).sum()

    return list(mx.grad(total, argnums=list(range(len(arrays))))(*arrays))
