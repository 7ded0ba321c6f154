"""Qwen-Image.

Reference: diffusers 0.42.1, pipelines/qwenimage. The last hidden states of Qwen2.5-VL's text tower,
without those of the template's beginning; a transformer on packed latents that predicts velocity;
a video autoencoder used for single frames. Guidance keeps the length of each token's velocity.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from lydite.core.request import Request
from lydite.models.modulation import Modulation
from lydite.models.packing import pack_latents, unpack_latents
from lydite.models.qwen_image import QwenImageTransformer
from lydite.pipelines.families import mflux
from lydite.pipelines.families.bound_transformer import BoundTransformer, latents
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.family import (
    BlockRule,
    Conditioning,
    Defaults,
    Family,
    Run,
    TraceNames,
    check_equal,
)
from lydite.pipelines.model import Component, Model
from lydite.pipelines.observer import Observer
from lydite.sampling.denoiser import cfg
from lydite.tokenizers.templates import QWEN_IMAGE, TemplateTokenizer
from lydite.tokenizers.tokenizer import load_qwen2_tokenizer

MOST_TOKENS = 1024  # of a prompt with the end of the template; the pipeline reads 512 by default


def load_tokenizer(folder: Path, length: int | None) -> TemplateTokenizer:
    """As the pipeline does: all tokens are encoded, then the features are cut."""
    tokenizer = load_qwen2_tokenizer(folder, MOST_TOKENS + QWEN_IMAGE.dropped)
    return TemplateTokenizer(tokenizer, QWEN_IMAGE, min(length or 512, MOST_TOKENS))


def encode(
    model: Model, prompts: Sequence[str], request: Request, observer: Observer
) -> Conditioning:
    """Text features `text` (1, S, D) and, with a negative prompt, `negative_text` of its length."""
    dtype = getattr(mx, model.dtype)
    features: dict[str, mx.array] = {}
    encoder = model.network("text_encoder")
    for name, prompt in zip(("text", "negative_text"), reversed(prompts), strict=False):
        ids = model.token_ids("text_encoder", [prompt], request.text_length)
        states = observer.observe("encoder_output", encoder(ids).last, name=f"text_encoder {name}")
        text = states[:, QWEN_IMAGE.dropped :][:, : request.text_length].astype(dtype)
        mx.eval(text)  # before the encoder may be freed
        features[name] = text
    del encoder
    model.release("text_encoder")
    return features


def bind(
    model: Model, conditioning: Conditioning, run: Run, batch: int, observer: Observer
) -> BoundTransformer:
    """The transformer for one run and size of batch."""
    transformer: QwenImageTransformer = model.network("transformer")
    dtype = conditioning["text"].dtype

    def tables(timesteps: mx.array, prompt: int) -> Modulation:
        return transformer.modulation(timesteps, dtype)

    texts = [conditioning[name] for name in ("negative_text", "text") if name in conditioning]
    return BoundTransformer(transformer, texts, tables, run, batch, observer, shared_tables=True)


def guide(uncond: Any, cond: Any, scale: float) -> Any:
    """Classifier-free guidance with each token's norm brought back to that of the prompt alone."""
    _, height, width, _ = cond.shape
    guided, prompted = (pack_latents(x) for x in (cfg(uncond, cond, scale), cond))
    norms = (mx.linalg.norm(x, axis=-1, keepdims=True) for x in (prompted, guided))
    return unpack_latents(guided * (next(norms) / next(norms)), height, width)


def check(path: Path, components: Mapping[str, Component]) -> None:
    """The text encoder and the VAE have to fit the transformer they feed."""
    transformer, channels = components["transformer"].config, components["vae"].config.z_dim
    facts = {
        "joint_attention_dim": (
            transformer.joint_attention_dim,
            components["text_encoder"].config.hidden_size,
            "the width of text_encoder",
        ),
        "in_channels": (transformer.in_channels, 4 * channels, "4 × the VAE's z_dim"),
        "out_channels": (transformer.out_channels, channels, "the VAE's z_dim"),
    }
    check_equal(path, facts)


_BLOCK = "transformer/transformer_blocks.*"
NAMES = TraceNames(
    renames={
        # the reference's last of these is normed, as `last` is here
        ("text_encoder*", "out.hidden_states.*"): ("", "out.states.*"),
        ("text_encoder", "out.last"): ("", "out.last_hidden_state"),
        ("text_encoder/model", "out.last"): ("", "out.last_hidden_state"),
        ("text_encoder/model.language_model", "out.last"): ("", "out.last_hidden_state"),
        ("text_encoder/*.self_attn", "in.0"): ("", "in.hidden_states"),
        ("transformer", "in.0"): ("", "in.hidden_states"),
        ("transformer", "in.1"): ("", "in.text"),  # embedded, which the reference's is not
        # the reference's is from 0 to 1
        ("transformer/time_text_embed", "in.0"): ("", "in.timesteps"),
        ("transformer/norm_out", "in.1"): ("", "in.table"),
        (f"{_BLOCK}.attn", "in.0"): ("", "in.hidden_states"),
        (f"{_BLOCK}.attn", "in.1"): ("", "in.encoder_hidden_states"),
        (f"{_BLOCK}.*", "*"): ("", ""),
        (_BLOCK, "in.0"): ("", "in.encoder_hidden_states"),
        (_BLOCK, "in.1"): ("", "in.hidden_states"),
    },
    channels_last=(("vae/*.to_qkv", ""), ("vae/*.proj", ""), ("vae/*", "*")),  # those have tokens
    constant=(("transformer/txt_norm", "*"), ("transformer/txt_in", "*")),
    once=(("transformer/txt_norm", "*"), ("transformer/txt_in", "*")),
    conditioning={
        "text": ("prompt_embeds", "b s d"),
        "negative_text": ("negative_prompt_embeds", "b s d"),
    },
)

FAMILY = Family(
    name="qwen_image",
    title="Qwen-Image",
    pipelines=frozenset({"QwenImagePipeline", "QwenImageImg2ImgPipeline"}),
    kinds=KINDS,
    classes={
        "transformer": ("QwenImageTransformer2DModel",),
        "vae": ("AutoencoderKLQwenImage",),
        "text_encoder": ("Qwen2_5_VLForConditionalGeneration",),
    },
    required=("transformer", "vae", "text_encoder"),
    network="transformer",
    encoders=("text_encoder",),
    tokenizers={"text_encoder": load_tokenizer},
    defaults=Defaults(steps=50, guidance=4.0, text_length=512),
    scheduler={
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": 1.0,
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
        "shift_terminal": 0.02,
        "time_shift_type": "exponential",
    },
    guidance="negative",
    guide=guide,
    check=check,
    latents=latents,
    encode=encode,
    bind=bind,
    flow_grid="even",
    inpaints=True,
    names=NAMES,
    blocks=(
        BlockRule(r"transformer_blocks\.\d+\.attn", {"out": "image", "out.1": "text"}),
        BlockRule(r"transformer_blocks\.\d+\.img_mlp", {"in.0": "image", "out": "image"}),
        BlockRule(r"transformer_blocks\.\d+\.txt_mlp", {"in.0": "text", "out": "text"}),
    ),
    inferred=(mflux.QWEN_IMAGE,),
)
