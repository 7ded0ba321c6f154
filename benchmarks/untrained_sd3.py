"""A small Stable Diffusion 3 checkpoint with random weights, for tests and benchmarks.

It is a folder in diffusers' layout with every part of the real one; T5 only where asked for. It
draws coloured noise.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map_with_path
from numpy.typing import NDArray

from lydite.core.files import write_atomic
from lydite.models.mmdit import MMDiTConfig
from lydite.models.text.clip import CLIPTextConfig
from lydite.models.text.t5 import T5Config
from lydite.models.vae.kl import AutoencoderKLConfig
from lydite.pipelines.families.network_classes import KINDS
from lydite.weights.load import save

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

Normals = NDArray[np.float32]
Draw = Callable[[str, Normals], Normals]  # name of a parameter and normal numbers -> its values


def draw_parameter(path: str, normals: Normals) -> Normals:
    """Matrices that keep the size of what passes through them; vectors near 0, or 1 in norms."""
    if normals.ndim > 1:
        return normals * (normals.size // normals.shape[0]) ** -0.5
    return normals * 0.1 + (1.0 if "norm" in path and path.endswith("weight") else 0.0)


def make_untrained(
    folder: Path,
    *,
    transformer: MMDiTConfig = TRANSFORMER,
    vae: AutoencoderKLConfig = VAE,
    clip_widths: tuple[int, int] = (32, 64),
    clip_heads: tuple[int, int] = (2, 2),
    clip_layers: int = 2,
    t5: T5Config | None = None,
    draw: Draw = draw_parameter,
    seed: int = 0,
) -> Path:
    """Write the folder; the same seed gives the same weights."""
    vocabulary = write_clip_tokenizer(folder / "tokenizer", pad="<|endoftext|>")
    write_clip_tokenizer(folder / "tokenizer_2", pad="!")
    clip_l, clip_g = (
        clip_config(vocabulary, width, heads, clip_layers, activation)
        for width, heads, activation in zip(
            clip_widths, clip_heads, ("quick_gelu", "gelu"), strict=True
        )
    )
    networks: dict[str, tuple[str, Any]] = {
        "transformer": ("SD3Transformer2DModel", transformer),
        "vae": ("AutoencoderKL", vae),
        "text_encoder": ("CLIPTextModelWithProjection", clip_l),
        "text_encoder_2": ("CLIPTextModelWithProjection", clip_g),
    }
    index = dict(_INDEX)
    if t5 is not None:
        write_t5_tokenizer(folder / "tokenizer_3")
        networks["text_encoder_3"] = ("T5EncoderModel", t5)
        index["text_encoder_3"] = ["transformers", "T5EncoderModel"]
        index["tokenizer_3"] = ["transformers", "T5Tokenizer"]
    for number, (name, (class_name, config)) in enumerate(networks.items()):
        write_network(folder / name, class_name, config, draw, seed + number)
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}
    write_json(folder / "scheduler" / "scheduler_config.json", {**scheduler, "shift": 3.0})
    write_json(folder / "model_index.json", index)
    return folder


def clip_config(
    vocabulary: int, width: int, heads: int, layers: int, activation: Literal["quick_gelu", "gelu"]
) -> CLIPTextConfig:
    """A CLIP text encoder for the tokenizer of `write_clip_tokenizer`."""
    return CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=77,
        hidden_act=activation,
        layer_norm_eps=1e-5,
        eos_token_id=vocabulary - 1,
        projection_dim=width,
    )


def write_network(folder: Path, class_name: str, config: Any, draw: Draw, seed: int) -> None:
    """One component of a checkpoint with random weights."""
    kind = KINDS[class_name]
    model = kind.build(config)
    generator = np.random.Generator(np.random.PCG64(seed))

    def drawn(path: str, value: mx.array) -> mx.array:
        normals = generator.standard_normal(value.shape, dtype=np.float32)
        return mx.array(draw(path, normals))

    model.update(tree_map_with_path(drawn, model.parameters()))
    from_diffusers = not isinstance(config, CLIPTextConfig | T5Config)
    name = "diffusion_pytorch_model" if from_diffusers else "model"
    label = {"_class_name": class_name} if from_diffusers else {"architectures": [class_name]}
    if class_name == "T5EncoderModel":  # transformers looks for the class by this
        label |= {"model_type": "t5"}
    save(model, folder / f"{name}.safetensors", kind.rules)
    write_json(folder / "config.json", {**label, **asdict(config)})


def write_clip_tokenizer(folder: Path, pad: str, size: int = 0) -> int:
    """A byte-level CLIP vocabulary without merges: every letter is a token.

    `size` fills it up with tokens that no text has.
    """
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + index) for index in range(256 - len(letters))]
    tokens = [
        *letters,
        *(f"{letter}</w>" for letter in letters),
        *(f"unused {index}" for index in range(2 * len(letters), size - 2)),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    write_json(folder / "vocab.json", {token: index for index, token in enumerate(tokens)})
    write_atomic(folder / "merges.txt", b"#version: 0.2\n")
    specials = {"bos_token": tokens[-2], "eos_token": tokens[-1], "unk_token": tokens[-1]}
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, **specials}
    write_json(folder / "tokenizer_config.json", {**settings, "pad_token": pad})
    return len(tokens)


def write_t5_tokenizer(folder: Path) -> None:
    """Every letter is a piece, and there are the hundred sentinels T5 always has."""
    specials = ["<pad>", "</s>", "<unk>"]
    sentinels = [f"<extra_id_{index}>" for index in reversed(range(100))]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = [*specials, "▁", *letters, *sentinels]
    scores = {"▁": -2.0} | {letter: -6.0 for letter in letters}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": index, "content": piece, **flags, "special": True}
        for index, piece in enumerate(pieces)
        if piece in specials or piece in sentinels
    ]
    space = {"replacement": "▁", "prepend_scheme": "always", "split": True}
    splits = [{"type": "WhitespaceSplit"}, {"type": "Metaspace", **space}]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "decoder": {"type": "Metaspace", **space},
        "model": {
            "type": "Unigram",
            "unk_id": 2,
            "vocab": [[piece, scores.get(piece, 0.0)] for piece in pieces],
            "byte_fallback": False,
        },
    }
    write_json(folder / "tokenizer.json", tokenizer)
    roles = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 100, **roles}
    write_json(
        folder / "tokenizer_config.json",
        {**config, "extra_special_tokens": list(reversed(sentinels))},
    )


def write_json(path: Path, value: Any) -> None:
    """A JSON file, with its folders."""
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
