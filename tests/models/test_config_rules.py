"""Rules between the numbers of a config: a sound one is accepted, each broken one is refused."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import ConfigError, InputError
from lydite.models.features.clip_vision import CLIPVisionConfig, read_clip_config
from lydite.models.flux import FluxConfig, FluxTransformer
from lydite.models.flux2 import Flux2Config, Flux2Transformer
from lydite.models.mmdit import MMDiTConfig, PatchEmbed
from lydite.models.qwen_image import MAX_POSITION, QwenImageConfig, QwenImageTransformer
from lydite.models.text.qwen import QwenConfig
from lydite.models.text.t5 import T5Config
from lydite.models.unet import UNetConfig
from lydite.models.vae.flux2 import AutoencoderKLFlux2Config
from lydite.models.vae.kl import AutoencoderKLConfig
from lydite.models.vae.qwen_image import QwenImageVAEConfig
from lydite.models.z_image import ZImageConfig, ZImageTransformer

MMDIT = MMDiTConfig(8, 2, 4, 3, 4, 2, 12, 8, 8, 4, 6, (0, 2))
FLUX2 = Flux2Config(4, 1, 1, 16, 2, 12, 8, 3.0, (4, 4, 4, 4), 2000.0, 1e-6)
QWEN = QwenConfig(10, 24, 16, 2, 4, 2, 1e-6, 1e4)
UNET = UNetConfig(
    4, 4, ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D"), (8, 16), 2,
    12, 2, norm_num_groups=4,
)  # fmt: skip
KL = AutoencoderKLConfig(
    3, 3, ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2, (8, 16), 1, 4, 4
)
QWEN_VAE = QwenImageVAEConfig(
    8, 2, (1, 2), 1, (False,), latents_mean=(0.0, 1.0), latents_std=(1.0, 2.0)
)
FLUX = FluxConfig(16, 1, 1, 12, 2, 8, 8, False, axes_dims_rope=(4, 4, 4))
QWEN_IMAGE = QwenImageConfig(16, 4, 1, 12, 2, 8, (4, 4, 4))
T5 = T5Config(10, 8, 4, 16, 1, 2, 32, 128, 1e-6, "gated-gelu")
FLUX2_VAE = AutoencoderKLFlux2Config(
    3, 3, ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2, (8, 16), 1, 4, 4
)
Z_IMAGE = ZImageConfig(4, 24, 1, 1, 2, 1e-5, 8, 256.0, (4, 4, 4), (16, 16, 16))
VISION = CLIPVisionConfig(
    hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    hidden_act="gelu", layer_norm_eps=1e-5, image_size=32, patch_size=8,
)  # fmt: skip


def levels_of_a_unet(count: int) -> dict[str, Any]:
    """A U-Net of so many levels."""
    blocks = {
        "down_block_types": ("DownBlock2D",) * count,
        "up_block_types": ("UpBlock2D",) * count,
    }
    return {"block_out_channels": (8,) * count, **blocks}


def levels_of_qwen_vae(count: int) -> dict[str, Any]:
    return {"dim_mult": (1,) * count, "temperal_downsample": (False,) * (count - 1)}


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (MMDIT, {"dual_attention_layers": (3,)}), (MMDIT, {"dual_attention_layers": (-1,)}),
        (MMDIT, {"caption_projection_dim": 9}),
        (FLUX2, {"mlp_ratio": 0.0}), (FLUX2, {"mlp_ratio": 65.0}), (FLUX2, {"mlp_ratio": -1.0}),
        (FLUX2, {"axes_dims_rope": (4, 4, 4)}), (FLUX2, {"axes_dims_rope": (3, 5, 4, 4)}),
        (FLUX2, {"axes_dims_rope": (4, 4, 4, 2)}),
        (QWEN, {"hidden_size": 22}), (QWEN, {"head_dim": 5}), (QWEN, {"num_key_value_heads": 3}),
        (UNET, {"block_out_channels": (8, 16, 16)}), (UNET, {"layers_per_block": (1, 2, 3)}),
        (UNET, {"block_out_channels": ()}), (UNET, {"norm_num_groups": 3}),
        (UNET, {"attention_head_dim": 3}), (UNET, {"attention_head_dim": (2, 5)}),
        (UNET, {"block_out_channels": (5, 10), "norm_num_groups": 5, "attention_head_dim": 5}),
        (UNET, {"down_block_types": ("DownBlock2D",)}), (UNET, {"up_block_types": ("UpBlock2D",)}),
        (KL, {"scaling_factor": 0.0}), (KL, {"scaling_factor": 2e4}), (KL, {"shift_factor": -2e4}),
        (KL, {"block_out_channels": (8,)}), (KL, {"down_block_types": ("DownEncoderBlock2D",)}),
        (KL, {"up_block_types": ("UpDecoderBlock2D",) * 3}), (KL, {"norm_num_groups": 3}),
        (QWEN_VAE, {"dim_mult": (1, 2, 4)}), (QWEN_VAE, {"latents_mean": (0.0,)}),
        (QWEN_VAE, {"latents_std": (1.0, 0.0)}), (QWEN_VAE, {"latents_std": (1.0,)}),
        (QWEN_VAE, {"base_dim": 7}), (QWEN_VAE, {"z_dim": 3}),
        (Z_IMAGE, {"n_heads": 5}), (Z_IMAGE, {"axes_dims": (6, 6)}),
        (Z_IMAGE, {"axes_lens": (16,)}),
        (Z_IMAGE, {"axes_dims": (3, 5, 4)}), (Z_IMAGE, {"axes_dims": (4, 4, 6)}),
        *((model, {"axes_dims_rope": axes}) for model in (FLUX, QWEN_IMAGE)
          for axes in ((6, 6), (3, 5, 4), (4, 4, 6), (4, 4, 4, 0))),
        (T5, {"dense_act_fn": "relu"}), (T5, {"is_gated_act": False}),
        (T5, {"relative_attention_num_buckets": 30}),
        (T5, {"relative_attention_max_distance": 8}),
        (FLUX2_VAE, {"decoder_block_out_channels": (8,)}),
        (FLUX2_VAE, {"decoder_block_out_channels": (8, 18)}), (FLUX2_VAE, {"norm_num_groups": 3}),
        (KL, {"block_out_channels": (8,) * 9, "down_block_types": ("DownEncoderBlock2D",) * 9,
              "up_block_types": ("UpDecoderBlock2D",) * 9}),
        (UNET, levels_of_a_unet(9)), (QWEN_VAE, levels_of_qwen_vae(9)),
        (UNET, {"transformer_layers_per_block": ((1, 1, 1), 1)}),
        (UNET, {"transformer_layers_per_block": (1, 1, 1)}),
        (UNET, {"reverse_transformer_layers_per_block": ((1, 1), 1)}),
        (UNET, {"addition_embed_type": "text_time"}),
        (UNET, {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}),
        (VISION, {"patch_size": 33}), (VISION, {"num_attention_heads": 3}),
    ],
)  # fmt: skip
def test_a_broken_rule_is_refused(config: Any, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        replace(config, **change)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (FLUX2, {"mlp_ratio": 64.0}), (QWEN, {"hidden_size": 22, "head_dim": 6}),
        (KL, {"scaling_factor": 1e-4}), (KL, {"scaling_factor": -1e4, "shift_factor": 1e4}),
        (QWEN_VAE, {"latents_std": (1e-4, 1e4)}), (VISION, {"patch_size": 32}),
        (T5, {"dense_act_fn": "gelu_new", "is_gated_act": True}),
        (T5, {"relative_attention_max_distance": 9}),
        (FLUX2_VAE, {"decoder_block_out_channels": (4, 8)}),
        (UNET, {"transformer_layers_per_block": ((1, 2), 1),
                "reverse_transformer_layers_per_block": ((1, 2, 3), 1)}),
        (UNET, {"addition_embed_type": "text_time", "addition_time_embed_dim": 8,
                "projection_class_embeddings_input_dim": 16}),
        (UNET, levels_of_a_unet(8)), (UNET, levels_of_a_unet(1)),
        (QWEN_VAE, levels_of_qwen_vae(8)), (QWEN_VAE, levels_of_qwen_vae(1)),
        *((KL, {"block_out_channels": (8,) * n, "down_block_types": ("DownEncoderBlock2D",) * n,
              "up_block_types": ("UpDecoderBlock2D",) * n}) for n in (1, 8)),
        (MMDIT, {"dual_attention_layers": (2,)}),
        (UNET, {"layers_per_block": (1, 2)}), (MMDIT, {"dual_attention_layers": ()}),
    ],
)  # fmt: skip
def test_the_limits_themselves_are_accepted(config: Any, change: dict[str, Any]) -> None:
    assert replace(config, **change) != config


def test_positions_are_cut_from_the_middle_of_the_table() -> None:
    embed = PatchEmbed(MMDIT)  # 6 × 6 patches of 2 × 2
    embed.pos_embed = mx.arange(36 * 8, dtype=mx.float32).reshape(1, 36, 8)
    table = embed.pos_embed.reshape(6, 6, 8)
    found = embed.positions(8, 4)
    assert mx.array_equal(found.reshape(4, 2, 8), table[1:5, 2:4])
    assert embed.positions(12, 12).shape == (1, 36, 8)
    for size in ((14, 12), (12, 14)):
        with pytest.raises(InputError, match="6×6 patches"):
            embed.positions(*size)


def test_positions_end_where_the_tables_of_the_reference_do() -> None:
    assert MAX_POSITION == 4096
    qwen, z_image = QwenImageTransformer(QWEN_IMAGE), ZImageTransformer(Z_IMAGE)
    most = MAX_POSITION - 2  # the text begins at half of the larger side
    assert qwen.positions(most, 4, 3).cos.shape[0] == most + 12
    with pytest.raises(InputError, match=f"beyond position {MAX_POSITION - 1}"):
        qwen.positions(most + 1, 4, 3)
    for at in ((15, 15, 15), (0, 0, 0)):
        z_image._rotation(np.array([at]))
    for at in ((16, 0, 0), (0, 16, 0), (0, 0, 16)):
        with pytest.raises(InputError, match="smaller size"):
            z_image._rotation(np.array([at]))


def test_guidance_is_given_exactly_where_the_model_has_an_input_for_it() -> None:
    pooled, scale = mx.zeros((1, 8)), mx.array([3.0])
    for embeds in (False, True):
        model = FluxTransformer(replace(FLUX, guidance_embeds=embeds))
        model.modulation(mx.array([1.0]), pooled, scale if embeds else None)
        with pytest.raises(ValueError, match=f"guidance_embeds {embeds}"):
            model.modulation(mx.array([1.0]), pooled, None if embeds else scale)


def test_guidance_of_flux2_is_given_where_the_model_has_an_input_for_it() -> None:
    for embeds in (False, True):
        model = Flux2Transformer(replace(FLUX2, guidance_embeds=embeds))
        scale = mx.array([3.0])
        model.modulation(mx.array([1.0]), mx.float32, scale if embeds else None)
        with pytest.raises(ValueError, match=f"guidance_embeds {embeds}"):
            model.modulation(mx.array([1.0]), mx.float32, None if embeds else scale)


def test_a_config_of_one_tower_is_not_clips() -> None:
    with pytest.raises(ConfigError, match="expected clip"):
        read_clip_config({"model_type": "clip_text_model"}, where="here")
