"""How much memory a run needs, known before a weight is read.

Weights are counted exactly, from configs and headers. What networks need while they run is an
estimate from the size of the picture: on the safe side, and small beside the weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from lydite.core.device import current_device
from lydite.core.errors import InputError
from lydite.core.files import size_text
from lydite.models.layers import WHOLE_ATTENTION
from lydite.pipelines.family import Run
from lydite.pipelines.model import Component
from lydite.pipelines.pipeline import Pipeline

TOKEN_ARRAYS = 16  # of (tokens, width) that are alive at once in a transformer's block
TILE = 1024  # pixels of a side, where a picture is too large to be decoded at once
PIXEL_ARRAYS = 6  # of (pixels, channels) that are alive at once in the decoder's last block


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes: the weights of each network, and what the transformer and the VAE work in."""

    weights: Mapping[str, int]
    denoising: int = 0
    decoding: int = 0

    @property
    def together(self) -> int:
        """With all networks in memory."""
        return sum(self.weights.values()) + max(self.denoising, self.decoding)

    @property
    def in_turn(self) -> int:
        """With one network in memory at a time."""
        work = {"vae": self.decoding, "transformer": self.denoising, "unet": self.denoising}
        return max(size + work.get(name.split()[-1], 0) for name, size in self.weights.items())


def weights_in_memory(
    components: Mapping[str, Component], dtype: str, bits: int | None = None
) -> MemoryEstimate:
    """Of the weights alone."""
    sizes: dict[str, int] = {}
    for name, component in components.items():
        wide = dtype == "float16" and component.widens
        sizes[name] = component.nbytes(mx.float32 if wide else getattr(mx, dtype), bits)
    return MemoryEstimate(sizes)


def estimate(
    pipeline: Pipeline, run: Run, batch: int = 1, *, bits: int | None = None
) -> MemoryEstimate:
    """Of one run; `bits` other than the model's own show what they would save."""
    model, request = pipeline.model, run.request
    assert request.width and request.height, "a planned request has a size"
    weights = weights_in_memory(model.components, model.dtype, bits or model.bits).weights
    if pipeline.refiner is not None:
        parts = pipeline.refiner.model.components
        second = weights_in_memory(parts, model.dtype, bits or model.bits).weights
        weights = {**weights, **{f"refiner {name}": size for name, size in second.items()}}
    itemsize = getattr(mx, model.dtype).size
    shown = run.image is not None and pipeline.family.image == "reference"
    tokens = pipeline.latents.tokens(request.width, request.height) * (1 + shown)
    tokens += request.text_length or 0
    width = _width(model.config(pipeline.family.network))
    side = pipeline.tile or max(request.width, request.height)
    pixels = min(request.width, side) * min(request.height, side)
    positions = pixels // pipeline.latents.vae_factor**2
    scores = min(positions, WHOLE_ATTENTION) ** 2  # of the VAE's attention
    return MemoryEstimate(
        weights,
        denoising=batch * tokens * width * TOKEN_ARRAYS * itemsize,
        decoding=(pixels * _channels(model.config("vae")) * PIXEL_ARRAYS + 3 * scores) * itemsize,
    )


def available() -> int:
    """Bytes that MLX may use on this machine."""
    return current_device().memory


def fit_in_memory(pipeline: Pipeline, runs: Sequence[Run], batch: int) -> list[str]:
    """Have a run that does not fit load its networks in turn, or decode in tiles; what was done.

    InputError where it cannot fit, before a weight is read, with what would.
    """
    limit, notes = available(), list[str]()
    both = [each for each in (pipeline, pipeline.refiner) if each is not None]
    largest = max(runs, key=lambda run: (run.request.width or 0) * (run.request.height or 0))
    needed = estimate(pipeline, largest, batch)
    if needed.decoding + needed.weights.get("vae", 0) > limit and pipeline.tile is None:
        for each in both:
            each.tile = TILE
        notes.append(
            f"decoding {largest.request.width}×{largest.request.height} pixels at once needs about "
            f"{size_text(needed.decoding)} of memory; it is done in tiles of {TILE}."
        )
        needed = estimate(pipeline, largest, batch)
    if needed.together > limit and not pipeline.model.low_memory and needed.in_turn <= limit:
        for each in both:
            each.model.low_memory = True
        notes.append(
            f"all networks together need about {size_text(needed.together)} of memory and "
            f"{size_text(limit)} are there; they are loaded in turn, as with --low-memory."
        )
    peak = needed.in_turn if pipeline.model.low_memory else needed.together
    if peak > limit:
        raise InputError(
            f"this run needs about {size_text(min(peak, needed.in_turn))} of memory; "
            f"{size_text(limit)} are there. {_advice(pipeline, largest, batch, limit)}"
        )
    return notes


def _advice(pipeline: Pipeline, run: Run, batch: int, limit: int) -> str:
    for bits in (8, 4):
        if pipeline.model.bits is None or bits < pipeline.model.bits:
            size = estimate(pipeline, run, batch, bits=bits).in_turn
            if size <= limit:
                return f"Add --bits {bits} ({size_text(size)})."
    return "A smaller --size, --batch or --tile needs less."


def _width(config: Any) -> int:
    """Channels of a token."""
    if width := getattr(config, "inner_dim", None) or getattr(config, "dim", None):
        return int(width)
    if blocks := getattr(config, "block_out_channels", None):
        return int(max(blocks))
    return 0


def _channels(config: Any) -> int:
    """The most channels that the decoder has at the size of the picture."""
    widths = getattr(config, "block_out_channels", None) or getattr(config, "widths", (0,))
    return int(max(widths[:2]))
