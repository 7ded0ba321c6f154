"""Z-Image's transformer: image and text as one sequence, after a few layers on each of them alone.

Reference: diffusers 0.42.1, models/transformers/transformer_z_image.py, with one image and text.
What does not change over the steps of one picture is computed first and passed in: `modulation`,
`positions` and `embed_text`, which includes the layers on the text alone.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lydite.core.config import Count, Epsilon, Size
from lydite.core.errors import InputError
from lydite.models.layers import Linear, SiLU, silu, sinusoids
from lydite.models.modulation import Modulation
from lydite.models.rotary_attention import Rotation, attend, queries_keys_values, rotation

IGNORED = frozenset({"n_kv_heads"})  # the reference does not read it
FIXED = {
    "all_patch_size": [2],
    "all_f_patch_size": [1],
    "qk_norm": True,
    "siglip_feat_dim": None,  # of the model that also takes images
    "t_scale": 1000.0,
}
PATCH = "2-1"  # latents of a side and frames of one token, in names
MULTIPLE = 32  # text and image are each filled up to a multiple of this many tokens


@dataclass(frozen=True)
class ZImageConfig:
    """Keys of diffusers' ZImageTransformer2DModel config."""

    in_channels: Size
    dim: Size
    n_layers: Count
    n_refiner_layers: Count
    n_heads: Count
    norm_eps: Epsilon
    cap_feat_dim: Size
    rope_theta: float
    axes_dims: tuple[Count, ...]
    axes_lens: tuple[Size, ...]  # how many positions each axis has

    def __post_init__(self) -> None:
        axes, head_dim = self.axes_dims, self.dim // self.n_heads
        if self.dim % self.n_heads or len(axes) != 3 or len(self.axes_lens) != 3:
            raise ValueError(f"dim {self.dim}, n_heads {self.n_heads}, axes_dims {list(axes)}")
        if any(dims % 2 for dims in axes) or sum(axes) != head_dim:
            raise ValueError(
                f"axes_dims {list(axes)} are not even numbers that make up dim / n_heads {head_dim}"
            )

    @property
    def embedding_dim(self) -> int:
        """Width of the vector that drives all modulation."""
        return min(self.dim, 256)


class ZImageTransformer(nn.Module):
    """Predicts the negative velocity of latents, channels last, from text and time."""

    def __init__(self, config: ZImageConfig) -> None:
        super().__init__()
        self.config = config
        dim, channels = config.dim, 4 * config.in_channels
        self.all_x_embedder = {PATCH: Linear(channels, dim)}
        self.all_final_layer = {PATCH: FinalLayer(config, channels)}
        self.noise_refiner = [ZImageBlock(config) for _ in range(config.n_refiner_layers)]
        self.context_refiner = [
            ZImageBlock(config, modulated=False) for _ in range(config.n_refiner_layers)
        ]
        self.t_embedder = TimeEmbedding(config.embedding_dim)
        self.cap_embedder = [
            nn.RMSNorm(config.cap_feat_dim, eps=config.norm_eps),
            Linear(config.cap_feat_dim, dim),
        ]
        self.x_pad_token = mx.zeros((1, dim))
        self.cap_pad_token = mx.zeros((1, dim))
        self.layers = [ZImageBlock(config) for _ in range(config.n_layers)]

    def modulation(self, times: mx.array, dtype: mx.Dtype) -> Modulation:
        """Tables of every block for all steps: (S,) to (S, 1, n, D) each.

        Times run from 0, which is noise, to 1000: 1000 minus the timestep of other models. `dtype`
        is the one the blocks run in.
        """
        embedding = self.t_embedder(times, dtype)[:, None]  # (S, 1, E)
        tables = {"final_layer": self.all_final_layer[PATCH].table(embedding)}
        for name in ("noise_refiner", "layers"):
            for index, block in enumerate(self[name]):
                tables[f"{name}.{index}"] = block.table(embedding)
        return tables

    def positions(self, text_length: int, rows: int, columns: int) -> Rotation:
        """Rotary tables for the tokens of an image, row by row, and then for the text."""
        return self._rotation(position_ids(text_length, rows, columns))

    def embed_text(self, text: mx.array) -> mx.array:
        """Text features (B, S, C) at the width of the blocks, filled up and refined: (B, S', D)."""
        norm, linear = self.cap_embedder
        x = _filled(linear(norm(text)), self.cap_pad_token)
        table = self._rotation(_text_ids(text.shape[1]))
        for block in self.context_refiner:
            x = block(x, table)
        return x

    def __call__(
        self, latents: mx.array, text: mx.array, modulation: Modulation, positions: Rotation
    ) -> mx.array:
        """One step: latents (B, h, w, C), embedded text, this step's tables, rotary tables."""
        B, height, width, C = latents.shape
        rows, columns = height // 2, width // 2
        patches = latents.reshape(B, rows, 2, columns, 2, C).transpose(0, 1, 3, 2, 4, 5)
        x = self.all_x_embedder[PATCH](patches.reshape(B, rows * columns, 4 * C))
        x = _filled(x, self.x_pad_token)
        cos, sin = positions
        L = x.shape[1]
        for index, block in enumerate(self.noise_refiner):
            table = Rotation(cos[:L], sin[:L])
            x = block(x, table, modulation[f"noise_refiner.{index}"])
        x = mx.concatenate([x, text], axis=1)
        for index, block in enumerate(self.layers):
            x = block(x, positions, modulation[f"layers.{index}"])
        x = self.all_final_layer[PATCH](x, modulation["final_layer"])
        patches = x[:, : rows * columns].reshape(B, rows, columns, 2, 2, C)
        return patches.transpose(0, 1, 3, 2, 4, 5).reshape(B, height, width, C)

    def _rotation(self, ids: np.ndarray) -> Rotation:
        config = self.config
        if (ids >= np.array(config.axes_lens)).any():
            raise InputError(
                f"text and image need positions {ids.max(axis=0).tolist()}, the model has "
                f"{list(config.axes_lens)}. Use a shorter prompt or a smaller size."
            )
        return rotation(ids, config.axes_dims, theta=config.rope_theta, angle_dtype=np.float32)


