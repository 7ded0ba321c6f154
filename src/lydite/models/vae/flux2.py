"""AutoencoderKLFlux2: AutoencoderKL whose latents are packed and normalized by stored statistics.

Reference: diffusers 0.42.1, models/autoencoders/autoencoder_kl_flux2.py, and `_patchify_latents` of
pipelines/flux2. The diffusion model sees 2 × 2 positions as one, in units of the mean and the
deviation that a batch norm without weights has stored for each of its channels.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from lydite.core.config import Epsilon, Size
from lydite.models.packing import pack_latents, unpack_latents
from lydite.models.vae import kl

IGNORED = kl.IGNORED | {"batch_norm_momentum"}  # of training
FIXED = {
    **kl.FIXED,
    "patch_size": [2, 2],
    "scaling_factor": None,  # this class has none
    "shift_factor": None,
}


@dataclass(frozen=True)
class AutoencoderKLFlux2Config(kl.AutoencoderKLConfig):
    """Keys of diffusers' AutoencoderKLFlux2 config."""

    batch_norm_eps: Epsilon = 1e-4
    decoder_block_out_channels: tuple[Size, ...] | None = None  # as the encoder's

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.decoder_widths) != len(self.block_out_channels):
            raise ValueError("decoder_block_out_channels, block_out_channels differ in length")
        if any(width % self.norm_num_groups for width in self.decoder_widths):
            raise ValueError(
                f"decoder_block_out_channels are not multiples of {self.norm_num_groups} groups"
            )

    @property
    def decoder_widths(self) -> tuple[int, ...]:
        return self.decoder_block_out_channels or self.block_out_channels


class AutoencoderKLFlux2(kl.AutoencoderKL):
    """Encoder and decoder with the mean and variance of each packed latent channel."""

    def __init__(self, config: AutoencoderKLFlux2Config) -> None:
        super().__init__(config)
        self.eps = config.batch_norm_eps
        self.bn = ChannelStatistics(4 * config.latent_channels)

    def normalize(self, latent: mx.array) -> mx.array:
        """Raw latents (B, h, w, C) as the diffusion model sees them: (B, h/2, w/2, 4C)."""
        B, height, width, _ = latent.shape
        tokens = (pack_latents(latent) - self.bn.running_mean) / self._deviation
        return tokens.reshape(B, height // 2, width // 2, -1)

    def denormalize(self, latent: mx.array) -> mx.array:
        """The diffusion model's latents (B, h, w, 4C) as the decoder takes them: (B, 2h, 2w, C)."""
        _, height, width, _ = latent.shape
        tokens = (latent * self._deviation + self.bn.running_mean).flatten(1, 2)
        return unpack_latents(tokens, 2 * height, 2 * width)

    @property
    def _deviation(self) -> mx.array:
        return mx.sqrt(self.bn.running_var + self.eps)


class ChannelStatistics(nn.Module):
    """Mean and variance of each channel, as torch's batch norm names them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.running_mean = mx.zeros(channels)
        self.running_var = mx.ones(channels)
