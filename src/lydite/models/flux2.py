"""FLUX.2, of which klein is the small one: modulation shared by all blocks, gated feed-forwards.

Reference: diffusers 0.42.1, models/transformers/transformer_flux2.py.
What does not change over the steps of one picture is computed first and passed in: `modulation`,
`positions` and `embed_text`.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lydite.core.config import Count, Epsilon, Size
from lydite.models.kernels import add_gated, norm_modulate
from lydite.models.layers import Linear, MLPEmbedder, silu, sinusoids, split_heads
from lydite.models.modulation import (
    AdaLayerNorm,
    Modulation,
    add_attention_and_feed_forward,
    clip_float16,
)
from lydite.models.rotary_attention import JointAttention, Rotation, attend, rotation

FIXED = {"patch_size": 1}  # latents come packed
REFERENCE_TIME = 10  # of the positions of a reference image
STREAMS = ("double_stream_modulation_img", "double_stream_modulation_txt")


@dataclass(frozen=True)
class Flux2Config:
    """Keys of diffusers' Flux2Transformer2DModel config."""

    in_channels: Size
    num_layers: Count
    num_single_layers: Count
    attention_head_dim: Size
    num_attention_heads: Count
    joint_attention_dim: Size
    timestep_guidance_channels: Size
    mlp_ratio: float
    axes_dims_rope: tuple[Count, ...]
    rope_theta: float
    eps: Epsilon
    guidance_embeds: bool = True  # older configs leave it out
    out_channels: Size | None = None  # as many as in_channels

    def __post_init__(self) -> None:
        axes = self.axes_dims_rope
        if len(axes) != 4 or any(dims % 2 for dims in axes) or sum(axes) != self.attention_head_dim:
            raise ValueError(
                f"axes_dims_rope {list(axes)} are not four even numbers that make up "
                f"attention_head_dim {self.attention_head_dim}"
            )
        if not 0 < self.mlp_ratio <= 64:
            raise ValueError(f"mlp_ratio {self.mlp_ratio}")

    @property
    def inner_dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forwards."""
        return int(self.inner_dim * self.mlp_ratio)


class Flux2Transformer(nn.Module):
    """Predicts the velocity of packed latents from text, timestep and guidance."""

    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        self.config = config
        dim = config.inner_dim
        self.time_guidance_embed = TimeGuidanceEmbedding(config)
        self.double_stream_modulation_img = SharedModulation(dim, 6)
        self.double_stream_modulation_txt = SharedModulation(dim, 6)
        self.single_stream_modulation = SharedModulation(dim, 3)
        self.x_embedder = Linear(config.in_channels, dim, bias=False)
        self.context_embedder = Linear(config.joint_attention_dim, dim, bias=False)
        self.transformer_blocks = [DoubleBlock(config) for _ in range(config.num_layers)]
        self.single_transformer_blocks = [
            SingleBlock(config) for _ in range(config.num_single_layers)
        ]
        self.norm_out = AdaLayerNorm(dim, 2, bias=False, eps=config.eps)
        self.proj_out = Linear(dim, config.out_channels or config.in_channels, bias=False)

    def modulation(
        self, timesteps: mx.array, dtype: mx.Dtype, guidance: mx.array | None = None
    ) -> Modulation:
        """Tables of the streams and of the last norm for all steps: (S,) to (S, 1, n, D) each.

        Timesteps run from 1000 to 0; `dtype` is the one the blocks run in. `guidance` (1,) is the
        pipeline's scale, for a model with guidance_embeds and for no other.
        """
        if (guidance is not None) != self.config.guidance_embeds:
            raise ValueError(f"guidance {guidance}, guidance_embeds {self.config.guidance_embeds}")
        scale = None if guidance is None else guidance.astype(mx.float32) * 1000
        embedding = self.time_guidance_embed(timesteps, dtype, scale)[:, None]  # (S, 1, D)
        tables = {"norm_out": self.norm_out.table(embedding)}
        for name in (*STREAMS, "single_stream_modulation"):
            tables[name] = mx.unflatten(self[name](embedding), -1, (self[name].chunks, -1))
        return tables

    def positions(
        self, text_length: int, rows: int, columns: int, *, reference: bool = False
    ) -> Rotation:
        """Rotary tables for the text and then the tokens of an image, row by row.

        With `reference` the tokens of another image of the same size follow.
        """
        ids = position_ids(text_length, rows, columns, reference=reference)
        return rotation(ids, self.config.axes_dims_rope, theta=self.config.rope_theta)

    def embed_text(self, text: mx.array) -> mx.array:
        """Text features at the width of the blocks: (B, S, D)."""
        return self.context_embedder(text)

    def __call__(
        self, tokens: mx.array, text: mx.array, modulation: Modulation, positions: Rotation
    ) -> mx.array:
        """One step: packed latents (B, L, C), embedded text, this step's tables, rotary tables."""
        S, image = text.shape[1], self.x_embedder(tokens)
        table, text_table = (modulation[name] for name in STREAMS)
        for block in self.transformer_blocks:
            text, image = block(text, image, table, text_table, positions)
        x = mx.concatenate([text, image], axis=1)
        for block in self.single_transformer_blocks:
            x = block(x, modulation["single_stream_modulation"], positions)
        return self.proj_out(self.norm_out(x[:, S:], modulation["norm_out"]))  # (B, L, C)


