"""Layers that more than one network is built from."""

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial, reduce
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lydite.models import cpu, kernels
from lydite.models.cpu import on_cpu


class Linear(nn.Linear):
    """A matrix product and a bias."""

    def __call__(self, x: mx.array) -> mx.array:
        if not on_cpu() or "bias" not in self:
            return super().__call__(x)
        return x @ self.weight.T + self.bias  # MLX would fill the product with the bias first

    def to_quantized(
        self,
        group_size: Any = None,
        bits: Any = None,
        mode: str = "affine",
        quantize_input: bool = False,
    ) -> Any:
        """What `nn.quantize` puts in its place."""
        assert not quantize_input, "how inputs are rounded is stored with a layer"
        return QuantizedLinear.from_linear(self, group_size, bits, mode)


class QuantizedLinear(nn.QuantizedLinear):
    """A linear whose weight is held in few bits.

    A checkpoint may add: `input_range`, by which the input is rounded to integers (a simulation:
    the product itself is computed with floats), with `input_times` one range for each group of
    steps; `input_shift` and `input_divisor`, per channel, before that; a low-rank branch at full
    precision.
    """

    quantize_input = False  # whether inputs are rounded to the format of the weight

    def __call__(self, x: mx.array) -> mx.array:
        y = self._product(self._rounded_input(x))
        if "low_rank_down" in self:
            y = y + (x @ self["low_rank_down"].T) @ self["low_rank_up"].T
        return y + self["bias"] if "bias" in self else y

    def _moved_input(self, x: mx.array) -> mx.array:
        if "input_shift" in self:
            x = x - self["input_shift"]
        return x / self["input_divisor"] if "input_divisor" in self else x

    def _rounded_input(self, x: mx.array) -> mx.array:
        x = self._moved_input(x)
        if "input_range" in self:
            scale, zero, most = self._range(x.ndim)
            steps = mx.clip(mx.round(x.astype(mx.float32) / scale) + zero, 0, most)
            x = (steps - zero) * scale
        return x.astype(self["scales"].dtype) if self.mode == "affine" else x

    def _range(self, axes: int) -> Sequence[mx.array]:
        """Scale, zero point and highest integer: numbers, or one for each row of the input."""
        found = [self["input_range"][..., n] for n in range(3)]
        return of_this_step(found, self["input_times"], axes) if "input_times" in self else found

    def _product(self, x: mx.array) -> mx.array:
        options = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        if self.quantize_input:
            if has_quantized_product(self.mode):
                return mx.qqmm(x.flatten(0, -2), self.weight, self.scales, **options).reshape(
                    *x.shape[:-1], -1
                )
            x = rounded_to_format(x, self.mode)
        biases = self.get("biases")
        if x.size // x.shape[-1] < (FEW_ROWS if on_cpu() or not mx.cuda.is_available() else 2):
            return mx.quantized_matmul(x, self.weight, self.scales, biases, **options)
        weight = mx.dequantize(self.weight, self.scales, biases, dtype=x.dtype, **options)
        return x @ weight.T


FLOAT_PRODUCTS = ("nvfp4", "mxfp8")  # formats in which MLX can also take the input of a product
_timestep: ContextVar[mx.array | None] = ContextVar("timestep", default=None)


@contextmanager
def at_timestep(timestep: float | mx.array | None) -> Generator[None]:
    """Calls of a network inside are for this timestep: a number, or one for each row."""
    now = None if timestep is None else mx.array(timestep, dtype=mx.float32)
    token = _timestep.set(now)
    try:
        yield
    finally:
        _timestep.reset(token)


def this_timestep() -> mx.array | None:
    """What the innermost `at_timestep` was given."""
    return _timestep.get()


def of_this_step(values: Sequence[mx.array], times: mx.array, axes: int) -> list[mx.array]:
    """The entries for this timestep, of arrays with one for each group of steps.

    `times` are the lowest timesteps of the groups, descending. Where each row has a timestep, so
    has each row of an input with so many axes its own entry.
    """
    now = this_timestep()
    assert now is not None, "ranges for groups of steps, and a call outside `at_timestep`"
    group = (now[..., None] < times[:-1]).sum(axis=-1)
    found = [each[group] for each in values]
    return [each.reshape(-1, *(1,) * (axes - 1)) for each in found] if now.ndim else found