class TimeEmbedding(nn.Module):
    """The time as the vector that drives all modulation."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = [Linear(256, 1024), SiLU(), Linear(1024, dim)]

    def __call__(self, times: mx.array, dtype: mx.Dtype) -> mx.array:
        x = sinusoids(times, 256).astype(dtype)
        for layer in self.mlp:
            x = layer(x)
        return x  # (S, E)


class Attention(nn.Module):
    def __init__(self, config: ZImageConfig) -> None:
        super().__init__()
        dim, head_dim = config.dim, config.dim // config.n_heads
        self.heads = config.n_heads
        self.norm_q, self.norm_k = (nn.RMSNorm(head_dim, eps=1e-5) for _ in range(2))
        self.to_q, self.to_k, self.to_v = (Linear(dim, dim, bias=False) for _ in range(3))
        self.to_out = [Linear(dim, dim, bias=False)]

    def __call__(self, x: mx.array, table: Rotation) -> mx.array:
        q, k, v = queries_keys_values(
            x, self.heads, (self.to_q, self.to_k, self.to_v), (self.norm_q, self.norm_k)
        )
        return self.to_out[0](attend(q, k, v, table))


class FeedForward(nn.Module):
    """`w3` gated by `w1`, then `w2`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = int(dim / 3 * 8)
        self.w1 = Linear(dim, hidden, bias=False)
        self.w2 = Linear(hidden, dim, bias=False)
        self.w3 = Linear(dim, hidden, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class ZImageBlock(nn.Module):
    """Attention and feed-forward, each normed before and after.

    A modulated block has a scale and a gate for each of the two; a gate goes through tanh.
    """

    def __init__(self, config: ZImageConfig, *, modulated: bool = True) -> None:
        super().__init__()
        dim, eps = config.dim, config.norm_eps
        self.attention = Attention(config)
        self.feed_forward = FeedForward(dim)
        self.attention_norm1, self.attention_norm2 = (nn.RMSNorm(dim, eps=eps) for _ in range(2))
        self.ffn_norm1, self.ffn_norm2 = (nn.RMSNorm(dim, eps=eps) for _ in range(2))
        if modulated:
            self.adaLN_modulation = [Linear(config.embedding_dim, 4 * dim)]

    def table(self, embedding: mx.array) -> mx.array:
        """Scale and gate of the attention, then of the feed-forward: (..., E) to (..., 4, D)."""
        return mx.unflatten(self.adaLN_modulation[0](embedding), -1, (4, -1))

    def __call__(self, x: mx.array, positions: Rotation, table: mx.array | None = None) -> mx.array:
        scale = gate = scale_ff = gate_ff = None
        if table is not None:
            scale, gate, scale_ff, gate_ff = (table[:, None, index] for index in range(4))
            gate, gate_ff = mx.tanh(gate), mx.tanh(gate_ff)
        attended = self.attention(_times(self.attention_norm1(x), scale, 1), positions)
        x = x + _times(self.attention_norm2(attended), gate)
        fed = self.feed_forward(_times(self.ffn_norm1(x), scale_ff, 1))
        return x + _times(self.ffn_norm2(fed), gate_ff)


class FinalLayer(nn.Module):
    def __init__(self, config: ZImageConfig, channels: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(config.dim, eps=1e-6, affine=False)
        self.linear = Linear(config.dim, channels)
        self.adaLN_modulation = [SiLU(), Linear(config.embedding_dim, config.dim)]

    def table(self, embedding: mx.array) -> mx.array:
        """The scale: (..., E) to (..., 1, D)."""
        activation, linear = self.adaLN_modulation
        return linear(activation(embedding))[..., None, :]

    def __call__(self, x: mx.array, table: mx.array) -> mx.array:
        return self.linear(self.norm_final(x) * (1 + table))


def position_ids(text_length: int, rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The image at (the number after the text's last, row, column), its filling at the origin,
    and then the text at (1, 2, …; 0; 0), its filling included: (L'+S', 3)."""
    text = _text_ids(text_length)
    image = np.zeros((rows * columns + -(rows * columns) % MULTIPLE, 3), np.int64)
    grid = image[: rows * columns].reshape(rows, columns, 3)
    grid[..., 0] = len(text) + 1
    grid[..., 1] = np.arange(rows)[:, None]
    grid[..., 2] = np.arange(columns)
    return np.concatenate([image, text])


def _text_ids(length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    ids = np.zeros((length + -length % MULTIPLE, 3), np.int64)
    ids[:, 0] = np.arange(1, len(ids) + 1)
    return ids


def _filled(x: mx.array, token: mx.array) -> mx.array:
    """x (B, L, D) followed by as many of `token` as a multiple needs. They are attended to."""
    B, L, D = x.shape
    return mx.concatenate([x, mx.broadcast_to(token, (B, -L % MULTIPLE, D))], axis=1)


def _times(x: mx.array, factor: mx.array | None, plus: int = 0) -> mx.array:
    return x if factor is None else x * (plus + factor)
