"""SD3 in one file, in its authors' names: which networks are inside, and their geometry.

Such a file has no config, so sizes are read off tensor shapes. Where many tensors show the same
size the majority decides: one damaged tensor is then named by the audit instead of bending the
whole model to fit it. Constants that no shape shows are SD3's own.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

from lydite.core.checkpoint import open_checkpoint
from lydite.core.config import read_config
from lydite.core.errors import ConfigError, WeightsError
from lydite.core.names import match
from lydite.core.tensorfile import TensorInfo
from lydite.pipelines.components import KINDS, Component
from lydite.weights.audit import Ledger, audit
from lydite.weights.maps import mmdit as mmdit_map
from lydite.weights.maps import text as text_map
from lydite.weights.maps import vae as vae_map
from lydite.weights.rules import Drop, Rule
from lydite.weights.source import Scope

HEAD_DIM = 64  # of every attention in SD3, its CLIP encoders and T5

PREFIXES = {
    "transformer": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "text_encoder": "text_encoders.clip_l.transformer.",
    "text_encoder_2": "text_encoders.clip_g.transformer.",
    "text_encoder_3": "text_encoders.t5xxl.transformer.",
}

# What may lie outside those prefixes.
LEFTOVERS: tuple[Rule, ...] = (
    Drop("text_encoders.{p}.logit_scale", because="used by contrastive training only"),
)


def components(path: Path) -> dict[str, Component]:
    """The networks inside a single-file checkpoint."""
    with open_checkpoint(path) as checkpoint:
        names = dict(checkpoint.tensors)
    bare = any(name.startswith("joint_blocks.") for name in names)
    prefixes = {"transformer": ""} if bare else PREFIXES
    found: dict[str, Component] = {}
    for name, prefix in prefixes.items():
        tensors = {key.removeprefix(prefix): names[key] for key in names if key.startswith(prefix)}
        if tensors:
            found[name] = _component(name, path, Shapes(path, prefix, tensors))
    if "transformer" not in found and "vae" not in found:
        raise ConfigError(
            f"{path}: no network we know. Expected SD3's names (joint_blocks.…, "
            f"first_stage_model.…), found {', '.join(sorted(names)[:3])} … "
            "A component's file needs its config.json beside it."
        )
    return found


def leftovers(path: Path) -> Ledger:
    """The tensors outside every network: dropped for a reason, or unexpected."""
    with open_checkpoint(path) as checkpoint:
        bare = any(name.startswith("joint_blocks.") for name in checkpoint.tensors)
        scope = Scope(checkpoint, exclude=("",) if bare else tuple(PREFIXES.values()))
        return audit(scope, {}, LEFTOVERS, where=f"{path} (outside every network)")


@dataclass(frozen=True)
class Shapes:
    """Tensor shapes under one prefix, asked by pattern."""

    path: Path
    prefix: str
    tensors: Mapping[str, TensorInfo]

    def vote(self, axis: int, *patterns: str, rank: int | None = None) -> int:
        """The size along `axis` that most tensors of these names agree on."""
        sizes = Counter(
            info.shape[axis]
            for name, info in self.tensors.items()
            for pattern in patterns
            if match(pattern, name) is not None
            and -len(info.shape) <= axis < len(info.shape)
            and rank in (None, len(info.shape))
        )
        if not sizes:
            raise WeightsError(
                f"{self.path}: {self.prefix}{patterns[0]} is missing or has the wrong number of "
                "dimensions; the geometry of the model is read from it."
            )
        return sizes.most_common(1)[0][0]

    def count(self, pattern: str) -> int:
        """One more than the largest number that {i} takes."""
        found = [int(slots["i"]) for name in self.tensors if (slots := match(pattern, name))]
        if not found or max(found) > 999:
            raise WeightsError(f"{self.path}: no usable tensors {self.prefix}{pattern}.")
        return max(found) + 1

    def has(self, pattern: str) -> bool:
        return any(match(pattern, name) is not None for name in self.tensors)


def _component(name: str, path: Path, shapes: Shapes) -> Component:
    class_name, raw, rules = _INFER[name](shapes)
    kind = KINDS[class_name]
    config = read_config(kind.config, raw, where=f"{path} ({name}, read off its shapes)")
    return Component(name, path, kind, config, rules, shapes.prefix)


Inferred = tuple[str, dict[str, Any], tuple[Rule, ...]]  # class, config, table


def _transformer(shapes: Shapes) -> Inferred:
    depth = shapes.count("joint_blocks.{i}.{p}")
    width = shapes.vote(0, "joint_blocks.{i}.x_block.attn.proj.bias")
    channels = shapes.vote(1, "x_embedder.proj.weight", rank=4)
    patch = isqrt(shapes.vote(0, "final_layer.linear.bias") // channels)
    side = isqrt(shapes.vote(1, "pos_embed", rank=3))
    dual = {
        int(slots["i"])
        for name in shapes.tensors
        if (slots := match("joint_blocks.{i}.x_block.attn2.{p}", name))
    }
    config = dict(
        sample_size=128,
        patch_size=patch,
        in_channels=channels,
        num_layers=depth,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=width // HEAD_DIM,
        joint_attention_dim=shapes.vote(1, "context_embedder.weight", rank=2),
        caption_projection_dim=width,
        pooled_projection_dim=shapes.vote(1, "y_embedder.mlp.0.weight", rank=2),
        out_channels=channels,
        pos_embed_max_size=side,
        dual_attention_layers=tuple(sorted(dual)),
        qk_norm="rms_norm" if shapes.has("joint_blocks.{i}.{p}.ln_q.weight") else None,
    )
    return "SD3Transformer2DModel", config, mmdit_map.original(depth)


def _vae(shapes: Shapes) -> Inferred:
    levels = shapes.count("encoder.down.{i}.{p}")
    config = dict(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=tuple(
            shapes.vote(
                0,
                *(f"encoder.down.{level}.block.{{j}}.{part}.bias" for part in ("conv1", "conv2")),
                f"encoder.down.{level}.block.{{j}}.norm2.weight",
            )
            for level in range(levels)
        ),
        layers_per_block=shapes.count("encoder.down.0.block.{i}.{p}"),
        latent_channels=shapes.vote(1, "decoder.conv_in.weight", rank=4),
        norm_num_groups=32,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        use_quant_conv=shapes.has("quant_conv.{p}"),
        use_post_quant_conv=shapes.has("post_quant_conv.{p}"),
        mid_block_add_attention=shapes.has("{p}.mid.attn_1.{q}"),
    )
    return "AutoencoderKL", config, vae_map.original(levels)


def _clip_l(shapes: Shapes) -> Inferred:
    return "CLIPTextModelWithProjection", _clip(shapes, "quick_gelu"), text_map.CLIP_L_ORIGINAL


def _clip_g(shapes: Shapes) -> Inferred:
    return "CLIPTextModelWithProjection", _clip(shapes, "gelu"), text_map.CLIP


def _clip(shapes: Shapes, activation: str) -> dict[str, Any]:
    layer = "text_model.encoder.layers.{i}"
    width = shapes.vote(0, f"{layer}.layer_norm1.weight", f"{layer}.layer_norm2.weight")
    return dict(
        vocab_size=shapes.vote(0, "text_model.embeddings.token_embedding.weight", rank=2),
        hidden_size=width,
        intermediate_size=shapes.vote(0, f"{layer}.mlp.fc1.bias"),
        num_hidden_layers=shapes.count("text_model.encoder.layers.{i}.{p}"),
        num_attention_heads=max(width // HEAD_DIM, 1),
        max_position_embeddings=shapes.vote(
            0, "text_model.embeddings.position_embedding.weight", rank=2
        ),
        hidden_act=activation,
        layer_norm_eps=1e-5,
        eos_token_id=2,  # the pooled output is taken at the highest token id, the end of text
        projection_dim=width,
    )


def _t5(shapes: Shapes) -> Inferred:
    attention = "encoder.block.{i}.layer.0.SelfAttention"
    dense = "encoder.block.{i}.layer.1.DenseReluDense"
    config = dict(
        vocab_size=shapes.vote(0, "shared.weight", "encoder.embed_tokens.weight", rank=2),
        d_model=shapes.vote(0, "encoder.block.{i}.layer.{j}.layer_norm.weight"),
        d_kv=HEAD_DIM,
        d_ff=shapes.vote(0, f"{dense}.wi_0.weight", f"{dense}.wi_1.weight", f"{dense}.wi.weight"),
        num_layers=shapes.count("encoder.block.{i}.{p}"),
        num_heads=shapes.vote(0, f"{attention}.q.weight", f"{attention}.k.weight") // HEAD_DIM,
        relative_attention_num_buckets=shapes.vote(
            0, f"{attention}.relative_attention_bias.weight", rank=2
        ),
        relative_attention_max_distance=128,
        layer_norm_epsilon=1e-6,
        feed_forward_proj="gated-gelu",
    )
    return "T5EncoderModel", config, text_map.T5


_INFER: dict[str, Callable[[Shapes], Inferred]] = {
    "transformer": _transformer,
    "vae": _vae,
    "text_encoder": _clip_l,
    "text_encoder_2": _clip_g,
    "text_encoder_3": _t5,
}
