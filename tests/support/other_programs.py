"""Tiny models as mflux and DiffusionKit have them, and the same in diffusers' layout.

tests/data/other_programs_names.json was written by running mflux 0.24.0 and DiffusionKit 0.5.2: the
name of each of their tensors, and of diffusers' tensor that it is made from.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from support import tiny_flux, tiny_qwen_image, tiny_sd3, tiny_z_image

NAMES = Path(__file__).parents[1] / "data" / "other_programs_names.json"
VAE = {
    "block_out_channels": (32, 64, 128, 128),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "norm_num_groups": 32,
    "layers_per_block": 2,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def make_flux(folder: Path, **schedule: Any) -> Path:
    """FLUX.1-dev with heads of 128, CLIP and T5 with heads of 64."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
    from transformers import CLIPTextModel

    torch.manual_seed(0)
    vocabulary = tiny_sd3.write_clip_tokenizer(folder / "seed_tokenizer", pad="<|endoftext|>")
    sizes = tiny_sd3.ORIGINAL
    clip = tiny_sd3.make_clip(vocabulary, 64, 1, "quick_gelu").config
    t5 = tiny_sd3.make_t5(sizes)
    FluxPipeline(
        transformer=tiny_flux.make_transformer(
            "dev",
            in_channels=64,
            attention_head_dim=128,
            num_attention_heads=1,
            axes_dims_rope=(16, 56, 56),
            joint_attention_dim=t5.config.d_model,
            pooled_projection_dim=64,
        ),
        vae=tiny_sd3.make_vae(**VAE),
        scheduler=FlowMatchEulerDiscreteScheduler(
            **{"shift": 3.0, "use_dynamic_shifting": True, **schedule}
        ),
        text_encoder=tiny_sd3.randomize(CLIPTextModel(clip)),
        tokenizer=tiny_sd3.clip_tokenizer(folder / "seed_tokenizer"),
        text_encoder_2=t5,
        tokenizer_2=tiny_sd3.t5_tokenizer(),
    ).save_pretrained(folder)
    return folder


def make_z_image(folder: Path) -> Path:
    """Z-Image with heads of 128."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline
    from transformers import Qwen2Tokenizer

    torch.manual_seed(0)
    vocabulary = tiny_qwen_image.write_tokenizer(folder / "seed_tokenizer")
    tokenizer = Qwen2Tokenizer.from_pretrained(folder / "seed_tokenizer")
    tokenizer.chat_template = tiny_z_image.CHAT_TEMPLATE
    ZImagePipeline(
        transformer=tiny_z_image.make_transformer(
            in_channels=16,
            dim=128,
            n_heads=1,
            n_kv_heads=1,
            cap_feat_dim=64,
            axes_dims=[32, 48, 48],
            axes_lens=[1024, 512, 512],
            norm_eps=1e-5,  # mflux writes no config: eps are those of the published models
        ),
        vae=tiny_sd3.make_vae(**VAE),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=tiny_z_image.make_text_encoder(
            vocab_size=vocabulary,
            hidden_size=64,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=128,
            head_dim=128,
            rms_norm_eps=1e-6,
        ).model,
        tokenizer=tokenizer,
    ).save_pretrained(folder)
    return folder


def make_qwen_image(folder: Path) -> Path:
    """Qwen-Image with heads of 128 and latents of 16 channels."""
    import torch
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImagePipeline
    from transformers import Qwen2Tokenizer

    torch.manual_seed(0)
    vocabulary = tiny_qwen_image.write_tokenizer(folder / "seed_tokenizer")
    QwenImagePipeline(
        transformer=tiny_qwen_image.make_transformer(
            in_channels=64,
            out_channels=16,
            attention_head_dim=128,
            num_attention_heads=1,
            axes_dims_rope=(16, 56, 56),
            joint_attention_dim=128,
        ),
        vae=tiny_sd3.randomize(AutoencoderKLQwenImage(base_dim=8)),
        scheduler=FlowMatchEulerDiscreteScheduler(**tiny_qwen_image.SCHEDULER),
        text_encoder=tiny_qwen_image.make_text_encoder(
            vocab_size=vocabulary,
            hidden_size=128,
            num_attention_heads=1,
            num_key_value_heads=1,
            rms_norm_eps=1e-6,
            rope_parameters={
                "rope_type": "default",
                "mrope_section": [16, 24, 24],
                "rope_theta": 1e6,
            },
        ),
        tokenizer=Qwen2Tokenizer.from_pretrained(folder / "seed_tokenizer"),
    ).save_pretrained(folder)
    return folder


MAKERS: dict[str, Callable[[Path], Path]] = {
    "mflux/flux": make_flux,
    "mflux/qwen_image": make_qwen_image,
    "mflux/z_image": make_z_image,
    "diffusionkit/flux": lambda folder: make_flux(folder, shift=1.0, use_dynamic_shifting=False),
    "diffusionkit/sd3": lambda folder: tiny_sd3.make_pipeline(
        folder, "sd3.5-large", sizes=tiny_sd3.ORIGINAL
    ),
}


Arrays = dict[str, mx.array]
_PREFIXES = {"transformer": "model.diffusion_model.", "vae": "first_stage_model."}


def make_pair(kind: str, folder: Path) -> tuple[Path, Path]:
    """A model as the program saves it, and a folder in diffusers' layout with the same values.

    Of DiffusionKit's the text encoders, and with FLUX.1 the autoencoder, are in that folder only.
    """
    own, theirs = MAKERS[kind](folder / "own"), folder / "theirs"
    named: dict[str, Any] = json.loads(NAMES.read_text())
    in_one_file: Arrays = {}
    for part in sorted(own.glob("*/*.safetensors")):
        key, network = f"{kind}/{part.parent.name}", part.parent.name
        if key not in named:
            continue
        stored = cast(Arrays, mx.load(str(part)))
        if kind.startswith("diffusionkit"):
            stored = _without_keys_bias(stored, part.parent / "config.json")
        arrays = _named(stored, named[key])
        if kind.startswith("diffusionkit"):
            arrays = _as_diffusionkit(arrays)
        if key not in ("mflux/qwen_image/text_encoder", "diffusionkit/sd3/vae"):
            kept = ("x_embedder.weight",) if key == "diffusionkit/flux/transformer" else ()
            arrays, stored = _quantized(arrays), _quantized(stored, kept)
        mx.save_safetensors(str(part), stored, {"format": "pt"})
        if kind.startswith("mflux"):
            (theirs / network).mkdir(parents=True)
            half = len(arrays) // 2
            for index, names in enumerate((list(arrays)[:half], list(arrays)[half:])):
                shard = {name: arrays[name] for name in names}
                metadata = {"quantization_level": "4", "mflux_version": "0.9.0"}
                mx.save_safetensors(str(theirs / network / f"{index}.safetensors"), shard, metadata)
        else:
            prefix = _PREFIXES[network] if kind.endswith("sd3") else ""
            in_one_file |= {prefix + name: x for name, x in arrays.items()}
    if in_one_file:
        theirs = folder / "theirs.safetensors"
        mx.save_safetensors(str(theirs), in_one_file)
    else:
        for tokenizer in own.glob("tokenizer*"):
            shutil.copytree(tokenizer, theirs / tokenizer.name)
    return theirs, own


def _named(stored: Arrays, names: Any) -> Arrays:
    """Under the program's names, in MLX's order of axes."""
    pairs: dict[str, str] = {**{name: name for name in names["same"]}, **names["different"]}
    stored = {re.sub(_PREFIX, "", name): _mlx_order(x) for name, x in stored.items()}
    arrays: Arrays = {}
    for theirs, name in pairs.items():
        pattern = re.escape(re.sub(_PREFIX, "", name)).replace(r"\{\}", r"(\d+)")
        for key, x in stored.items():
            if found := re.fullmatch(rf"{pattern}(\.weight|\.bias)?", key):
                *number, end = found.groups("")
                arrays[theirs.format(*number) + end] = x
    return arrays


_PREFIX = r"^(text_)?model\."  # of some versions of transformers


def _mlx_order(x: mx.array) -> mx.array:
    """Channels last; one number for each channel as a vector."""
    if x.ndim < 3:
        return x
    return x.reshape(-1) if x.size == x.shape[0] else x.transpose(0, *range(2, x.ndim), 1)


def _without_keys_bias(stored: Arrays, config: Path) -> Arrays:
    """DiffusionKit has none, nor FLUX.1's guidance."""
    if config.parent.name == "transformer":
        settings = json.loads(config.read_text())
        if "guidance_embeds" in settings:
            config.write_text(json.dumps(settings | {"guidance_embeds": False}))
        zero = [name for name in stored if name.endswith(("to_k.bias", "add_k_proj.bias"))]
        stored = {**stored, **{name: mx.zeros_like(stored[name]) for name in zero}}
    return {name: x for name, x in stored.items() if "guidance" not in name}


