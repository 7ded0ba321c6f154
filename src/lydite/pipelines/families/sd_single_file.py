"""Stable Diffusion 1.x, 2.x and XL in one file, in their authors' names.

Which networks are inside, and their geometry, read off names and shapes. As in SD3's files the
majority of tensors decides, so that the audit can name a damaged one.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from lydite.core.checkpoint import open_checkpoint
from lydite.core.errors import ConfigError
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.inferred_models import Found, Inferred, InferredModel, InferredNetwork, Shapes
from lydite.weights.maps import text as text_map
from lydite.weights.maps import unet as unet_map
from lydite.weights.maps import vae as vae_map
from lydite.weights.rules import Drop, Rule

HEAD_DIM = 64  # of every attention but SD 1.x's U-Net, which has
SD1_HEADS = 8  # at every level
TIME_ID_DIM = 256  # width of one time id's embedding in SDXL


def _unet(shapes: Shapes, found: Found) -> Inferred:
    levels = _levels(shapes)
    widths = shapes.sizes(_UNET_AXES)
    context = widths.get("context", 768)
    linear = _is_linear(shapes)
    attention = [_depth(shapes, f"input_blocks.{level[0]}.1") for level in levels]
    middle = _depth(shapes, "middle_block.1") or 1
    added = shapes.tensors.get("label_emb.0.0.weight")
    if "label_emb.weight" in shapes.tensors or (added is not None and context == 1024):
        raise ConfigError(
            "this U-Net takes class labels (an upscaler or an image variation model), "
            "which is not supported."
        )
    # A level without attention has no depth of its own; the middle block uses the last level's.
    depths = [depth or 1 for depth in attention[:-1]] + [attention[-1] or middle]
    used = {depth for depth in (*attention, middle) if depth}
    block_widths = [
        Counter(widths.get(f"width{index}", 1280) for index in level).most_common(1)[0][0]
        for level in levels
    ]
    conv_in = shapes.tensors.get("input_blocks.0.0.weight", ())
    config: dict[str, Any] = dict(
        sample_size=128 if added else 96 if context == 1024 else 64,
        in_channels=conv_in[1] if len(conv_in) == 4 else 4,
        out_channels=4,
        down_block_types=[
            "CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in attention
        ],
        up_block_types=[
            "CrossAttnUpBlock2D" if depth else "UpBlock2D" for depth in reversed(attention)
        ],
        block_out_channels=block_widths,
        layers_per_block=len(levels[0]),
        cross_attention_dim=context,
        attention_head_dim=[width // HEAD_DIM for width in block_widths] if linear else SD1_HEADS,
        transformer_layers_per_block=used.pop() if len(used) == 1 else depths,
        use_linear_projection=linear,
        upcast_attention=context == 1024,
    )
    if added:
        config |= dict(
            addition_embed_type="text_time",
            addition_time_embed_dim=TIME_ID_DIM,
            projection_class_embeddings_input_dim=added[1] if len(added) == 2 else 2816,
        )
    down = [bool(depth) for depth in attention]
    return "UNet2DConditionModel", config, unet_map.original(len(levels[0]), down, down[::-1])


def _levels(shapes: Shapes) -> list[list[int]]:
    """The numbers of each level's resnets: a downsampler stands between two levels."""
    votes = shapes.numbers("input_blocks.{i}.0.in_layers.{p}", "input_blocks.{i}.0.out_layers.{p}")
    numbers = sorted(number for number, times in votes.items() if times >= 4)  # of 8
    levels = [[number] for number in numbers[:1]]
    for before, number in pairwise(numbers):
        if number == before + 1:
            levels[-1].append(number)
        else:
            levels.append([number])
    if not levels:
        raise ConfigError("the U-Net has no input_blocks.N.0.in_layers.")
    return levels


def _depth(shapes: Shapes, transformer: str) -> int:
    """How many blocks the transformer of this name has; 0 when there is none."""
    pattern = f"{transformer}.transformer_blocks.{{i}}.{{p}}"
    return shapes.count(pattern) if shapes.numbers(pattern) else 0


def _is_linear(shapes: Shapes) -> bool:
    ranks = [len(x) for name, x in shapes.tensors.items() if name.endswith(".proj_in.weight")]
    return 2 * ranks.count(2) > len(ranks)


