"""Stable Diffusion 1.x and 2.x, and what SDXL shares with them: the U-Net.

Reference: diffusers 0.42.1, pipelines/stable_diffusion. One CLIP text encoder, whose last layer is
used with its final norm; a U-Net that predicts noise or v; a KL autoencoder of 4 channels. The text
encoder of 2.x is OpenCLIP's without its last layer, which is no different here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from lydite.core.errors import ConfigError, InputError
from lydite.core.request import Request
from lydite.models.text.clip import CLIPTextOutput
from lydite.models.unet import UNet
from lydite.pipelines.families import sd_single_file
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.family import (
    BlockRule,
    Conditioning,
    Defaults,
    Family,
    LatentSpace,
    Run,
    TraceNames,
    Variant,
)
from lydite.pipelines.model import Component, Model
from lydite.pipelines.observer import Observer
from lydite.pipelines.prompt_weights import encoder_rows
from lydite.pipelines.steps import for_device
from lydite.pipelines.textual_inversion import ANY_NAME
from lydite.tokenizers.tokenizer import load_clip_tokenizer
from lydite.weights.maps import unet as unet_map
from lydite.weights.rules import Rule

DEFAULTS = Defaults(steps=50, guidance=7.5, strength=0.8)
DEFAULT_SIZE = 64  # of the latents, where the U-Net's config has no sample_size


def encode(
    model: Model, prompts: Sequence[str], request: Request, observer: Observer
) -> Conditioning:
    """Text features `text` (C, S, D) of C prompts, negative first."""
    encoder = model.network("text_encoder")
    rows = encoder_rows(model, "text_encoder", prompts, request.weighting)
    output = encoder(rows.ids) if rows.hidden is None else encoder(rows.ids, rows.hidden)
    text = rows.combine(output.last)
    if request.clip_skip:  # of the prompt alone, as the reference has it
        skipped = skipped_states(output, request.clip_skip)
        skipped = skipped[-1:] if request.weighting is None else skipped
        skipped = encoder.text_model.final_layer_norm(skipped)
        text = mx.concatenate([text[:-1], rows.combine(skipped)[-1:]])
    text = observer.observe("encoder_output", text, name="text_encoder")
    mx.eval(text)  # before the encoder may be freed
    del output, encoder
    model.release("text_encoder")
    return {"text": text}


def skipped_states(output: CLIPTextOutput, layers: int) -> mx.array:
    """The hidden states before the last `layers` layers: (B, S, D)."""
    if layers >= len(output.hidden_states):
        raise InputError(
            f"clip_skip is {layers}; expected at most {len(output.hidden_states) - 1}, the number "
            "of layers that the text encoder has."
        )
    return output.hidden_states[-(layers + 1)]


class BoundUNet:
    """The U-Net with its text, and the embedding of every step."""

    def __init__(
        self, unet: UNet, conditioning: Conditioning, run: Run, batch: int, observer: Observer
    ) -> None:
        self._unet, self._batch = unet, batch
        # SDXL's; the embedding is (S, C, D) with them and (S, 1, D) without
        self._added = {name: x for name, x in conditioning.items() if name != "text"}
        timesteps = run.schedule.timesteps.astype(np.float32)
        with observer.all_steps(len(timesteps)):
            self._embeddings = unet.embed_time(mx.array(timesteps), **self._added)
        self._text = mx.repeat(conditioning["text"], batch, axis=0)  # (C*B, S, D)
        mx.eval(self._embeddings, self._text)
        self._network = for_device(unet)
        self._steps = {float(at): index for index, at in enumerate(run.schedule.timesteps)}

    def __call__(self, x: mx.array, timestep: float, prompts: int) -> mx.array:
        inputs = mx.concatenate([x] * prompts).astype(self._text.dtype)  # (C*B, h, w, C)
        text = self._text[-prompts * self._batch :]  # (C*B, S, D)
        return self._network(inputs, self._embedding(timestep, prompts), text).astype(mx.float32)

    def _embedding(self, timestep: float, prompts: int) -> mx.array:
        """This step's; some samplers evaluate between two steps of the schedule."""
        if timestep in self._steps:
            embedding = self._embeddings[self._steps[timestep]]  # (C or 1, D)
        else:
            at = mx.array([timestep], dtype=mx.float32)
            embedding = self._unet.embed_time(at, **self._added)[0]
        if embedding.shape[0] == 1:
            return embedding
        return mx.repeat(embedding[-prompts:], self._batch, axis=0)  # (C*B, D)


def bind(
    model: Model, conditioning: Conditioning, run: Run, batch: int, observer: Observer
) -> BoundUNet:
    """The U-Net for one run and size of batch."""
    return BoundUNet(model.network("unet"), conditioning, run, batch, observer)