def rounded_to_format(x: mx.array, mode: str) -> mx.array:
    """Each value as it is after rounding to a floating-point format of MLX."""
    rows = x.reshape(-1, x.shape[-1])
    return mx.dequantize(*mx.quantize(rows, mode=mode), mode=mode, dtype=x.dtype).reshape(x.shape)


@cache
def has_quantized_product(mode: str) -> bool:
    """Whether this device multiplies quantized inputs by quantized weights, tried once."""
    x = mx.random.normal((64, 256), key=mx.random.key(0))
    weight, scales, *_ = mx.quantize(mx.random.normal((128, 256), key=mx.random.key(1)), mode=mode)
    try:
        found = mx.qqmm(x, weight, scales, mode=mode)
        unpacked = mx.dequantize(weight, scales, mode=mode, dtype=x.dtype)
        wanted = rounded_to_format(x, mode) @ unpacked.T
        return bool((mx.abs(found - wanted).max() < 1e-2 * mx.abs(wanted).max()).item())
    except (RuntimeError, ValueError):
        return False


def input_products(modes: Iterable[str]) -> Literal["simulated", "mx.qqmm"]:
    """How products take inputs in few bits on this device: in formats that weights have, or in
    integers, where there are none of these."""
    own = set(modes) & set(FLOAT_PRODUCTS)
    return "mx.qqmm" if own and all(map(has_quantized_product, own)) else "simulated"


def round_inputs(network: nn.Module) -> None:
    """Let linears in a format with such products round their inputs to it."""
    for module in network.modules():
        if isinstance(module, QuantizedLinear) and module.mode in FLOAT_PRODUCTS:
            module.quantize_input = True


# Rows of an input from which a plain product with the unpacked weight is faster than MLX's product
# with the packed one: by 2 to 4 times on a CPU and, for 8,858 rows, by 2.5 to 5 times on an H200.
# On CUDA it is used for one row only: for more MLX compiles a kernel, which takes up to a minute
# and needs headers that it does not install.
FEW_ROWS = 32


def project(x: mx.array, layers: Sequence[nn.Linear]) -> list[mx.array]:
    """Several linears of one input."""
    product = joint_product(x, layers)
    if product is None:
        return [layer(x) for layer in layers]
    return list(mx.split(product, len(layers), axis=-1))


def joint_product(x: mx.array, layers: Sequence[nn.Linear]) -> mx.array | None:
    """Several linears of one input as one product, on CUDA and on a CPU; None elsewhere.

    On CUDA a launch costs as much as a product of the text stream, on a CPU an operation costs
    5 µs. A quantized or a recorded linear is another class, and has to be called.
    """
    if not _joins_weights() or any(type(layer) is not Linear for layer in layers):
        return None
    joined: _Joined | None = getattr(layers[0], _JOINED, None)
    if joined is None or not joined.is_of(layers):  # not by `join_weights`, or changed since
        if on_cpu():
            return None
        joined = _Joined(layers)
    if joined.bias is None:
        return x @ joined.weight.T
    if on_cpu():
        return x @ joined.weight.T + joined.bias
    return mx.addmm(joined.bias, x, joined.weight.T)


def join_weights(network: nn.Module) -> None:
    """Store what `joint_product` multiplies by; the linears' own weights become parts of it.

    No value changes, and no weight is in memory twice.
    """
    if not _joins_weights():
        return
    for module in network.modules():
        for names in JOINED:
            layers = [module[name] for name in names if name in module]
            if len({layer.weight.shape[-1] for layer in layers if type(layer) is Linear}) != 1:
                layers = layers[1:]  # the queries of a cross-attention have an input of their own
            if len(layers) < 2 or any(type(layer) is not Linear for layer in layers):
                continue
            joined = _Joined(layers)
            joined.divide(layers)
            object.__setattr__(layers[0], _JOINED, joined)  # no parameter


def _joins_weights() -> bool:
    return on_cpu() or mx.cuda.is_available()


