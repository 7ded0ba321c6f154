"""The model the bugs live in: a tiny Stable Diffusion 3 whose random weights hide nothing.

Default initialisation hides bugs: biases and gates of 0, norms of 1. Here every parameter is drawn,
widths make the usual slips expressible (square matrices) and height is not width, so that a swap of
the two shows. CLIP's embeddings are as small as in the real one, which is where an epsilon matters.
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
from lydite.models.text.t5 import T5Config
from lydite.models.vae.kl import AutoencoderKLConfig
from lydite.pipelines.components import KINDS
from lydite.pipelines.images import Pixels
from lydite.pipelines.sd3 import Request
from lydite.pipelines.untrained import make_untrained
from lydite.weights.save import save

NAME = "zoo subject"  # what traces call the model
SEED = 5
REQUEST = Request(
    prompt="A red star",  # the capital tells whether a tokenizer lowers it
    negative="blue fog",
    steps=3,
    guidance=4.0,
    width=32,
    height=48,
    text_length=16,
)

TRANSFORMER = MMDiTConfig(
    sample_size=12,
    patch_size=2,
    in_channels=16,
    num_layers=3,
    attention_head_dim=16,
    num_attention_heads=4,
    joint_attention_dim=64,
    caption_projection_dim=64,
    pooled_projection_dim=56,
    out_channels=16,
    pos_embed_max_size=12,
    dual_attention_layers=(0,),
    qk_norm="rms_norm",
)
VAE = AutoencoderKLConfig(
    in_channels=3,
    out_channels=3,
    down_block_types=("DownEncoderBlock2D",) * 3,
    up_block_types=("UpDecoderBlock2D",) * 3,
    block_out_channels=(16, 32, 32),
    layers_per_block=1,
    latent_channels=16,
    norm_num_groups=8,
    scaling_factor=1.5305,
    shift_factor=0.0609,
)
T5 = T5Config(
    vocab_size=130,
    d_model=64,
    d_kv=16,
    d_ff=96,
    num_layers=2,
    num_heads=4,
    relative_attention_num_buckets=16,
    relative_attention_max_distance=32,
    layer_norm_epsilon=1e-6,
    feed_forward_proj="gated-gelu",
    dense_act_fn="gelu_new",
    is_gated_act=True,
)


def make_subject(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint in diffusers' layout; the same seed gives the same weights."""
    make_untrained(folder, transformer=TRANSFORMER, vae=VAE, clip_widths=(24, 32))
    _write_t5_tokenizer(folder / "tokenizer_3")
    vocabulary = len(json.loads((folder / "tokenizer" / "vocab.json").read_bytes()))
    networks: dict[str, tuple[str, Any]] = {
        "transformer": ("SD3Transformer2DModel", TRANSFORMER),
        "vae": ("AutoencoderKL", VAE),
        "text_encoder": ("CLIPTextModelWithProjection", _clip(vocabulary, 24, 2, "quick_gelu")),
        "text_encoder_2": ("CLIPTextModelWithProjection", _clip(vocabulary, 32, 4, "gelu")),
        "text_encoder_3": ("T5EncoderModel", T5),
    }
    for index, (name, (class_name, config)) in enumerate(networks.items()):
        _write_network(folder / name, class_name, config, seed + index)
    index = json.loads((folder / "model_index.json").read_bytes())
    index["text_encoder_3"] = ["transformers", "T5EncoderModel"]
    index["tokenizer_3"] = ["transformers", "T5Tokenizer"]
    _write_json(folder / "model_index.json", index)
    return folder


def picture() -> Pixels:
    """What the encoder of the VAE is given: smooth, with an edge, unlike its mirror image."""
    y, x = np.mgrid[0:48, 0:32]
    waves = [np.sin(x / 5 + y / 9), np.cos(y / 7), (x + y > 40) * 1.5 - 0.75]
    return ((np.stack(waves, axis=-1) + 1) * 127).clip(0, 255).astype(np.uint8)


def _clip(vocabulary: int, width: int, heads: int, activation: Any) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=3,
        num_attention_heads=heads,
        max_position_embeddings=77,
        hidden_act=activation,
        layer_norm_eps=1e-5,
        eos_token_id=vocabulary - 1,
        projection_dim=width,
    )


def _write_network(folder: Path, class_name: str, config: Any, seed: int) -> None:
    kind = KINDS[class_name]
    model = kind.build(config)
    _draw_weights(model, seed)
    ours = class_name in ("SD3Transformer2DModel", "AutoencoderKL")
    label = {"_class_name": class_name} if ours else {"architectures": [class_name]}
    if class_name == "T5EncoderModel":  # transformers looks for the class by this
        label |= {"model_type": "t5"}
    save(
        model, folder / f"{'diffusion_pytorch_model' if ours else 'model'}.safetensors", kind.rules
    )
    _write_json(folder / "config.json", {**label, **asdict(config)})


def _draw_weights(model: nn.Module, seed: int) -> None:
    """Matrices that keep the size of what passes; biases, norms and gates that do something.

    CLIP's MLPs are numbers that bfloat16 holds exactly, for a control that stores them so.
    """
    generator = np.random.Generator(np.random.PCG64(seed))

    def draw(path: str, value: mx.array) -> mx.array:
        normal = generator.standard_normal(value.shape, dtype=np.float32)
        if path.endswith(("token_embedding.weight", "position_embedding.weight")):
            return mx.array(normal * 0.02)
        if path.endswith("pos_embed.pos_embed"):
            return mx.array(normal * 0.5)
        if path.endswith(("shared.weight", "relative_attention_bias.weight")):
            return mx.array(normal)
        if value.ndim > 1:
            fan_in = value.size // value.shape[0]
            if ".mlp." in path:
                return mx.array(normal * fan_in**-0.5).astype(mx.bfloat16).astype(mx.float32)
            unscaled = T5.d_kv if path.endswith("SelfAttention.q.weight") else 1
            return mx.array(normal * (fan_in * unscaled) ** -0.5)
        return mx.array(normal * 0.3 + (1.0 if "norm" in path and path.endswith("weight") else 0.0))

    model.update(tree_map_with_path(draw, model.parameters()))


def _write_t5_tokenizer(folder: Path) -> None:
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
    _write_json(folder / "tokenizer.json", tokenizer)
    roles = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 100, **roles}
    _write_json(
        folder / "tokenizer_config.json",
        {**config, "extra_special_tokens": list(reversed(sentinels))},
    )


def _write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2).encode())
