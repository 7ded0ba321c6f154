"""A picture drawn by diffusers' Stable Diffusion 3. torch is imported here, and only when used."""

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.core.errors import LyditeError

NEEDED = ("torch", "diffusers", "transformers")
INSTALL = "pip install 'lydite[reference]' adds what a comparison needs."


class ReferenceMissing(LyditeError):
    """The reference extra is not installed, or what is installed does not start."""


def draw(
    model: Path,
    prompt: str,
    *,
    seed: int,
    steps: int,
    guidance: float,
    width: int,
    height: int,
    text_length: int,
    on_step: Callable[[], None],
) -> NDArray[np.uint8]:
    """Pixels (H, W, 3) of `prompt` in float32 on the CPU, from the noise of torch's `seed`."""
    with imported() as (torch, pipeline_class):
        pipeline = pipeline_class.from_pretrained(model, dtype=torch.float32)
        pipeline.set_progress_bar_config(disable=True)

        def stepped(pipe: Any, index: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            on_step()
            return values

        image = pipeline(
            prompt,
            num_inference_steps=steps,
            guidance_scale=guidance,
            width=width,
            height=height,
            max_sequence_length=text_length,
            generator=torch.Generator().manual_seed(seed),
            output_type="np",
            callback_on_step_end=stepped,
        ).images[0]
    return (image * 255).round().astype(np.uint8)  # as diffusers itself makes an image of it


@contextlib.contextmanager
def imported() -> Iterator[tuple[Any, Any]]:
    """torch and the pipeline class, with their progress bars and advice silenced meanwhile."""
    if absent := [name for name in NEEDED if find_spec(name) is None]:
        raise ReferenceMissing(
            f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed; {INSTALL}"
        )
    with contextlib.ExitStack() as stack:
        try:
            import torch
            from diffusers.utils import logging as diffusers_logging
            from transformers.utils import logging as transformers_logging

            stack.enter_context(_silent(diffusers_logging))
            stack.enter_context(_silent(transformers_logging))
            from diffusers import StableDiffusion3Pipeline
        except (ImportError, OSError, RuntimeError) as error:  # a wheel for another machine, say
            reason = " ".join(str(error).split())
            raise ReferenceMissing(
                f"torch and diffusers do not start ({reason:.200}); {INSTALL}"
            ) from error
        yield torch, StableDiffusion3Pipeline


@contextlib.contextmanager
def _silent(logging: Any) -> Iterator[None]:
    """Errors only, in the logging module that diffusers and transformers each have."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
