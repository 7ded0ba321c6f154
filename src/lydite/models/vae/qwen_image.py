"""AutoencoderKLQwenImage for single pictures: pixels to latents and back, channels last.

Reference: diffusers 0.42.1, models/autoencoders/autoencoder_kl_qwenimage.py. It is made for video,
with convolutions over time that see the present frame and those before it. A picture is a first
frame: what is before it is zero, so that of each kernel only the slice for the present counts, and
the layers that change the number of frames are not run. The weights' rules take that slice.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from lydite.core.config import Count, Size
from lydite.models.layers import Conv2d, Linear, silu, sliced_attention
from lydite.models.vae.kl import Posterior

IGNORED = frozenset({"dropout"})
FIXED = {"attn_scales": []}


@dataclass(frozen=True)
class QwenImageVAEConfig:
    """Keys of diffusers' AutoencoderKLQwenImage config."""

    base_dim: Size
    z_dim: Size
    dim_mult: tuple[Count, ...]
    num_res_blocks: Count
    temperal_downsample: tuple[bool, ...]  # as the reference spells it; no picture depends on it
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]
    input_channels: Size = 3

    def __post_init__(self) -> None:
        if not 0 < len(self.dim_mult) == len(self.temperal_downsample) + 1 <= 8:
            raise ValueError(
                f"dim_mult {list(self.dim_mult)} is not one longer than "
                f"temperal_downsample {list(self.temperal_downsample)}"
            )
        if not len(self.latents_mean) == len(self.latents_std) == self.z_dim:
            raise ValueError(f"latents_mean and latents_std do not have z_dim = {self.z_dim} items")
        if any(not 1e-4 <= std <= 1e4 for std in self.latents_std):
            raise ValueError(f"latents_std {list(self.latents_std)}")
        if any(self.base_dim * mult % 2 for mult in self.dim_mult):
            raise ValueError(f"base_dim {self.base_dim} cannot be halved by the decoder")

    @property
    def factor(self) -> int:
        """Pixels per latent position, along each side."""
        return 2 ** (len(self.dim_mult) - 1)

    @property
    def latent_channels(self) -> int:
        return self.z_dim

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels at each resolution, from the picture inwards."""
        return tuple(self.base_dim * mult for mult in self.dim_mult)


class AutoencoderKLQwenImage(nn.Module):
    """Encoder and decoder with the mean and deviation of each latent channel."""

    def __init__(self, config: QwenImageVAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.quant_conv = Conv2d(2 * config.z_dim, 2 * config.z_dim, kernel_size=1)
        self.post_quant_conv = Conv2d(config.z_dim, config.z_dim, kernel_size=1)
        self.decoder = Decoder(config)

    def encode(self, image: mx.array) -> Posterior:
        """Images in −1…1, (B, H, W, 3), to the distribution of their raw latents."""
        mean, logvar = mx.split(self.quant_conv(self.encoder(image)), 2, axis=-1)
        return Posterior(mean, mx.exp(0.5 * mx.clip(logvar, -30.0, 20.0)))

    def decode(self, latent: mx.array) -> mx.array:
        """Raw latents (B, h, w, C) to images in −1…1, (B, H, W, 3)."""
        return mx.clip(self.decoder(self.post_quant_conv(latent)), -1.0, 1.0)

    def normalize(self, latent: mx.array) -> mx.array:
        """Raw latents as the diffusion model sees them."""
        return (latent - mx.array(self.config.latents_mean)) / mx.array(self.config.latents_std)

    def denormalize(self, latent: mx.array) -> mx.array:
        """The diffusion model's latents as the decoder takes them."""
        return latent * mx.array(self.config.latents_std) + mx.array(self.config.latents_mean)


class Encoder(nn.Module):
    def __init__(self, config: QwenImageVAEConfig) -> None:
        super().__init__()
        widths = config.widths
        self.conv_in = Conv2d(config.input_channels, config.base_dim, kernel_size=3)
        self.down_blocks: list[nn.Module] = []
        width_in = config.base_dim
        for level, width in enumerate(widths):
            for _ in range(config.num_res_blocks):
                self.down_blocks.append(ResidualBlock(width_in, width))
                width_in = width
            if level < len(widths) - 1:
                self.down_blocks.append(Downsample(width))
        self.mid_block = MidBlock(widths[-1])
        self.norm_out = ChannelNorm(widths[-1])
        self.conv_out = Conv2d(widths[-1], 2 * config.z_dim, kernel_size=3)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(silu(self.norm_out(self.mid_block(x))))


