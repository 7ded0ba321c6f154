"""The U-Net of Stable Diffusion 1.x, 2.x and XL (base, refiner, inpainting, LCM).

Reference: diffusers 0.42.1, models/unets/unet_2d_condition.py and unet_2d_blocks.py. Channels last.
The timestep embedding of every step is computed first, by `embed_time`, and passed in. Arguments
that the reference passes by name are passed by the same name here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import mlx.core as mx
import mlx.nn as nn
from msgspec import Meta

from lydite.core.config import Count, Epsilon, Size
from lydite.core.errors import InputError
from lydite.models.layers import (
    GEGLU,
    Conv2d,
    FeedForward,
    GroupNorm,
    HalvingConv2d,
    Linear,
    MLPEmbedder,
    attention,
    double_size,
    join_heads,
    norm_silu_conv,
    project,
    silu,
    sinusoids,
    split_heads,
)

# No influence without training, without another kind of added conditioning or of middle block.
IGNORED = frozenset({"dropout", "addition_embed_type_num_heads", "mid_block_only_cross_attention"})
# Keys that would change the arithmetic, with the one value that Stable Diffusion uses.
FIXED = {
    "act_fn": "silu",
    "attention_type": "default",
    "center_input_sample": False,
    "class_embed_type": None,
    "class_embeddings_concat": False,
    "conv_in_kernel": 3,
    "conv_out_kernel": 3,
    "cross_attention_norm": None,
    "downsample_padding": 1,
    "dual_cross_attention": False,
    "encoder_hid_dim": None,
    "encoder_hid_dim_type": None,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "mid_block_scale_factor": 1,
    "num_attention_heads": None,
    "num_class_embeds": None,
    "only_cross_attention": False,
    "resnet_out_scale_factor": 1.0,
    "resnet_skip_time_act": False,
    "resnet_time_scale_shift": "default",
    "time_embedding_act_fn": None,
    "time_embedding_dim": None,
    "time_embedding_type": "positional",
    "timestep_post_act": None,
}

Depth = Annotated[int, Meta(ge=0, le=64)]  # transformer blocks behind one resnet


@dataclass(frozen=True)
class UNetConfig:
    """Keys of diffusers' UNet2DConditionModel config. Defaults are those of keys added later."""

    in_channels: Size
    out_channels: Size
    down_block_types: tuple[Literal["CrossAttnDownBlock2D", "DownBlock2D"], ...]
    up_block_types: tuple[Literal["CrossAttnUpBlock2D", "UpBlock2D"], ...]
    block_out_channels: tuple[Size, ...]
    layers_per_block: Count | tuple[Count, ...]
    cross_attention_dim: Size
    # Despite its name the number of heads: a misnomer that every published config carries.
    attention_head_dim: Count | tuple[Count, ...]
    norm_num_groups: Count = 32
    norm_eps: Epsilon = 1e-5
    sample_size: Size | tuple[Size, ...] | None = None
    mid_block_type: Literal["UNetMidBlock2DCrossAttn"] | None = "UNetMidBlock2DCrossAttn"
    transformer_layers_per_block: Depth | tuple[Depth | tuple[Depth, ...], ...] = 1
    reverse_transformer_layers_per_block: tuple[Depth | tuple[Depth, ...], ...] | None = None
    use_linear_projection: bool = False
    upcast_attention: bool = False
    addition_embed_type: Literal["text_time"] | None = None
    addition_time_embed_dim: Size | None = None
    projection_class_embeddings_input_dim: Size | None = None
    time_cond_proj_dim: Size | None = None

    def __post_init__(self) -> None:
        levels = len(self.block_out_channels)
        lists = (
            self.down_block_types,
            self.up_block_types,
            self.layers_per_block,
            self.attention_head_dim,
            self.transformer_layers_per_block,
            self.reverse_transformer_layers_per_block,
        )
        if not 0 < levels <= 8 or any(
            len(values) != levels for values in lists if isinstance(values, tuple)
        ):
            raise ValueError(f"a list does not have one item for each of the {levels} levels")
        for heads, width in zip(self.heads, self.block_out_channels, strict=True):
            if width % self.norm_num_groups or width % heads:
                raise ValueError(
                    f"width {width} is not a multiple of {self.norm_num_groups} groups "
                    f"and of {heads} heads"
                )
        if self.block_out_channels[0] % 2:
            raise ValueError(f"width {self.block_out_channels[0]} is odd")
        layers = self.layers
        for depths, counts in (
            (self.down_depths, layers),
            (self.up_depths, tuple(count + 1 for count in reversed(layers))),
        ):
            if any(len(row) != count for row, count in zip(depths, counts, strict=True)):
                raise ValueError("transformer_layers_per_block does not fit layers_per_block")
        added = (self.addition_time_embed_dim, self.projection_class_embeddings_input_dim)
        if self.addition_embed_type and None in added:
            raise ValueError(
                f"addition_embed_type {self.addition_embed_type} needs addition_time_embed_dim "
                "and projection_class_embeddings_input_dim"
            )

    @property
    def heads(self) -> tuple[int, ...]:
        """Attention heads at each level."""
        return _each_level(self.attention_head_dim, len(self.block_out_channels))

    @property
    def layers(self) -> tuple[int, ...]:
        """Resnets of each level's down block; its up block has one more."""
        return _each_level(self.layers_per_block, len(self.block_out_channels))

    @property
    def down_depths(self) -> tuple[tuple[int, ...], ...]:
        """Transformer blocks behind each resnet of each down block."""
        depths = self.transformer_layers_per_block
        if isinstance(depths, int):
            depths = (depths,) * len(self.block_out_channels)
        return _each_layer(depths, self.layers)

    @property
    def up_depths(self) -> tuple[tuple[int, ...], ...]:
        """Transformer blocks behind each resnet of each up block, the deepest level first."""
        depths = self.reverse_transformer_layers_per_block
        if depths is None:
            depths = self.transformer_layers_per_block
            if isinstance(depths, int):
                depths = (depths,) * len(self.block_out_channels)
            depths = tuple(reversed(depths))
        return _each_layer(depths, [count + 1 for count in reversed(self.layers)])

    @property
    def time_dim(self) -> int:
        """Width of the timestep embedding."""
        return 4 * self.block_out_channels[0]