class TimeGuidanceEmbedding(nn.Module):
    """Timestep and guidance as one vector, which drives all modulation."""

    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        self.channels = config.timestep_guidance_channels
        self.timestep_embedder = MLPEmbedder(self.channels, config.inner_dim, bias=False)
        if config.guidance_embeds:
            self.guidance_embedder = MLPEmbedder(self.channels, config.inner_dim, bias=False)

    def __call__(self, timesteps: mx.array, dtype: mx.Dtype, guidance: mx.array | None) -> mx.array:
        time = self.timestep_embedder(sinusoids(timesteps, self.channels).astype(dtype))
        if guidance is None:
            return time
        return time + self.guidance_embedder(sinusoids(guidance, self.channels).astype(dtype))


class SharedModulation(nn.Module):
    """Shift, scale and gate of the attention, then of the feed-forward, for all blocks alike."""

    def __init__(self, dim: int, chunks: int) -> None:
        super().__init__()
        self.chunks = chunks
        self.linear = Linear(dim, chunks * dim, bias=False)

    def __call__(self, embedding: mx.array) -> mx.array:
        return self.linear(silu(embedding))


class FeedForward(nn.Module):
    """The second half of a projection gated by the first."""

    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        self.linear_in = Linear(config.inner_dim, 2 * config.hidden_dim, bias=False)
        self.linear_out = Linear(config.hidden_dim, config.inner_dim, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear_out(gated(self.linear_in(x)))


class DoubleBlock(nn.Module):
    """Text and image in streams of their own that meet in the attention."""

    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        dim, eps = config.inner_dim, config.eps
        self.norm1 = nn.LayerNorm(dim, eps=eps, affine=False)
        self.norm1_context = nn.LayerNorm(dim, eps=eps, affine=False)
        self.attn = JointAttention(
            config.num_attention_heads, config.attention_head_dim, bias=False, eps=eps
        )
        self.norm2 = nn.LayerNorm(dim, eps=eps, affine=False)
        self.ff = FeedForward(config)
        self.norm2_context = nn.LayerNorm(dim, eps=eps, affine=False)
        self.ff_context = FeedForward(config)

    def __call__(
        self,
        text: mx.array,
        image: mx.array,
        table: mx.array,
        text_table: mx.array,
        positions: Rotation,
    ) -> tuple[mx.array, mx.array]:
        shift, scale = table[:, 0], table[:, 1]
        normed = norm_modulate(self.norm1, image, shift=shift, scale=scale)
        shift, scale = text_table[:, 0], text_table[:, 1]
        text_normed = norm_modulate(self.norm1_context, text, shift=shift, scale=scale)
        attended, text_attended = self.attn(normed, text_normed, positions)
        image = add_attention_and_feed_forward(image, attended, self.norm2, self.ff, table)
        text = add_attention_and_feed_forward(
            text, text_attended, self.norm2_context, self.ff_context, text_table
        )
        return clip_float16(text), image


class ParallelAttention(nn.Module):
    """Attention and feed-forward side by side, with one projection in and one out."""

    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        dim, head_dim = config.inner_dim, config.attention_head_dim
        self.heads, self.hidden = config.num_attention_heads, config.hidden_dim
        self.to_qkv_mlp_proj = Linear(dim, 3 * dim + 2 * self.hidden, bias=False)
        self.norm_q, self.norm_k = (nn.RMSNorm(head_dim, eps=config.eps) for _ in range(2))
        self.to_out = Linear(dim + self.hidden, dim, bias=False)

    def __call__(self, x: mx.array, positions: Rotation) -> mx.array:
        D = x.shape[-1]
        *parts, hidden = mx.split(self.to_qkv_mlp_proj(x), [D, 2 * D, 3 * D], axis=-1)
        q, k, v = (split_heads(part, self.heads) for part in parts)
        attended = attend(self.norm_q(q), self.norm_k(k), v, positions)
        return self.to_out(mx.concatenate([attended, gated(hidden)], axis=-1))


class SingleBlock(nn.Module):
    """Text and image as one sequence."""

    def __init__(self, config: Flux2Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.inner_dim, eps=config.eps, affine=False)
        self.attn = ParallelAttention(config)

    def __call__(self, x: mx.array, table: mx.array, positions: Rotation) -> mx.array:
        normed = norm_modulate(self.norm, x, shift=table[:, 0], scale=table[:, 1])
        return clip_float16(add_gated(x, self.attn(normed, positions), table[:, 2]))


def gated(x: mx.array) -> mx.array:
    """The second half of the channels times SiLU of the first."""
    first, second = mx.split(x, 2, axis=-1)
    return silu(first) * second


def position_ids(
    text_length: int, rows: int, columns: int, *, reference: bool = False
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Text at (0, 0, 0, number), then the image at (0, row, column, 0): (S+L, 4).

    A reference of the same size comes last, at (10, row, column, 0).
    """
    times = (0, REFERENCE_TIME) if reference else (0,)
    ids = np.zeros((text_length + len(times) * rows * columns, 4), np.int64)
    ids[:text_length, 3] = np.arange(text_length)
    grid = ids[text_length:].reshape(len(times), rows, columns, 4)
    grid[..., 0] = np.array(times)[:, None, None]
    grid[..., 1] = np.arange(rows)[:, None]
    grid[..., 2] = np.arange(columns)
    return ids
