"""Qwen-Image on diffusers."""

from collections.abc import Sequence
from typing import Any

from lydite.core.request import Request
from lydite.reference import flux
from lydite.reference.family import ReferenceFamily


def _pipeline_class(kind: str = "") -> type:
    import diffusers

    return getattr(diffusers, f"QwenImage{kind}Pipeline")


def _encode(pipeline: Any, prompts: Sequence[str], request: Request) -> dict[str, tuple[Any, str]]:
    """Each prompt alone, at its own length; a mask is not needed then."""
    names = ("prompt_embeds", "negative_prompt_embeds")
    return {
        name: (
            pipeline.encode_prompt(prompt, max_sequence_length=request.text_length)[0],
            "b s d",
        )
        for name, prompt in zip(names, reversed(prompts), strict=False)
    }


def _arguments(conditioning: dict[str, Any], request: Request, guided: bool) -> dict[str, Any]:
    import torch

    masks = {
        f"{name}_mask": torch.ones(text.shape[:2], dtype=torch.long)
        for name, text in conditioning.items()
    }
    return {
        **conditioning,
        **masks,
        "guidance_scale": None,  # of models distilled from guidance
        "true_cfg_scale": request.guidance if guided else 1.0,
        "max_sequence_length": request.text_length,
        "height": request.height,  # img2img would draw 1024 × 1024
        "width": request.width,
    }


def _used_weight(name: str, array: Any) -> Any:
    """Of a kernel over time, what meets the present frame: before a single one there is nothing."""
    return array[:, :, -1] if name.startswith("vae/") and array.ndim == 5 else array


def _unpack(pipeline: Any, latents: Any, request: Request) -> Any:
    return flux.unpack(pipeline, latents, request)[:, :, 0]


FAMILY = ReferenceFamily(
    name="qwen_image",
    pipeline_class=_pipeline_class,
    image_pipeline_class=lambda: _pipeline_class("Img2Img"),
    mask_pipeline_class=lambda: _pipeline_class("Inpaint"),
    networks=("text_encoder", "transformer", "vae"),
    optional=(),
    channels_first=(),
    encode=_encode,
    arguments=_arguments,
    noise_shape=flux.noise_shape,
    is_guided=lambda request: bool(request.negative) and (request.guidance or 0.0) > 1,
    pack=flux.pack,
    unpack=_unpack,
    used_weight=_used_weight,
)
