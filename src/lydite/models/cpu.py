"""Layers arranged for MLX's CPU backend, which is fast at sums, products and matrices only.

On x86 it takes 12 ns for an exponential and 0.2 ns for a sum, copies the input of a convolution
once for each tap of the kernel, and adds up a group norm in one long chain of float32, which is
wrong in the fourth digit for a picture of 512². Inputs may have any dtype; outputs are float32.

It runs a stream on one core, so large pictures are divided into blocks of rows, and these among as
many streams as there are cores. The blocks do not depend on the number of streams, nor do the bits.
"""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import pairwise, product
from typing import Any

import mlx.core as mx

from lydite.core.device import GPU_BRANCHES
from lydite.core.fast_blas import cpu_threads

LOG2E = math.log2(math.e)

_BLOCK = 1 << 17  # values of a block of rows, about
# A number near 0 added to this is rounded, and has its float32 exponent in the lowest bits.
_ROUNDER = 1.5 * 2.0**23 + 127
# 2 ** f = (C + f) / (C − f), |f| ≤ ½; C is a series in f², highest power first; off by 7e-9.
_SERIES = (-0.00092045381, 0.11552396, 2.8853900)
# erfc(x/√2) = (series in t = 1 / (1 + slope·x)) · exp(−x²/2), highest power first, times t.
_ERFC_SLOPE = 0.3275911 / math.sqrt(2)
_ERFC_SERIES = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def on_cpu() -> bool:
    """Whether MLX runs on the CPU; a test may have the branches of a GPU taken there."""
    return mx.default_device() == mx.Device(mx.cpu) and not os.environ.get(GPU_BRANCHES)


def exp2(x: mx.array) -> mx.array:
    """2 ** x in float32 for x up to 126; below -126 it may stop at 2 ** -126.

    Thirteen passes, 2.5 ns a value in all, where MLX's power takes 4.4 and its exponential 12.
    """
    above, below, power = _exp2_parts(x)
    return above * power / below


def silu(x: mx.array) -> mx.array:
    """x·σ(x)."""
    x = x.astype(mx.float32)
    return x * _sigmoid_of_exponent(x * _filled(-LOG2E, x))


def gelu_tanh(x: mx.array) -> mx.array:
    """½·x·(1 + tanh u) = x·σ(2u) with u = √(2/π)·(x + 0.044715·x³)."""
    x = x.astype(mx.float32)
    slope = -2 * LOG2E * math.sqrt(2 / math.pi)
    cubic = _filled(slope, x) + _filled(0.044715 * slope, x) * (x * x)
    return x * _sigmoid_of_exponent(x * cubic)


def gelu(x: mx.array) -> mx.array:
    """x·Φ(x) with Φ(−|x|) = ½·erfc(|x|/√2) as a series times exp(−x²/2); Φ is off by 8e-8.

    The series is equation 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions.
    """
    x = x.astype(mx.float32)
    t = 1 / (1 + _ERFC_SLOPE * mx.abs(x))
    tail = 0.5 * _series(_ERFC_SERIES, t) * t * exp2(x * x * (-0.5 * LOG2E))
    return x * mx.where(x > 0, 1 - tail, tail)


def attention(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | None = None
) -> mx.array:
    """Scaled dot-product attention, (B, H, L, D) each; keys where `mask` is False are left out."""
    q, k, v = (array.astype(mx.float32) for array in (q, k, v))
    scores = (q * _filled(scale * LOG2E, q)) @ k.swapaxes(-1, -2)  # (B, H, L, L)
    if mask is not None:
        scores = mx.where(mask, scores, -1e9)
    weights = exp2(scores - mx.stop_gradient(scores.max(axis=-1, keepdims=True)))
    return (weights @ v) / weights.sum(axis=-1, keepdims=True)


def conv2d(x: mx.array, weight: mx.array, bias: mx.array) -> mx.array:
    """A convolution of stride 1 that keeps the size; the kernel is (O, 1, 1, C) or (O, 3, 3, C)."""
    O, K, _, C = weight.shape
    if K == 1:
        return x.astype(mx.float32) @ weight.astype(mx.float32).reshape(O, C).T + bias
    return _by_blocks(x, partial(_convolved, _taps(weight), bias))


def norm_silu_conv2d(
    x: mx.array,
    norm: tuple[mx.array, mx.array],
    conv: tuple[mx.array, mx.array],
    *,
    groups: int,
    eps: float,
) -> mx.array:
    """A 3 × 3 convolution of SiLU of a group norm; weight and bias of both.

    Between the three, values are rounded to the dtype of x, as where each is called by itself.
    """
    (weight, bias), (kernel, conv_bias) = norm, conv
    mean, scale = _statistics(x, weight, groups, eps)

    def activated(picture: int, rows: mx.array) -> mx.array:
        normed = ((rows - mean[picture, :]) * scale[picture, :] + bias).astype(x.dtype)
        return silu(normed).astype(x.dtype).astype(mx.float32)

    return _by_blocks(x, partial(_convolved, _taps(kernel), conv_bias), activated)


