"""FLUX.2-klein, base and distilled.

Reference: diffusers 0.42.1, pipelines/flux2/pipeline_flux2_klein.py. Hidden states of three layers
of Qwen3 side by side, those of padding too; a transformer on latents of 2 × 2 packed positions that
predicts velocity. The base models run with classifier-free guidance, the distilled ones cannot. An
image is shown to the transformer as more tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from lydite.core.errors import ConfigError
from lydite.core.request import Request
from lydite.models.flux2 import Flux2Transformer
from lydite.models.modulation import Modulation
from lydite.models.rotary_attention import Rotation
from lydite.pipelines.families.bound_transformer import SIDE, BoundTransformer
from lydite.pipelines.families.flux2_single_file import SINGLE_FILE
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
    check_equal,
)
from lydite.pipelines.model import Component, Model
from lydite.pipelines.observer import Observer
from lydite.sampling.schedules.flow import flux2_mu
from lydite.tokenizers.templates import FLUX2_KLEIN, TemplateTokenizer
from lydite.tokenizers.tokenizer import load_qwen2_tokenizer
from lydite.weights.maps import flux as flux_map

LAYERS = (9, 18, 27)  # of the text encoder, whose outputs are the text features
BASE = Variant(
    Defaults(steps=50, guidance=4.0, text_length=512),
    {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": 3.0,
        "use_dynamic_shifting": True,
    },
)
DISTILLED = replace(BASE, defaults=replace(BASE.defaults, steps=4, guidance=1.0, guided=False))


class BoundFlux2(BoundTransformer):
    """The latents are packed already; the tokens of a reference image follow theirs."""

    def __init__(self, *arguments: Any, reference: mx.array | None, **options: Any) -> None:
        self._reference = reference  # (1, h, w, 4C)
        super().__init__(*arguments, **options)

    def positions(self, transformer: Flux2Transformer, text_length: int) -> Rotation:
        shown = self._reference is not None
        return transformer.positions(text_length, self._height, self._width, reference=shown)

    def pack(self, latents: mx.array) -> mx.array:
        if self._reference is not None:
            shown = mx.repeat(self._reference, latents.shape[0], axis=0)
            latents = mx.concatenate([latents, shown], axis=1)  # (B, 2h, w, 4C)
        return latents.flatten(1, 2)

    def unpack(self, output: mx.array, height: int, width: int) -> mx.array:
        return mx.unflatten(output[:, : height * width], 1, (height, width))


def variant(components: Mapping[str, Component], index: Mapping[str, Any]) -> Variant:
    """Only model_index.json says which models are distilled."""
    return DISTILLED if index.get("is_distilled") else BASE


def load_tokenizer(folder: Path, length: int | None) -> TemplateTokenizer:
    """The prompt with its template is cut at the length, or filled up to it."""
    tokenizer = load_qwen2_tokenizer(folder, length or 512, padded=True)
    return TemplateTokenizer(tokenizer, FLUX2_KLEIN, length or 512)


def encode(
    model: Model, prompts: Sequence[str], request: Request, observer: Observer
) -> Conditioning:
    """Text features `text` (C, S, 3D) of C prompts, negative first."""
    template = model.tokenizer("text_encoder", request.text_length)
    assert isinstance(template, TemplateTokenizer)
    rows = [template.tokenizer.join([FLUX2_KLEIN(prompt)]) for prompt in prompts]
    ids = model.checked_ids("text_encoder", np.stack([ids for ids, _ in rows]))
    mask = mx.array([owners for _, owners in rows]) >= 0  # False where there is padding
    states = model.network("text_encoder")(ids, mask).hidden_states
    text = mx.concatenate([states[layer] for layer in LAYERS], axis=-1)  # (C, S, 3D)
    text = observer.observe("encoder_output", text, name="text_encoder")
    text = text.astype(getattr(mx, model.dtype))
    mx.eval(text)  # before the encoder may be freed
    del states
    model.release("text_encoder")
    return {"text": text}


def bind(
    model: Model, conditioning: Conditioning, run: Run, batch: int, observer: Observer
) -> BoundFlux2:
    """The transformer for one run and size of batch."""
    reference = encode_reference(model, run, observer)
    transformer: Flux2Transformer = model.network("transformer")
    text = conditioning["text"]

    def tables(timesteps: mx.array, prompt: int) -> Modulation:
        # the reference's pipeline divides by 1000, and its network multiplies again
        return transformer.modulation(timesteps / 1000 * 1000, text.dtype)

    texts = [text[prompt : prompt + 1] for prompt in range(text.shape[0])]
    return BoundFlux2(
        *(transformer, texts, tables, run, batch, observer), shared_tables=True, reference=reference
    )


def encode_reference(model: Model, run: Run, observer: Observer) -> mx.array | None:
    """The mean latents of the run's image, normalized: (1, h, w, 4C)."""
    if run.image is None:
        return None
    vae = model.network("vae")
    pixels = mx.array(run.image.astype(np.float32) / 127.5 - 1)[None]  # (1, H, W, 3)
    mean = vae.encode(pixels.astype(model.dtype_of("vae"))).mean
    reference = vae.normalize(observer.observe("image_latents", mean))
    mx.eval(reference)  # before the VAE may be freed
    del vae
    model.release("vae")
    return reference


