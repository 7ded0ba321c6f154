"""SD3 MMDiT: SD3-medium, SD3.5-large (qk norm), SD3.5-medium (qk norm and dual attention).

Reference: diffusers 0.42.1, models/transformers/transformer_sd3.py; paper arXiv 2403.03206.
Nothing is written into the model at run time. What does not change over the steps of one picture
is computed first and passed in: `modulation`, `positions` and `embed_text`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from lydite.core.config import Count, Size
from lydite.core.errors import InputError
from lydite.models.kernels import add_gated, norm_modulate
from lydite.models.layers import (
    JOINED,
    FeedForward,
    Linear,
    attention,
    join_heads,
    join_tokens,
    joint_product,
    project,
    split_heads,
)
from lydite.models.modulation import (
    AdaLayerNorm,
    Modulation,
    TimeTextEmbedding,
    add_attention_and_feed_forward,
)

OF_IMAGE, OF_TEXT = JOINED


@dataclass(frozen=True)
class MMDiTConfig:
    """Keys of diffusers' SD3Transformer2DModel config."""

    sample_size: Size
    patch_size: Count
    in_channels: Size
    num_layers: Count
    attention_head_dim: Size
    num_attention_heads: Count
    joint_attention_dim: Size
    caption_projection_dim: Size
    pooled_projection_dim: Size
    out_channels: Size
    pos_embed_max_size: Count
    # SD3-medium's config was written before these two keys existed.
    dual_attention_layers: tuple[int, ...] = ()
    qk_norm: Literal["rms_norm"] | None = None

    def __post_init__(self) -> None:
        if any(not 0 <= index < self.num_layers for index in self.dual_attention_layers):
            raise ValueError(f"dual_attention_layers has an index outside 0…{self.num_layers - 1}")
        if self.caption_projection_dim != self.inner_dim:
            raise ValueError(
                f"caption_projection_dim {self.caption_projection_dim} is not "
                f"num_attention_heads × attention_head_dim = {self.inner_dim}"
            )

    @property
    def inner_dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


