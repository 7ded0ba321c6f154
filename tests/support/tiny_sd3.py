"""Tiny Stable Diffusion 3 checkpoints with random weights, made and saved by the reference.

Widths are the smallest that keep what is special about SD3: 16 latent channels, patch 2, two CLIP
encoders with different activations, T5, an 8× VAE would be too slow so 4× here.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "sd3-medium": {},
    "sd3.5-large": {"qk_norm": "rms_norm"},
    "sd3.5-medium": {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)},
}
WORDS = ["a", "red", "star", "fox", "in", "snow", "the", "of", "blue", "ring"]


@dataclass(frozen=True)
class Sizes:
    """Widths of the tiny model; single files need heads of 64, the rest is faster without."""

    head: int = 8
    heads: int = 4
    clip_l: int = 16
    clip_g: int = 24
    clip_heads: int = 2
    t5_heads: int = 4
    t5_kv: int = 8
    groups: int = 8

    @property
    def joint(self) -> int:
        return 64 if self.head < 64 else 192


SMALL = Sizes()
ORIGINAL = Sizes(
    head=64, heads=2, clip_l=64, clip_g=128, clip_heads=1, t5_heads=2, t5_kv=64, groups=32
)


def make_pipeline(
    folder: Path, variant: str = "sd3-medium", *, t5: bool = True, sizes: Sizes = SMALL
) -> Path:
    """A whole StableDiffusion3Pipeline folder in diffusers' layout."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    torch.manual_seed(0)
    vocabulary = write_clip_tokenizer(folder / "seed_tokenizer", pad="<|endoftext|>")
    write_clip_tokenizer(folder / "seed_tokenizer_2", pad="!")
    clips = [
        make_clip(vocabulary, width, heads, activation)
        for width, heads, activation in (
            (sizes.clip_l, sizes.clip_heads, "quick_gelu"),
            (sizes.clip_g, sizes.clip_heads * (2 if sizes.head == 64 else 1), "gelu"),
        )
    ]
    pooled = sizes.clip_l + sizes.clip_g
    parts: dict[str, Any] = {
        "text_encoder_3": make_t5(sizes) if t5 else None,
        "tokenizer_3": t5_tokenizer() if t5 else None,
    }
    pipeline = StableDiffusion3Pipeline(
        transformer=make_transformer(variant, pooled=pooled, sizes=sizes),
        vae=make_vae(sizes=sizes, use_quant_conv=False, use_post_quant_conv=False),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=clips[0],
        tokenizer=clip_tokenizer(folder / "seed_tokenizer"),
        text_encoder_2=clips[1],
        tokenizer_2=clip_tokenizer(folder / "seed_tokenizer_2"),
        **parts,
    )
    pipeline.save_pretrained(folder)
    return folder


def make_transformer(variant: str, *, pooled: int = 40, sizes: Sizes = SMALL) -> Any:
    """SD3Transformer2DModel with two or three blocks."""
    from diffusers import SD3Transformer2DModel

    width = sizes.head * sizes.heads
    return randomize(
        SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=16,
            num_layers=3 if sizes.head < 64 else 2,
            attention_head_dim=sizes.head,
            num_attention_heads=sizes.heads,
            joint_attention_dim=sizes.joint,
            caption_projection_dim=width,
            pooled_projection_dim=pooled,
            out_channels=16,
            pos_embed_max_size=12,
            **VARIANTS[variant],
        )
    )


def make_vae(*, sizes: Sizes = SMALL, **options: Any) -> Any:
    """AutoencoderKL with three resolutions."""
    from diffusers import AutoencoderKL

    base = 2 * sizes.groups
    settings: dict[str, Any] = {
        "block_out_channels": (base, base, 2 * base) if sizes.head < 64 else (32, 32, 64),
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "latent_channels": 16,
        "norm_num_groups": sizes.groups,
        "layers_per_block": 1,
        "scaling_factor": 1.5305,
        "shift_factor": 0.0609,
    }
    return randomize(AutoencoderKL(**{**settings, **options}))