class _Joined:
    """Weights and biases of several linears, one below the other."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.weight = mx.concatenate([layer.weight for layer in layers])
        with_bias = "bias" in layers[0]
        self.bias = mx.concatenate([layer.bias for layer in layers]) if with_bias else None
        self._parts: list[tuple[mx.array, mx.array | None]] = []

    def divide(self, layers: Sequence[nn.Linear]) -> None:
        """Make the weights of the linears parts of the joined ones."""
        sizes = [layer.weight.shape[0] for layer in layers]
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes) - 1)]
        mx.eval(self.weight, *([] if self.bias is None else [self.bias]))
        for layer, part in zip(layers, mx.split(self.weight, ends), strict=True):
            layer.weight = part
        if self.bias is not None:
            for layer, part in zip(layers, mx.split(self.bias, ends), strict=True):
                layer.bias = part
        self._parts = [(layer.weight, layer.get("bias")) for layer in layers]
        mx.eval([layer.parameters() for layer in layers])

    def is_of(self, layers: Sequence[nn.Linear]) -> bool:
        return len(layers) == len(self._parts) and all(
            layer.weight is weight and layer.get("bias") is bias
            for layer, (weight, bias) in zip(layers, self._parts, strict=True)
        )


_JOINED = "_joined"
# Linears of an attention that have one input.
JOINED = (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"))


class GELUTanh(nn.Module):
    """A projection and the tanh approximation of GELU, as diffusers' `gelu-approximate`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.proj = Linear(dim, hidden)

    def __call__(self, x: mx.array) -> mx.array:
        return gelu_tanh(self.proj(x))


