"""A tiny Stable Diffusion 3 folder with random weights: something to run with nothing downloaded.

It has every part of the real thing but T5, in diffusers' layout, and draws coloured noise.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path

from lydite.core.files import write_atomic
from lydite.models.mmdit import MMDiTConfig
from lydite.models.text.clip import CLIPTextConfig
from lydite.models.vae.kl import AutoencoderKLConfig
from lydite.pipelines.components import KINDS
from lydite.weights.save import save

TRANSFORMER = MMDiTConfig(
    sample_size=16,
    patch_size=2,
    in_channels=16,
    num_layers=4,
    attention_head_dim=32,
    num_attention_heads=4,
    joint_attention_dim=128,
    caption_projection_dim=128,
    pooled_projection_dim=96,
    out_channels=16,
    pos_embed_max_size=24,
    qk_norm="rms_norm",
)
VAE = AutoencoderKLConfig(
    in_channels=3,
    out_channels=3,
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    block_out_channels=(16, 32, 32, 32),
    layers_per_block=1,
    latent_channels=16,
    norm_num_groups=8,
    scaling_factor=1.5305,
    shift_factor=0.0609,
    use_quant_conv=False,
    use_post_quant_conv=False,
)


def make_untrained(
    folder: Path,
    *,
    transformer: MMDiTConfig = TRANSFORMER,
    vae: AutoencoderKLConfig = VAE,
    clip_widths: tuple[int, int] = (32, 64),
    seed: int = 0,
) -> Path:
    """Write the folder; the same seed gives the same weights."""
    vocabulary = _write_tokenizer(folder / "tokenizer", pad="<|endoftext|>")
    _write_tokenizer(folder / "tokenizer_2", pad="!")
    clip_l, clip_g = (
        _clip_config(vocabulary, width, activation)
        for width, activation in zip(clip_widths, ("quick_gelu", "gelu"), strict=True)
    )
    networks = {
        "transformer": ("SD3Transformer2DModel", transformer),
        "vae": ("AutoencoderKL", vae),
        "text_encoder": ("CLIPTextModelWithProjection", clip_l),
        "text_encoder_2": ("CLIPTextModelWithProjection", clip_g),
    }
    for index, (name, (class_name, config)) in enumerate(networks.items()):
        _write(folder / name, class_name, config, seed + index)
    _write_json(
        folder / "scheduler" / "scheduler_config.json",
        {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "num_train_timesteps": 1000,
            "shift": 3.0,
        },
    )
    _write_json(folder / "model_index.json", _INDEX)
    return folder


def _clip_config(vocabulary: int, width: int, activation: Any) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        hidden_act=activation,
        layer_norm_eps=1e-5,
        eos_token_id=vocabulary - 1,
        projection_dim=width,
    )


def _write(folder: Path, class_name: str, config: Any, seed: int) -> None:
    kind = KINDS[class_name]
    model = kind.build(config)
    _randomize(model, seed)
    from_diffusers = class_name in ("SD3Transformer2DModel", "AutoencoderKL")
    name = "diffusion_pytorch_model" if from_diffusers else "model"
    label = {"_class_name": class_name} if from_diffusers else {"architectures": [class_name]}
    save(model, folder / f"{name}.safetensors", kind.rules)
    _write_json(folder / "config.json", {**label, **asdict(config)})


def _randomize(model: nn.Module, seed: int) -> None:
    """Matrices that keep the size of what passes through them; vectors near 0, or 1 in norms."""
    generator = np.random.Generator(np.random.PCG64(seed))

    def draw(path: str, value: mx.array) -> mx.array:
        normal = generator.standard_normal(value.shape, dtype=np.float32)
        if value.ndim > 1:
            return mx.array(normal * (value.size // value.shape[0]) ** -0.5)
        return mx.array(normal * 0.1 + (1.0 if "norm" in path and path.endswith("weight") else 0.0))

    model.update(tree_map_with_path(draw, model.parameters()))


def _write_tokenizer(folder: Path, pad: str) -> int:
    """A byte-level CLIP vocabulary without merges: every letter is a token."""
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + index) for index in range(256 - len(letters))]
    tokens = [
        *letters,
        *(f"{letter}</w>" for letter in letters),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    _write_json(folder / "vocab.json", {token: index for index, token in enumerate(tokens)})
    write_atomic(folder / "merges.txt", b"#version: 0.2\n")
    specials = {"bos_token": tokens[-2], "eos_token": tokens[-1], "unk_token": tokens[-1]}
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, **specials}
    _write_json(folder / "tokenizer_config.json", {**settings, "pad_token": pad})
    return len(tokens)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(value, indent=2).encode())


_INDEX = {
    "_class_name": "StableDiffusion3Pipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_3": [None, None],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "tokenizer_3": [None, None],
    "transformer": ["diffusers", "SD3Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
