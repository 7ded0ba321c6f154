"""Tiny FLUX.1 models with random weights, made by the reference."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from lydite.weights.maps.flux import ORIGINAL
from lydite.weights.rules import Rule, Split, layout_of, match, stored_names
from support import tiny_sd3

VARIANTS: dict[str, dict[str, Any]] = {
    "schnell": {"guidance_embeds": False},
    "dev": {"guidance_embeds": True},
    "fill": {"guidance_embeds": True, "in_channels": 96, "out_channels": 16},
}


def make_transformer(variant: str, **options: Any) -> Any:
    """FluxTransformer2DModel with two blocks of either kind; heads of 24 channels, 4 + 8 + 12."""
    from diffusers import FluxTransformer2DModel

    settings: dict[str, Any] = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 24,
        "num_attention_heads": 2,
        "joint_attention_dim": 40,
        "pooled_projection_dim": 20,
        "axes_dims_rope": (4, 8, 12),
    }
    return tiny_sd3.randomize(
        FluxTransformer2DModel(**{**settings, **VARIANTS[variant], **options})
    )


def make_pipeline(folder: Path, variant: str = "dev", **options: Any) -> Path:
    """A whole pipeline's folder in diffusers' layout: CLIP without projection, T5, 4× VAE."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxFillPipeline, FluxPipeline
    from transformers import CLIPTextModel

    torch.manual_seed(0)
    vocabulary = tiny_sd3.write_clip_tokenizer(folder / "seed_tokenizer", pad="<|endoftext|>")
    config = tiny_sd3.make_clip(vocabulary, 16, 2, "quick_gelu").config
    t5 = tiny_sd3.make_t5()
    # Fill's takes two times 16 latents and 4 × 4 pixels of the mask, at 2 × 2 positions
    channels = {"in_channels": 192, "out_channels": 64} if variant == "fill" else {}
    pipeline = (FluxFillPipeline if variant == "fill" else FluxPipeline)(
        transformer=make_transformer(
            variant,
            **{"in_channels": 64, **channels},
            joint_attention_dim=t5.config.d_model,
            pooled_projection_dim=16,
            **options,
        ),
        vae=tiny_sd3.make_vae(use_quant_conv=False, use_post_quant_conv=False),
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=1.0 if variant == "schnell" else 3.0, use_dynamic_shifting=variant != "schnell"
        ),
        text_encoder=tiny_sd3.randomize(CLIPTextModel(config)),
        tokenizer=tiny_sd3.clip_tokenizer(folder / "seed_tokenizer"),
        text_encoder_2=t5,
        tokenizer_2=tiny_sd3.t5_tokenizer(),
    )
    pipeline.save_pretrained(folder)
    return folder


def original_transformer(
    tensors: dict[str, Any], rules: tuple[Rule, ...] = ORIGINAL
) -> dict[str, Any]:
    """The tensors of FLUX.1's or FLUX.2's transformer as its original file has them, by our rules.

    test_flux and test_flux2 prove these rules against diffusers' own converters.
    """
    import numpy as np

    splits = [pattern for rule in rules if isinstance(rule, Split) for pattern in rule.targets]

    def order(target: str) -> int:
        return next((n for n, pattern in enumerate(splits) if match(pattern, target)), 0)

    parts: defaultdict[str, list[Any]] = defaultdict(list)
    for target in sorted(tensors, key=order):
        (name,) = stored_names(target, rules)
        layout = layout_of(target, rules)
        parts[name].append(layout.inverse(tensors[target]) if layout else tensors[target])
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}
