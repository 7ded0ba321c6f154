"""The models that get the bugs: a tiny SD3 and a tiny SDXL whose random weights hide none of them.

Default initialisation hides bugs: biases and gates of 0, norms of 1. Here every parameter is drawn,
widths make the usual bugs possible (square matrices) and height is not width, so that a swap of
the two shows. CLIP's embeddings are as small as in the real one, which is where an epsilon matters.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np

from lydite.core.request import Request
from lydite.models.mmdit import MMDiTConfig
from lydite.models.text.t5 import T5Config
from lydite.models.unet import UNetConfig
from lydite.models.vae.kl import AutoencoderKLConfig
from lydite.pipelines.picture import Pixels
from untrained_sd3 import (
    Normals,
    clip_config,
    make_untrained,
    write_clip_tokenizer,
    write_json,
    write_network,
)

NAME = "tiny model"  # what traces call the model
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
SDXL_REQUEST = Request(prompt="A red star", negative="blue fog", steps=3, width=32, height=40)
UNET = UNetConfig(
    in_channels=4,
    out_channels=4,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    block_out_channels=(16, 32, 64),
    layers_per_block=1,
    cross_attention_dim=40,
    attention_head_dim=(1, 2, 4),
    norm_num_groups=8,
    sample_size=16,
    transformer_layers_per_block=(1, 1, 2),
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=8,
    projection_class_embeddings_input_dim=24 + 6 * 8,
)
SDXL_VAE = replace(VAE, latent_channels=4, scaling_factor=0.13025, shift_factor=None)


def make_tiny_model(folder: Path) -> Path:
    """Write the checkpoint in diffusers' layout, always with the same weights."""
    return make_untrained(
        folder,
        transformer=TRANSFORMER,
        vae=VAE,
        clip_widths=(24, 32),
        clip_heads=(2, 4),
        clip_layers=3,
        t5=T5,
        draw=draw_parameter,
    )


def make_tiny_sdxl(folder: Path) -> Path:
    """The same for the base model of SDXL, with Euler's method on Karras' sigmas."""
    vocabulary = write_clip_tokenizer(folder / "tokenizer", pad="<|endoftext|>")
    write_clip_tokenizer(folder / "tokenizer_2", pad="!")
    networks = {
        "unet": ("UNet2DConditionModel", UNET),
        "vae": ("AutoencoderKL", SDXL_VAE),
        "text_encoder": ("CLIPTextModel", clip_config(vocabulary, 16, 2, 3, "quick_gelu")),
        "text_encoder_2": (
            "CLIPTextModelWithProjection",
            clip_config(vocabulary, 24, 2, 3, "gelu"),
        ),
    }
    for number, (name, (class_name, config)) in enumerate(networks.items()):
        write_network(folder / name, class_name, config, draw_parameter, number)
    scheduler = {
        "_class_name": "EulerDiscreteScheduler",
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "timestep_spacing": "linspace",
        "use_karras_sigmas": True,
    }
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    index = {
        "_class_name": "StableDiffusionXLPipeline",
        "force_zeros_for_empty_prompt": True,
        "scheduler": ["diffusers", "EulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    write_json(folder / "model_index.json", index)
    return folder


def picture() -> Pixels:
    """What the encoder of the VAE is given: smooth, with an edge, unlike its mirror image."""
    y, x = np.mgrid[0:48, 0:32]
    waves = [np.sin(x / 5 + y / 9), np.cos(y / 7), (x + y > 40) * 1.5 - 0.75]
    return ((np.stack(waves, axis=-1) + 1) * 127).clip(0, 255).astype(np.uint8)


def draw_parameter(path: str, normals: Normals) -> Normals:
    """Matrices that keep the size of what passes; biases, norms and gates that do something.

    CLIP's MLPs are numbers that bfloat16 holds exactly, for a control that stores them so.
    """
    if path.endswith(("token_embedding.weight", "position_embedding.weight")):
        return normals * 0.02
    if path.endswith("pos_embed.pos_embed"):
        return normals * 0.5
    if path.endswith(("shared.weight", "relative_attention_bias.weight")):
        return normals
    if normals.ndim > 1:
        fan_in = normals.size // normals.shape[0]
        if ".mlp." in path:
            return (normals * fan_in**-0.5).astype(ml_dtypes.bfloat16).astype(np.float32)
        unscaled = T5.d_kv if path.endswith("SelfAttention.q.weight") else 1
        return normals * (fan_in * unscaled) ** -0.5
    return normals * 0.3 + (1.0 if "norm" in path and path.endswith("weight") else 0.0)


@dataclass(frozen=True)
class TinyModel:
    """A family's model and the picture that shows its bugs."""

    make: Callable[[Path], Path]
    request: Request


MODELS = {
    "sd3": TinyModel(make_tiny_model, REQUEST),
    "sdxl": TinyModel(make_tiny_sdxl, SDXL_REQUEST),
}
