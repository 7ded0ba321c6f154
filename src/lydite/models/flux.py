"""FLUX.1: schnell, dev with its guidance embedding, and Fill with its wider input.

Reference: diffusers 0.42.1, models/transformers/transformer_flux.py. What does not change over the
steps of one picture is computed first and passed in: `modulation`, `positions` and `embed_text`.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lydite.core.config import Count, Size
from lydite.models.kernels import add_gated
from lydite.models.layers import FeedForward, Linear, gelu_tanh
from lydite.models.modulation import (
    AdaLayerNorm,
    Modulation,
    TimeTextEmbedding,
    add_attention_and_feed_forward,
    clip_float16,
)
from lydite.models.rotary_attention import JointAttention, Rotation, SelfAttention, rotation

FIXED = {"patch_size": 1}  # latents come packed


@dataclass(frozen=True)
class FluxConfig:
    """Keys of diffusers' FluxTransformer2DModel config."""

    in_channels: Size  # 64; 384 in Fill, which also takes the masked image and the mask
    num_layers: Count
    num_single_layers: Count
    attention_head_dim: Size
    num_attention_heads: Count
    joint_attention_dim: Size
    pooled_projection_dim: Size
    guidance_embeds: bool
    out_channels: Size | None = None  # as many as in_channels
    axes_dims_rope: tuple[Count, ...] = (16, 56, 56)  # FLUX.1's first configs leave it out

    def __post_init__(self) -> None:
        axes = self.axes_dims_rope
        if len(axes) != 3 or any(dims % 2 for dims in axes) or sum(axes) != self.attention_head_dim:
            raise ValueError(
                f"axes_dims_rope {list(axes)} are not three even numbers that make up "
                f"attention_head_dim {self.attention_head_dim}"
            )

    @property
    def inner_dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


class FluxTransformer(nn.Module):
    """Predicts the velocity of packed latents from text, pooled text, timestep and guidance."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.inner_dim
        self.time_text_embed = TimeTextEmbedding(
            dim, config.pooled_projection_dim, guidance=config.guidance_embeds
        )
        self.context_embedder = Linear(config.joint_attention_dim, dim)
        self.x_embedder = Linear(config.in_channels, dim)
        self.transformer_blocks = [DoubleBlock(config) for _ in range(config.num_layers)]
        self.single_transformer_blocks = [
            SingleBlock(config) for _ in range(config.num_single_layers)
        ]
        self.norm_out = AdaLayerNorm(dim, 2)
        self.proj_out = Linear(dim, config.out_channels or config.in_channels)

    def modulation(
        self, timesteps: mx.array, pooled: mx.array, guidance: mx.array | None = None
    ) -> Modulation:
        """Tables of every adaptive norm for all steps: (S,) and (B, P) to (S, B, n, D) each.

        Timesteps run from 1000 to 0. `guidance` (B,) or (1,) is the pipeline's scale, for a model
        with guidance_embeds and for no other.
        """
        if (guidance is not None) != self.config.guidance_embeds:
            raise ValueError(f"guidance {guidance}, guidance_embeds {self.config.guidance_embeds}")
        scale = None if guidance is None else guidance.astype(mx.float32) * 1000
        embedding = self.time_text_embed(timesteps, pooled, scale)  # (S, B, D)
        tables = {"norm_out": self.norm_out.table(embedding)}
        for index, block in enumerate(self.transformer_blocks):
            for name in ("norm1", "norm1_context"):
                tables[f"transformer_blocks.{index}.{name}"] = block[name].table(embedding)
        for index, block in enumerate(self.single_transformer_blocks):
            tables[f"single_transformer_blocks.{index}.norm"] = block.norm.table(embedding)
        return tables

    def positions(self, text_length: int, rows: int, columns: int) -> Rotation:
        """Rotary tables for the text and then the tokens of an image, row by row."""
        return rotation(position_ids(text_length, rows, columns), self.config.axes_dims_rope)

    def embed_text(self, text: mx.array) -> mx.array:
        """Text features at the width of the blocks: (B, S, D)."""
        return self.context_embedder(text)

    def __call__(
        self, tokens: mx.array, text: mx.array, modulation: Modulation, positions: Rotation
    ) -> mx.array:
        """One step: packed latents (B, L, C), embedded text, this step's tables, rotary tables."""
        image = self.x_embedder(tokens)
        for index, block in enumerate(self.transformer_blocks):
            path = f"transformer_blocks.{index}"
            text, image = block(
                text,
                image,
                modulation[f"{path}.norm1"],
                modulation[f"{path}.norm1_context"],
                positions,
            )
        for index, block in enumerate(self.single_transformer_blocks):
            table = modulation[f"single_transformer_blocks.{index}.norm"]
            text, image = block(text, image, table, positions)
        return self.proj_out(self.norm_out(image, modulation["norm_out"]))  # (B, L, C)


class DoubleBlock(nn.Module):
    """Text and image in streams of their own that meet in the attention."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        dim = config.inner_dim
        self.norm1 = AdaLayerNorm(dim, 6)
        self.norm1_context = AdaLayerNorm(dim, 6)
        self.attn = JointAttention(config.num_attention_heads, config.attention_head_dim)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, affine=False)
        self.ff = FeedForward(dim)
        self.norm2_context = nn.LayerNorm(dim, eps=1e-6, affine=False)
        self.ff_context = FeedForward(dim)

    def __call__(
        self,
        text: mx.array,
        image: mx.array,
        table: mx.array,
        text_table: mx.array,
        positions: Rotation,
    ) -> tuple[mx.array, mx.array]:
        attended, text_attended = self.attn(
            self.norm1(image, table), self.norm1_context(text, text_table), positions
        )
        image = add_attention_and_feed_forward(image, attended, self.norm2, self.ff, table)
        text = add_attention_and_feed_forward(
            text, text_attended, self.norm2_context, self.ff_context, text_table
        )
        return clip_float16(text), image


class SingleBlock(nn.Module):
    """Text and image as one sequence; attention and feed-forward side by side."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        dim = config.inner_dim
        self.norm = AdaLayerNorm(dim, 3)
        self.proj_mlp = Linear(dim, 4 * dim)
        self.proj_out = Linear(5 * dim, dim)
        self.attn = SelfAttention(config.num_attention_heads, config.attention_head_dim)

    def __call__(
        self, text: mx.array, image: mx.array, table: mx.array, positions: Rotation
    ) -> tuple[mx.array, mx.array]:
        S = text.shape[1]
        x = mx.concatenate([text, image], axis=1)  # (B, S+L, D)
        normed = self.norm(x, table)
        parts = [self.attn(normed, positions), gelu_tanh(self.proj_mlp(normed))]
        x = clip_float16(add_gated(x, self.proj_out(mx.concatenate(parts, axis=-1)), table[:, 2]))
        return x[:, :S], x[:, S:]


def position_ids(text_length: int, rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Text at the origin, then each token of the image at (0, row, column): (S+L, 3)."""
    grid = np.zeros((rows, columns, 3), np.int64)
    grid[..., 1] = np.arange(rows)[:, None]
    grid[..., 2] = np.arange(columns)
    return np.concatenate([np.zeros((text_length, 3), np.int64), grid.reshape(-1, 3)])
