"""Stable Diffusion XL on diffusers: base and refiner."""

from collections.abc import Sequence
from typing import Any

from lydite.core.request import Request
from lydite.reference.family import ReferenceFamily
from lydite.reference.sd import draws_before_noise, noise_shape

AESTHETIC_SCORES = (6.0, 2.5)  # the call's defaults, for the prompt and the negative prompt


def _class(task: str = "") -> type:
    import diffusers

    return getattr(diffusers, f"StableDiffusionXL{task}Pipeline")


def _encode(pipeline: Any, prompts: Sequence[str], request: Request) -> dict[str, tuple[Any, str]]:
    import torch

    zeros = len(prompts) > 1 and not prompts[0] and pipeline.config["force_zeros_for_empty_prompt"]
    # both prompts as one batch; the pipeline would run the encoders twice, for the same numbers
    text, _, pooled, _ = pipeline.encode_prompt(
        list(prompts[1:] if zeros else prompts), device="cpu", do_classifier_free_guidance=False
    )
    if request.clip_skip:  # of the prompt alone
        own, *_ = pipeline.encode_prompt(
            list(prompts[-1:]),
            device="cpu",
            do_classifier_free_guidance=False,
            clip_skip=request.clip_skip,
        )
        text = torch.cat([text[:-1], own])
    if zeros:
        text = torch.cat([torch.zeros_like(text), text])
        pooled = torch.cat([torch.zeros_like(pooled), pooled])
    ids = _time_ids(pipeline, request)[-len(prompts) :]
    return {"prompt_embeds": (text, "b s d"), "pooled": (pooled, "b d"), "time_ids": (ids, "b d")}


def _time_ids(pipeline: Any, request: Request) -> Any:
    """As the pipeline's call computes them: of the negative prompt and of the prompt."""
    import torch

    size, crop = (request.height, request.width), (0, 0)
    options = {
        "dtype": torch.float32,
        "text_encoder_projection_dim": pipeline.text_encoder_2.config.projection_dim,
    }
    if not hasattr(pipeline.config, "requires_aesthetics_score"):
        return torch.cat([pipeline._get_add_time_ids(size, crop, size, **options)] * 2)
    ids, negative = pipeline._get_add_time_ids(
        size, crop, size, *AESTHETIC_SCORES, size, crop, size, **options
    )
    return torch.cat([negative, ids])


def _arguments(conditioning: dict[str, Any], request: Request, guided: bool) -> dict[str, Any]:
    text, pooled = conditioning["prompt_embeds"], conditioning["pooled"]
    negative = {
        "negative_prompt_embeds": text[:1],
        "negative_pooled_prompt_embeds": pooled[:1],
    }
    return {
        "prompt_embeds": text[-1:],
        "pooled_prompt_embeds": pooled[-1:],
        **(negative if guided else {}),
    }


FAMILY = ReferenceFamily(
    name="sdxl",
    pipeline_class=_class,
    image_pipeline_class=lambda: _class("Img2Img"),
    mask_pipeline_class=lambda: _class("Inpaint"),
    draws_before_noise=draws_before_noise,
    networks=("text_encoder", "text_encoder_2", "unet", "vae"),
    optional=("text_encoder", "tokenizer", "feature_extractor", "image_encoder"),
    channels_first=("unet",),
    encode=_encode,
    arguments=_arguments,
    noise_shape=noise_shape,
)
