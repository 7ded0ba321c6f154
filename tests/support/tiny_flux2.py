"""Tiny FLUX.2-klein models with random weights, made by the reference."""

from pathlib import Path
from typing import Any

from lydite.weights.maps.flux import FLUX2_ORIGINAL
from support import tiny_flux, tiny_qwen_image, tiny_sd3, tiny_z_image

SCHEDULER: dict[str, Any] = {"shift": 3.0, "use_dynamic_shifting": True, "max_shift": 1.15}


def make_pipeline(folder: Path, *, distilled: bool = False, **options: Any) -> Path:
    """A whole Flux2KleinPipeline folder in diffusers' layout; Qwen3 has 28 layers, as it needs."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline
    from transformers import Qwen2Tokenizer

    torch.manual_seed(0)
    vocabulary = tiny_qwen_image.write_tokenizer(folder / "seed_tokenizer")
    tokenizer = Qwen2Tokenizer.from_pretrained(folder / "seed_tokenizer")
    tokenizer.chat_template = tiny_z_image.CHAT_TEMPLATE
    text_encoder = tiny_z_image.make_text_encoder(
        vocab_size=vocabulary,
        num_hidden_layers=28,
        hidden_size=8,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    pipeline = Flux2KleinPipeline(
        transformer=make_transformer(guidance_embeds=False, joint_attention_dim=24, **options),
        vae=make_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        is_distilled=distilled,
    )
    pipeline.save_pretrained(folder)
    return folder


def make_transformer(**options: Any) -> Any:
    """Flux2Transformer2DModel with two blocks of either kind; heads of 24 channels."""
    from diffusers import Flux2Transformer2DModel

    settings: dict[str, Any] = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 24,
        "num_attention_heads": 2,
        "joint_attention_dim": 40,
        "axes_dims_rope": (4, 6, 6, 8),
    }
    return tiny_sd3.randomize(Flux2Transformer2DModel(**{**settings, **options}))


def make_vae(**options: Any) -> Any:
    """AutoencoderKLFlux2 with three resolutions and statistics as training leaves them."""
    import torch
    from diffusers import AutoencoderKLFlux2

    settings: dict[str, Any] = {
        "block_out_channels": (8, 8, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "layers_per_block": 1,
    }
    vae = tiny_sd3.randomize(AutoencoderKLFlux2(**{**settings, **options}))
    vae.bn.running_mean.copy_(torch.randn(16))
    vae.bn.running_var.copy_(torch.rand(16) + 0.5)
    return vae


def original_transformer(tensors: dict[str, Any]) -> dict[str, Any]:
    """The transformer's tensors as the original file has them."""
    return tiny_flux.original_transformer(tensors, FLUX2_ORIGINAL)
