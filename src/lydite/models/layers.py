"""Layers that more than one network is built from."""

import math

import mlx.core as mx
import mlx.nn as nn


class GELUTanh(nn.Module):
    """A projection and the tanh approximation of GELU, as diffusers' `gelu-approximate`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, hidden)

    def __call__(self, x: mx.array) -> mx.array:
        return gelu_tanh(self.proj(x))


class FeedForward(nn.Module):
    """Two linears around a GELU; the list reproduces the names net.0.proj and net.2."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = [GELUTanh(dim, 4 * dim), nn.Identity(), nn.Linear(4 * dim, dim)]

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.net:
            x = layer(x)
        return x


class MLPEmbedder(nn.Module):
    """Linear, SiLU, linear: how timesteps and pooled text enter the modulation."""

    def __init__(self, dim_in: int, dim: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(dim_in, dim)
        self.linear_2 = nn.Linear(dim, dim)

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear_2(silu(self.linear_1(x)))


def gelu_tanh(x: mx.array) -> mx.array:
    """GELU's tanh approximation, ½·x·(1 + tanh u) = x·σ(2u) with u = √(2/π)·(x + 0.044715·x³)."""
    if not on_cpu():
        return nn.gelu_approx(x)
    wide = x.astype(mx.float32)
    u = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide / (1 + _exp(-2 * u))).astype(x.dtype)


def silu(x: mx.array) -> mx.array:
    """x·σ(x)."""
    if not on_cpu():
        return nn.silu(x)
    wide = x.astype(mx.float32)
    return (wide / (1 + _exp(-wide))).astype(x.dtype)


def on_cpu() -> bool:
    """Whether MLX runs on the CPU."""
    return mx.default_device() == mx.Device(mx.cpu)


def _exp(x: mx.array) -> mx.array:
    # MLX's exp and tanh take 17 and 28 ns a value on an x86 CPU, its power of two takes 6
    return mx.power(2.0, x * math.log2(math.e))


def sinusoids(timesteps: mx.array, channels: int) -> mx.array:
    """Cosines then sines of `timesteps` at log-spaced frequencies, always in float32.

    bf16 timesteps are off by up to 0.74 of a step, so the cast comes after this function.
    """
    half = channels // 2
    frequencies = mx.exp(-math.log(10_000) / half * mx.arange(half, dtype=mx.float32))
    angles = timesteps.astype(mx.float32)[..., None] * frequencies
    return mx.concatenate([mx.cos(angles), mx.sin(angles)], axis=-1)  # (..., channels)


def split_heads(x: mx.array, heads: int) -> mx.array:
    """(B, L, D) to (B, H, L, D/H)."""
    B, L, _ = x.shape
    return x.reshape(B, L, heads, -1).transpose(0, 2, 1, 3)


def join_heads(x: mx.array) -> mx.array:
    """(B, H, L, D/H) to (B, L, D)."""
    B, _, L, _ = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, L, -1)