def latents(model: Model) -> LatentSpace:
    """Any multiple of the VAE's factor; the default size is the one that the U-Net learnt on."""
    unet, vae = model.config("unet"), model.config("vae")
    size = unet.sample_size or DEFAULT_SIZE
    height, width = size if isinstance(size, tuple) else (size, size)
    return LatentSpace(
        channels=vae.latent_channels,
        factor=vae.factor,
        patch=1,
        default=(width * vae.factor, height * vae.factor),
    )


def needs(model: Model) -> tuple[str, ...]:
    """A U-Net with 9 input channels takes a mask and what is not masked of an image."""
    unet, vae = model.config("unet"), model.config("vae")
    return ("image", "mask") if unet.in_channels > vae.latent_channels else ()


def lora_tables(component: Component) -> tuple[tuple[Rule, ...], ...]:
    """kohya's scripts name SDXL's U-Net as its authors did, whatever form the model has."""
    tables = (component.kind.rules, component.rules)
    layers = getattr(component.config, "layers_per_block", None)
    if component.name != "unet" or not isinstance(layers, int):
        return tables
    down, up = (
        [kind.startswith("CrossAttn") for kind in kinds]
        for kinds in (component.config.down_block_types, component.config.up_block_types)
    )
    return *tables, unet_map.original(layers, down, up)


def check_unet(path: Path, components: Mapping[str, Component], text_width: int) -> None:
    """The text encoders and the VAE have to fit the U-Net they feed."""
    unet, channels = components["unet"].config, components["vae"].config.latent_channels
    if unet.cross_attention_dim != text_width:
        raise ConfigError(
            f"{path}: unet has cross_attention_dim {unet.cross_attention_dim}, but the text "
            f"encoders' width is {text_width}."
        )
    # latents, or latents, mask and the latents of what is not masked
    if unet.in_channels not in (channels, 2 * channels + 1) or unet.out_channels != channels:
        raise ConfigError(
            f"{path}: unet has {unet.in_channels} input and {unet.out_channels} output channels; "
            f"with the VAE's {channels} latent channels {channels} or {2 * channels + 1} input "
            f"and {channels} output channels are supported."
        )


def check(path: Path, components: Mapping[str, Component]) -> None:
    """The components fit each other, and the U-Net is not SDXL's."""
    if components["unet"].config.addition_embed_type:
        raise ConfigError(f"{path}: the U-Net is SDXL's, which the pipeline class does not say.")
    check_unet(path, components, components["text_encoder"].config.hidden_size)


_TRANSFORMER = "unet/*.transformer_blocks.*"
UNET_NAMES = TraceNames(
    renames={
        ("text_encoder*/text_model", "out.last"): ("", "out.last_hidden_state"),
        ("text_encoder*/text_model", "out.pooled"): ("", "out.pooler_output"),
        ("text_encoder*", "out.last"): ("", "out.last_hidden_state"),
        ("text_encoder*", "out.pooled"): ("", "out.pooler_output"),
        ("unet", "in.2"): ("", "in.encoder_hidden_states"),
    },
    channels_last=(
        ("unet", "*"),
        ("unet/*.time_emb_proj", ""),
        (_TRANSFORMER, ""),  # tokens
        ("unet/*", "*"),
        ("vae/*.to_*", ""),  # tokens
        ("vae/*", "*"),
    ),
    conditioning={"text": ("prompt_embeds", "b s d")},
)
UNET_BLOCKS = (
    BlockRule(r".*\.transformer_blocks\.\d+\.attn1", {"out": "image"}),
    BlockRule(r".*\.transformer_blocks\.\d+\.attn2", {"in.0": "image", "out": "image"}),
    BlockRule(r".*\.transformer_blocks\.\d+\.ff", {"in.0": "image", "out": "image"}),
)

FAMILY = Family(
    name="sd",
    title="Stable Diffusion 1.x and 2.x",
    pipelines=frozenset(
        {
            "StableDiffusionPipeline",
            "StableDiffusionImg2ImgPipeline",
            "StableDiffusionInpaintPipeline",
        }
    ),
    kinds=KINDS,
    classes={
        "unet": ("UNet2DConditionModel",),
        "vae": ("AutoencoderKL",),
        "text_encoder": ("CLIPTextModel", "CLIPTextModelWithProjection"),
    },
    required=("unet", "vae", "text_encoder"),
    network="unet",
    encoders=("text_encoder",),
    tokenizers={"text_encoder": lambda folder, _: load_clip_tokenizer(folder)},
    defaults=DEFAULTS,
    scheduler=sd_single_file.SD1_SCHEDULER,
    check=check,
    latents=latents,
    encode=encode,
    bind=bind,
    variant=lambda parts, _: Variant(DEFAULTS, sd_single_file.scheduler_config(parts)),
    strength="diffusers",
    inpaints=True,
    skips_layers=True,
    weighs_prompts=True,
    embeddings={ANY_NAME: "text_encoder"},
    needs=needs,
    names=UNET_NAMES,
    blocks=UNET_BLOCKS,
    lora_tables=lora_tables,
    inferred=(sd_single_file.SINGLE_FILE,),
)