class GEGLU(nn.Module):
    """A projection to twice the width: one half times the exact GELU of the other."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.proj = Linear(dim, 2 * hidden)

    def __call__(self, x: mx.array) -> mx.array:
        x, gate = mx.split(self.proj(x), 2, axis=-1)
        return x * gelu(gate)


class FeedForward(nn.Module):
    """Two linears around an activation; the list reproduces the names net.0.proj and net.2."""

    def __init__(self, dim: int, activation: type[GELUTanh] | type[GEGLU] = GELUTanh) -> None:
        super().__init__()
        self.net = [activation(dim, 4 * dim), nn.Identity(), Linear(4 * dim, dim)]

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.net:
            x = layer(x)
        return x


class SiLU(nn.Module):
    """x·σ(x) where the reference has a module for it."""

    def __call__(self, x: mx.array) -> mx.array:
        return silu(x)


class MLPEmbedder(nn.Module):
    """Linear, SiLU, linear: how timesteps and pooled text enter the modulation."""

    def __init__(self, dim_in: int, dim: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear_1 = Linear(dim_in, dim, bias)
        self.linear_2 = Linear(dim, dim, bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear_2(silu(self.linear_1(x)))


class _Convolution(nn.Conv2d):
    """A convolution whose kernel may be held in few bits, which MLX has no layer for."""

    def kernel(self) -> mx.array:
        """(O, H, W, C)."""
        if "scales" not in self:
            return self.weight
        packed = self.weight, self["scales"], self.get("biases")
        weight = mx.dequantize(*packed, self.group_size, self.bits, self.mode)
        return weight.reshape(self.kernel_shape)

    def convolve(self, x: mx.array) -> mx.array:
        """As MLX does it."""
        return mx.conv2d(x, self.kernel(), self.stride, self.padding) + self.bias

    def to_quantized(
        self,
        group_size: Any = None,
        bits: Any = None,
        mode: str = "affine",
        quantize_input: bool = False,
    ) -> Any:
        """For `nn.quantize`: the same layer, its kernel packed as the weight of a linear is."""
        assert not quantize_input, "how inputs are rounded is stored with a layer"
        self.kernel_shape, rows = self.weight.shape, self.weight.flatten(1)
        self.weight, self.scales, *biases = mx.quantize(rows, group_size, bits, mode)
        if biases:
            (self.biases,) = biases
        self.group_size, self.bits, self.mode = group_size, bits, mode
        return self


class Conv2d(_Convolution):
    """A convolution of stride 1 that keeps the size of the picture."""

    def __init__(self, width_in: int, width: int, kernel_size: int) -> None:
        super().__init__(width_in, width, kernel_size, padding=kernel_size // 2)

    def __call__(self, x: mx.array) -> mx.array:
        if not on_cpu():
            return self.convolve(x)
        return cpu.conv2d(x, self.kernel(), self.bias).astype(x.dtype)


class HalvingConv2d(_Convolution):
    """A 3 × 3 convolution of stride 2: half the height and width."""

    def __init__(self, width: int, *, padding: int) -> None:
        super().__init__(width, width, kernel_size=3, stride=2, padding=padding)

    def __call__(self, x: mx.array) -> mx.array:
        if not on_cpu():
            return self.convolve(x)
        (top, left) = self.padding
        x = mx.pad(x, [(0, 0), (top, top), (left, left), (0, 0)])
        return cpu.conv2d_stride2(x, self.kernel(), self.bias).astype(x.dtype)


class GroupNorm(nn.GroupNorm):
    """Group norm over neighbouring channels, as PyTorch groups them."""

    def __init__(self, groups: int, width: int, *, eps: float) -> None:
        super().__init__(groups, width, eps=eps, pytorch_compatible=True)

    def __call__(self, x: mx.array) -> mx.array:
        if not on_cpu():
            y = self.fused(x)
            return super().__call__(x) if y is None else y
        y = cpu.group_norm(x, self.weight, self.bias, groups=self.num_groups, eps=self.eps)
        return y.astype(x.dtype)

    def fused(self, x: mx.array, *, silu: bool = False) -> mx.array | None:
        """By one kernel, and SiLU of it; None where there is no such kernel."""
        return kernels.group_norm(
            x, self.weight, self.bias, groups=self.num_groups, eps=self.eps, silu=silu
        )


def norm_silu(norm: GroupNorm, x: mx.array) -> mx.array:
    """SiLU of the normed x. A recorded norm is another class, and called."""
    y = norm.fused(x, silu=True) if type(norm) is GroupNorm and not on_cpu() else None
    return silu(norm(x)) if y is None else y


def norm_silu_conv(
    norm: GroupNorm,
    conv: Conv2d,
    x: mx.array,
    step: Callable[[mx.array], mx.array] = lambda value: value,
) -> mx.array:
    """A convolution of SiLU of the normed x, on a CPU in one pass over the picture.

    Elsewhere norm and convolution pass through `step`.
    """
    if not on_cpu() or type(norm) is not GroupNorm or type(conv) is not Conv2d:
        return step(conv(step(norm_silu(norm, x))))
    y = cpu.norm_silu_conv2d(
        x,
        (norm.weight, norm.bias),
        (conv.kernel(), conv.bias),
        groups=norm.num_groups,
        eps=norm.eps,
    )
    return y.astype(x.dtype)


def conv_doubled(conv: Conv2d, x: mx.array) -> mx.array:
    """A convolution of x at twice its height and width."""
    if not on_cpu() or type(conv) is not Conv2d or x.dtype != mx.float32:
        return conv(computed_if_large(double_size(x)))
    return cpu.conv2d_doubled(x, conv.kernel(), conv.bias)


def attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: mx.array | None = None
) -> mx.array:
    """Scaled dot-product attention, (B, H, L, D) each; keys where `mask` is False are left out."""
    if not on_cpu():
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    return cpu.attention(q, k, v, scale, mask).astype(q.dtype)


WHOLE_ATTENTION = 2**14  # positions up to which all scores of a head are in memory at once


def sliced_attention(q: mx.array, k: mx.array, v: mx.array, *, scale: float) -> mx.array:
    """`attention` for one wide head, which no fused kernel has, over slices of a long q.

    A picture of 1024² has 2**14 positions in a VAE, and 2**28 scores: half a GB in bfloat16.
    """
    length = q.shape[2]
    if length <= WHOLE_ATTENTION:
        return attention(q, k, v, scale=scale)
    rows = max(WHOLE_ATTENTION**2 // length, 1)
    slices: list[mx.array] = []
    for first in range(0, length, rows):
        slices.append(attention(q[:, :, first : first + rows], k, v, scale=scale))
        mx.eval(slices[-1])  # the scores of one slice at a time
    return mx.concatenate(slices, axis=2)


def computed_if_large(x: mx.array) -> mx.array:
    """x, computed now if it has more than `LARGE` values and MLX runs on a GPU.

    Before an operation is done MLX keeps what it reads and writes, and many are begun at a time:
    of a decoder's last block that is several GB.
    """
    if x.size > LARGE and not on_cpu():
        mx.eval(x)
    return x


LARGE = 2**26


def gelu(x: mx.array) -> mx.array:
    """x·Φ(x), with the exact normal distribution function Φ."""
    return cpu.gelu(x).astype(x.dtype) if on_cpu() else _gelu(x)


@partial(mx.compile, shapeless=True)
def _gelu(x: mx.array) -> mx.array:
    y = x.astype(mx.float32)
    return (0.5 * y * (1 + mx.erf(y * math.sqrt(0.5)))).astype(x.dtype)


def gelu_tanh(x: mx.array) -> mx.array:
    """The tanh approximation of GELU."""
    if on_cpu():
        return cpu.gelu_tanh(x).astype(x.dtype)
    y = kernels.gelu_tanh(x)
    return _gelu_tanh(x) if y is None else y


@partial(mx.compile, shapeless=True)
def _gelu_tanh(x: mx.array) -> mx.array:
    """x·σ(2u) in float32, without the power that makes MLX's own the slowest pass of a block."""
    y = x.astype(mx.float32)
    slope = 2 * math.sqrt(2 / math.pi)
    return (y * mx.sigmoid(y * (slope + 0.044715 * slope * (y * y)))).astype(x.dtype)


