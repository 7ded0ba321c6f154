"""Z-Image on diffusers."""

from collections.abc import Sequence
from typing import Any

from lydite.core.request import Request
from lydite.reference.family import ReferenceFamily


def _pipeline_class(kind: str = "") -> type:
    import diffusers

    return getattr(diffusers, f"ZImage{kind}Pipeline")


class _WithoutPadding:
    """A tokenizer whose padding is left out: no token sees what comes after it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._tokenizer(*args, **{**options, "padding": False})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _encode(pipeline: Any, prompts: Sequence[str], request: Request) -> dict[str, tuple[Any, str]]:
    """Each prompt alone, at its own length, which the pipeline would fill up and cut again."""
    features: dict[str, tuple[Any, str]] = {}
    names, tokenizer = ("prompt_embeds", "negative_prompt_embeds"), pipeline.tokenizer
    vars(pipeline)["tokenizer"] = _WithoutPadding(tokenizer)
    try:
        for name, prompt in zip(names, reversed(prompts), strict=False):
            (text,), _ = pipeline.encode_prompt(
                prompt,
                do_classifier_free_guidance=False,
                max_sequence_length=request.text_length,
            )
            features[name] = (text[None], "b s d")
    finally:
        vars(pipeline)["tokenizer"] = tokenizer
    return features


def _arguments(conditioning: dict[str, Any], request: Request, guided: bool) -> dict[str, Any]:
    lists = {name: [text[0]] for name, text in conditioning.items()}
    return {**lists, "max_sequence_length": request.text_length}


def _noise_shape(pipeline: Any, height: int, width: int) -> tuple[int, ...]:
    factor = pipeline.vae_scale_factor
    return 1, pipeline.transformer.in_channels, height // factor, width // factor


FAMILY = ReferenceFamily(
    name="z_image",
    pipeline_class=_pipeline_class,
    image_pipeline_class=lambda: _pipeline_class("Img2Img"),
    mask_pipeline_class=lambda: _pipeline_class("Inpaint"),
    networks=("text_encoder", "transformer", "vae"),
    optional=(),
    channels_first=("transformer",),
    encode=_encode,
    arguments=_arguments,
    noise_shape=_noise_shape,
    is_guided=lambda request: (request.guidance or 0.0) > 0,
    float32_latents=True,
)
