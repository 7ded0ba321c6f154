"""FLUX.1 on diffusers."""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from lydite.core.config import read_json
from lydite.core.request import Request
from lydite.reference.family import ReferenceFamily

FILL = "FluxFillPipeline"


def pipeline_class(
    name: str = "FluxPipeline", transformer_class: str = "FluxTransformer2DModel"
) -> type:
    """A class of diffusers that also reads the authors' single files."""
    import diffusers

    base: Any = getattr(diffusers, name)

    class Pipeline(base):
        @classmethod
        def from_single_file(cls, pretrained_model_link_or_path: str, **options: Any) -> Any:
            """The authors' files hold the transformer alone; the rest is in the folder `config`."""
            folder = options.pop("config")
            transformer = getattr(diffusers, transformer_class).from_single_file(
                pretrained_model_link_or_path,
                config=folder,
                subfolder="transformer",
                torch_dtype=options["dtype"],
                local_files_only=True,
            )
            return cls.from_pretrained(folder, transformer=transformer, **options)

    return Pipeline


def _mask_pipeline_class() -> type:
    class Chosen:
        """The class for inpainting that the model's index asks for."""

        @staticmethod
        def from_pretrained(folder: Any, **options: Any) -> Any:
            return _class_for(folder).from_pretrained(folder, **options)

        @staticmethod
        def from_single_file(path: str, **options: Any) -> Any:
            return _class_for(options["config"]).from_single_file(path, **options)

    def _class_for(folder: Any) -> Any:
        fills = read_json(Path(folder) / "model_index.json").get("_class_name") == FILL
        return pipeline_class(FILL if fills else "FluxInpaintPipeline")

    return Chosen


def _check(pipeline: Any, request: Request) -> None:
    if request.negative and "negative_prompt" not in signature(pipeline.__call__).parameters:
        raise ValueError("its pipeline for filling takes no negative prompt")


def _encode(pipeline: Any, prompts: Sequence[str], request: Request) -> dict[str, tuple[Any, str]]:
    text, pooled, _ = pipeline.encode_prompt(list(prompts), max_sequence_length=request.text_length)
    return {"prompt_embeds": (text, "b s d"), "pooled": (pooled, "b d")}


def _arguments(conditioning: dict[str, Any], request: Request, guided: bool) -> dict[str, Any]:
    text, pooled = conditioning["prompt_embeds"], conditioning["pooled"]
    negative = {
        "negative_prompt_embeds": text[:1],
        "negative_pooled_prompt_embeds": pooled[:1],
        "true_cfg_scale": request.true_guidance,
    }
    return {
        "prompt_embeds": text[-1:],
        "pooled_prompt_embeds": pooled[-1:],
        "max_sequence_length": request.text_length,
        "height": request.height,  # img2img would draw 1024 × 1024
        "width": request.width,
        **(negative if guided else {}),
    }


def noise_shape(pipeline: Any, height: int, width: int) -> tuple[int, ...]:
    factor = pipeline.vae_scale_factor
    return 1, pipeline.transformer.config.in_channels // 4, height // factor, width // factor


def pack(pipeline: Any, latents: Any) -> Any:
    """(1, C, h, w) as tokens of 2 × 2 positions."""
    return pipeline._pack_latents(latents, *latents.shape)


def unpack(pipeline: Any, latents: Any, request: Request) -> Any:
    """Tokens as (1, C, h, w), or with an axis of one frame before h."""
    factor = pipeline.vae_scale_factor
    return pipeline._unpack_latents(latents, request.height, request.width, factor)


FAMILY = ReferenceFamily(
    name="flux",
    pipeline_class=pipeline_class,
    image_pipeline_class=lambda: pipeline_class("FluxImg2ImgPipeline"),
    mask_pipeline_class=_mask_pipeline_class,
    check=_check,
    networks=("text_encoder", "text_encoder_2", "transformer", "vae"),
    optional=("image_encoder", "feature_extractor"),
    channels_first=(),
    encode=_encode,
    arguments=_arguments,
    noise_shape=noise_shape,
    is_guided=lambda request: bool(request.negative) and (request.true_guidance or 0.0) > 1,
    pack=pack,
    unpack=unpack,
)
