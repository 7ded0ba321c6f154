"""SD3 in one file, in its authors' names: which networks are inside, and their geometry."""

from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import Any

from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.inferred_models import Found, Inferred, InferredModel, InferredNetwork, Shapes
from lydite.weights.maps import mmdit as mmdit_map
from lydite.weights.maps import text as text_map
from lydite.weights.maps import vae as vae_map
from lydite.weights.rules import Drop, Rule

HEAD_DIM = 64  # of every attention in SD3, its CLIP encoders and T5
CHANNELS = 16  # of its latents


Rules = Callable[[int], tuple[Rule, ...]]  # the table of a network with so many blocks or levels


def infer_transformer(shapes: Shapes, found: Found, blocks: str, rules: Rules) -> Inferred:
    """Class, config and rules of a transformer whose blocks are named `blocks`.{i}."""
    depth = shapes.count(f"{blocks}.{{i}}.{{p}}")
    shapes = shapes.renamed(rules(depth))
    dual = shapes.numbers("transformer_blocks.{i}.attn2.{p}")
    sizes = {"width": 1536, "joint": 4096, "pooled": 2048, "positions": 192**2}
    if "text_encoder_3" in found:
        sizes["joint"] = found["text_encoder_3"].config.d_model
    if "text_encoder" in found and "text_encoder_2" in found:
        clips = (found["text_encoder"], found["text_encoder_2"])
        sizes["pooled"] = sum(clip.config.projection_dim for clip in clips)
    sizes |= shapes.sizes(_TRANSFORMER_AXES)
    config = dict(
        sample_size=128,
        patch_size=2,
        in_channels=CHANNELS,
        num_layers=depth,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=_heads(sizes["width"]),
        joint_attention_dim=sizes["joint"],
        caption_projection_dim=sizes["width"],
        pooled_projection_dim=sizes["pooled"],
        out_channels=CHANNELS,
        pos_embed_max_size=isqrt(sizes["positions"]),
        dual_attention_layers=tuple(
            index
            for index in range(depth)
            if dual[index] >= 5  # of 8, or of 10 with norms
        ),
        qk_norm="rms_norm" if shapes.most(_QK_NORMS, 4 * depth) else None,
    )
    return "SD3Transformer2DModel", config, rules(depth)


def infer_vae(
    shapes: Shapes, found: Found, levels: tuple[str, str], rules: Rules, **constants: float
) -> Inferred:
    """Class, config and rules of a KL autoencoder whose resolutions are named by `levels`."""
    count = shapes.count(*(f"{level}.{{i}}.{{p}}" for level in levels))
    shapes = shapes.renamed(rules(count))
    sizes = shapes.sizes(_VAE_AXES)
    config = dict(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * count,
        up_block_types=("UpDecoderBlock2D",) * count,
        block_out_channels=tuple(sizes.get(f"width{level}", 512) for level in range(count)),
        layers_per_block=shapes.count("encoder.down_blocks.{j}.resnets.{i}.{p}"),
        latent_channels=CHANNELS,
        norm_num_groups=32,
        use_quant_conv=shapes.most("quant_conv.{p}", 2),
        use_post_quant_conv=shapes.most("post_quant_conv.{p}", 2),
        mid_block_add_attention=shapes.most("{p}.mid_block.attentions.0.{q}", 20),
        **constants,
    )
    return "AutoencoderKL", config, rules(count)


def _clip_l(shapes: Shapes, found: Found) -> Inferred:
    config = clip_config(shapes, "quick_gelu", width=768)
    return "CLIPTextModelWithProjection", config, text_map.CLIP_L_ORIGINAL


def _clip_g(shapes: Shapes, found: Found) -> Inferred:
    return "CLIPTextModelWithProjection", clip_config(shapes, "gelu", width=1280), text_map.CLIP


def clip_config(shapes: Shapes, activation: str, *, width: int) -> dict[str, Any]:
    """The config of a CLIP text encoder in transformers' names."""
    sizes = {"vocabulary": 49408, "width": width, "hidden": 4 * width}
    sizes |= shapes.sizes(_CLIP_AXES)
    return dict(
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["width"],
        intermediate_size=sizes["hidden"],
        num_hidden_layers=shapes.count("text_model.encoder.layers.{i}.{p}"),
        num_attention_heads=_heads(sizes["width"]),
        max_position_embeddings=77,
        hidden_act=activation,
        layer_norm_eps=1e-5,
        eos_token_id=2,  # the pooled output is taken at the highest token id, the end of text
        projection_dim=sizes["width"],
    )


