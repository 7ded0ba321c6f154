"""FLUX.2-klein on diffusers."""

from collections.abc import Sequence
from typing import Any

from lydite.core.request import Request
from lydite.reference import flux
from lydite.reference.family import ReferenceFamily


def _pipeline_class() -> type:
    base: Any = flux.pipeline_class("Flux2KleinPipeline", "Flux2Transformer2DModel")

    class Pipeline(base):
        def prepare_latents(self, *, height: int, width: int, latents: Any, **options: Any) -> Any:
            """The loop has tokens; the call takes what it makes them of."""
            latents = _as_image(self, latents, height, width)
            return super().prepare_latents(height=height, width=width, latents=latents, **options)

    return Pipeline


def _encode(pipeline: Any, prompts: Sequence[str], request: Request) -> dict[str, tuple[Any, str]]:
    text, _ = pipeline.encode_prompt(list(prompts), max_sequence_length=request.text_length)
    return {"prompt_embeds": (text, "b s d")}


def _arguments(conditioning: dict[str, Any], request: Request, guided: bool) -> dict[str, Any]:
    text = conditioning["prompt_embeds"]
    negative = {"negative_prompt_embeds": text[:1]} if guided else {}
    return {
        "prompt_embeds": text[-1:],
        "max_sequence_length": request.text_length,
        **negative,
    }


def _noise_shape(pipeline: Any, height: int, width: int) -> tuple[int, ...]:
    side = 2 * pipeline.vae_scale_factor
    return 1, pipeline.transformer.config.in_channels, height // side, width // side


def _as_image(pipeline: Any, latents: Any, height: int, width: int) -> Any:
    """Tokens (1, L, C) as (1, C, h, w)."""
    _, _, rows, columns = _noise_shape(pipeline, height, width)
    return latents.unflatten(1, (rows, columns)).permute(0, 3, 1, 2)


def _unpack(pipeline: Any, latents: Any, request: Request) -> Any:
    assert request.height and request.width, "a planned request has a size"
    return _as_image(pipeline, latents, request.height, request.width)


FAMILY = ReferenceFamily(
    name="flux2",
    pipeline_class=_pipeline_class,
    image_pipeline_class=_pipeline_class,
    networks=("text_encoder", "transformer", "vae"),
    optional=(),
    channels_first=(),
    encode=_encode,
    arguments=_arguments,
    noise_shape=_noise_shape,
    pack=lambda pipeline, latents: pipeline._pack_latents(latents),
    unpack=_unpack,
)