def _vae(shapes: Shapes, found: Found) -> Inferred:
    levels = shapes.count("encoder.down.{i}.{p}", "decoder.up.{i}.{p}")
    sizes = {"latent": 4} | shapes.sizes(_VAE_AXES)
    sdxl = "unet" in found and found["unet"].config.addition_embed_type is not None
    config = dict(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=tuple(sizes.get(f"width{level}", 512) for level in range(levels)),
        layers_per_block=shapes.count("encoder.down.{j}.block.{i}.{p}"),
        latent_channels=sizes["latent"],
        norm_num_groups=32,
        scaling_factor=0.13025 if sdxl else 0.18215,
    )
    return "AutoencoderKL", config, (*vae_map.original(levels), *_VAE_DROPS)


def _clip_l(shapes: Shapes, found: Found) -> Inferred:
    bare = shapes.most("encoder.layers.{i}.{p}", 1)  # without `text_model.`
    prefix = "" if bare else "text_model."
    sizes = shapes.sizes({prefix + name: axes for name, axes in _CLIP_AXES.items()})
    layers = shapes.count(prefix + "encoder.layers.{i}.{p}")
    return "CLIPTextModel", _clip(sizes, layers, "quick_gelu", width=768), text_map.CLIP


def _openclip_h(shapes: Shapes, found: Found) -> Inferred:
    layers = shapes.count("transformer.resblocks.{i}.{p}") - 1
    config = _clip(shapes.sizes(_OPENCLIP_AXES), layers, "gelu", width=1024)
    return "CLIPTextModel", config, text_map.openclip(layers, projected=False)


def _openclip_g(shapes: Shapes, found: Found) -> Inferred:
    layers = shapes.count("transformer.resblocks.{i}.{p}")
    config = _clip(shapes.sizes(_OPENCLIP_AXES), layers, "gelu", width=1280)
    return "CLIPTextModelWithProjection", config, text_map.openclip(layers, projected=True)


def _clip(sizes: Mapping[str, int], layers: int, activation: str, *, width: int) -> dict[str, Any]:
    width = sizes.get("width", width)
    return dict(
        vocab_size=sizes.get("vocabulary", 49408),
        hidden_size=width,
        intermediate_size=sizes.get("hidden", 4 * width),
        num_hidden_layers=layers,
        num_attention_heads=0 if width % HEAD_DIM else width // HEAD_DIM,  # 0 is refused
        max_position_embeddings=77,
        hidden_act=activation,
        layer_norm_eps=1e-5,
        eos_token_id=2,  # the pooled output is taken at the highest token id, the end of text
        projection_dim=sizes.get("projection", width),
    )


NETWORKS = (
    # Text encoders first, then the U-Net: only the U-Net shows whether a VAE is SDXL's.
    InferredNetwork("text_encoder", "cond_stage_model.transformer.", "", _clip_l),  # SD 1.x
    InferredNetwork("text_encoder", "cond_stage_model.model.", "transformer.", _openclip_h),  # 2.x
    InferredNetwork("text_encoder", "conditioner.embedders.0.transformer.", "", _clip_l),  # SDXL
    InferredNetwork(
        "text_encoder_2", "conditioner.embedders.1.model.", "transformer.", _openclip_g
    ),
    # SDXL's refiner has the second encoder alone.
    InferredNetwork(
        "text_encoder_2", "conditioner.embedders.0.model.", "transformer.", _openclip_g
    ),
    InferredNetwork("unet", "model.diffusion_model.", "input_blocks.", _unet),
    InferredNetwork("vae", "first_stage_model.", "encoder.down.", _vae),
)

_TABLE = "a table of the noise schedule: computed from the scheduler's config"
LEFTOVERS: tuple[Rule, ...] = (
    *(
        Drop(name, because=_TABLE)
        for name in (
            "alphas_cumprod",
            "alphas_cumprod_prev",
            "betas",
            "denoiser.sigmas",
            "log_one_minus_alphas_cumprod",
            "logvar",
            "lvlb_weights",
            "posterior_log_variance_clipped",
            "posterior_mean_coef1",
            "posterior_mean_coef2",
            "posterior_variance",
            "scale_factor",
            "sqrt_alphas_cumprod",
            "sqrt_one_minus_alphas_cumprod",
            "sqrt_recip_alphas_cumprod",
            "sqrt_recipm1_alphas_cumprod",
        )
    ),
    Drop("model_ema.{p}", because="a moving average for training; the reference reads the other"),
    Drop("cond_stage_model.logit_scale", because="used by contrastive training only"),
    Drop("conditioner.embedders.0.logit_scale", because="used by contrastive training only"),
    Drop("cond_stage_model.text_projection.{p}", because="SD 1 does not use the pooled output"),
    Drop("v_pred", because="a mark of v-prediction, read by scheduler_config"),
    Drop("ztsnr", because="a mark of zero terminal SNR, read by scheduler_config"),
)
_VAE_DROPS: tuple[Rule, ...] = (
    Drop("loss.{p}", because="used by training only"),
    Drop("model_ema.{p}", because="a moving average for training"),
)


