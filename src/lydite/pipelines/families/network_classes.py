"""The network classes that families share, by their names in diffusers and transformers."""

from functools import partial

from lydite.models import flux, flux2, qwen_image, unet, z_image
from lydite.models.mmdit import MMDiT, MMDiTConfig
from lydite.models.text import clip, qwen, t5
from lydite.models.vae import kl
from lydite.models.vae import qwen_image as qwen_image_vae
from lydite.pipelines.model import Kind
from lydite.weights.maps import flux as flux_map
from lydite.weights.maps import mmdit as mmdit_map
from lydite.weights.maps import text as text_map
from lydite.weights.maps import unet as unet_map
from lydite.weights.maps import vae as vae_map

KINDS: dict[str, Kind] = {
    "SD3Transformer2DModel": Kind(MMDiTConfig, MMDiT, mmdit_map.DIFFUSERS, quantized=True),
    "UNet2DConditionModel": Kind(
        unet.UNetConfig, unet.UNet, unet_map.DIFFUSERS, unet.IGNORED, unet.FIXED
    ),
    "FluxTransformer2DModel": Kind(
        flux.FluxConfig, flux.FluxTransformer, flux_map.DIFFUSERS, fixed=flux.FIXED, quantized=True
    ),
    "Flux2Transformer2DModel": Kind(
        flux2.Flux2Config, flux2.Flux2Transformer, (), fixed=flux2.FIXED, quantized=True
    ),
    "QwenImageTransformer2DModel": Kind(
        qwen_image.QwenImageConfig,
        qwen_image.QwenImageTransformer,
        (),
        qwen_image.IGNORED,
        qwen_image.FIXED,
        quantized=True,
    ),
    "ZImageTransformer2DModel": Kind(
        z_image.ZImageConfig,
        z_image.ZImageTransformer,
        (),
        z_image.IGNORED,
        z_image.FIXED,
        quantized=True,
    ),
    "AutoencoderKL": Kind(
        kl.AutoencoderKLConfig, kl.AutoencoderKL, vae_map.DIFFUSERS, kl.IGNORED, kl.FIXED
    ),
    "CLIPTextModel": Kind(
        clip.CLIPTextConfig,
        partial(clip.CLIPTextModel, projection=False),
        text_map.CLIP,
        clip.IGNORED,
        clip.FIXED,
    ),
    "CLIPTextModelWithProjection": Kind(
        clip.CLIPTextConfig,
        partial(clip.CLIPTextModel, projection=True),
        text_map.CLIP,
        clip.IGNORED,
        clip.FIXED,
    ),
    "T5EncoderModel": Kind(
        t5.T5Config,
        t5.T5EncoderModel,
        text_map.T5,
        t5.IGNORED,
        t5.FIXED,
        t5.KEEP_FLOAT32,
        quantized=True,
    ),
    "Qwen2_5_VLForConditionalGeneration": Kind(
        qwen.QwenConfig,
        qwen.Qwen2_5_VLTextEncoder,
        text_map.QWEN2_5_VL,
        qwen.IGNORED,
        qwen.QWEN2_5_VL_FIXED,
        flat=qwen.flat,
        quantized=True,
    ),
    "Qwen3ForCausalLM": Kind(
        qwen.QwenConfig,
        qwen.Qwen3TextEncoder,
        text_map.QWEN3_WITH_HEAD,
        qwen.IGNORED,
        qwen.QWEN3_FIXED,
        flat=qwen.flat,
        quantized=True,
    ),
    "Qwen3Model": Kind(
        qwen.QwenConfig,
        partial(qwen.QwenTextModel, qk_norm=True),
        text_map.QWEN3,
        qwen.IGNORED,
        qwen.QWEN3_FIXED,
        flat=qwen.flat,
        quantized=True,
    ),
    "AutoencoderKLQwenImage": Kind(
        qwen_image_vae.QwenImageVAEConfig,
        qwen_image_vae.AutoencoderKLQwenImage,
        vae_map.QWEN_IMAGE,
        qwen_image_vae.IGNORED,
        qwen_image_vae.FIXED,
    ),
}
