"""Z-Image and Z-Image-Turbo.

Reference: diffusers 0.42.1, pipelines/z_image. The last but one hidden states of Qwen3; a
transformer on latents whose time runs the other way and whose output is the negative velocity; a KL
autoencoder of 16 channels.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx

from lydite.core.request import Request
from lydite.models.modulation import Modulation
from lydite.models.z_image import ZImageTransformer
from lydite.pipelines.families import mflux
from lydite.pipelines.families.bound_transformer import SIDE, BoundTransformer
from lydite.pipelines.families.network_classes import KINDS
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
from lydite.pipelines.model import Component, Model
from lydite.pipelines.observer import Observer
from lydite.tokenizers.templates import Z_IMAGE, TemplateTokenizer
from lydite.tokenizers.tokenizer import load_qwen2_tokenizer


class BoundZImage(BoundTransformer):
    """The transformer makes its own patches."""

    def pack(self, latents: mx.array) -> mx.array:
        return latents

    def unpack(self, output: mx.array, height: int, width: int) -> mx.array:
        return -output


def load_tokenizer(folder: Path, length: int | None) -> TemplateTokenizer:
    """The prompt with its template is cut at the length."""
    tokenizer = load_qwen2_tokenizer(folder, length or 512)
    return TemplateTokenizer(tokenizer, Z_IMAGE, length or 512)


def encode(
    model: Model, prompts: Sequence[str], request: Request, observer: Observer
) -> Conditioning:
    """Text features `text` (1, S, D) and, with a negative prompt, `negative_text` of its length."""
    dtype = getattr(mx, model.dtype)
    features: dict[str, mx.array] = {}
    encoder = model.network("text_encoder")
    for name, prompt in zip(("text", "negative_text"), reversed(prompts), strict=False):
        ids = model.token_ids("text_encoder", [prompt], request.text_length)
        text = observer.observe(
            "encoder_output", encoder(ids).penultimate, name=f"text_encoder {name}"
        )
        features[name] = text.astype(dtype)
        mx.eval(features[name])  # before the encoder may be freed
    del encoder
    model.release("text_encoder")
    return features


def bind(
    model: Model, conditioning: Conditioning, run: Run, batch: int, observer: Observer
) -> BoundZImage:
    """The transformer for one run and size of batch."""
    transformer: ZImageTransformer = model.network("transformer")
    dtype = conditioning["text"].dtype

    def tables(timesteps: mx.array, prompt: int) -> Modulation:
        # the reference's pipeline divides by 1000, and its network multiplies again
        return transformer.modulation((1000 - timesteps) / 1000 * 1000, dtype)

    texts = [conditioning[name] for name in ("negative_text", "text") if name in conditioning]
    return BoundZImage(transformer, texts, tables, run, batch, observer, shared_tables=True)


def latents(model: Model) -> LatentSpace:
    """Positions are computed, for as many rows and columns as the model has."""
    vae, transformer = model.config("vae"), model.config("transformer")
    side = SIDE * vae.factor
    most = 2 * vae.factor * min(transformer.axes_lens[1:])
    return LatentSpace(
        vae.latent_channels, vae.factor, patch=2, default=(min(side, most),) * 2, largest=most
    )


def check(path: Path, components: Mapping[str, Component]) -> None:
    """The text encoder and the VAE have to fit the transformer they feed."""
    transformer = components["transformer"].config
    facts = {
        "cap_feat_dim": (
            transformer.cap_feat_dim,
            components["text_encoder"].config.hidden_size,
            "the width of text_encoder",
        ),
        "in_channels": (
            transformer.in_channels,
            components["vae"].config.latent_channels,
            "the VAE's latent channels",
        ),
    }
    check_equal(path, facts)


_TEXT = (("transformer/cap_embedder*", "*"), ("transformer/context_refiner.*", "*"))
NAMES = TraceNames(
    renames={
        # the reference's last of these is normed, as `last` is here
        ("text_encoder*", "out.hidden_states.*"): ("", "out.states.*"),
        ("text_encoder", "out.last"): ("", "out.last_hidden_state"),
        ("text_encoder/*.self_attn", "in.0"): ("", "in.hidden_states"),
        ("transformer", "in.1"): ("", "in.text"),  # embedded, which the reference's is not
        # the reference embeds what fills up to a multiple, too, and replaces it
        ("transformer/all_x_embedder.*", "in.0"): ("", "in.tokens"),
        ("transformer/all_x_embedder.*", "out"): ("", "out.tokens"),
        ("transformer/cap_embedder.*", "in.0"): ("", "in.tokens"),
        ("transformer/cap_embedder.*", "out"): ("", "out.tokens"),
        # the reference's blocks take the embedding, ours the table computed from it
        ("transformer/all_final_layer.*-1", "in.1"): ("transformer/final_table", "out"),
        ("transformer/noise_refiner.*", "in.2"): ("", "in.table"),
        ("transformer/layers.*", "in.2"): ("", "in.table"),
    },
    constant=_TEXT,
    once=_TEXT,
    conditioning={
        "text": ("prompt_embeds", "b s d"),
        "negative_text": ("negative_prompt_embeds", "b s d"),
    },
    channels_last=(("transformer", "*"), ("vae/*.to_*", ""), ("vae/*", "*")),
)

FAMILY = Family(
    name="z_image",
    title="Z-Image",
    pipelines=frozenset({"ZImagePipeline", "ZImageImg2ImgPipeline"}),
    kinds=KINDS,
    classes={
        "transformer": ("ZImageTransformer2DModel",),
        "vae": ("AutoencoderKL",),
        "text_encoder": ("Qwen3Model", "Qwen3ForCausalLM"),
    },
    required=("transformer", "vae", "text_encoder"),
    network="transformer",
    encoders=("text_encoder",),
    tokenizers={"text_encoder": load_tokenizer},
    defaults=Defaults(steps=8, guidance=0.0, text_length=512),  # of Turbo
    scheduler={
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": 3.0,
    },
    guidance="above_0",
    check=check,
    latents=latents,
    encode=encode,
    bind=bind,
    flow_grid="even",
    inpaints=True,
    names=NAMES,
    blocks=(
        BlockRule(r"(layers|noise_refiner)\.\d+\.attention", {"out": "both"}),
        BlockRule(r"(layers|noise_refiner)\.\d+\.feed_forward", {"in.0": "both", "out": "both"}),
    ),
    inferred=(mflux.Z_IMAGE,),
)