_BETAS: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
    "timestep_spacing": "leading",
    "prediction_type": "epsilon",
}
SD1_SCHEDULER = _BETAS | {
    "_class_name": "PNDMScheduler",
    "skip_prk_steps": True,
    "set_alpha_to_one": False,
}
SD2_SCHEDULER = _BETAS | {
    "_class_name": "DDIMScheduler",
    "prediction_type": "v_prediction",
    "set_alpha_to_one": False,
    "clip_sample": False,
}
SDXL_SCHEDULER = _BETAS | {
    "_class_name": "EulerDiscreteScheduler",
    "interpolation_type": "linear",
    "use_karras_sigmas": False,
}


def scheduler_config(found: Found) -> dict[str, Any]:
    """The scheduler config that a single file implies: of the model it is a version of.

    An SD 2.x file does not show whether it predicts noise (512²) or v (768²): v is assumed, as the
    reference does. A mark says so of fine-tuned SDXL models.
    """
    names: frozenset[str] = frozenset()
    if found["unet"].path.is_file():
        with open_checkpoint(found["unet"].path) as checkpoint:
            names = frozenset(checkpoint.tensors)
    unet = found["unet"].config
    if unet.addition_embed_type:
        config = dict(SDXL_SCHEDULER)
    else:
        config = dict(SD2_SCHEDULER if unet.upcast_attention else SD1_SCHEDULER)
    if "v_pred" in names:
        config["prediction_type"] = "v_prediction"
    if "ztsnr" in names:
        config["rescale_betas_zero_snr"] = True
    return config


_UNET_AXES = {
    "input_blocks.{i}.0.in_layers.2.bias": "width{i}",
    "input_blocks.{i}.0.out_layers.0.weight": "width{i}",
    "input_blocks.{i}.0.out_layers.0.bias": "width{i}",
    "input_blocks.{i}.0.out_layers.3.bias": "width{i}",
    "{p}.attn2.to_k.weight": "any context",
    "{p}.attn2.to_v.weight": "any context",
}
_VAE_AXES = {
    "encoder.down.{i}.block.{j}.conv1.bias": "width{i}",
    "encoder.down.{i}.block.{j}.conv2.bias": "width{i}",
    "encoder.down.{i}.block.{j}.norm2.bias": "width{i}",
    "encoder.down.{i}.block.{j}.norm2.weight": "width{i}",
    "post_quant_conv.bias": "latent",
    "post_quant_conv.weight": "latent latent one one",
}
_CLIP_AXES = {
    "embeddings.token_embedding.weight": "vocabulary width",
    "final_layer_norm.bias": "width",
    "encoder.layers.{i}.layer_norm1.bias": "width",
    "encoder.layers.{i}.mlp.fc1.weight": "hidden width",
    "encoder.layers.{i}.mlp.fc1.bias": "hidden",
    "encoder.layers.{i}.mlp.fc2.weight": "width hidden",
}
_OPENCLIP_AXES = {
    "token_embedding.weight": "vocabulary width",
    "ln_final.bias": "width",
    "text_projection": "width projection",
    "transformer.resblocks.{i}.ln_1.bias": "width",
    "transformer.resblocks.{i}.mlp.c_fc.weight": "hidden width",
    "transformer.resblocks.{i}.mlp.c_fc.bias": "hidden",
    "transformer.resblocks.{i}.mlp.c_proj.weight": "width hidden",
}

SINGLE_FILE = InferredModel(
    title="Stable Diffusion 1.x and 2.x",
    networks=NETWORKS,
    kinds=KINDS,
    main="unet",
    alone=("unet", "vae"),
    leftovers=LEFTOVERS,
)
# The same, of files whose U-Net takes pooled text and time ids.
SDXL_SINGLE_FILE = replace(
    SINGLE_FILE,
    title="Stable Diffusion XL",
    networks=tuple(
        replace(network, mark="label_emb.") if network.name == "unet" else network
        for network in NETWORKS
    ),
    alone=("unet",),
)