def _each_level(value: int | tuple[int, ...], levels: int) -> tuple[int, ...]:
    return (value,) * levels if isinstance(value, int) else value


def _each_layer(
    values: Sequence[int | tuple[int, ...]], layers: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    return tuple(
        (value,) * count if isinstance(value, int) else value
        for value, count in zip(values, layers, strict=True)
    )


class UNet(nn.Module):
    """diffusers' UNet2DConditionModel."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        widths, dim = config.block_out_channels, config.time_dim
        self.conv_in = Conv2d(config.in_channels, widths[0], kernel_size=3)
        self.time_embedding = TimestepEmbedding(widths[0], dim, config.time_cond_proj_dim)
        if config.projection_class_embeddings_input_dim and config.addition_embed_type:
            self.add_embedding = MLPEmbedder(config.projection_class_embeddings_input_dim, dim)
        self.down_blocks = [DownBlock(config, level) for level in range(len(widths))]
        if config.mid_block_type:
            self.mid_block = MidBlock(config)
        self.up_blocks = [UpBlock(config, index) for index in range(len(widths))]
        self.conv_norm_out = GroupNorm(config.norm_num_groups, widths[0], eps=config.norm_eps)
        self.conv_out = Conv2d(widths[0], config.out_channels, kernel_size=3)

    def embed_time(
        self,
        timesteps: mx.array,
        *,
        pooled: mx.array | None = None,
        time_ids: mx.array | None = None,
        guidance: mx.array | None = None,
    ) -> mx.array:
        """The embedding of every step: (S,) to (S, B, D); B is 1 where no argument has it.

        SDXL adds pooled text (B, P) and time ids (B, 6; refiner: 5). A latent consistency model
        takes the guidance strength as (B, time_cond_proj_dim), from `guidance_embedding`.
        """
        dtype = self.conv_in.bias.dtype  # a quantized weight has another
        time = sinusoids(timesteps, self.config.block_out_channels[0]).astype(dtype)[:, None]
        embedding = self.time_embedding(time, guidance)  # (S, 1 or B, D)
        if not self.config.addition_embed_type:
            return embedding
        if pooled is None or time_ids is None:
            raise InputError("this U-Net needs pooled text and time ids: its config is SDXL's.")
        width = self.config.addition_time_embed_dim or 0
        numbers = sinusoids(time_ids, width).flatten(1)  # (B, 6 * width)
        found = pooled.shape[-1] + numbers.shape[-1]
        if found != self.config.projection_class_embeddings_input_dim:
            raise InputError(
                f"pooled text of {pooled.shape[-1]} and {time_ids.shape[-1]} time ids make {found} "
                f"values; this U-Net takes {self.config.projection_class_embeddings_input_dim}."
            )
        added = mx.concatenate([pooled.astype(dtype), numbers.astype(dtype)], axis=-1)
        return embedding + self.add_embedding(added)

    def __call__(
        self,
        sample: mx.array,
        temb: mx.array,
        encoder_hidden_states: mx.array,
        down_block_additional_residuals: Sequence[mx.array] | None = None,
        mid_block_additional_residual: mx.array | None = None,
    ) -> mx.array:
        """One step: latents (B, H, W, C), this step's embedding (B or 1, D), text (B, T, D).

        The last two are what a ControlNet gives: one array for each skip connection, and one for
        the middle block.
        """
        x = self.conv_in(sample)
        skips = [x]
        for block in self.down_blocks:
            x, states = block(
                hidden_states=x, temb=temb, encoder_hidden_states=encoder_hidden_states
            )
            skips.extend(states)
        if down_block_additional_residuals is not None:
            pairs = zip(skips, down_block_additional_residuals, strict=True)
            skips = [skip + residual for skip, residual in pairs]
        if "mid_block" in self:
            x = self.mid_block(x, temb, encoder_hidden_states=encoder_hidden_states)
        if mid_block_additional_residual is not None:
            x = x + mid_block_additional_residual
        for block in self.up_blocks:
            count = len(block.resnets)
            used, skips = skips[-count:], skips[:-count]
            x = block(
                hidden_states=x,
                temb=temb,
                res_hidden_states_tuple=tuple(used),
                encoder_hidden_states=encoder_hidden_states,
                upsample_size=skips[-1].shape[1:3] if skips else None,
            )
        return norm_silu_conv(self.conv_norm_out, self.conv_out, x)


class TimestepEmbedding(MLPEmbedder):
    """Linear, SiLU, linear; a latent consistency model adds its guidance strength first."""

    def __init__(self, dim_in: int, dim: int, guidance_dim: int | None) -> None:
        super().__init__(dim_in, dim)
        if guidance_dim:
            self.cond_proj = Linear(guidance_dim, dim_in, bias=False)

    def __call__(self, x: mx.array, guidance: mx.array | None = None) -> mx.array:
        if guidance is not None:
            if "cond_proj" not in self:
                raise InputError(
                    "this U-Net has no input for guidance: time_cond_proj_dim is null."
                )
            x = x + self.cond_proj(guidance.astype(x.dtype))
        return super().__call__(x)


def guidance_embedding(scale: mx.array, channels: int) -> mx.array:
    """Guidance scales (B,) as a latent consistency model takes them: (B, channels), in float32."""
    half = channels // 2
    # Sines first, frequencies to the last one inclusive: unlike the timesteps'.
    frequencies = mx.exp(-mx.log(mx.array(10_000.0)) / (half - 1) * mx.arange(half))
    angles = 1000.0 * (scale.astype(mx.float32)[:, None] - 1.0) * frequencies
    return mx.concatenate([mx.sin(angles), mx.cos(angles)], axis=-1)


class DownBlock(nn.Module):
    """Resnets, each with a transformer or none; then half the size, except at the last level."""

    def __init__(self, config: UNetConfig, level: int) -> None:
        super().__init__()
        widths = config.block_out_channels
        width, width_in = widths[level], widths[max(level - 1, 0)]
        if config.down_block_types[level] == "CrossAttnDownBlock2D":
            self.attentions = [
                Transformer(config, width, config.heads[level], depth)
                for depth in config.down_depths[level]
            ]
        self.resnets = [
            ResnetBlock(config, width if layer else width_in, width)
            for layer in range(config.layers[level])
        ]
        if level < len(widths) - 1:
            self.downsamplers = [Downsample(width)]

    def __call__(
        self, hidden_states: mx.array, temb: mx.array, encoder_hidden_states: mx.array
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        """The output, and what the up blocks take as skip connections."""
        x, states = hidden_states, []
        for index, resnet in enumerate(self.resnets):
            x = resnet(x, temb)
            if "attentions" in self:
                x = self.attentions[index](x, encoder_hidden_states=encoder_hidden_states)
            states.append(x)
        if "downsamplers" in self:
            x = self.downsamplers[0](x)
            states.append(x)
        return x, tuple(states)


class MidBlock(nn.Module):
    """Resnet, transformer, resnet at the smallest size."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        width, depth = config.block_out_channels[-1], config.down_depths[-1][0]
        self.attentions = [Transformer(config, width, config.heads[-1], depth)]
        self.resnets = [ResnetBlock(config, width, width) for _ in range(2)]

    def __call__(
        self, hidden_states: mx.array, temb: mx.array, encoder_hidden_states: mx.array
    ) -> mx.array:
        x = self.resnets[0](hidden_states, temb)
        x = self.attentions[0](x, encoder_hidden_states=encoder_hidden_states)
        return self.resnets[1](x, temb)


class UpBlock(nn.Module):
    """Resnets over the input and a skip connection, the newest first; then twice the size."""

    def __init__(self, config: UNetConfig, index: int) -> None:
        super().__init__()
        widths = tuple(reversed(config.block_out_channels))  # the deepest level first
        width, above = widths[index], widths[max(index - 1, 0)]
        below = widths[min(index + 1, len(widths) - 1)]
        depths = config.up_depths[index]
        if config.up_block_types[index] == "CrossAttnUpBlock2D":
            heads = config.heads[-1 - index]
            self.attentions = [Transformer(config, width, heads, depth) for depth in depths]
        last = len(depths) - 1
        self.resnets = [
            ResnetBlock(
                config, (width if layer else above) + (below if layer == last else width), width
            )
            for layer in range(len(depths))
        ]
        if index < len(widths) - 1:
            self.upsamplers = [Upsample(width)]

    def __call__(
        self,
        hidden_states: mx.array,
        temb: mx.array,
        res_hidden_states_tuple: tuple[mx.array, ...],
        encoder_hidden_states: mx.array,
        upsample_size: tuple[int, ...] | None,
    ) -> mx.array:
        x = hidden_states
        for index, resnet in enumerate(self.resnets):
            x = resnet(mx.concatenate([x, res_hidden_states_tuple[-1 - index]], axis=-1), temb)
            if "attentions" in self:
                x = self.attentions[index](x, encoder_hidden_states=encoder_hidden_states)
        return self.upsamplers[0](x, upsample_size) if "upsamplers" in self else x


class ResnetBlock(nn.Module):
    """Two convolutions; the timestep embedding is added between them."""

    def __init__(self, config: UNetConfig, width_in: int, width: int) -> None:
        super().__init__()
        groups, eps = config.norm_num_groups, config.norm_eps
        self.norm1 = GroupNorm(groups, width_in, eps=eps)
        self.conv1 = Conv2d(width_in, width, kernel_size=3)
        self.time_emb_proj = Linear(config.time_dim, width)
        self.norm2 = GroupNorm(groups, width, eps=eps)
        self.conv2 = Conv2d(width, width, kernel_size=3)
        if width_in != width:
            self.conv_shortcut = Conv2d(width_in, width, kernel_size=1)

    def __call__(self, x: mx.array, temb: mx.array) -> mx.array:
        hidden = norm_silu_conv(self.norm1, self.conv1, x)
        hidden = hidden + self.time_emb_proj(silu(temb))[:, None, None]  # (B, 1, 1, C)
        hidden = norm_silu_conv(self.norm2, self.conv2, hidden)
        return (self.conv_shortcut(x) if "conv_shortcut" in self else x) + hidden


class Transformer(nn.Module):
    """diffusers' Transformer2DModel: positions as tokens, through blocks that see the text."""

    def __init__(self, config: UNetConfig, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.linear = config.use_linear_projection
        self.norm = GroupNorm(config.norm_num_groups, width, eps=1e-6)
        self.proj_in, self.proj_out = (
            Linear(width, width) if self.linear else Conv2d(width, width, kernel_size=1)
            for _ in range(2)
        )
        self.transformer_blocks = [TransformerBlock(config, width, heads) for _ in range(depth)]

    def __call__(self, x: mx.array, encoder_hidden_states: mx.array) -> mx.array:
        shape = x.shape  # (B, H, W, C)
        tokens = self.norm(x)
        if self.linear:
            tokens = self.proj_in(tokens.flatten(1, 2))  # (B, L, C)
        else:
            tokens = self.proj_in(tokens).flatten(1, 2)
        for block in self.transformer_blocks:
            tokens = block(tokens, encoder_hidden_states=encoder_hidden_states)
        if self.linear:
            return x + self.proj_out(tokens).reshape(shape)
        return x + self.proj_out(tokens.reshape(shape))


class TransformerBlock(nn.Module):
    """diffusers' BasicTransformerBlock: self-attention, attention to the text, feed-forward."""

    def __init__(self, config: UNetConfig, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width, eps=1e-5) for _ in range(3))
        upcast, text_dim = config.upcast_attention, config.cross_attention_dim
        self.attn1 = Attention(width, width, heads, upcast=upcast)
        self.attn2 = Attention(width, text_dim, heads, upcast=upcast)
        self.ff = FeedForward(width, GEGLU)

    def __call__(self, x: mx.array, encoder_hidden_states: mx.array) -> mx.array:
        x = x + self.attn1(self.norm1(x))
        x = x + self.attn2(self.norm2(x), encoder_hidden_states=encoder_hidden_states)
        return x + self.ff(self.norm3(x))


class Attention(nn.Module):
    """Attention of tokens to themselves, or to the text."""

    def __init__(self, width: int, width_in: int, heads: int, *, upcast: bool) -> None:
        super().__init__()
        self.heads = heads
        self.upcast = upcast
        self.scale = (width // heads) ** -0.5
        self.to_q = Linear(width, width, bias=False)
        self.to_k, self.to_v = (Linear(width_in, width, bias=False) for _ in range(2))
        self.to_out = [Linear(width, width)]

    def __call__(self, x: mx.array, encoder_hidden_states: mx.array | None = None) -> mx.array:
        if encoder_hidden_states is None:
            projected = project(x, [self.to_q, self.to_k, self.to_v])
        else:
            projected = [self.to_q(x), *project(encoder_hidden_states, [self.to_k, self.to_v])]
        q, k, v = (split_heads(tokens, self.heads) for tokens in projected)
        if self.upcast and x.dtype == mx.float16:  # q·k of SD 2.1 exceeds the range of float16
            q, k, v = (tokens.astype(mx.float32) for tokens in (q, k, v))
        out = attention(q, k, v, scale=self.scale).astype(x.dtype)
        return self.to_out[0](join_heads(out))


class Downsample(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = HalvingConv2d(width, padding=1)

    def __call__(self, x: mx.array) -> mx.array:
        return self.conv(x)


class Upsample(nn.Module):
    """Twice the size, or one row or column less where the skip connection has an odd size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = Conv2d(width, width, kernel_size=3)

    def __call__(self, x: mx.array, size: tuple[int, ...] | None) -> mx.array:
        x = double_size(x)
        return self.conv(x[:, : size[0], : size[1]] if size else x)