def make_clip(vocabulary: int, width: int, heads: int, activation: str) -> Any:
    """CLIPTextModelWithProjection with two layers."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=heads,
        max_position_embeddings=77,
        hidden_act=activation,
        projection_dim=width,
        bos_token_id=vocabulary - 2,
        eos_token_id=vocabulary - 1,
        pad_token_id=vocabulary - 1,
    )
    return randomize(CLIPTextModelWithProjection(config))


def make_t5(sizes: Sizes = SMALL) -> Any:
    """T5EncoderModel with two gated layers."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=160,
        d_model=sizes.joint,
        d_kv=sizes.t5_kv,
        d_ff=2 * sizes.joint,
        num_layers=2,
        num_heads=sizes.t5_heads,
        feed_forward_proj="gated-gelu",
    )
    return randomize(T5EncoderModel(config))


def randomize(model: Any) -> Any:
    """Disturb every parameter: a norm or bias left at 0 or 1 could hide a slip."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def write_clip_tokenizer(folder: Path, *, pad: str) -> int:
    """A byte-level BPE with the few words of this file; returns the size of its vocabulary."""
    from tokenizers.pre_tokenizers import ByteLevel

    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(ByteLevel.alphabet())
    vocabulary = ["!"] + [letter for letter in letters if letter != "!"]
    vocabulary += [f"{letter}</w>" for letter in vocabulary[:256]]
    merges: list[str] = []
    for word in WORDS:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            merged = parts[0] + parts[1]
            if f"{parts[0]} {parts[1]}" not in merges:
                merges.append(f"{parts[0]} {parts[1]}")
                vocabulary.append(merged)
            parts = [merged, *parts[2:]]
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]
    ids = {token: index for index, token in enumerate(dict.fromkeys(vocabulary))}
    (folder / "vocab.json").write_text(json.dumps(ids))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    settings = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": 77,
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "pad_token": pad,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(ids)


def clip_tokenizer(folder: Path) -> Any:
    from transformers import CLIPTokenizer

    return CLIPTokenizer.from_pretrained(folder)


def t5_tokenizer() -> Any:
    """A unigram tokenizer over single letters and the words of this file."""
    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(f"▁{word}", -3.0) for word in WORDS]
    pieces += [(chr(code), -6.0) for code in range(ord("a"), ord("z") + 1)]
    return T5Tokenizer(vocab=pieces, extra_ids=100)


def reload(model: Any, folder: Path, dtype: Any) -> Any:
    """The saved model as the reference loads it in another precision."""
    return type(model).from_pretrained(folder, torch_dtype=dtype).eval()


def read_tensors(path: Path) -> dict[str, Any]:
    """Every tensor of a component's folder or file, as NumPy arrays."""
    from lydite.core.checkpoint import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        return {name: checkpoint.read(name).copy() for name in checkpoint.tensors}


def original_file(folder: Path) -> dict[str, Any]:
    """A pipeline's tensors as SD3's authors put them in a single file; sizes are ORIGINAL.

    test_single_file proves it against diffusers' own converters, which go the other way.
    """
    named = {
        "model.diffusion_model.": original_transformer(read_tensors(folder / "transformer")),
        "first_stage_model.": original_vae(read_tensors(folder / "vae")),
        "text_encoders.clip_l.transformer.": read_tensors(folder / "text_encoder"),
        "text_encoders.clip_g.transformer.": read_tensors(folder / "text_encoder_2"),
        "text_encoders.t5xxl.transformer.": read_tensors(folder / "text_encoder_3"),
    }
    del named["text_encoders.clip_l.transformer."]["text_projection.weight"]
    return {prefix + name: x for prefix, part in named.items() for name, x in part.items()}


