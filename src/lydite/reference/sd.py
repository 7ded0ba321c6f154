"""Stable Diffusion 1.x and 2.x on diffusers."""

from collections.abc import Sequence
from typing import Any

from lydite.core.request import Request
from lydite.reference.family import ReferenceFamily


def _class(task: str = "") -> type:
    import diffusers

    return getattr(diffusers, f"StableDiffusion{task}Pipeline")


def _encode(pipeline: Any, prompts: Sequence[str], request: Request) -> dict[str, tuple[Any, str]]:
    # both prompts as one batch; the pipeline would run the encoder twice, for the same numbers
    if request.clip_skip:
        text = _encode_skipping(pipeline, prompts, request.clip_skip)
    else:
        text, _ = pipeline.encode_prompt(list(prompts), "cpu", 1, False)
    return {"prompt_embeds": (text, "b s d")}


def _encode_skipping(pipeline: Any, prompts: Sequence[str], layers: int) -> Any:
    """As `encode_prompt`, which fails here: transformers 5 has no `text_model`."""
    import torch

    tokenizer, encoder = pipeline.tokenizer, pipeline.text_encoder
    options = {"max_length": tokenizer.model_max_length, "padding": "max_length"}
    ids = tokenizer(list(prompts), **options, truncation=True, return_tensors="pt").input_ids
    output = encoder(ids, output_hidden_states=True)
    norm = getattr(encoder, "text_model", encoder).final_layer_norm
    own = norm(output.hidden_states[-(layers + 1)][-1:])  # of the prompt alone
    return torch.cat([output.last_hidden_state[:-1], own])


def _arguments(conditioning: dict[str, Any], request: Request, guided: bool) -> dict[str, Any]:
    text = conditioning["prompt_embeds"]
    negative = {"negative_prompt_embeds": text[:1]} if guided else {}
    return {"prompt_embeds": text[-1:], **negative}


def noise_shape(pipeline: Any, height: int, width: int) -> tuple[int, ...]:
    """Of the latents of one picture."""
    factor = pipeline.vae_scale_factor
    return 1, pipeline.vae.config.latent_channels, height // factor, width // factor


def draws_before_noise(pipeline: Any, request: Request, masked: bool) -> int:
    """A U-Net that takes the mask needs the image itself only below strength 1."""
    takes_mask = pipeline.unet.config.in_channels > pipeline.vae.config.latent_channels
    return 0 if masked and takes_mask and request.strength == 1 else 1


FAMILY = ReferenceFamily(
    name="sd",
    pipeline_class=_class,
    image_pipeline_class=lambda: _class("Img2Img"),
    mask_pipeline_class=lambda: _class("Inpaint"),
    draws_before_noise=draws_before_noise,
    networks=("text_encoder", "unet", "vae"),
    optional=("safety_checker", "feature_extractor", "image_encoder"),
    channels_first=("unet",),
    encode=_encode,
    arguments=_arguments,
    noise_shape=noise_shape,
)