def _as_diffusionkit(arrays: Arrays) -> Arrays:
    depth = (
        1 + max(int(name.split(".")[1]) for name in arrays if name.startswith("multimodal"))
        if any(name.startswith("multimodal") for name in arrays)
        else 0
    )
    last = f"multimodal_transformer_blocks.{depth - 1}.text_transformer_block.adaLN"
    is_sd3 = "x_pos_embedder.pos_embed.weight" in arrays
    made: Arrays = {}
    for name, x in arrays.items():
        if name.endswith("k_proj.bias"):
            continue
        if name.startswith("final_layer.adaLN") or (is_sd3 and name.startswith(last)):
            x = mx.concatenate(list(mx.split(x, 2))[::-1])  # shift first
        elif name == "x_pos_embedder.pos_embed.weight":
            x = x.transpose(0, 2, 1)[0]  # not a convolution
        elif name == "x_embedder.proj.weight" and x.ndim == 2:
            x = x[:, None, None]
        elif name.endswith("conv_shortcut.weight"):
            x = x[:, 0, 0]
        elif ".o_proj.weight" in name and name.startswith("unified"):
            x = x[:, : x.shape[0]]
        elif ".fc2.weight" in name and name.startswith("unified"):
            x = x[:, x.shape[0] :]
        made[name] = x
    return made


_TABLES = ("x_pos_embedder.pos_embed.weight",)  # no embedding of tokens


def _quantized(arrays: Arrays, kept: tuple[str, ...] = _TABLES) -> Arrays:
    """Every matrix of a linear or an embedding whose rows are whole groups, in 4 bits.

    mflux takes 8 for the modulation of Qwen-Image's image stream.
    """
    made: Arrays = {}
    for name, x in arrays.items():
        if not name.endswith(".weight") or x.ndim != 2 or x.shape[1] % 64 or name in kept:
            made[name] = x
            continue
        stem = name.removesuffix("weight")
        parts = mx.quantize(x, group_size=64, bits=8 if ".img_mod" in name else 4)
        made |= zip((name, f"{stem}scales", f"{stem}biases"), parts, strict=True)
    return made
