"""FLUX.1 schnell, dev and Fill.

Reference: diffusers 0.42.1, pipelines/flux. CLIP's pooled output and T5; a transformer on packed
latents that predicts velocity and, in dev, takes the guidance scale as an input; a KL autoencoder
of 16 channels. With a negative prompt classifier-free guidance comes on top. Fill's transformer
also takes a mask and the rest of an image.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from lydite.core.request import Request
from lydite.models.flux import FluxConfig, FluxTransformer
from lydite.models.modulation import Modulation
from lydite.pipelines.families import diffusionkit, mflux
from lydite.pipelines.families.bound_transformer import BoundTransformer, latents
from lydite.pipelines.families.flux_single_file import SINGLE_FILE
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.family import (
    BlockRule,
    Conditioning,
    Defaults,
    Family,
    Run,
    TraceNames,
    Variant,
    check_equal,
)
from lydite.pipelines.inpainting import Mask
from lydite.pipelines.model import Component, Model
from lydite.pipelines.observer import Observer
from lydite.tokenizers.tokenizer import load_clip_tokenizer, load_t5_tokenizer
from lydite.weights.maps import flux as flux_map

DEV = Variant(
    Defaults(steps=28, guidance=3.5, text_length=512, true_guidance=4.0),
    {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": 3.0,
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "base_image_seq_len": 256,
        "max_image_seq_len": 4096,
    },
)
# Distilled to few steps without guidance, on text of at most 256 tokens.
SCHNELL = Variant(
    replace(DEV.defaults, steps=4, guidance=0.0, text_length=256),
    {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": 1.0,
    },
)


FILL = Variant(replace(DEV.defaults, steps=50, guidance=30.0), DEV.scheduler)


def variant(components: Mapping[str, Component], index: Mapping[str, Any]) -> Variant:
    """schnell has no guidance embedding; Fill's transformer has more inputs than outputs."""
    transformer = components["transformer"].config
    if takes_mask(transformer):
        return FILL
    return DEV if transformer.guidance_embeds else SCHNELL


def takes_mask(transformer: FluxConfig) -> bool:
    return (transformer.out_channels or transformer.in_channels) < transformer.in_channels


def mask_channels(mask: Mask, rest: mx.array, factor: int) -> mx.array:
    """The latents of the rest (B, h, w, C), then all pixels of the mask: (B, h, w, C + factor²)."""
    B, height, width, _ = rest.shape
    pixels = mx.array((mask >= 128).astype(np.float32)).reshape(height, factor, width, factor)
    shown = pixels.transpose(0, 2, 1, 3).reshape(1, height, width, factor * factor)
    return mx.concatenate([rest, mx.repeat(shown, B, axis=0)], axis=-1)


def encode(
    model: Model, prompts: Sequence[str], request: Request, observer: Observer
) -> Conditioning:
    """Text features: `text` (C, S, D) and `pooled` (C, P) of C prompts, negative first."""
    assert request.text_length is not None, "a planned request has one"
    dtype = getattr(mx, model.dtype)
    pooled = model.network("text_encoder")(model.token_ids("text_encoder", prompts)).pooled
    pooled = observer.observe("encoder_output", pooled, name="text_encoder pooled")
    mx.eval(pooled)  # before the encoder may be freed
    model.release("text_encoder")
    ids = model.token_ids("text_encoder_2", prompts, request.text_length)
    text = model.network("text_encoder_2")(ids)  # (C, S, D)
    text = observer.observe("encoder_output", text, name="text_encoder_2")
    mx.eval(text)
    model.release("text_encoder_2")
    return {"text": text.astype(dtype), "pooled": pooled.astype(dtype)}


def bind(
    model: Model, conditioning: Conditioning, run: Run, batch: int, observer: Observer
) -> BoundTransformer:
    """The transformer for one run and size of batch."""
    transformer: FluxTransformer = model.network("transformer")
    text, pooled = conditioning["text"], conditioning["pooled"]
    guided = transformer.config.guidance_embeds
    guidance = mx.array([run.request.guidance or 0.0]) if guided else None

    def tables(timesteps: mx.array, prompt: int) -> Modulation:
        # the reference's pipeline divides by 1000, and its network multiplies again
        timesteps = timesteps / 1000 * 1000
        return transformer.modulation(timesteps, pooled[prompt : prompt + 1], guidance)

    texts = [text[prompt : prompt + 1] for prompt in range(text.shape[0])]
    return BoundTransformer(transformer, texts, tables, run, batch, observer)


def check(path: Path, components: Mapping[str, Component]) -> None:
    """The text encoders and the VAE have to fit the transformer they feed."""
    transformer = components["transformer"].config
    vae = components["vae"].config
    channels = 4 * vae.latent_channels
    inputs, what = channels, "4 × the VAE's latent channels"
    if takes_mask(transformer):
        inputs = 2 * channels + 4 * vae.factor**2
        what = f"8 × the VAE's latent channels and 4 × {vae.factor**2} pixels of a mask"
    facts = {
        "pooled_projection_dim": (
            transformer.pooled_projection_dim,
            components["text_encoder"].config.hidden_size,
            "the width of text_encoder",
        ),
        "joint_attention_dim": (
            transformer.joint_attention_dim,
            components["text_encoder_2"].config.d_model,
            "the width of text_encoder_2",
        ),
        "in_channels": (transformer.in_channels, inputs, what),
        "out_channels": (
            transformer.out_channels or transformer.in_channels,
            channels,
            "4 × the VAE's latent channels",
        ),
    }
    check_equal(path, facts)


