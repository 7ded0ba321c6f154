"""AutoencoderKL: pixels to latents and back, channels last.

Reference: diffusers 0.42.1, models/autoencoders/autoencoder_kl.py and vae.py.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from lydite.core.config import Count, Size
from lydite.models.layers import (
    Conv2d,
    GroupNorm,
    Linear,
    computed_if_large,
    conv_doubled,
    norm_silu_conv,
    sliced_attention,
)

IGNORED = frozenset({"sample_size"})  # a hint for tiling
FIXED = {"act_fn": "silu", "latents_mean": None, "latents_std": None}


@dataclass(frozen=True)
class AutoencoderKLConfig:
    """Keys of diffusers' AutoencoderKL config."""

    in_channels: Size
    out_channels: Size
    down_block_types: tuple[Literal["DownEncoderBlock2D"], ...]
    up_block_types: tuple[Literal["UpDecoderBlock2D"], ...]
    block_out_channels: tuple[Size, ...]
    layers_per_block: Count
    latent_channels: Size
    norm_num_groups: Count
    scaling_factor: float = 0.18215  # older files leave out what was then the only value
    shift_factor: float | None = None
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True
    # Whether activations exceed the range of float16, as in SDXL's first VAE: a pipeline in
    # float16 then encodes and decodes in float32. True where a config has no such key.
    force_upcast: bool = field(default=True, metadata={"since": "0.2"})

    def __post_init__(self) -> None:
        if not 1e-4 <= abs(self.scaling_factor) <= 1e4 or abs(self.shift_factor or 0.0) > 1e4:
            raise ValueError(
                f"scaling_factor {self.scaling_factor}, shift_factor {self.shift_factor}"
            )
        levels = len(self.block_out_channels)
        if (
            not 0 < levels <= 8
            or levels != len(self.down_block_types)
            or levels != len(self.up_block_types)
        ):
            raise ValueError(
                "block_out_channels, down_block_types, up_block_types differ in length"
            )
        if any(width % self.norm_num_groups for width in self.block_out_channels):
            raise ValueError(
                f"block_out_channels are not multiples of {self.norm_num_groups} groups"
            )

    @property
    def factor(self) -> int:
        """Pixels per latent position, along each side."""
        return 2 ** (len(self.block_out_channels) - 1)

    @property
    def decoder_widths(self) -> tuple[int, ...]:
        """Channels of the decoder at each resolution, from the picture inwards."""
        return self.block_out_channels


class Posterior(NamedTuple):
    """The encoder's diagonal Gaussian over latents."""

    mean: mx.array
    std: mx.array


class AutoencoderKL(nn.Module):
    """Encoder and decoder with the latents' scale and shift."""

    def __init__(self, config: AutoencoderKLConfig) -> None:
        super().__init__()
        self.config = config
        latent = config.latent_channels
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        if config.use_quant_conv:
            self.quant_conv = Conv2d(2 * latent, 2 * latent, kernel_size=1)
        if config.use_post_quant_conv:
            self.post_quant_conv = Conv2d(latent, latent, kernel_size=1)

    def encode(self, image: mx.array) -> Posterior:
        """Images in −1…1, (B, H, W, 3), to the distribution of their raw latents."""
        moments = self.encoder(image)
        if self.config.use_quant_conv:
            moments = self.quant_conv(moments)
        mean, logvar = mx.split(moments, 2, axis=-1)
        return Posterior(mean, mx.exp(0.5 * mx.clip(logvar, -30.0, 20.0)))

    def decode(self, latent: mx.array) -> mx.array:
        """Raw latents (B, h, w, C) to images near −1…1, (B, H, W, 3)."""
        if self.config.use_post_quant_conv:
            latent = self.post_quant_conv(latent)
        return self.decoder(latent)

    def normalize(self, latent: mx.array) -> mx.array:
        """Raw latents as the diffusion model sees them."""
        return (latent - (self.config.shift_factor or 0.0)) * self.config.scaling_factor

    def denormalize(self, latent: mx.array) -> mx.array:
        """The diffusion model's latents as the decoder takes them."""
        return latent / self.config.scaling_factor + (self.config.shift_factor or 0.0)


class Encoder(nn.Module):
    def __init__(self, config: AutoencoderKLConfig) -> None:
        super().__init__()
        widths, groups = config.block_out_channels, config.norm_num_groups
        self.conv_in = Conv2d(config.in_channels, widths[0], kernel_size=3)
        self.down_blocks = [
            DownBlock(
                widths[max(level - 1, 0)],
                width,
                groups,
                layers=config.layers_per_block,
                halve=level < len(widths) - 1,
            )
            for level, width in enumerate(widths)
        ]
        self.mid_block = MidBlock(widths[-1], groups, attention=config.mid_block_add_attention)
        self.conv_norm_out = group_norm(widths[-1], groups)
        self.conv_out = Conv2d(widths[-1], 2 * config.latent_channels, kernel_size=3)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        x = self.mid_block(x)
        return norm_silu_conv(self.conv_norm_out, self.conv_out, x)


