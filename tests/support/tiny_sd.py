"""Tiny networks of Stable Diffusion 1.x, 2.x and XL with random weights, made by the reference."""

from pathlib import Path
from typing import Any

from support.tiny_sd3 import (
    ORIGINAL,
    SMALL,
    clip_tokenizer,
    make_clip,
    make_vae,
    original_vae,
    randomize,
    read_tensors,
    write_clip_tokenizer,
)

CROSS, PLAIN = "CrossAttn{}Block2D", "{}Block2D"


def blocks(kinds: tuple[str, ...]) -> dict[str, Any]:
    """Block types of a U-Net whose levels are of these kinds, seen from the picture inwards."""
    return {
        "down_block_types": tuple(kind.format("Down") for kind in kinds),
        "up_block_types": tuple(kind.format("Up") for kind in reversed(kinds)),
    }


TEXT_TIME: dict[str, Any] = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
}
SD1: dict[str, Any] = {
    **blocks((CROSS, CROSS, CROSS, PLAIN)),
    "block_out_channels": (16, 32, 32, 32),
    "attention_head_dim": 4,
    "cross_attention_dim": 24,
    "layers_per_block": 1,
}
SD2 = {**SD1, "attention_head_dim": (2, 4, 4, 4), "use_linear_projection": True}
UNETS: dict[str, dict[str, Any]] = {
    "sd1": SD1 | {"layers_per_block": 2},
    "sd2": SD2 | {"upcast_attention": True},
    "sdxl": {
        **blocks((PLAIN, CROSS, CROSS)),
        "block_out_channels": (16, 32, 64),
        "attention_head_dim": (1, 2, 4),
        "transformer_layers_per_block": (1, 2, 3),
        "use_linear_projection": True,
        "cross_attention_dim": 40,
        "layers_per_block": 2,
        **TEXT_TIME,
        "projection_class_embeddings_input_dim": 24 + 6 * 8,
    },
    "sdxl-refiner": {
        **blocks((PLAIN, CROSS, CROSS, PLAIN)),
        "block_out_channels": (16, 32, 64, 64),
        "attention_head_dim": (1, 2, 4, 4),
        "transformer_layers_per_block": 2,
        "use_linear_projection": True,
        "cross_attention_dim": 24,
        "layers_per_block": 1,
        **TEXT_TIME,
        "projection_class_embeddings_input_dim": 24 + 5 * 8,
    },
    "inpainting": SD1 | {"in_channels": 9},
    "lcm": SD1 | {"time_cond_proj_dim": 32},
    # Lists within lists, no middle block: distilled models have them.
    "distilled": {
        **blocks((PLAIN, CROSS, CROSS)),
        "block_out_channels": (16, 32, 32),
        "attention_head_dim": 4,
        "cross_attention_dim": 24,
        "layers_per_block": (2, 1, 2),
        "transformer_layers_per_block": (1, (2,), (1, 2)),
        "reverse_transformer_layers_per_block": ((1, 0, 2), (1, 1), 1),
        "mid_block_type": None,
        "use_linear_projection": True,
    },
}


def make_unet(variant: str, **options: Any) -> Any:
    """UNet2DConditionModel in one of the shapes of UNETS."""
    from diffusers import UNet2DConditionModel

    settings = {"sample_size": 8, "norm_num_groups": 8, **UNETS[variant], **options}
    return randomize(UNet2DConditionModel(**settings))


# The networks as published, for names and shapes alone: on torch's meta device they need no memory.
LAYERS = {"layers_per_block": 2, "block_out_channels": (320, 640, 1280, 1280)}
FULL_UNETS: dict[str, dict[str, Any]] = {
    "sd1": {
        **blocks((CROSS, CROSS, CROSS, PLAIN)),
        **LAYERS,
        "attention_head_dim": 8,
        "cross_attention_dim": 768,
        "sample_size": 64,
    },
    "sd2": {
        **blocks((CROSS, CROSS, CROSS, PLAIN)),
        **LAYERS,
        "attention_head_dim": (5, 10, 20, 20),
        "cross_attention_dim": 1024,
        "use_linear_projection": True,
        "upcast_attention": True,
        "sample_size": 96,
    },
    "sdxl": {
        **blocks((PLAIN, CROSS, CROSS)),
        "layers_per_block": 2,
        "block_out_channels": (320, 640, 1280),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "transformer_layers_per_block": (1, 2, 10),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
        "sample_size": 128,
    },
    "sdxl-refiner": {
        **blocks((PLAIN, CROSS, CROSS, PLAIN)),
        "layers_per_block": 2,
        "block_out_channels": (384, 768, 1536, 1536),
        "attention_head_dim": (6, 12, 24, 24),
        "cross_attention_dim": 1280,
        "transformer_layers_per_block": 4,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2560,
        "sample_size": 128,
    },
}
FULL_UNETS["inpainting"] = FULL_UNETS["sd1"] | {"in_channels": 9}

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_OUTSIDE = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}


