"""Stable Diffusion XL: base and refiner.

Reference: diffusers 0.42.1, pipelines/stable_diffusion_xl. The base model joins the last but one
layer of two CLIP encoders, the refiner has the second encoder alone. The U-Net also takes the
second encoder's pooled and projected text and some numbers, the time ids: size of the training
picture, its crop, and the size of the picture to draw or, for the refiner, an aesthetic score.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from lydite.core.config import read_json
from lydite.core.errors import ConfigError
from lydite.core.request import Request
from lydite.pipelines.families import sd, sd_single_file
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.families.sd import (
    UNET_BLOCKS,
    UNET_NAMES,
    bind,
    check_unet,
    latents,
)
from lydite.pipelines.family import Conditioning, Defaults, Family, Variant
from lydite.pipelines.model import Component, Model, join_features
from lydite.pipelines.observer import Observer
from lydite.pipelines.prompt_weights import encoder_rows
from lydite.tokenizers.tokenizer import load_clip_tokenizer

DEFAULTS = Defaults(steps=50, guidance=5.0, strength=0.3, mask_strength=0.9999)
ENCODERS = ("text_encoder", "text_encoder_2")
AESTHETIC_SCORES = (2.5, 6.0)  # of the negative prompt and of the prompt


def encode(
    model: Model, prompts: Sequence[str], request: Request, observer: Observer
) -> Conditioning:
    """`text` (C, S, D), `pooled` (C, P) and `time_ids` (C, 6 or 5) of C prompts, negative first."""
    # Zeros stand for an empty negative prompt, in models that were trained so.
    zeros = len(prompts) > 1 and not prompts[0] and _is_empty_prompt_zero(model)
    encoded = prompts[1:] if zeros else prompts
    states: list[mx.array] = []
    pooled = mx.zeros(())
    for name in ENCODERS:
        if name not in model:
            continue
        encoder, rows = model.network(name), encoder_rows(model, name, encoded, request.weighting)
        output = encoder(rows.ids) if rows.hidden is None else encoder(rows.ids, rows.hidden)
        state = rows.combine(output.penultimate)
        if request.clip_skip:  # of the prompt alone, as the reference has it
            skipped = sd.skipped_states(output, request.clip_skip + 1)
            state = mx.concatenate([state[:-1], rows.combine(skipped)[-1:]])
        states.append(observer.observe("encoder_output", state, name=name))
        pooled = output.pooled[mx.array(rows.pooled)]
        if name == "text_encoder_2":  # the first encoder's is not used
            pooled = observer.observe("encoder_output", pooled, name=f"{name} pooled")
        mx.eval(states[-1], pooled)  # before the encoder may be freed
        del output, encoder
        model.release(name)
    text = join_features(states, model.path)  # (C, S, D1 + D2)
    if zeros:
        text = mx.concatenate([mx.zeros_like(text), text])
        pooled = mx.concatenate([mx.zeros_like(pooled), pooled])
    return {"text": text, "pooled": pooled, "time_ids": _time_ids(model, request, len(prompts))}


def _time_ids(model: Model, request: Request, prompts: int) -> mx.array:
    """(C, 6 or 5) in float32: the picture as if a training picture of its size, not cropped."""
    assert request.width and request.height, "a planned request has a size"
    size, crop = [request.height, request.width], [0, 0]
    ids = count_time_ids(model.components)
    last = [size] * 2 if ids == 6 else [[score] for score in AESTHETIC_SCORES]
    return mx.array([[*size, *crop, *row] for row in last[-prompts:]], dtype=mx.float32)


def count_time_ids(components: Mapping[str, Component]) -> int:
    """6, or 5 for a refiner."""
    unet, encoder = components["unet"].config, components["text_encoder_2"].config
    width = unet.projection_class_embeddings_input_dim - (encoder.projection_dim or 0)
    return width // unet.addition_time_embed_dim


def needs(model: Model) -> tuple[str, ...]:
    """A refiner works on an image; diffusers has no text to image for it."""
    return sd.needs(model) or (("image",) if count_time_ids(model.components) == 5 else ())


def _is_empty_prompt_zero(model: Model) -> bool:
    """What model_index.json says; a single file is taken for what was published in this form."""
    if model.path.is_dir():
        settings = read_json(model.path / "model_index.json")
        return settings.get("force_zeros_for_empty_prompt", True) is True
    return count_time_ids(model.components) == 6


def check(path: Path, components: Mapping[str, Component]) -> None:
    """The components fit each other."""
    unet, encoder = components["unet"].config, components["text_encoder_2"].config
    if not unet.addition_embed_type:
        raise ConfigError(f"{path}: the U-Net is not SDXL's: it has no addition_embed_type.")
    encoders = [components[name].config for name in ENCODERS if name in components]
    check_unet(path, components, sum(config.hidden_size for config in encoders))
    pooled, width = encoder.projection_dim or 0, unet.addition_time_embed_dim
    if unet.projection_class_embeddings_input_dim not in (pooled + 6 * width, pooled + 5 * width):
        raise ConfigError(
            f"{path}: unet has projection_class_embeddings_input_dim "
            f"{unet.projection_class_embeddings_input_dim}; expected {pooled + 6 * width} or, for "
            f"a refiner, {pooled + 5 * width}: text_encoder_2's {pooled} and 6 or 5 ids of {width}."
        )


FAMILY = Family(
    name="sdxl",
    title="Stable Diffusion XL",
    pipelines=frozenset(
        {
            "StableDiffusionXLPipeline",
            "StableDiffusionXLImg2ImgPipeline",
            "StableDiffusionXLInpaintPipeline",
        }
    ),
    kinds=KINDS,
    classes={
        "unet": ("UNet2DConditionModel",),
        "vae": ("AutoencoderKL",),
        "text_encoder": ("CLIPTextModel", "CLIPTextModelWithProjection"),
        "text_encoder_2": ("CLIPTextModelWithProjection",),
    },
    required=("unet", "vae", "text_encoder_2"),
    network="unet",
    encoders=ENCODERS,
    tokenizers={name: lambda folder, _: load_clip_tokenizer(folder) for name in ENCODERS},
    defaults=DEFAULTS,
    scheduler=sd_single_file.SDXL_SCHEDULER,
    check=check,
    latents=latents,
    encode=encode,
    bind=bind,
    variant=lambda parts, _: Variant(DEFAULTS, sd_single_file.scheduler_config(parts)),
    strength="diffusers",
    inpaints=True,
    skips_layers=True,
    weighs_prompts=True,
    embeddings={"clip_l": "text_encoder", "clip_g": "text_encoder_2"},
    refines=True,
    needs=needs,
    names=replace(
        UNET_NAMES,
        renames={
            ("text_encoder_2", "out.pooled"): ("", "out.text_embeds"),
            **UNET_NAMES.renames,
        },
        constant=(("unet/add_embedding*", "*"),),
        conditioning={
            **UNET_NAMES.conditioning,
            "pooled": ("pooled", "b d"),
            "time_ids": ("time_ids", "b d"),
        },
    ),
    blocks=UNET_BLOCKS,
    lora_tables=sd.lora_tables,
    inferred=(sd_single_file.SDXL_SINGLE_FILE,),
)