def infer_t5(shapes: Shapes, found: Found, rules: tuple[Rule, ...] = text_map.T5) -> Inferred:
    """Class, config and rules of a T5 encoder of version 1.1."""
    shapes = shapes.renamed(rules)
    sizes = {"vocabulary": 32128, "width": 4096, "hidden": 10240, "inner": 4096}
    sizes |= shapes.sizes(_T5_AXES)
    config = dict(
        vocab_size=sizes["vocabulary"],
        d_model=sizes["width"],
        d_kv=HEAD_DIM,
        d_ff=sizes["hidden"],
        num_layers=shapes.count("encoder.block.{i}.{p}"),
        num_heads=_heads(sizes["inner"]),
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        layer_norm_epsilon=1e-6,
        feed_forward_proj="gated-gelu",
    )
    return "T5EncoderModel", config, rules


def _heads(width: int) -> int:
    """How many heads; none, which every config refuses, when they do not fill the width."""
    return 0 if width % HEAD_DIM else width // HEAD_DIM


_QK_NORMS = "transformer_blocks.{i}.attn.norm_{q}"
_TRANSFORMER_AXES = {
    "pos_embed.pos_embed": "one positions width",
    "context_embedder.weight": "width joint",
    "context_embedder.bias": "width",
    "time_text_embed.text_embedder.linear_1.weight": "width pooled",
    "time_text_embed.text_embedder.linear_1.bias": "width",
    "transformer_blocks.{i}.attn.to_out.0.weight": "width width",
    "transformer_blocks.{i}.attn.to_out.0.bias": "width",
    "transformer_blocks.{i}.ff.net.2.bias": "width",
}
_VAE_AXES = {
    "encoder.down_blocks.{i}.resnets.{j}.conv1.bias": "width{i}",
    "encoder.down_blocks.{i}.resnets.{j}.conv2.bias": "width{i}",
    "encoder.down_blocks.{i}.resnets.{j}.norm2.bias": "width{i}",
    "encoder.down_blocks.{i}.resnets.{j}.norm2.weight": "width{i}",
}
_CLIP_AXES = {
    "text_model.embeddings.token_embedding.weight": "vocabulary width",
    "text_model.final_layer_norm.bias": "width",
    "text_model.encoder.layers.{i}.layer_norm1.bias": "width",
    "text_model.encoder.layers.{i}.mlp.fc1.weight": "hidden width",
    "text_model.encoder.layers.{i}.mlp.fc1.bias": "hidden",
    "text_model.encoder.layers.{i}.mlp.fc2.weight": "width hidden",
}
_T5_AXES = {
    "shared.weight": "vocabulary width",
    "encoder.block.{i}.layer.{j}.layer_norm.weight": "width",
    "encoder.block.{i}.layer.0.SelfAttention.q.weight": "inner width",
    "encoder.block.{i}.layer.0.SelfAttention.k.weight": "inner width",
    "encoder.block.{i}.layer.0.SelfAttention.o.weight": "width inner",
    "encoder.block.{i}.layer.1.DenseReluDense.wi_0.weight": "hidden width",
    "encoder.block.{i}.layer.1.DenseReluDense.wi_1.weight": "hidden width",
    "encoder.block.{i}.layer.1.DenseReluDense.wo.weight": "width hidden",
}

_CLIP = "text_encoders.clip_{}.transformer."

VAE_SCALE = {"scaling_factor": 1.5305, "shift_factor": 0.0609}

SINGLE_FILE = InferredModel(
    title="SD3",
    networks=(  # text encoders first: the transformer is as wide as they are
        InferredNetwork("text_encoder", _CLIP.format("l"), "text_model.", _clip_l),
        InferredNetwork("text_encoder_2", _CLIP.format("g"), "text_model.", _clip_g),
        InferredNetwork(
            "text_encoder_3", "text_encoders.t5xxl.transformer.", "encoder.block.", infer_t5
        ),
        InferredNetwork(
            "vae",
            "first_stage_model.",
            "encoder.down.",
            partial(
                infer_vae,
                levels=("encoder.down", "decoder.up"),
                rules=vae_map.original,
                **VAE_SCALE,
            ),
        ),
        InferredNetwork(
            "transformer",
            "model.diffusion_model.",
            "joint_blocks.",
            partial(infer_transformer, blocks="joint_blocks", rules=mmdit_map.original),
        ),
    ),
    kinds=KINDS,
    main="transformer",
    alone=("transformer",),
    leftovers=tuple(
        Drop(f"text_encoders.{name}.logit_scale", because="used by contrastive training only")
        for name in ("clip_l", "clip_g", "t5xxl")
    ),
)
