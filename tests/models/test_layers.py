"""Layers that networks share, each against torch, on the branches of the CPU and of a GPU."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from lydite import models
from lydite.core.device import GPU_BRANCHES
from lydite.models import layers
from lydite.models.layers import (
    ACTIVATIONS,
    Conv2d,
    FeedForward,
    GroupNorm,
    HalvingConv2d,
    Linear,
    MLPEmbedder,
    QuantizedLinear,
)
from support.distance import relative_l2

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

F = torch.nn.functional
CLOSE = 3e-6  # float32, other orders of sums


@pytest.fixture(params=["cpu", "gpu"], autouse=True)
def branch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The branches of a GPU run on the CPU too; only their own kernels do not."""
    if request.param == "gpu":
        monkeypatch.setenv(GPU_BRANCHES, "1")
    else:
        request.getfixturevalue("on_the_cpu")
    assert layers.on_cpu() == (request.param == "cpu")
    return request.param


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def first(x: np.ndarray) -> Any:
    """Channels first, as torch has them."""
    return torch.from_numpy(np.moveaxis(x, -1, 1).copy())


def same(ours: mx.array, theirs: Any, channels_first: bool = False) -> None:
    wanted = theirs.detach().numpy()
    found = np.array(ours.astype(mx.float32))
    wanted = np.moveaxis(wanted, 1, -1) if channels_first else wanted
    assert found.shape == wanted.shape and relative_l2(found, wanted) < CLOSE


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias: bool) -> None:
    x, ours, theirs = normal(2, 5, 8), Linear(8, 6, bias), torch.nn.Linear(8, 6, bias)
    ours.weight = mx.array(theirs.weight.detach().numpy())
    if bias:
        ours.bias = mx.array(theirs.bias.detach().numpy())
    same(ours(mx.array(x)), theirs(torch.from_numpy(x)))
    assert len(layers.project(mx.array(x), [ours, ours, ours])) == 3
    for part in layers.project(mx.array(x), [ours, ours]):
        same(part, theirs(torch.from_numpy(x)))


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_convolution(kernel: int, packed: bool, branch: str) -> None:
    x, layer = normal(2, 7, 5, 32), Conv2d(32, 6, kernel)
    layer.bias = mx.array(normal(6, seed=1))
    if packed:
        layer.to_quantized(32, 8)
    weight = torch.from_numpy(np.moveaxis(np.array(layer.kernel()), -1, 1).copy())
    theirs = F.conv2d(first(x), weight, torch.from_numpy(normal(6, seed=1)), padding=kernel // 2)
    same(layer(mx.array(x)), theirs, channels_first=True)
    if branch == "cpu":
        assert layer(mx.array(x).astype(mx.bfloat16)).dtype == mx.bfloat16


@pytest.mark.parametrize("padding", [0, 1])
def test_convolution_of_stride_2(padding: int) -> None:
    x, layer = normal(2, 9, 7, 4), HalvingConv2d(4, padding=padding)
    layer.bias = mx.array(normal(4, seed=1))
    weight = torch.from_numpy(np.moveaxis(np.array(layer.weight), -1, 1).copy())
    theirs = F.conv2d(first(x), weight, torch.from_numpy(normal(4, seed=1)), 2, padding)
    same(layer(mx.array(x)), theirs, channels_first=True)


def test_group_norm_and_silu_of_it() -> None:
    x, layer = 3 * normal(2, 5, 6, 8) + 1, GroupNorm(4, 8, eps=1e-2)
    layer.weight, layer.bias = mx.array(normal(8, seed=1)), mx.array(normal(8, seed=2))
    weight, bias = (torch.from_numpy(normal(8, seed=seed)) for seed in (1, 2))
    theirs = F.group_norm(first(x), 4, weight, bias, 1e-2)
    same(layer(mx.array(x)), theirs, channels_first=True)
    same(layers.norm_silu(layer, mx.array(x)), F.silu(theirs), channels_first=True)


@pytest.mark.parametrize("masked", [False, True])
def test_attention(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = normal(2, 3, 11, 8), normal(2, 3, 9, 8, seed=1), normal(2, 3, 9, 8, seed=2)
    mask: Any = np.random.default_rng(3).random((2, 1, 1, 9)) < 0.6 if masked else None
    given = None if mask is None else mx.array(mask)
    wanted = F.scaled_dot_product_attention(
        *(torch.from_numpy(array) for array in (q, k, v)), scale=0.2,
        attn_mask=None if mask is None else torch.from_numpy(mask),
    )  # fmt: skip
    arrays = [mx.array(array) for array in (q, k, v)]
    same(layers.attention(*arrays, scale=0.2, mask=given), wanted)
    if not masked:
        for whole in (11, 10, 7, 2):
            monkeypatch.setattr(layers, "WHOLE_ATTENTION", whole)
            same(layers.sliced_attention(*arrays, scale=0.2), wanted)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (layers.gelu, F.gelu),
        (layers.gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
        (layers.silu, F.silu),
    ],
)
def test_activations(ours: Callable[[mx.array], mx.array], theirs: Callable[[Any], Any]) -> None:
    x = np.linspace(-9, 9, 4001, dtype=np.float32)
    same(ours(mx.array(x)), theirs(torch.from_numpy(x)))
    assert ours(mx.array(x).astype(mx.float16)).dtype == mx.float16


def test_activations_by_the_names_of_transformers() -> None:
    known = pytest.importorskip("transformers").activations.ACT2FN
    x = np.linspace(-6, 6, 2001, dtype=np.float32)
    for name, ours in ACTIVATIONS.items():
        same(ours(mx.array(x)), known[name](torch.from_numpy(x)))


@pytest.mark.parametrize("exact", [True, False])
def test_sinusoids(exact: bool) -> None:
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    times = np.array([0.0, 1.0, 17.5, 999.0], np.float32)
    wanted = embeddings.get_timestep_embedding(
        torch.from_numpy(times), 12, flip_sin_to_cos=True, downscale_freq_shift=0
    )
    found = layers.sinusoids(mx.array(times), 12, exact=exact)
    np.testing.assert_allclose(np.array(found), wanted.numpy(), atol=2e-4)
    scaled = layers.sinusoids(mx.array(times / 1000), 12, exact=exact, scale=1000.0)
    np.testing.assert_allclose(np.array(scaled), wanted.numpy(), atol=2e-3)
    coarse = layers.sinusoids(mx.array(times).astype(mx.bfloat16), 12)
    assert coarse.dtype == mx.float32


def test_sizes_and_windows() -> None:
    x = normal(2, 7, 6, 3)
    same(layers.double_size(mx.array(x)), F.interpolate(first(x), scale_factor=2), True)
    for size, stride in ((3, 2), (2, 2), (3, 1)):
        ours = layers.max_pool(mx.array(x), size, stride=stride)
        same(ours, F.max_pool2d(first(x), size, stride), True)


def test_heads_are_split_joined_and_put_one_after_the_other() -> None:
    x = mx.array(normal(2, 5, 12))
    heads = layers.split_heads(x, 3)
    assert heads.shape == (2, 3, 5, 4) and mx.array_equal(heads[1, 2, 3], x[1, 3, 8:12])
    assert mx.array_equal(layers.join_heads(heads), x)
    both = layers.join_tokens(heads, heads[:, :, :2])
    assert mx.array_equal(both, mx.concatenate([heads, heads[:, :, :2]], axis=2))


def test_feed_forward_and_embedder() -> None:
    x = mx.array(normal(2, 3, 8))
    for kind in (layers.GELUTanh, layers.GEGLU):
        layer = FeedForward(8, kind)
        assert layer.net[2].weight.shape == (8, 32)
        hidden = layer.net[0].proj(x)
        if kind is layers.GEGLU:
            value, gate = mx.split(hidden, 2, axis=-1)
            wanted = value * layers.gelu(gate)
        else:
            wanted = layers.gelu_tanh(hidden)
        assert mx.allclose(layer(x), layer.net[2](wanted), atol=1e-6)
    embedder = MLPEmbedder(8, 4)
    wanted = embedder.linear_2(nn.silu(embedder.linear_1(x)))
    assert mx.allclose(embedder(x), wanted, atol=1e-6)


@pytest.mark.parametrize("rows", [1, layers.FEW_ROWS - 1, layers.FEW_ROWS, 200])
@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_a_linear_in_few_bits_is_that_of_its_unpacked_weight(rows: int, mode: str) -> None:
    plain = Linear(64, 16)
    plain.bias = mx.array(normal(16, seed=1))
    layer: Any = plain.to_quantized(64 if mode == "affine" else 32, 4, mode)
    assert type(layer) is QuantizedLinear
    x = normal(rows, 64, seed=2)
    packed = layer.weight, layer.scales, layer.get("biases")
    unpacked = mx.dequantize(*packed, layer.group_size, 4, mode=mode).astype(mx.float32)
    weight = np.array(unpacked)
    bias = np.array(plain.bias)
    assert relative_l2(np.array(layer(mx.array(x))), x @ weight.T + bias) < 1e-5
    down, up = normal(3, 64, seed=3), normal(16, 3, seed=4)
    layer.low_rank_down, layer.low_rank_up = mx.array(down), mx.array(up)
    wanted = x @ weight.T + x @ down.T @ up.T + bias
    assert relative_l2(np.array(layer(mx.array(x))), wanted) < 1e-5
    shift, divisor = normal(64, seed=5), 1 + np.abs(normal(64, seed=6))
    layer.input_shift, layer.input_divisor = mx.array(shift), mx.array(divisor)
    scale, zero, most = 0.1, 100.0, 255.0
    layer.input_range = mx.array([scale, zero, most])
    steps = np.clip(np.rint(((x - shift) / divisor) / scale) + zero, 0, most)
    wanted = (steps - zero) * scale @ weight.T + x @ down.T @ up.T + bias
    assert relative_l2(np.array(layer(mx.array(x))), wanted) < 2e-3  # a step may be rounded over


def test_large_values_are_computed_at_once_on_a_gpu(
    branch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(layers.mx, "eval", lambda x: seen.append(x.size))
    monkeypatch.setattr(layers, "LARGE", 10)
    for size in (10, 11):
        assert layers.computed_if_large(mx.zeros(size)).size == size
    assert seen == ([11] if branch == "gpu" else [])


def test_a_large_picture_is_normed_and_convolved_in_two_steps_on_a_gpu(branch: str) -> None:
    norm, conv = layers.GroupNorm(2, 4, eps=1e-6), layers.Conv2d(4, 8, kernel_size=3)
    x, seen = mx.array(normal(1, 5, 6, 4)), []

    def step(value: mx.array) -> mx.array:
        seen.append(value.shape)
        return value

    y = layers.norm_silu_conv(norm, conv, x, step=step)
    assert seen == ([(1, 5, 6, 4), (1, 5, 6, 8)] if branch == "gpu" else [])
    assert relative_l2(np.array(y), np.array(layers.norm_silu_conv(norm, conv, x))) < 1e-6


def test_every_module_begins_as_one_of_mlx() -> None:
    # Without it a module runs, but cannot be frozen or switched between training and use.
    kinds = {
        kind
        for found in pkgutil.walk_packages(models.__path__, "lydite.models.")
        for kind in vars(importlib.import_module(found.name)).values()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and "__init__" in vars(kind)
    }
    own = [kind for kind in kinds if kind.__module__.startswith("lydite.")]
    assert len(own) > 50
    for kind in own:
        assert "super().__init__(" in inspect.getsource(kind.__init__), kind
