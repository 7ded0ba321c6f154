"""Tiny Qwen-Image models with random weights, made by the reference."""

import json
from pathlib import Path
from typing import Any

from support import tiny_sd3

SCHEDULER: dict[str, Any] = {  # of Qwen/Qwen-Image
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}


def make_pipeline(folder: Path) -> Path:
    """A whole QwenImagePipeline folder in diffusers' layout."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline
    from transformers import Qwen2Tokenizer

    torch.manual_seed(0)
    vocabulary = write_tokenizer(folder / "seed_tokenizer")
    pipeline = QwenImagePipeline(
        transformer=make_transformer(joint_attention_dim=64),
        vae=make_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        text_encoder=make_text_encoder(vocab_size=vocabulary),
        tokenizer=Qwen2Tokenizer.from_pretrained(folder / "seed_tokenizer"),
    )
    pipeline.save_pretrained(folder)
    return folder


def make_transformer(**options: Any) -> Any:
    """QwenImageTransformer2DModel with three blocks; heads of 24 channels, 4 + 8 + 12."""
    from diffusers import QwenImageTransformer2DModel

    settings: dict[str, Any] = {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 3,
        "attention_head_dim": 24,
        "num_attention_heads": 2,
        "joint_attention_dim": 40,
        "axes_dims_rope": (4, 8, 12),
    }
    return tiny_sd3.randomize(QwenImageTransformer2DModel(**{**settings, **options}))


def make_text_encoder(**options: Any) -> Any:
    """Qwen2_5_VLForConditionalGeneration with three layers and the smallest vision tower."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 2e-3,  # not what a framework would choose
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 3, 3],
            "rope_theta": 1_000_000.0,
        },
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(text_config={**text, **options}, vision_config=vision)
    return tiny_sd3.randomize(Qwen2_5_VLForConditionalGeneration(config))


def make_vae(**options: Any) -> Any:
    """AutoencoderKLQwenImage with four resolutions, of which two also halve the frames."""
    from diffusers import AutoencoderKLQwenImage

    settings: dict[str, Any] = {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "latents_mean": [-0.75, 0.1, 1.55, 0.4],
        "latents_std": [2.8, 1.4, 2.3, 1.2],
    }
    return tiny_sd3.randomize(AutoencoderKLQwenImage(**{**settings, **options}))


def write_tokenizer(folder: Path) -> int:
    """A Qwen2 tokenizer of bytes and a few words; returns the size of its vocabulary."""
    from tokenizers.pre_tokenizers import ByteLevel

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = sorted(ByteLevel.alphabet())
    merges: list[str] = []
    words = [*tiny_sd3.WORDS, "describe", "image", "一只", "café", "ĊĊ"]
    for word in [*words, *(f" {word}" for word in words)]:
        piece = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)[0][0]
        parts = list(piece if word != "ĊĊ" else word)
        while len(parts) > 1:
            if f"{parts[0]} {parts[1]}" not in merges:
                merges.append(f"{parts[0]} {parts[1]}")
                vocabulary.append(parts[0] + parts[1])
            parts = [parts[0] + parts[1], *parts[2:]]
    ids = {token: index for index, token in enumerate(dict.fromkeys(vocabulary))}
    (folder / "vocab.json").write_text(json.dumps(ids))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>"]
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(len(ids) + number): {"content": text, "special": text[1] == "|", **flags}
            for number, text in enumerate(special)
        },
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": 131072,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(ids) + len(special)
