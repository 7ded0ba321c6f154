"""A family on the reference's side: what differs between diffusers' pipelines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from lydite.core.errors import ConfigError
from lydite.core.request import Request

# Modules of this package.
BUILT_IN = ("sd3", "flux", "flux2", "qwen_image", "z_image", "sdxl", "sd")


@dataclass(frozen=True)
class ReferenceFamily:
    """One of diffusers' pipelines, or a class with its methods.

    That is `from_pretrained`, `from_single_file` where `--components` may be given, a call that
    takes `latents`, `num_inference_steps`, `guidance_scale`, `height`, `width`, `output_type` and
    `callback_on_step_end`, and the attributes `scheduler` and those named in `networks`.
    """

    name: str  # as in lydite.pipelines
    pipeline_class: Callable[[], type]  # imports it
    networks: tuple[str, ...]  # recorded; text encoders, then the denoiser, then the VAE
    optional: tuple[str, ...]  # components that a checkpoint may lack
    channels_first: tuple[str, ...]  # modules whose values are images or latents, beside the VAE's
    # Conditioning by its name in the trace, with its axes, of prompts with the negative one first.
    encode: Callable[[Any, Sequence[str], Request], dict[str, tuple[Any, str]]]
    # The arguments of the pipeline's call that hand the conditioning over; `guidance_scale` too,
    # where that is not the request's guidance.
    arguments: Callable[[dict[str, Any], Request, bool], dict[str, Any]]
    noise_shape: Callable[[Any, int, int], tuple[int, ...]]  # pipeline, height, width
    # A parameter by its name, NETWORK/PATH, as far as the network uses it on a picture.
    used_weight: Callable[[str, Any], Any] = lambda name, array: array
    # Whether the call runs the negative prompt, which `encode` is then given first.
    is_guided: Callable[[Request], bool] = lambda request: (request.guidance or 0.0) > 1
    # Latents (1, C, h, w) in the form in which the pipeline's loop has them, and back.
    pack: Callable[[Any, Any], Any] = lambda pipeline, latents: latents
    unpack: Callable[[Any, Any, Request], Any] = lambda pipeline, latents, request: latents
    # The classes for img2img and inpainting, which take a generator and not the noise.
    image_pipeline_class: Callable[[], type] | None = None
    mask_pipeline_class: Callable[[], type] | None = None
    # What they draw before the noise: a sample of the encoded image. Pipeline, request, masked.
    draws_before_noise: Callable[[Any, Request, bool], int] = lambda *_: 1
    float32_latents: bool = False  # the call refuses latents of another precision
    check: Callable[[Any, Request], None] = lambda pipeline, request: None  # ValueError
    mend_single_file: Callable[[Any], None] = lambda pipeline: None  # what from_single_file omits


def find_reference_family(name: str) -> ReferenceFamily:
    """The family called `name`, from this package or from an entry point of another one."""
    if name in BUILT_IN:
        return import_module(f"lydite.reference.{name}").FAMILY
    for point in entry_points(group="lydite.reference_families"):
        family: ReferenceFamily = point.load()
        if family.name == name:
            return family
    raise ConfigError(f"family {name!r} has no reference; known are {', '.join(BUILT_IN)}.")
