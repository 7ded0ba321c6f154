"""Models that mflux saved: a folder for each network and no configs.

What no tensor shows is as mflux has it, which is as the models were published.
"""

from functools import partial

from lydite.pipelines.families import flux_single_file, sd3_single_file
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.inferred_models import (
    Found,
    Inferred,
    InferredModel,
    InferredNetwork,
    Shapes,
)
from lydite.weights.maps import mflux as names
from lydite.weights.maps import text as text_map
from lydite.weights.rules import Rule

HEAD_DIM = 128  # of the transformers and the Qwen text encoders


def _clip(shapes: Shapes, found: Found) -> Inferred:
    config = sd3_single_file.clip_config(shapes, "quick_gelu", width=768)
    return "CLIPTextModel", config, text_map.CLIP


def _qwen(shapes: Shapes, found: Found, class_name: str, rules: tuple[Rule, ...]) -> Inferred:
    """A Qwen text encoder, whose layers are named alike but for what is before them."""
    shapes = shapes.renamed(rules)
    sizes = {"width": 3584, "hidden": 18944, "queries": 3584, "keys": 512, "vocabulary": 152064}
    prefix = "model.language_model." if class_name.startswith("Qwen2") else ""
    sizes |= shapes.sizes({prefix + name: axes for name, axes in _QWEN_AXES.items()})
    config = dict(
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["width"],
        intermediate_size=sizes["hidden"],
        num_hidden_layers=shapes.count(f"{prefix}layers.{{i}}.{{p}}"),
        num_attention_heads=sizes["queries"] // HEAD_DIM,
        num_key_value_heads=sizes["keys"] // HEAD_DIM,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
    )
    return class_name, config, rules


def _qwen_image(shapes: Shapes, found: Found) -> Inferred:
    shapes = shapes.renamed(names.QWEN_IMAGE)
    sizes = {"width": 3072, "input": 64, "output": 64, "text": 3584}
    sizes |= shapes.sizes(_QWEN_IMAGE_AXES)
    config = dict(
        in_channels=sizes["input"],
        out_channels=sizes["output"] // 4,
        num_layers=shapes.count("transformer_blocks.{i}.{p}"),
        attention_head_dim=HEAD_DIM,
        num_attention_heads=sizes["width"] // HEAD_DIM,
        joint_attention_dim=sizes["text"],
        axes_dims_rope=(16, 56, 56),
    )
    return "QwenImageTransformer2DModel", config, names.QWEN_IMAGE


def _qwen_image_vae(shapes: Shapes, found: Found) -> Inferred:
    levels = shapes.count("encoder.down_blocks.{i}.{p}")
    resnets = shapes.count("encoder.down_blocks.{j}.resnets.{i}.{p}")
    rules = names.qwen_image_vae(levels, resnets)
    sizes = {"base": 96, "latents": 16}
    sizes |= shapes.sizes(
        {
            "encoder.conv_in.conv3d.bias": "base",
            "decoder.norm_out.weight": "base one one one",
            "post_quant_conv.conv3d.bias": "latents",
            "encoder.down_blocks.{i}.resnets.{j}.conv1.conv3d.bias": "width{i}",
            "encoder.down_blocks.{i}.resnets.{j}.conv2.conv3d.bias": "width{i}",
        }
    )
    widths = [sizes.get(f"width{level}", sizes["base"]) for level in range(levels)]
    config = dict(
        base_dim=sizes["base"],
        z_dim=sizes["latents"],
        dim_mult=tuple(width // sizes["base"] for width in widths),
        num_res_blocks=resnets,
        temperal_downsample=(False, *(True,) * (levels - 2)),
        latents_mean=LATENTS_MEAN,
        latents_std=LATENTS_STD,
        input_channels=3,
    )
    return "AutoencoderKLQwenImage", config, rules


# Of every Qwen-Image, whose latents have 16 channels.
LATENTS_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
LATENTS_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)