def conv2d_doubled(x: mx.array, weight: mx.array, bias: mx.array) -> mx.array:
    """A 3 × 3 convolution of x with every value four times: (B, H, W, C) to (B, 2H, 2W, O).

    Of three neighbours two are equal. So each of the four outputs at a position has a kernel of
    2 × 2 taps, which are sums of the given ones.
    """
    kernels = [_summed(rows, axis=1) for rows in _summed(_taps(weight), axis=0)]
    return _by_blocks(x, partial(_convolved_doubled, kernels, bias))


def conv2d_stride2(x: mx.array, weight: mx.array, bias: mx.array) -> mx.array:
    """A 3 × 3 convolution of stride 2 over an input that has its padding: one product per tap."""
    x, weight = x.astype(mx.float32), weight.astype(mx.float32)
    B, H, W, C = x.shape
    rows, columns = (H - 1) // 2, (W - 1) // 2
    taps = weight.transpose(1, 2, 3, 0)  # (3, 3, C, O)
    out = mx.array(0.0)
    for i in range(3):
        for j in range(3):
            moved = x[:, i : i + 2 * rows - 1 : 2, j : j + 2 * columns - 1 : 2]
            out = mx.addmm(out, moved.reshape(-1, C), taps[i, j])
    return out.reshape(B, rows, columns, -1) + bias


def norm_modulate(x: mx.array, shift: mx.array, scale: mx.array, eps: float) -> mx.array:
    """Layer norm of (B, L, D), scaled by 1 + scale and shifted per channel by (B, D) arrays."""
    D = x.shape[-1]
    total = x.sum(axis=-1, keepdims=True)
    centred = x - total * _filled(1 / D, total)
    squares = mx.square(centred).sum(axis=-1, keepdims=True)
    factor = (scale + _filled(1.0, scale)) * _filled(math.sqrt(D), scale)
    normed = centred * mx.rsqrt(squares + _filled(D * eps, squares))
    return normed * factor[:, None] + shift[:, None]


def group_norm(
    x: mx.array, weight: mx.array, bias: mx.array, *, groups: int, eps: float
) -> mx.array:
    """Group norm of (B, H, W, C) over neighbouring channels."""
    mean, scale = _statistics(x, weight, groups, eps)
    return (x.astype(mx.float32) - mean) * scale + bias


def in_parallel(calls: Iterable[Callable[[], mx.array]]) -> list[mx.array]:
    """The result of each call, computed on the streams in turn; a call has its share of them."""
    calls, available, outer = list(calls), streams(), _share.get()
    results: list[mx.array] = []
    for index, call in enumerate(calls):
        mine = available[index % len(available) :: len(calls)]
        _share.set(mine)
        try:
            with mx.stream(mine[0]):
                results.append(call())
        finally:
            _share.set(outer)
    return results


def streams() -> tuple[Any, ...]:
    """As many as there are cores, the default one first; within `in_parallel` the call's share."""
    share = _share.get()
    if share:
        return share
    others = cpu_threads() - 1
    _others.extend(mx.new_thread_local_stream(mx.cpu) for _ in range(others - len(_others)))
    return mx.default_stream(mx.cpu), *_others[:others]


_others: list[Any] = []
_share: ContextVar[tuple[Any, ...]] = ContextVar("_share", default=())