class Decoder(nn.Module):
    def __init__(self, config: QwenImageVAEConfig) -> None:
        super().__init__()
        widths = tuple(reversed(config.widths))
        self.conv_in = Conv2d(config.z_dim, widths[0], kernel_size=3)
        self.mid_block = MidBlock(widths[0])
        self.up_blocks = [
            UpBlock(
                widths[level - 1] // 2 if level else width,  # upsampling has halved the channels
                width,
                layers=config.num_res_blocks + 1,  # one more than the encoder's
                double=level < len(widths) - 1,
            )
            for level, width in enumerate(widths)
        ]
        self.norm_out = ChannelNorm(widths[-1])
        self.conv_out = Conv2d(widths[-1], config.input_channels, kernel_size=3)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.mid_block(self.conv_in(x))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(silu(self.norm_out(x)))


class UpBlock(nn.Module):
    def __init__(self, width_in: int, width: int, *, layers: int, double: bool) -> None:
        super().__init__()
        self.resnets = [ResidualBlock(width if n else width_in, width) for n in range(layers)]
        if double:
            self.upsamplers = [Upsample(width)]

    def __call__(self, x: mx.array) -> mx.array:
        for resnet in self.resnets:
            x = resnet(x)
        return self.upsamplers[0](x) if "upsamplers" in self else x


class MidBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attentions = [PixelAttention(width)]
        self.resnets = [ResidualBlock(width, width) for _ in range(2)]

    def __call__(self, x: mx.array) -> mx.array:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class ResidualBlock(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.norm1 = ChannelNorm(width_in)
        self.conv1 = Conv2d(width_in, width, kernel_size=3)
        self.norm2 = ChannelNorm(width)
        self.conv2 = Conv2d(width, width, kernel_size=3)
        if width_in != width:
            self.conv_shortcut = Conv2d(width_in, width, kernel_size=1)

    def __call__(self, x: mx.array) -> mx.array:
        hidden = self.conv1(silu(self.norm1(x)))
        hidden = self.conv2(silu(self.norm2(hidden)))
        return hidden + (self.conv_shortcut(x) if "conv_shortcut" in self else x)


class PixelAttention(nn.Module):
    """Single-head attention over all positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = width**-0.5
        self.norm = ChannelNorm(width)
        self.to_qkv = Linear(width, 3 * width)
        self.proj = Linear(width, width)

    def __call__(self, x: mx.array) -> mx.array:
        B, H, W, C = x.shape
        tokens = self.norm(x).reshape(B, 1, H * W, C)  # (B, heads=1, L, C)
        q, k, v = mx.split(self.to_qkv(tokens), 3, axis=-1)
        out = sliced_attention(q, k, v, scale=self.scale)
        return x + self.proj(out).reshape(B, H, W, C)


class ChannelNorm(nn.Module):
    """Each position's channels at root mean square 1, times `gamma`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = mx.ones((width,))

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.gamma, 1e-26)  # next to nothing, and finite where x is 0


class Downsample(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.resample = [PadRightBottom(), nn.Conv2d(width, width, kernel_size=3, stride=2)]

    def __call__(self, x: mx.array) -> mx.array:
        return self.resample[1](self.resample[0](x))


class Upsample(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.resample = [Double(), Conv2d(width, width // 2, kernel_size=3)]

    def __call__(self, x: mx.array) -> mx.array:
        return self.resample[1](self.resample[0](x))


class PadRightBottom(nn.Module):
    def __call__(self, x: mx.array) -> mx.array:
        return mx.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)])


class Double(nn.Module):
    """Each position as 2 × 2."""

    def __call__(self, x: mx.array) -> mx.array:
        B, H, W, C = x.shape
        return mx.broadcast_to(x[:, :, None, :, None], (B, H, 2, W, 2, C)).reshape(
            B, 2 * H, 2 * W, C
        )