_BLOCK = "transformer/transformer_blocks.*"
_SINGLE = "transformer/single_transformer_blocks.*"
NAMES = TraceNames(
    renames={
        # transformers 5 has no `text_model` in a CLIP encoder without projection
        ("text_encoder/text_model", "out.last"): ("text_encoder", "out.last_hidden_state"),
        ("text_encoder/text_model", "out.pooled"): ("text_encoder", "out.pooler_output"),
        ("text_encoder/text_model.*", "*"): ("text_encoder/*", ""),
        ("text_encoder_2", "out"): ("", "out.last_hidden_state"),
        ("text_encoder_2/encoder", "out"): ("", "out.last_hidden_state"),
        ("text_encoder_2/shared", "*"): ("text_encoder_2/encoder.embed_tokens", ""),
        ("transformer", "in.0"): ("", "in.hidden_states"),
        ("transformer", "in.1"): ("", "in.text"),  # embedded, which the reference's is not
        ("transformer/time_text_embed", "in.1"): ("", "in.pooled"),  # of dev: the guidance
        ("transformer/time_text_embed", "in.2"): ("", "in.guidance"),  # there the pooled text
        ("transformer/norm_out", "in.1"): ("", "in.table"),
        (f"{_BLOCK}.attn.*", "*"): ("", ""),
        (f"{_BLOCK}.attn", "in.0"): ("", "in.hidden_states"),
        (f"{_BLOCK}.attn", "in.1"): ("", "in.encoder_hidden_states"),
        # the reference's norms take the embedding, ours the table computed from it
        (f"{_BLOCK}.norm1*", "in.1"): ("", "in.table"),
        (f"{_SINGLE}.norm", "in.1"): ("", "in.table"),
        (f"{_SINGLE}.attn", "in.0"): ("", "in.hidden_states"),
        (f"{_BLOCK}.*", "*"): ("", ""),
        (f"{_SINGLE}.*", "*"): ("", ""),
        (_BLOCK, "in.0"): ("", "in.encoder_hidden_states"),
        (_BLOCK, "in.1"): ("", "in.hidden_states"),
        (_SINGLE, "in.0"): ("", "in.encoder_hidden_states"),
        (_SINGLE, "in.1"): ("", "in.hidden_states"),
    },
    channels_last=(("vae/*.to_*", ""), ("vae/*", "*")),  # to_q and the others have tokens
    constant=(
        ("transformer/context_embedder", "*"),
        ("transformer/time_text_embed", "in.pooled"),
        ("transformer/time_text_embed", "in.guidance"),
        ("transformer/time_text_embed.text_embedder*", "*"),
        ("transformer/time_text_embed.guidance_embedder*", "*"),
    ),
    once=(("transformer/context_embedder", "*"),),
    conditioning={"text": ("prompt_embeds", "b s d"), "pooled": ("pooled", "b d")},
)

FAMILY = Family(
    name="flux",
    title="FLUX.1",
    pipelines=frozenset({"FluxPipeline", "FluxImg2ImgPipeline", "FluxFillPipeline"}),
    kinds=KINDS,
    classes={
        "transformer": ("FluxTransformer2DModel",),
        "vae": ("AutoencoderKL",),
        "text_encoder": ("CLIPTextModel",),
        "text_encoder_2": ("T5EncoderModel",),
    },
    required=("transformer", "vae", "text_encoder", "text_encoder_2"),
    network="transformer",
    encoders=("text_encoder", "text_encoder_2"),
    tokenizers={
        "text_encoder": lambda folder, _: load_clip_tokenizer(folder),
        "text_encoder_2": lambda folder, length: load_t5_tokenizer(
            folder, max_length=length or 512
        ),
    },
    defaults=DEV.defaults,
    scheduler=DEV.scheduler,
    variant=variant,
    guidance="distilled",
    check=check,
    latents=latents,
    encode=encode,
    bind=bind,
    flow_grid="even",
    inpaints=True,
    needs=lambda model: ("image", "mask") if takes_mask(model.config("transformer")) else (),
    mask_channels=mask_channels,
    encodes_unused_image=True,
    names=NAMES,
    blocks=(
        BlockRule(r"transformer_blocks\.\d+\.attn", {"out": "image", "out.1": "text"}),
        BlockRule(r"transformer_blocks\.\d+\.ff", {"in.0": "image", "out": "image"}),
        BlockRule(r"transformer_blocks\.\d+\.ff_context", {"in.0": "text", "out": "text"}),
        BlockRule(r"single_transformer_blocks\.\d+\.attn", {"out": "both"}),
    ),
    inferred=(SINGLE_FILE, diffusionkit.FLUX, mflux.FLUX),
    lora_tables=lambda component: (
        component.kind.rules,
        component.rules,
        *((flux_map.ORIGINAL,) if component.name == "transformer" else ()),
    ),
)