def original_unet(tensors: dict[str, Any], config: Any) -> dict[str, Any]:
    """UNet2DConditionModel's tensors under the names of the original U-Net.

    test_sd_single_file proves it against diffusers' own converter, which goes the other way.
    """
    return {_original_unet_name(name, config): x for name, x in tensors.items()}


def _original_unet_name(name: str, config: Any) -> str:
    stem, _, part = name.rpartition(".")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{part}"
    side, *words = name.split(".")
    count = config["layers_per_block"] + 1
    if side == "mid_block":
        kind, index, *rest = words
        block = (
            "middle_block." + {"resnets0": "0", "attentions0": "1", "resnets1": "2"}[kind + index]
        )
    else:
        level, kind, index, *rest = words
        layer = count - 1 if kind in ("downsamplers", "upsamplers") else int(index)
        number = int(level) * count + layer + (side == "down_blocks")
        attended = config["up_block_types"][int(level)].startswith("Cross")
        position = {"resnets": 0, "downsamplers": 0, "attentions": 1, "upsamplers": 1 + attended}
        block = f"{side.replace('down_', 'input_').replace('up_', 'output_')}.{number}"
        block += f".{position[kind]}"
    if kind == "resnets":
        rest[0] = _RESNET[rest[0]]
    elif kind == "downsamplers":
        rest[0] = "op"
    return ".".join([block, *rest])


def original_openclip(tensors: dict[str, Any]) -> dict[str, Any]:
    """A CLIP text encoder's tensors under OpenCLIP's names, with q, k and v stacked."""
    import numpy as np

    found: dict[str, Any] = {}
    for name, x in tensors.items():
        name = name.removeprefix("text_model.")
        stem, _, part = name.rpartition(".")
        if stem.endswith(".q_proj"):
            parts = [tensors[_whole(tensors, f"{stem[:-7]}.{w}_proj.{part}")] for w in "qkv"]
            found[_openclip_name(f"{stem[:-7]}.in_proj_{part}")] = np.concatenate(parts)
        elif not stem.endswith((".k_proj", ".v_proj")):
            found[_openclip_name(name)] = x.T.copy() if stem == "text_projection" else x
    return found


def _whole(tensors: dict[str, Any], name: str) -> str:
    return name if name in tensors else f"text_model.{name}"


def _openclip_name(name: str) -> str:
    for ours, theirs in _OPENCLIP.items():
        name = name.replace(ours, theirs)
    return name


_OPENCLIP = {
    "embeddings.position_embedding.weight": "positional_embedding",
    "embeddings.token_embedding": "token_embedding",
    "final_layer_norm": "ln_final",
    "text_projection.weight": "text_projection",
    "encoder.layers": "transformer.resblocks",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn": "attn",
}


# Whole pipelines: the U-Net's variant, the encoders' widths, the scheduler's class and its config.
_LEADING = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "steps_offset": 1,
    "timestep_spacing": "leading",
}
_PNDM = ("PNDMScheduler", {**_LEADING, "skip_prk_steps": True, "set_alpha_to_one": False})
_DDIM = {**_LEADING, "set_alpha_to_one": False, "clip_sample": False}
_EULER = ("EulerDiscreteScheduler", _LEADING)
SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sd1": _PNDM,
    "sd2": ("DDIMScheduler", {**_DDIM, "prediction_type": "v_prediction"}),
    "sdxl": _EULER,
    "sdxl-refiner": _EULER,
    "inpainting": _PNDM,
}
PIPELINES = tuple(SCHEDULERS)


