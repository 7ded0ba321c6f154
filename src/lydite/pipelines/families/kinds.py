"""The network classes that families share, by their names in diffusers and transformers."""

from lydite.models import unet
from lydite.models.mmdit import MMDiT, MMDiTConfig
from lydite.models.text import clip, t5
from lydite.models.vae import kl
from lydite.pipelines.model import Kind
from lydite.weights.maps import mmdit as mmdit_map
from lydite.weights.maps import text as text_map
from lydite.weights.maps import unet as unet_map
from lydite.weights.maps import vae as vae_map

KINDS: dict[str, Kind] = {
    "SD3Transformer2DModel": Kind(MMDiTConfig, MMDiT, mmdit_map.DIFFUSERS),
    "UNet2DConditionModel": Kind(
        unet.UNetConfig, unet.UNet, unet_map.DIFFUSERS, unet.IGNORED, unet.FIXED
    ),
    "AutoencoderKL": Kind(
        kl.AutoencoderKLConfig, kl.AutoencoderKL, vae_map.DIFFUSERS, kl.IGNORED, kl.FIXED
    ),
    "CLIPTextModel": Kind(
        clip.CLIPTextConfig,
        lambda config: clip.CLIPTextModel(config, projection=False),
        text_map.CLIP,
        clip.IGNORED,
        clip.FIXED,
    ),
    "CLIPTextModelWithProjection": Kind(
        clip.CLIPTextConfig,
        lambda config: clip.CLIPTextModel(config, projection=True),
        text_map.CLIP,
        clip.IGNORED,
        clip.FIXED,
    ),
    "T5EncoderModel": Kind(
        t5.T5Config, t5.T5EncoderModel, text_map.T5, t5.IGNORED, t5.FIXED, t5.KEEP_FLOAT32
    ),
}