class MMDiT(nn.Module):
    """Predicts the velocity of noisy latents, channels last, from text and timestep."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.inner_dim
        self.pos_embed = PatchEmbed(config)
        self.time_text_embed = TimeTextEmbedding(
            dim,
            config.pooled_projection_dim,
            exact=False,  # pictures stay as in version 0.1
        )
        self.context_embedder = Linear(config.joint_attention_dim, config.caption_projection_dim)
        self.transformer_blocks = [JointBlock(config, index) for index in range(config.num_layers)]
        self.norm_out = AdaLayerNorm(dim, 2)
        self.proj_out = Linear(dim, config.patch_size**2 * config.out_channels)

    def modulation(self, timesteps: mx.array, pooled: mx.array) -> Modulation:
        """Tables of every adaptive norm for all steps: (S,) and (B, P) to (S, B, n, D) each."""
        embedding = self.time_text_embed(timesteps, pooled)  # (S, B, D)
        tables = {"norm_out": self.norm_out.table(embedding)}
        for index, block in enumerate(self.transformer_blocks):
            for name in ("norm1", "norm1_context"):
                tables[f"transformer_blocks.{index}.{name}"] = block[name].table(embedding)
        return tables

    def positions(self, height: int, width: int) -> mx.array:
        """Positional table for latents of this height and width: (1, L, D)."""
        return self.pos_embed.positions(height, width)

    def embed_text(self, text: mx.array) -> mx.array:
        """Text features at the width of the blocks: (B, S, D)."""
        return self.context_embedder(text)

    def __call__(
        self, latent: mx.array, text: mx.array, modulation: Modulation, positions: mx.array
    ) -> mx.array:
        """One step: latent (B, H, W, C), embedded text, this step's tables, positional table."""
        B, height, width, _ = latent.shape
        image = self.pos_embed(latent, positions)  # (B, L, D)
        for index, block in enumerate(self.transformer_blocks):
            path = f"transformer_blocks.{index}"
            text, image = block(
                text, image, modulation[f"{path}.norm1"], modulation[f"{path}.norm1_context"]
            )
        image = self.norm_out(image, modulation["norm_out"])
        patches = self.proj_out(image)  # (B, L, p*p*C)
        p = self.config.patch_size
        patches = patches.reshape(B, height // p, width // p, p, p, self.config.out_channels)
        return patches.transpose(0, 1, 3, 2, 4, 5).reshape(B, height, width, -1)


class PatchEmbed(nn.Module):
    """Latent patches as tokens, with a positional table cropped around its centre."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        dim, patch = config.inner_dim, config.patch_size
        self.patch = patch
        self.side = config.pos_embed_max_size
        self.proj = nn.Conv2d(config.in_channels, dim, kernel_size=patch, stride=patch)
        self.pos_embed = mx.zeros((1, self.side**2, dim))

    def positions(self, height: int, width: int) -> mx.array:
        rows, columns = height // self.patch, width // self.patch
        if max(rows, columns) > self.side:
            raise InputError(
                f"the model's positional table covers {self.side}×{self.side} patches, "
                f"the picture needs {columns}×{rows}. Ask for a smaller size."
            )
        top, left = (self.side - rows) // 2, (self.side - columns) // 2
        table = self.pos_embed.reshape(1, self.side, self.side, -1)
        table = table[:, top : top + rows, left : left + columns]
        return table.reshape(1, rows * columns, -1)  # (1, L, D)

    def __call__(self, latent: mx.array, positions: mx.array) -> mx.array:
        return self.proj(latent).flatten(1, 2) + positions  # (B, L, D)


class JointAttention(nn.Module):
    """Attention over image and text tokens together, each stream with its own projections."""

    def __init__(self, config: MMDiTConfig, *, joint: bool, text_out: bool) -> None:
        super().__init__()
        dim, head = config.inner_dim, config.attention_head_dim
        self.heads = config.num_attention_heads
        self.scale = head**-0.5
        self.to_q, self.to_k, self.to_v = (Linear(dim, dim) for _ in range(3))
        self.to_out = [Linear(dim, dim)]
        if joint:
            self.add_q_proj, self.add_k_proj, self.add_v_proj = (Linear(dim, dim) for _ in range(3))
        if text_out:
            self.to_add_out = Linear(dim, dim)
        if config.qk_norm:
            self.norm_q, self.norm_k = (nn.RMSNorm(head, eps=1e-6) for _ in range(2))
            if joint:
                self.norm_added_q, self.norm_added_k = (
                    nn.RMSNorm(head, eps=1e-6) for _ in range(2)
                )

    def __call__(self, image: mx.array, text: mx.array | None) -> tuple[mx.array, mx.array | None]:
        L = image.shape[1]
        q, k, v = self._joint(image, text)
        x = attention(q, k, v, scale=self.scale)  # (B, H, L+S, D/H)
        x = join_heads(x)  # (B, L+S, D)
        if text is None:
            return self.to_out[0](x), None
        image, text = x[:, :L], x[:, L:]
        return self.to_out[0](image), self.to_add_out(text) if "to_add_out" in self else None

    def _joint(self, image: mx.array, text: mx.array | None) -> Sequence[mx.array]:
        """Queries, keys and values of both streams, the image's first, as the reference."""
        if text is not None and "norm_q" not in self:
            of_image = joint_product(image, [self[name] for name in OF_IMAGE])
            of_text = joint_product(text, [self[name] for name in OF_TEXT])
            if of_image is not None and of_text is not None:  # one copy of each, not of three parts
                joined = mx.concatenate([of_image, of_text], axis=1)
                return [split_heads(part, self.heads) for part in mx.split(joined, 3, axis=-1)]
        parts = self._project(image, OF_IMAGE, ("norm_q", "norm_k"))
        if text is None:
            return parts
        added = self._project(text, OF_TEXT, ("norm_added_q", "norm_added_k"))
        return [join_tokens(x, y) for x, y in zip(parts, added, strict=True)]

    def _project(
        self, x: mx.array, projections: tuple[str, str, str], norms: tuple[str, str]
    ) -> tuple[mx.array, mx.array, mx.array]:
        projected = project(x, [self[name] for name in projections])
        q, k, v = (split_heads(y, self.heads) for y in projected)
        if norms[0] in self:
            q, k = self[norms[0]](q), self[norms[1]](k)
        return q, k, v


class JointBlock(nn.Module):
    """One MMDiT block. In the last one the text stream ends at the attention."""

    def __init__(self, config: MMDiTConfig, index: int) -> None:
        super().__init__()
        dim = config.inner_dim
        last, dual = index == config.num_layers - 1, index in config.dual_attention_layers
        self.norm1 = AdaLayerNorm(dim, 9 if dual else 6)
        self.norm1_context = AdaLayerNorm(dim, 2 if last else 6)
        self.attn = JointAttention(config, joint=True, text_out=not last)
        if dual:
            self.attn2 = JointAttention(config, joint=False, text_out=False)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, affine=False)
        self.ff = FeedForward(dim)
        if not last:
            self.norm2_context = nn.LayerNorm(dim, eps=1e-6, affine=False)
            self.ff_context = FeedForward(dim)

    def __call__(
        self, text: mx.array, image: mx.array, table: mx.array, text_table: mx.array
    ) -> tuple[mx.array, mx.array]:
        normed = self.norm1(image, table)
        attended, text_attended = self.attn(normed, self.norm1_context(text, text_table))
        gate = 2
        if "attn2" in self:
            shift, scale = table[:, 6], table[:, 7]
            normed = norm_modulate(self.norm1.norm, image, shift=shift, scale=scale)
            image = add_gated(image, attended, table[:, gate])
            attended, gate = self.attn2(normed, None)[0], 8
        image = add_attention_and_feed_forward(
            image, attended, self.norm2, self.ff, table, gate=gate
        )
        if text_attended is not None:
            text = add_attention_and_feed_forward(
                text, text_attended, self.norm2_context, self.ff_context, text_table
            )
        return text, image