def make_pipeline(folder: Path, variant: str, *, original: bool = False, **settings: Any) -> Path:
    """A whole pipeline in diffusers' layout, of the class that the published models name.

    `original`: in sizes that a single file can show, with heads of 64.
    """
    import diffusers
    import torch
    from transformers import CLIPTextModel

    torch.manual_seed(0)
    vocabulary = write_clip_tokenizer(folder / "seed_tokenizer", pad="<|endoftext|>")
    write_clip_tokenizer(folder / "seed_tokenizer_2", pad="!")
    xl, refiner = variant.startswith("sdxl"), variant == "sdxl-refiner"
    width, heads = (64, 1) if original else (16 if xl else 24, 2)
    first = make_clip(vocabulary, width, heads, "gelu" if variant == "sd2" else "quick_gelu")
    width = 64 if original else 24
    second = make_clip(vocabulary, width, heads, "gelu") if xl else None
    name, config = SCHEDULERS[variant]
    depths: dict[str, Any] = {}
    if variant == "sdxl":
        depths = {"transformer_layers_per_block": (1, 1, 2)}
    if original:
        levels = len(UNETS[variant]["block_out_channels"])
        depths |= {"block_out_channels": (64, 64, 128, 64)[:levels], "norm_num_groups": 32}
        depths["cross_attention_dim"] = 128 if variant == "sdxl" else 64
        depths["attention_head_dim"] = (1, 1, 2, 1)[:levels] if xl else 8
        if xl:
            ids = 5 if refiner else 6
            depths |= {"addition_time_embed_dim": 256}
            depths |= {"projection_class_embeddings_input_dim": 64 + ids * 256}
    parts: dict[str, Any] = {
        "unet": make_unet(variant, sample_size=16, layers_per_block=1, **depths),
        "vae": make_vae(
            sizes=ORIGINAL if original else SMALL,
            latent_channels=4,
            scaling_factor=0.13025 if xl else 0.18215,
            shift_factor=None,
        ),
        "scheduler": getattr(diffusers, name)(**config),
        "text_encoder": None if refiner else randomize(CLIPTextModel(first.config)),
        "tokenizer": None if refiner else clip_tokenizer(folder / "seed_tokenizer"),
    }
    if xl:
        parts |= {
            "text_encoder_2": second,
            "tokenizer_2": clip_tokenizer(folder / "seed_tokenizer_2"),
        }
        kind = diffusers.StableDiffusionXLPipeline
        if refiner:
            kind = diffusers.StableDiffusionXLImg2ImgPipeline
            parts |= {"requires_aesthetics_score": True, "force_zeros_for_empty_prompt": False}
    else:
        inpainting = variant == "inpainting"
        kind = diffusers.StableDiffusionPipeline
        kind = diffusers.StableDiffusionInpaintPipeline if inpainting else kind
        parts |= {
            "safety_checker": None,
            "feature_extractor": None,
            "requires_safety_checker": False,
        }
    kind(**parts, **settings).save_pretrained(folder)
    return folder


def write_original_file(folder: Path, path: Path) -> Path:
    """A pipeline's tensors as its authors put them in a single file; its sizes are `original`."""
    import json

    from lydite.core.tensorfile import save

    config = json.loads((folder / "unet" / "config.json").read_text())
    named = {
        "model.diffusion_model.": original_unet(read_tensors(folder / "unet"), config),
        "first_stage_model.": original_vae(read_tensors(folder / "vae")),
    }
    first = folder / "text_encoder"
    if (folder / "text_encoder_2").exists():
        number = int(first.exists())
        second = original_openclip(read_tensors(folder / "text_encoder_2"))
        named[f"conditioner.embedders.{number}.model."] = second
    if first.exists():
        xl = (folder / "text_encoder_2").exists()
        prefix = "conditioner.embedders.0.transformer." if xl else "cond_stage_model.transformer."
        clip = {name.removeprefix("text_model."): x for name, x in read_tensors(first).items()}
        named[prefix + "text_model."] = clip
    save(path, {prefix + name: x for prefix, part in named.items() for name, x in part.items()})
    return path