def silu(x: mx.array) -> mx.array:
    """x·σ(x)."""
    return cpu.silu(x).astype(x.dtype) if on_cpu() else nn.silu(x)


def sinusoids(
    timesteps: mx.array, channels: int, *, exact: bool = True, scale: float = 1.0
) -> mx.array:
    """Cosines then sines of `timesteps` at log-spaced frequencies, always in float32.

    bf16 timesteps are off by up to 0.74 of a step, so the cast comes after this function. MLX's own
    exponentials are off by 5e-7, which a guidance of 3500 multiplies; `exact` ones are NumPy's.
    """
    half = channels // 2
    if exact:
        exponents = np.arange(half, dtype=np.float32) * -math.log(10_000) / half
        frequencies = mx.array(np.exp(exponents.astype(np.float64)).astype(np.float32))
    else:
        frequencies = mx.exp(-math.log(10_000) / half * mx.arange(half, dtype=mx.float32))
    angles = timesteps.astype(mx.float32)[..., None] * frequencies
    if scale != 1.0:  # of timesteps from 0 to 1; multiplied here, it rounds as the reference does
        angles = angles * scale
    return mx.concatenate([mx.cos(angles), mx.sin(angles)], axis=-1)  # (..., channels)


def double_size(x: mx.array) -> mx.array:
    """(B, H, W, C) to (B, 2H, 2W, C), every value four times: nearest-neighbour upsampling."""
    B, H, W, C = x.shape
    return mx.broadcast_to(x[:, :, None, :, None], (B, H, 2, W, 2, C)).reshape(B, 2 * H, 2 * W, C)


def max_pool(x: mx.array, size: int, *, stride: int) -> mx.array:
    """The maxima of size × size windows of (B, H, W, C), as far as whole windows fit."""
    _, H, W, _ = x.shape
    x = reduce(mx.maximum, [x[:, i : H - size + i + 1 : stride] for i in range(size)])
    return reduce(mx.maximum, [x[:, :, i : W - size + i + 1 : stride] for i in range(size)])


def split_heads(x: mx.array, heads: int) -> mx.array:
    """(B, L, D) to (B, H, L, D/H)."""
    B, L, _ = x.shape
    return x.reshape(B, L, heads, -1).transpose(0, 2, 1, 3)


def join_heads(x: mx.array) -> mx.array:
    """(B, H, L, D/H) to (B, L, D)."""
    B, _, L, _ = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, L, -1)


def join_tokens(first: mx.array, second: mx.array) -> mx.array:
    """(B, H, L, D) and (B, H, S, D) to (B, H, L+S, D).

    In memory the tokens come before the heads, as linears write them and `join_heads` reads them:
    two long copies here, and none after the attention.
    """
    return mx.concatenate([first.swapaxes(1, 2), second.swapaxes(1, 2)], axis=1).swapaxes(1, 2)


# By the names that transformers' configs use.
Activation = Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu"]

ACTIVATIONS: Mapping[Activation, Callable[[mx.array], mx.array]] = {
    "gelu": lambda x: x * (1 + mx.erf(x / math.sqrt(2))) / 2,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": lambda x: x * mx.sigmoid(1.702 * x),
    "relu": nn.relu,
}
