"""Stable Diffusion 3 on diffusers.

The negative prompt and the prompt are encoded as one batch in that order; diffusers would run each
encoder twice, for the same numbers.
"""

from collections.abc import Sequence
from typing import Any

from lydite.core.request import Request
from lydite.reference.family import ReferenceFamily


def _pipeline_class() -> type:
    from diffusers import StableDiffusion3Pipeline

    return StableDiffusion3Pipeline


def _encode(pipeline: Any, prompts: Sequence[str], request: Request) -> dict[str, tuple[Any, str]]:
    text, _, pooled, _ = pipeline.encode_prompt(
        list(prompts),
        None,
        None,
        do_classifier_free_guidance=False,  # both are here already
        max_sequence_length=request.text_length,
    )
    return {"prompt_embeds": (text, "b s d"), "pooled": (pooled, "b d")}


def _arguments(conditioning: dict[str, Any], request: Request, guided: bool) -> dict[str, Any]:
    text, pooled = conditioning["prompt_embeds"], conditioning["pooled"]
    negative = {
        "negative_prompt_embeds": text[:1],
        "negative_pooled_prompt_embeds": pooled[:1],
    }
    return {
        "prompt_embeds": text[-1:],
        "pooled_prompt_embeds": pooled[-1:],
        "max_sequence_length": request.text_length,
        **(negative if guided else {}),
    }


def _noise_shape(pipeline: Any, height: int, width: int) -> tuple[int, ...]:
    factor = pipeline.vae_scale_factor
    return 1, pipeline.transformer.config.in_channels, height // factor, width // factor


def _check(pipeline: Any, request: Request) -> None:
    pipeline.check_inputs(
        request.prompt,
        None,
        None,
        request.height,
        request.width,
        max_sequence_length=request.text_length,
    )


def _mend_single_file(pipeline: Any) -> None:
    if (t5 := pipeline.text_encoder_3) is not None:
        # diffusers 0.42 leaves T5's second name for its table empty, and dropout on.
        t5.tie_weights()
        t5.eval()


FAMILY = ReferenceFamily(
    name="sd3",
    pipeline_class=_pipeline_class,
    networks=("text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "vae"),
    optional=("text_encoder_3", "tokenizer_3"),
    channels_first=("transformer", "transformer/pos_embed", "transformer/pos_embed.proj"),
    encode=_encode,
    arguments=_arguments,
    noise_shape=_noise_shape,
    check=_check,
    mend_single_file=_mend_single_file,
)