def _z_image(shapes: Shapes, found: Found) -> Inferred:
    shapes = shapes.renamed(names.Z_IMAGE)
    sizes = {"width": 3840, "input": 64, "text": 2560} | shapes.sizes(_Z_IMAGE_AXES)
    config = dict(
        in_channels=sizes["input"] // 4,
        dim=sizes["width"],
        n_layers=shapes.count("layers.{i}.{p}"),
        n_refiner_layers=shapes.count("noise_refiner.{i}.{p}", "context_refiner.{i}.{p}"),
        n_heads=sizes["width"] // HEAD_DIM,
        norm_eps=1e-5,
        cap_feat_dim=sizes["text"],
        rope_theta=256.0,
        axes_dims=(32, 48, 48),
        axes_lens=(1024, 512, 512),
    )
    return "ZImageTransformer2DModel", config, names.Z_IMAGE


_QWEN_AXES = {
    "embed_tokens.weight": "vocabulary width",
    "norm.weight": "width",
    "layers.{i}.input_layernorm.weight": "width",
    "layers.{i}.self_attn.q_proj.weight": "queries width",
    "layers.{i}.self_attn.k_proj.weight": "keys width",
    "layers.{i}.self_attn.v_proj.weight": "keys width",
    "layers.{i}.mlp.up_proj.weight": "hidden width",
    "layers.{i}.mlp.down_proj.weight": "width hidden",
}
_QWEN_IMAGE_AXES = {
    "img_in.weight": "width input",
    "txt_in.weight": "width text",
    "txt_norm.weight": "text",
    "proj_out.weight": "output width",
    "proj_out.bias": "output",
    "transformer_blocks.{i}.attn.to_q.weight": "width width",
    "transformer_blocks.{i}.attn.to_q.bias": "width",
}
_Z_IMAGE_AXES = {
    "all_x_embedder.2-1.weight": "width input",
    "all_final_layer.2-1.linear.weight": "input width",
    "cap_embedder.0.weight": "text",
    "cap_embedder.1.weight": "width text",
    "layers.{i}.attention.to_q.weight": "width width",
    "layers.{i}.attention_norm1.weight": "width",
}

_KL_VAE = InferredNetwork(
    "vae",
    "vae/",
    "decoder.conv_norm_out.norm.",
    partial(
        sd3_single_file.infer_vae,
        levels=("encoder.down_blocks", "decoder.up_blocks"),
        rules=lambda levels: names.KL_VAE,
        scaling_factor=0.3611,
        shift_factor=0.1159,
    ),
)

FLUX = InferredModel(
    title="FLUX.1 of mflux",
    networks=(
        InferredNetwork(
            "transformer",
            "transformer/",
            "single_transformer_blocks.",
            partial(flux_single_file.infer_transformer, rules=names.FLUX),
        ),
        InferredNetwork("text_encoder", "text_encoder/", "text_model.", _clip),
        InferredNetwork(
            "text_encoder_2",
            "text_encoder_2/",
            "t5_blocks.",
            partial(sd3_single_file.infer_t5, rules=names.T5),
        ),
        _KL_VAE,
    ),
    kinds=KINDS,
    main="transformer",
    alone=(),
)
QWEN_IMAGE = InferredModel(
    title="Qwen-Image of mflux",
    networks=(
        InferredNetwork("transformer", "transformer/", "txt_norm.", _qwen_image),
        InferredNetwork(
            "text_encoder",
            "text_encoder/",
            "encoder.layers.",
            partial(_qwen, class_name="Qwen2_5_VLForConditionalGeneration", rules=names.QWEN2_5_VL),
        ),
        InferredNetwork("vae", "vae/", "decoder.up_block0.", _qwen_image_vae),
    ),
    kinds=KINDS,
    main="transformer",
    alone=(),
)
Z_IMAGE = InferredModel(
    title="Z-Image of mflux",
    networks=(
        InferredNetwork("transformer", "transformer/", "cap_embedder.", _z_image),
        InferredNetwork(
            "text_encoder",
            "text_encoder/",
            "layers.",
            partial(_qwen, class_name="Qwen3Model", rules=names.QWEN3),
        ),
        _KL_VAE,
    ),
    kinds=KINDS,
    main="transformer",
    alone=(),
)
