"""Qwen-Image's transformer: two streams in every block, each with a modulation of its own.

Reference: diffusers 0.42.1, models/transformers/transformer_qwenimage.py. What does not change over
the steps of one picture is computed first and passed in: `modulation`, `positions`, `embed_text`.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lydite.core.config import Count, Size
from lydite.core.errors import InputError
from lydite.models.kernels import norm_modulate
from lydite.models.layers import FeedForward, Linear, MLPEmbedder, SiLU, sinusoids
from lydite.models.modulation import (
    AdaLayerNorm,
    Modulation,
    add_attention_and_feed_forward,
    clip_float16,
)
from lydite.models.rotary_attention import JointAttention, Rotation, rotation

# Latents come packed, so that patch_size shapes proj_out only. The others are of the editing and
# layered models.
FIXED = {
    "patch_size": 2,
    "guidance_embeds": False,
    "zero_cond_t": False,
    "use_additional_t_cond": False,
    "use_layer3d_rope": False,
}
MAX_POSITION = 4096  # the reference's tables end here
# The published config has it; QwenImageTransformer2DModel does not take it.
IGNORED = frozenset({"pooled_projection_dim"})


@dataclass(frozen=True)
class QwenImageConfig:
    """Keys of diffusers' QwenImageTransformer2DModel config."""

    in_channels: Size
    out_channels: Size
    num_layers: Count
    attention_head_dim: Size
    num_attention_heads: Count
    joint_attention_dim: Size
    axes_dims_rope: tuple[Count, ...]

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


class QwenImageTransformer(nn.Module):
    """Predicts the velocity of packed latents from text and timestep."""

    def __init__(self, config: QwenImageConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.inner_dim
        self.time_text_embed = TimeEmbedding(dim)
        self.txt_norm = nn.RMSNorm(config.joint_attention_dim, eps=1e-6)
        self.img_in = Linear(config.in_channels, dim)
        self.txt_in = Linear(config.joint_attention_dim, dim)
        self.transformer_blocks = [QwenImageBlock(config) for _ in range(config.num_layers)]
        self.norm_out = AdaLayerNorm(dim, 2)
        self.proj_out = Linear(dim, 4 * config.out_channels)

    def modulation(self, timesteps: mx.array, dtype: mx.Dtype) -> Modulation:
        """Tables of both streams of every block for all steps: (S,) to (S, 1, n, D) each.

        Timesteps run from 1000 to 0; `dtype` is the one the blocks run in.
        """
        embedding = self.time_text_embed(timesteps, dtype)[:, None]  # (S, 1, D)
        tables = {"norm_out": self.norm_out.table(embedding)}
        for index, block in enumerate(self.transformer_blocks):
            for name in ("img_mod", "txt_mod"):
                activation, linear = block[name]
                table = mx.unflatten(linear(activation(embedding)), -1, (6, -1))
                tables[f"transformer_blocks.{index}.{name}"] = table
        return tables

    def positions(self, text_length: int, rows: int, columns: int) -> Rotation:
        """Rotary tables for the text and then the tokens of an image, row by row."""
        ids = position_ids(text_length, rows, columns)
        if ids.max() >= MAX_POSITION:
            raise InputError(
                f"the text's {text_length} tokens after an image of {columns}×{rows} tokens go "
                f"beyond position {MAX_POSITION - 1}. Use a shorter prompt or a smaller size."
            )
        return rotation(ids, self.config.axes_dims_rope, dtype=np.float32)

    def embed_text(self, text: mx.array) -> mx.array:
        """Text features, normed and at the width of the blocks: (B, S, D)."""
        return self.txt_in(self.txt_norm(text))

    def __call__(
        self,
        tokens: mx.array,
        text: mx.array,
        modulation: Modulation,
        positions: Rotation,
        mask: mx.array | None = None,
    ) -> mx.array:
        """One step: packed latents (B, L, C), embedded text, this step's tables, rotary tables.

        `mask` (B, S) is False where a shorter prompt of the batch is padding.
        """
        image = self.img_in(tokens)
        for index, block in enumerate(self.transformer_blocks):
            path = f"transformer_blocks.{index}"
            text, image = block(
                text,
                image,
                modulation[f"{path}.img_mod"],
                modulation[f"{path}.txt_mod"],
                positions,
                mask,
            )
        return self.proj_out(self.norm_out(image, modulation["norm_out"]))  # (B, L, 4C)


class TimeEmbedding(nn.Module):
    """The timestep as the vector that drives all modulation."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.timestep_embedder = MLPEmbedder(256, dim)

    def __call__(self, timesteps: mx.array, dtype: mx.Dtype) -> mx.array:
        angles = sinusoids(timesteps / 1000, 256, scale=1000)
        return self.timestep_embedder(angles.astype(dtype))  # (S, D)


class QwenImageBlock(nn.Module):
    """Text and image in streams of their own that meet in the attention."""

    def __init__(self, config: QwenImageConfig) -> None:
        super().__init__()
        dim = config.inner_dim
        self.img_mod = [SiLU(), Linear(dim, 6 * dim)]
        self.img_norm1 = nn.LayerNorm(dim, eps=1e-6, affine=False)
        self.attn = JointAttention(config.num_attention_heads, config.attention_head_dim)
        self.img_norm2 = nn.LayerNorm(dim, eps=1e-6, affine=False)
        self.img_mlp = FeedForward(dim)
        self.txt_mod = [SiLU(), Linear(dim, 6 * dim)]
        self.txt_norm1 = nn.LayerNorm(dim, eps=1e-6, affine=False)
        self.txt_norm2 = nn.LayerNorm(dim, eps=1e-6, affine=False)
        self.txt_mlp = FeedForward(dim)

    def __call__(
        self,
        text: mx.array,
        image: mx.array,
        table: mx.array,
        text_table: mx.array,
        positions: Rotation,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        shift, scale = table[:, 0], table[:, 1]
        normed = norm_modulate(self.img_norm1, image, shift=shift, scale=scale)
        shift, scale = text_table[:, 0], text_table[:, 1]
        text_normed = norm_modulate(self.txt_norm1, text, shift=shift, scale=scale)
        attended, text_attended = self.attn(normed, text_normed, positions, mask)
        image = add_attention_and_feed_forward(image, attended, self.img_norm2, self.img_mlp, table)
        text = add_attention_and_feed_forward(
            text, text_attended, self.txt_norm2, self.txt_mlp, text_table
        )
        return clip_float16(text), clip_float16(image)


def position_ids(text_length: int, rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Text on a diagonal after the image, which is centred on the origin: (S+L, 3).

    Of an odd number of rows or columns the longer half is before the origin.
    """
    first = max(rows // 2, columns // 2)
    text = np.repeat(np.arange(first, first + text_length)[:, None], 3, axis=1)
    grid = np.zeros((rows, columns, 3), np.int64)
    grid[..., 1] = (np.arange(rows) - (rows - rows // 2))[:, None]
    grid[..., 2] = np.arange(columns) - (columns - columns // 2)
    return np.concatenate([text, grid.reshape(-1, 3)])