def original_transformer(tensors: dict[str, Any]) -> dict[str, Any]:
    """SD3Transformer2DModel's tensors under the names and in the order of the original MMDiT."""
    import numpy as np

    tensors = dict(tensors)
    depth = 1 + max(int(name.split(".")[1]) for name in tensors if "transformer_blocks" in name)
    for norm in (f"transformer_blocks.{depth - 1}.norm1_context", "norm_out"):
        for part in ("weight", "bias"):
            scale, shift = np.split(tensors[f"{norm}.linear.{part}"], 2)
            tensors[f"{norm}.linear.{part}"] = np.concatenate([shift, scale])
    for block in [f"transformer_blocks.{index}." for index in range(depth)]:
        for attention, stem in (
            ("attn.to_{}", "attn.qkv"),
            ("attn2.to_{}", "attn2.qkv"),
            ("attn.add_{}_proj", "attn.add_qkv"),
        ):
            for part in ("weight", "bias"):
                names = [f"{block}{attention.format(each)}.{part}" for each in "qkv"]
                if names[0] in tensors:
                    joined = np.concatenate([tensors.pop(name) for name in names])
                    tensors[f"{block}{stem}.{part}"] = joined
    return {_renamed(name, _ORIGINAL_TRANSFORMER): x for name, x in tensors.items()}


def original_vae(tensors: dict[str, Any]) -> dict[str, Any]:
    """AutoencoderKL's tensors under the names and shapes of the original one."""
    levels = 1 + max(int(name.split(".")[2]) for name in tensors if "up_blocks" in name)
    table = dict(_ORIGINAL_VAE)
    for level in range(levels):
        table[f"decoder.up_blocks.{level}."] = f"decoder.up.{levels - 1 - level}."
    return {
        _renamed(name, table): x[:, :, None, None] if ".to_" in name and x.ndim == 2 else x
        for name, x in tensors.items()
    }


def _renamed(name: str, table: dict[str, str]) -> str:
    for ours, theirs in table.items():
        name = name.replace(ours, theirs)
    return name


_ORIGINAL_TRANSFORMER = {
    "pos_embed.proj.": "x_embedder.proj.",
    "pos_embed.pos_embed": "pos_embed",
    "time_text_embed.timestep_embedder.linear_1.": "t_embedder.mlp.0.",
    "time_text_embed.timestep_embedder.linear_2.": "t_embedder.mlp.2.",
    "time_text_embed.text_embedder.linear_1.": "y_embedder.mlp.0.",
    "time_text_embed.text_embedder.linear_2.": "y_embedder.mlp.2.",
    "norm_out.linear.": "final_layer.adaLN_modulation.1.",
    "proj_out.": "final_layer.linear.",
    "transformer_blocks.": "joint_blocks.",
    "norm1.linear.": "x_block.adaLN_modulation.1.",
    "norm1_context.linear.": "context_block.adaLN_modulation.1.",
    "attn.add_qkv.": "context_block.attn.qkv.",
    "attn.to_add_out.": "context_block.attn.proj.",
    "attn.norm_added_": "context_block.attn.ln_",
    ".attn.qkv.": ".x_block.attn.qkv.",
    ".attn.to_out.0.": ".x_block.attn.proj.",
    ".attn.norm_": ".x_block.attn.ln_",
    ".attn2.to_out.0.": ".x_block.attn2.proj.",
    ".attn2.norm_": ".x_block.attn2.ln_",
    ".attn2.qkv.": ".x_block.attn2.qkv.",
    "ff_context.net.0.proj.": "context_block.mlp.fc1.",
    "ff_context.net.2.": "context_block.mlp.fc2.",
    "ff.net.0.proj.": "x_block.mlp.fc1.",
    "ff.net.2.": "x_block.mlp.fc2.",
    "block.x_block.": "block.",
}
_ORIGINAL_VAE = {
    "down_blocks.": "down.",
    ".downsamplers.0.": ".downsample.",
    ".upsamplers.0.": ".upsample.",
    ".conv_norm_out.": ".norm_out.",
    ".mid_block.attentions.0.group_norm.": ".mid.attn_1.norm.",
    ".mid_block.attentions.0.to_out.0.": ".mid.attn_1.proj_out.",
    ".mid_block.attentions.0.to_": ".mid.attn_1.",
    ".mid_block.resnets.0.": ".mid.block_1.",
    ".mid_block.resnets.1.": ".mid.block_2.",
    ".resnets.": ".block.",
    ".conv_shortcut.": ".nin_shortcut.",
}