def latents(model: Model) -> LatentSpace:
    """Any size: positions are computed, not learnt."""
    vae = model.config("vae")
    side = SIDE * vae.factor
    channels, factor = 4 * vae.latent_channels, 2 * vae.factor
    return LatentSpace(channels, factor, patch=1, packed=2, default=(side, side))


def check(path: Path, components: Mapping[str, Component]) -> None:
    """The text encoder and the VAE have to fit the transformer they feed."""
    transformer, text = components["transformer"].config, components["text_encoder"].config
    if transformer.guidance_embeds:
        raise ConfigError(
            f"{path}: transformer has guidance_embeds, as FLUX.2-dev's; supported is FLUX.2-klein."
        )
    if text.num_hidden_layers <= max(LAYERS):  # the output of the last one would be normed
        raise ConfigError(
            f"{path}: text_encoder has {text.num_hidden_layers} layers; "
            f"expected more than {max(LAYERS)}."
        )
    channels = 4 * components["vae"].config.latent_channels
    facts = {
        "joint_attention_dim": (
            transformer.joint_attention_dim,
            len(LAYERS) * text.hidden_size,
            f"{len(LAYERS)} × the width of text_encoder",
        ),
        "in_channels": (transformer.in_channels, channels, "4 × the VAE's latent channels"),
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
        # the reference's last of these is normed, as `last` is here
        ("text_encoder*", "out.hidden_states.*"): ("", "out.states.*"),
        ("text_encoder", "out.last"): ("", "out.last_hidden_state"),
        ("text_encoder/model", "out.last"): ("", "out.last_hidden_state"),
        ("text_encoder/*.self_attn", "in.0"): ("", "in.hidden_states"),
        ("transformer", "in.0"): ("", "in.hidden_states"),
        ("transformer", "in.1"): ("", "in.text"),  # embedded, which the reference's is not
        ("transformer/norm_out", "in.1"): ("", "in.table"),
        (f"{_BLOCK}.attn", "in.0"): ("", "in.hidden_states"),
        (f"{_BLOCK}.attn", "in.1"): ("", "in.encoder_hidden_states"),
        (f"{_SINGLE}.attn", "in.0"): ("", "in.hidden_states"),
        (f"{_BLOCK}.*", "*"): ("", ""),
        (f"{_SINGLE}.*", "*"): ("", ""),
        (_BLOCK, "in.0"): ("", "in.encoder_hidden_states"),
        (_BLOCK, "in.1"): ("", "in.hidden_states"),
        (_SINGLE, "in.0"): ("", "in.hidden_states"),
    },
    channels_last=(("vae/*.to_*", ""), ("vae/*", "*")),  # to_q and the others have tokens
    constant=(("transformer/context_embedder", "*"),),
    once=(("transformer/context_embedder", "*"),),
    conditioning={"text": ("prompt_embeds", "b s d")},
)

FAMILY = Family(
    name="flux2",
    title="FLUX.2-klein",
    pipelines=frozenset({"Flux2KleinPipeline"}),
    kinds=KINDS,
    classes={
        "transformer": ("Flux2Transformer2DModel",),
        "vae": ("AutoencoderKLFlux2",),
        "text_encoder": ("Qwen3ForCausalLM", "Qwen3Model"),
    },
    required=("transformer", "vae", "text_encoder"),
    network="transformer",
    encoders=("text_encoder",),
    tokenizers={"text_encoder": load_tokenizer},
    defaults=BASE.defaults,
    scheduler=BASE.scheduler,
    variant=variant,
    check=check,
    latents=latents,
    encode=encode,
    bind=bind,
    image="reference",
    flow_grid="even",
    mu=flux2_mu,
    names=NAMES,
    blocks=(
        BlockRule(r"transformer_blocks\.\d+\.attn", {"out": "image", "out.1": "text"}),
        BlockRule(r"transformer_blocks\.\d+\.ff", {"in.0": "image", "out": "image"}),
        BlockRule(r"transformer_blocks\.\d+\.ff_context", {"in.0": "text", "out": "text"}),
        BlockRule(r"single_transformer_blocks\.\d+\.attn", {"out": "both"}),
    ),
    inferred=(SINGLE_FILE,),
    lora_tables=lambda component: (
        component.kind.rules,
        component.rules,
        *((flux_map.FLUX2_ORIGINAL,) if component.name == "transformer" else ()),
    ),
)
