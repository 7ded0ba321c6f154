"""Stable Diffusion 3 and 3.5.

Reference: diffusers 0.42.1, pipelines/stable_diffusion_3. Two CLIP encoders side by side and T5,
which may be missing; an MMDiT that predicts velocity; a KL autoencoder of 16 channels.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from lydite.core.errors import ConfigError
from lydite.core.request import Request
from lydite.models.mmdit import MMDiT
from lydite.models.modulation import Modulation
from lydite.pipelines.families import diffusionkit
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.families.sd3_single_file import SINGLE_FILE
from lydite.pipelines.family import (
    BlockRule,
    Conditioning,
    Defaults,
    Family,
    LatentSpace,
    Run,
    TraceNames,
    check_equal,
)
from lydite.pipelines.model import Component, Model, join_features
from lydite.pipelines.observer import Observer
from lydite.pipelines.steps import for_device
from lydite.tokenizers.tokenizer import load_clip_tokenizer, load_t5_tokenizer
from lydite.weights.maps import mmdit as mmdit_map

CLIP_ENCODERS = ("text_encoder", "text_encoder_2")


def encode(
    model: Model, prompts: Sequence[str], request: Request, observer: Observer
) -> Conditioning:
    """Text features: `text` (C, S, D) and `pooled` (C, P) of C prompts, negative first."""
    assert request.text_length is not None, "a planned request has one"
    dtype, width = getattr(mx, model.dtype), model.config("transformer").joint_attention_dim
    states: list[mx.array] = []
    pooled: list[mx.array] = []
    for name in CLIP_ENCODERS:
        output = model.network(name)(model.token_ids(name, prompts))
        states.append(observer.observe("encoder_output", output.penultimate, name=name))
        pooled.append(observer.observe("encoder_output", output.pooled, name=f"{name} pooled"))
        mx.eval(states[-1], pooled[-1])  # before the encoder may be freed
        del output
        model.release(name)
    clip = join_features(states, model.path)  # (C, S1, D1 + D2)
    clip = mx.pad(clip, [(0, 0), (0, 0), (0, width - clip.shape[-1])])  # (C, S1, D)
    if "text_encoder_3" in model:
        ids = model.token_ids("text_encoder_3", prompts, request.text_length)
        t5 = model.network("text_encoder_3")(ids)  # (C, S2, D)
        t5 = observer.observe("encoder_output", t5, name="text_encoder_3")
        mx.eval(t5)
        model.release("text_encoder_3")
    else:  # the reference then attends to this many zero vectors, which changes the picture
        t5 = mx.zeros((len(prompts), request.text_length, width), dtype)
    return {
        "text": mx.concatenate([clip.astype(dtype), t5.astype(dtype)], axis=1),
        "pooled": mx.concatenate(pooled, axis=-1).astype(dtype),
    }


class BoundMMDiT:
    """The transformer with its text, positions and modulation tables for every step."""

    def __init__(
        self,
        transformer: MMDiT,
        conditioning: Conditioning,
        run: Run,
        batch: int,
        observer: Observer,
    ) -> None:
        self._transformer, self._pooled = transformer, conditioning["pooled"]
        timesteps = run.schedule.timesteps.astype(np.float32)
        _, height, width = run.shape
        with observer.all_steps(len(timesteps)):
            tables = transformer.modulation(mx.array(timesteps), self._pooled)
            text = transformer.embed_text(conditioning["text"])
        self._modulation = _for_batch(tables, batch)  # here, so that a step only takes parts of it
        self._text = mx.repeat(text, batch, axis=0)  # (C*B, S, D)
        self._positions = transformer.positions(height, width)
        mx.eval(self._modulation, self._text, self._positions)
        self._network = for_device(transformer)
        self._steps = {float(at): index for index, at in enumerate(run.schedule.timesteps)}
        self._dtype, self._batch = conditioning["text"].dtype, batch

    def __call__(self, x: mx.array, timestep: float, prompts: int) -> mx.array:
        inputs = mx.concatenate([x] * prompts).astype(self._dtype)  # (C*B, h, w, C)
        text = self._text[-prompts * self._batch :]  # (C*B, S, D)
        tables = self._tables(timestep, prompts)
        return self._network(inputs, text, tables, self._positions).astype(mx.float32)

    def _tables(self, timestep: float, prompts: int) -> Modulation:
        """This step's tables; some samplers evaluate between two steps of the schedule."""
        if timestep in self._steps:
            tables, step = self._modulation, self._steps[timestep]
        else:
            at = mx.array([timestep], dtype=mx.float32)
            tables = _for_batch(self._transformer.modulation(at, self._pooled), self._batch)
            step = 0
        rows = prompts * self._batch
        return {path: table[step, -rows:] for path, table in tables.items()}


def _for_batch(tables: Modulation, batch: int) -> Modulation:
    """(S, C, n, D) each to (S, C·B, n, D)."""
    return {path: mx.repeat(table, batch, axis=1) for path, table in tables.items()}


def bind(
    model: Model, conditioning: Conditioning, run: Run, batch: int, observer: Observer
) -> BoundMMDiT:
    """The transformer for one run and size of batch."""
    return BoundMMDiT(model.network("transformer"), conditioning, run, batch, observer)


