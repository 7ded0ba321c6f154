"""Rotary positions of several axes, and the joint attention of FLUX and Qwen-Image with them.

Reference: diffusers 0.42.1, `FluxAttention` and `QwenDoubleStreamAttnProcessor2_0`. Both put the
text's tokens before the image's and name their projections alike.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import ArrayLike

from lydite.models.layers import (
    Linear,
    attention,
    join_heads,
    join_tokens,
    on_cpu,
    project,
    split_heads,
)


class Rotation(NamedTuple):
    """How far each pair of channels turns at each token: (L, head_dim / 2) each, in float32."""

    cos: mx.array
    sin: mx.array


def rotation(
    ids: ArrayLike,
    axes_dims: Sequence[int],
    *,
    theta: float = 10_000.0,
    dtype: type = np.float64,
    angle_dtype: type | None = None,
) -> Rotation:
    """Tables for tokens at positions `ids` (L, axes); each axis turns `axes_dims` channels.

    The precision is the reference's: `dtype` in which it multiplies positions and frequencies,
    `angle_dtype` to which it rounds the product, if to another.
    """
    positions = np.asarray(ids, dtype)  # (L, axes)
    angles: list[np.ndarray] = []
    for axis, dims in enumerate(axes_dims):
        exponents = np.arange(0, dims, 2, dtype=dtype) / dtype(dims)
        frequencies = dtype(1) / np.power(dtype(theta), exponents, dtype=dtype)
        angles.append(np.outer(positions[:, axis], frequencies))
    joined = np.concatenate(angles, axis=1).astype(angle_dtype or dtype)
    return Rotation(
        mx.array(np.cos(joined).astype(np.float32)), mx.array(np.sin(joined).astype(np.float32))
    )


def rotate(x: mx.array, table: Rotation) -> mx.array:
    """Turn neighbouring pairs of channels of x (B, H, L, D), in float32."""
    return _rotate(x, *table) if on_cpu() else _compiled_rotate(x, *table)


def _rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    pairs = mx.unflatten(x.astype(mx.float32), -1, (-1, 2))  # (B, H, L, D/2, 2)
    real, imaginary = pairs[..., 0], pairs[..., 1]
    turned = [real * cos - imaginary * sin, imaginary * cos + real * sin]
    return mx.stack(turned, axis=-1).flatten(-2).astype(x.dtype)


_compiled_rotate = mx.compile(_rotate)


class SelfAttention(nn.Module):
    """Attention over one sequence; the output projection belongs to the block around it."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        dim = heads * head_dim
        self.heads = heads
        self.norm_q, self.norm_k = (nn.RMSNorm(head_dim, eps=1e-6) for _ in range(2))
        self.to_q, self.to_k, self.to_v = (Linear(dim, dim) for _ in range(3))

    def __call__(self, x: mx.array, table: Rotation) -> mx.array:
        q, k, v = queries_keys_values(
            x, self.heads, (self.to_q, self.to_k, self.to_v), (self.norm_q, self.norm_k)
        )
        return attend(q, k, v, table)


class JointAttention(nn.Module):
    """Attention over text and image tokens together, each stream with its own projections."""

    def __init__(self, heads: int, head_dim: int, *, bias: bool = True, eps: float = 1e-6) -> None:
        super().__init__()
        linear = partial(Linear, heads * head_dim, heads * head_dim, bias)
        norm = partial(nn.RMSNorm, head_dim, eps)
        self.heads = heads
        self.norm_q, self.norm_k = norm(), norm()
        self.to_q, self.to_k, self.to_v = linear(), linear(), linear()
        self.to_out = [linear()]
        self.norm_added_q, self.norm_added_k = norm(), norm()
        self.add_q_proj, self.add_k_proj, self.add_v_proj = linear(), linear(), linear()
        self.to_add_out = linear()

    def __call__(
        self, image: mx.array, text: mx.array, table: Rotation, mask: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Both streams attended; `mask` (B, S) is False where the text is padding."""
        S = text.shape[1]
        of_image = queries_keys_values(
            image, self.heads, (self.to_q, self.to_k, self.to_v), (self.norm_q, self.norm_k)
        )
        of_text = queries_keys_values(
            text,
            self.heads,
            (self.add_q_proj, self.add_k_proj, self.add_v_proj),
            (self.norm_added_q, self.norm_added_k),
        )
        q, k, v = (join_tokens(*parts) for parts in zip(of_text, of_image, strict=True))
        if mask is not None:
            mask = mx.pad(mask, [(0, 0), (0, image.shape[1])], constant_values=True)
            mask = mask[:, None, None]  # (B, 1, 1, S+L)
        x = attend(q, k, v, table, mask)
        return self.to_out[0](x[:, S:]), self.to_add_out(x[:, :S])


def queries_keys_values(
    x: mx.array, heads: int, projections: Sequence[Linear], norms: Sequence[nn.RMSNorm]
) -> tuple[mx.array, mx.array, mx.array]:
    """(B, L, D) to three of (B, H, L, D/H), the first two normed."""
    q, k, v = (split_heads(part, heads) for part in project(x, projections))
    return norms[0](q), norms[1](k), v


def attend(
    q: mx.array, k: mx.array, v: mx.array, table: Rotation, mask: mx.array | None = None
) -> mx.array:
    """Attention with rotated queries and keys: three of (B, H, L, D/H) to (B, L, D)."""
    scale = q.shape[-1] ** -0.5
    x = attention(rotate(q, table), rotate(k, table), v, scale=scale, mask=mask)
    return join_heads(x)