def _exp2_parts(x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """a, b and a power of two, p, so that 2 ** x = p·a/b."""
    x = mx.maximum(x, _filled(-126.0, x))
    rounder = _filled(_ROUNDER, x)
    rounded = mx.stop_gradient(x + rounder)
    fraction = x - (rounded - rounder)
    centre = _series(_SERIES, fraction * fraction)
    bits = rounded.view(mx.int32)
    power = mx.left_shift(bits, _filled(23, bits)).view(mx.float32)
    return centre + fraction, centre - fraction, power


def _sigmoid_of_exponent(x: mx.array) -> mx.array:
    """1 / (1 + 2 ** x)."""
    above, below, power = _exp2_parts(mx.minimum(x, _filled(126.0, x)))
    return below / (below + above * power)


def _series(coefficients: Sequence[float], x: mx.array) -> mx.array:
    """A polynomial in x, highest power first."""
    first, *others = coefficients
    total = _filled(first, x)
    for coefficient in others:
        total = total * x + _filled(coefficient, x)
    return total


def _filled(value: float, like: mx.array) -> mx.array:
    """An array of the shape of another with one value, which is in memory once.

    Of a number in an expression MLX makes an array and an operation in every call, 3 µs.
    """
    return _filled_shape(value, like.shape)


@lru_cache(maxsize=4096)
def _filled_shape(value: float, shape: tuple[int, ...]) -> mx.array:
    array = mx.broadcast_to(mx.array(value), shape)
    mx.eval(array)
    return array


def _by_blocks(
    x: mx.array,
    compute: Callable[[mx.array, int], mx.array],
    before: Callable[[int, mx.array], mx.array] | None = None,
) -> mx.array:
    """What `compute` makes of blocks of rows of each picture, joined: (B, H, W, C) to (B, …, O).

    It is given the rows in the form that `_flat` describes, and their width. `before` acts on the
    positions of a picture, one by one.
    """
    B, H, W, _ = x.shape
    blocks = _blocks(x)

    def block(picture: int, first: int, last: int) -> mx.array:
        rows = x[picture, max(first - 1, 0) : last + 1].astype(mx.float32)
        if before is not None:
            rows = before(picture, rows)
        return compute(_flat(rows, top=first == 0, bottom=last == H), W)

    calls = [partial(block, picture, *rows) for picture, rows in product(range(B), blocks)]
    results, count = in_parallel(calls), len(blocks)
    return mx.stack([mx.concatenate(results[at : at + count]) for at in range(0, B * count, count)])


def _flat(rows: mx.array, *, top: bool, bottom: bool) -> mx.array:
    """Rows (h, W, C) with a zero before each, and a row of zeros beyond the picture: (…, C).

    The picture moved by a tap is a slice of it. The last tap reads beyond the last row.
    """
    C = rows.shape[-1]
    return mx.pad(rows, [(int(top), bottom + 1), (1, 0), (0, 0)]).reshape(-1, C)


def _convolved(taps: mx.array, bias: mx.array, flat: mx.array, width: int) -> mx.array:
    """(h, W, O), of 3 × 3 taps."""
    return _moved_and_added(flat, taps, (0, 0), width) + bias


def _convolved_doubled(
    kernels: Sequence[Sequence[mx.array]], bias: mx.array, flat: mx.array, width: int
) -> mx.array:
    """(2h, 2W, O), of 2 × 2 taps for each of four outputs."""
    outputs = [
        _moved_and_added(flat, kernels[i][j], (i, j), width) for i, j in product(range(2), repeat=2)
    ]
    h, _, O = outputs[0].shape
    joined = mx.stack(outputs).reshape(2, 2, h, width, O) + bias
    return joined.transpose(2, 0, 3, 1, 4).reshape(2 * h, 2 * width, O)


def _summed(taps: mx.array, axis: int) -> tuple[mx.array, mx.array]:
    """Two taps of three along an axis, for the even and for the odd outputs."""
    first, second, third = mx.split(taps, 3, axis)
    even, odd = [first, second + third], [first + second, third]
    return mx.concatenate(even, axis), mx.concatenate(odd, axis)


def _moved_and_added(
    flat: mx.array, taps: mx.array, start: tuple[int, int], width: int
) -> mx.array:
    """One matrix product for each tap of (…, …, C, O), the first at `start`: (h, W, O)."""
    rows, columns, _, O = taps.shape
    length = flat.shape[0] - 3 * (width + 1)
    slices = (
        (start[0] + row) * (width + 1) + start[1] + column
        for row, column in product(range(rows), range(columns))
    )
    out: mx.array | None = None
    for at, tap in zip(slices, mx.split(taps.reshape(-1, O), rows * columns), strict=True):
        moved = flat[at : at + length]
        out = moved @ tap if out is None else mx.addmm(out, moved, tap)
    assert out is not None
    return out.reshape(-1, width + 1, O)[:, :width]


def _taps(weight: mx.array) -> mx.array:
    """(O, 3, 3, C) to (3, 3, C, O)."""
    return mx.contiguous(weight.astype(mx.float32).transpose(1, 2, 3, 0))


def _statistics(
    x: mx.array, weight: mx.array, groups: int, eps: float
) -> tuple[mx.array, mx.array]:
    """What a group norm subtracts, and what it multiplies the rest by: (B, 1, 1, C) each."""

    def mean(value: Callable[[mx.array], mx.array]) -> mx.array:
        def total(first: int, last: int) -> mx.array:
            rows = value(x[:, first:last].astype(mx.float32))
            return rows.sum(axis=2).sum(axis=1)  # (B, C), in two short chains

        totals = in_parallel(partial(total, *rows) for rows in _blocks(x))
        B, H, W, C = x.shape
        of_groups = (sum(totals[1:], totals[0]) / (H * W)).reshape(B, groups, -1)
        of_groups = of_groups.mean(axis=-1, keepdims=True)
        return mx.broadcast_to(of_groups, (B, groups, C // groups)).reshape(B, 1, 1, C)

    centre = mean(lambda rows: rows)
    variance = mean(lambda rows: mx.square(rows - centre))
    return centre, weight * mx.rsqrt(variance + eps)


def _blocks(x: mx.array) -> list[tuple[int, int]]:
    """The first row of each block of a picture, and that of the next."""
    _, H, W, C = x.shape
    count = min(-(-H * W * C // _BLOCK), H)
    return list(pairwise(H * index // count for index in range(count + 1)))
