"""Stable Diffusion 1.x and 2.x on diffusers."""

from collections.abc import Sequence
from typing import Any

from lydite.core.request import Request
from lydite.reference.family import ReferenceFamily


def _pipeline_class() -> type:
    from diffusers import StableDiffusionPipeline

    return StableDiffusionPipeline


def _encode(pipeline: Any, prompts: Sequence[str], request: Request) -> dict[str, tuple[Any, str]]:
    # both prompts as one batch; the pipeline would run the encoder twice, for the same numbers
    text, _ = pipeline.encode_prompt(list(prompts), "cpu", 1, False)
    return {"prompt_embeds": (text, "b s d")}


def _arguments(conditioning: dict[str, Any], request: Request, guided: bool) -> dict[str, Any]:
    text = conditioning["prompt_embeds"]
    negative = {"negative_prompt_embeds": text[:1]} if guided else {}
    return {"prompt_embeds": text[-1:], **negative}


def noise_shape(pipeline: Any, height: int, width: int) -> tuple[int, ...]:
    """Of the latents of one picture."""
    factor = pipeline.vae_scale_factor
    return 1, pipeline.vae.config.latent_channels, height // factor, width // factor


FAMILY = ReferenceFamily(
    name="sd",
    pipeline_class=_pipeline_class,
    networks=("text_encoder", "unet", "vae"),
    optional=("safety_checker", "feature_extractor", "image_encoder"),
    channels_first=("unet",),
    encode=_encode,
    arguments=_arguments,
    noise_shape=noise_shape,
)