class Decoder(nn.Module):
    def __init__(self, config: AutoencoderKLConfig) -> None:
        super().__init__()
        widths, groups = tuple(reversed(config.decoder_widths)), config.norm_num_groups
        self.conv_in = Conv2d(config.latent_channels, widths[0], kernel_size=3)
        self.mid_block = MidBlock(widths[0], groups, attention=config.mid_block_add_attention)
        self.up_blocks = [
            UpBlock(
                widths[max(level - 1, 0)],
                width,
                groups,
                layers=config.layers_per_block + 1,  # one more than the encoder's
                double=level < len(widths) - 1,
            )
            for level, width in enumerate(widths)
        ]
        self.conv_norm_out = group_norm(widths[-1], groups)
        self.conv_out = Conv2d(widths[-1], config.out_channels, kernel_size=3)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.mid_block(self.conv_in(x))
        for block in self.up_blocks:
            x = block(x)
        return norm_silu_conv(self.conv_norm_out, self.conv_out, x)


class DownBlock(nn.Module):
    def __init__(self, width_in: int, width: int, groups: int, *, layers: int, halve: bool) -> None:
        super().__init__()
        self.resnets = [
            ResnetBlock(width if layer else width_in, width, groups) for layer in range(layers)
        ]
        if halve:
            self.downsamplers = [Downsample(width)]

    def __call__(self, x: mx.array) -> mx.array:
        for resnet in self.resnets:
            x = resnet(x)
        return self.downsamplers[0](x) if "downsamplers" in self else x


class UpBlock(nn.Module):
    def __init__(
        self, width_in: int, width: int, groups: int, *, layers: int, double: bool
    ) -> None:
        super().__init__()
        self.resnets = [
            ResnetBlock(width if layer else width_in, width, groups) for layer in range(layers)
        ]
        if double:
            self.upsamplers = [Upsample(width)]

    def __call__(self, x: mx.array) -> mx.array:
        for resnet in self.resnets:
            x = computed_if_large(resnet(x))
        return computed_if_large(self.upsamplers[0](x)) if "upsamplers" in self else x


class MidBlock(nn.Module):
    def __init__(self, width: int, groups: int, *, attention: bool) -> None:
        super().__init__()
        self.resnets = [ResnetBlock(width, width, groups) for _ in range(2)]
        if attention:
            self.attentions = [PixelAttention(width, groups)]

    def __call__(self, x: mx.array) -> mx.array:
        x = self.resnets[0](x)
        if "attentions" in self:
            x = self.attentions[0](x)
        return self.resnets[1](x)


class ResnetBlock(nn.Module):
    def __init__(self, width_in: int, width: int, groups: int) -> None:
        super().__init__()
        self.norm1 = group_norm(width_in, groups)
        self.conv1 = Conv2d(width_in, width, kernel_size=3)
        self.norm2 = group_norm(width, groups)
        self.conv2 = Conv2d(width, width, kernel_size=3)
        if width_in != width:
            self.conv_shortcut = Conv2d(width_in, width, kernel_size=1)

    def __call__(self, x: mx.array) -> mx.array:
        hidden = norm_silu_conv(self.norm1, self.conv1, x, step=computed_if_large)
        hidden = norm_silu_conv(self.norm2, self.conv2, hidden, step=computed_if_large)
        return hidden + (self.conv_shortcut(x) if "conv_shortcut" in self else x)


class PixelAttention(nn.Module):
    """Single-head attention over all positions."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.scale = width**-0.5
        self.group_norm = group_norm(width, groups)
        self.to_q, self.to_k, self.to_v = (Linear(width, width) for _ in range(3))
        self.to_out = [Linear(width, width)]

    def __call__(self, x: mx.array) -> mx.array:
        B, H, W, C = x.shape
        tokens = self.group_norm(x).reshape(B, 1, H * W, C)  # (B, heads=1, L, C)
        q, k, v = self.to_q(tokens), self.to_k(tokens), self.to_v(tokens)
        out = sliced_attention(q, k, v, scale=self.scale)
        return x + self.to_out[0](out).reshape(B, H, W, C)


class Downsample(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, kernel_size=3, stride=2)

    def __call__(self, x: mx.array) -> mx.array:
        return self.conv(mx.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)]))  # right and bottom only


class Upsample(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = Conv2d(width, width, kernel_size=3)

    def __call__(self, x: mx.array) -> mx.array:
        return conv_doubled(self.conv, x)


def group_norm(width: int, groups: int) -> GroupNorm:
    """The autoencoder's norm; MLX's default eps is 1e-5."""
    return GroupNorm(groups, width, eps=1e-6)