def latents(model: Model) -> LatentSpace:
    """Sizes follow from the positional table and the VAE."""
    transformer, vae = model.config("transformer"), model.config("vae")
    side = transformer.sample_size * vae.factor
    unit = vae.factor * transformer.patch_size
    return LatentSpace(
        channels=vae.latent_channels,
        factor=vae.factor,
        patch=transformer.patch_size,
        default=(side, side),
        largest=unit * transformer.pos_embed_max_size,
    )


def check(path: Path, components: Mapping[str, Component]) -> None:
    """The text encoders and the VAE have to fit the transformer they feed."""
    transformer = components["transformer"].config
    clips = [components[name].config for name in CLIP_ENCODERS]
    if any(clip.projection_dim is None for clip in clips):
        raise ConfigError(f"{path}: a text encoder's config has no projection_dim.")
    facts = {
        "pooled_projection_dim": (
            transformer.pooled_projection_dim,
            sum(clip.projection_dim for clip in clips),
            "the two text encoders' pooled outputs together",
        ),
        "in_channels": (
            transformer.in_channels,
            components["vae"].config.latent_channels,
            "the VAE's latent channels",
        ),
    }
    if "text_encoder_3" in components:
        facts["joint_attention_dim"] = (
            transformer.joint_attention_dim,
            components["text_encoder_3"].config.d_model,
            "T5's width",
        )
    check_equal(path, facts)
    widths = sum(clip.hidden_size for clip in clips)
    if widths > transformer.joint_attention_dim:
        raise ConfigError(
            f"{path}: the two CLIP widths together are {widths}, more than the transformer's "
            f"joint_attention_dim {transformer.joint_attention_dim}."
        )


_BLOCK = "transformer/transformer_blocks.*"
NAMES = TraceNames(
    renames={
        ("text_encoder*/text_model", "out.last"): ("", "out.last_hidden_state"),
        ("text_encoder*/text_model", "out.pooled"): ("", "out.pooler_output"),
        ("text_encoder*", "out.last"): ("", "out.last_hidden_state"),
        ("text_encoder*", "out.pooled"): ("", "out.text_embeds"),
        ("text_encoder_3", "out"): ("", "out.last_hidden_state"),
        ("text_encoder_3/encoder", "out"): ("", "out.last_hidden_state"),
        ("text_encoder_3/shared", "*"): ("text_encoder_3/encoder.embed_tokens", ""),
        ("transformer", "in.0"): ("", "in.hidden_states"),
        (f"{_BLOCK}.attn*.*", "*"): ("", ""),
        (f"{_BLOCK}.attn*", "in.0"): ("", "in.hidden_states"),
        (f"{_BLOCK}.attn*", "in.1"): ("", "in.encoder_hidden_states"),
        # the reference's norms take the embedding, ours the table computed from it
        (f"{_BLOCK}.norm1*", "in.1"): ("", "in.table"),
        ("transformer/norm_out", "in.1"): ("", "in.table"),
        (f"{_BLOCK}.*", "*"): ("", ""),
        (_BLOCK, "in.0"): ("", "in.encoder_hidden_states"),
        (_BLOCK, "in.1"): ("", "in.hidden_states"),
    },
    channels_last=(
        ("transformer", "*"),
        ("transformer/pos_embed*", "*"),
        ("vae/*.to_*", ""),  # tokens
        ("vae/*", "*"),
    ),
    constant=(
        ("transformer/context_embedder", "*"),
        ("transformer/time_text_embed", "in.1"),
        ("transformer/time_text_embed.text_embedder*", "*"),
    ),
    once=(("transformer/context_embedder", "*"),),
    conditioning={"text": ("prompt_embeds", "b s d"), "pooled": ("pooled", "b d")},
)

FAMILY = Family(
    name="sd3",
    title="Stable Diffusion 3 and 3.5",
    pipelines=frozenset({"StableDiffusion3Pipeline", "StableDiffusion3Img2ImgPipeline"}),
    kinds=KINDS,
    classes={
        "transformer": ("SD3Transformer2DModel",),
        "vae": ("AutoencoderKL",),
        "text_encoder": ("CLIPTextModelWithProjection",),
        "text_encoder_2": ("CLIPTextModelWithProjection",),
        "text_encoder_3": ("T5EncoderModel",),
    },
    required=("transformer", "vae", *CLIP_ENCODERS),
    network="transformer",
    encoders=(*CLIP_ENCODERS, "text_encoder_3"),
    tokenizers={
        "text_encoder": lambda folder, _: load_clip_tokenizer(folder),
        "text_encoder_2": lambda folder, _: load_clip_tokenizer(folder),
        "text_encoder_3": lambda folder, length: load_t5_tokenizer(
            folder, max_length=length or 256
        ),
    },
    defaults=Defaults(steps=28, guidance=7.0, text_length=256),
    scheduler={
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": 3.0,
    },
    check=check,
    latents=latents,
    encode=encode,
    bind=bind,
    names=NAMES,
    blocks=(
        BlockRule(
            r"transformer_blocks\.\d+\.attn2?",
            {"out": "image", "out.0": "image", "out.1": "text"},
        ),
        BlockRule(r"transformer_blocks\.\d+\.ff", {"in.0": "image", "out": "image"}),
        BlockRule(r"transformer_blocks\.\d+\.ff_context", {"in.0": "text", "out": "text"}),
    ),
    inferred=(SINGLE_FILE, diffusionkit.SD3),
    lora_tables=lambda component: (
        component.kind.rules,
        component.rules,
        *(
            (mmdit_map.original(component.config.num_layers),)
            if component.name == "transformer"
            else ()
        ),
    ),
)
