"""How much memory a run needs, known before a weight is read.

Weights are counted exactly, from configs and headers. What networks need while they run is an
estimate from the size of the picture: on the safe side, and small beside the weights.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from lydite.pipelines.family import Run
from lydite.pipelines.model import Component
from lydite.pipelines.pipeline import Pipeline

TOKEN_ARRAYS = 16  # of (tokens, width) that are alive at once in a transformer's block
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
        return max(size + work.get(name, 0) for name, size in self.weights.items())


def weights_in_memory(
    components: Mapping[str, Component], dtype: str, bits: int | None = None
) -> MemoryEstimate:
    """Of the weights alone; the VAE runs in float32 where the others do in float16."""
    sizes: dict[str, int] = {}
    for name, component in components.items():
        wide = name == "vae" and dtype == "float16"
        sizes[name] = component.nbytes(mx.float32 if wide else getattr(mx, dtype), bits)
    return MemoryEstimate(sizes)


def estimate(
    pipeline: Pipeline, run: Run, batch: int = 1, *, bits: int | None = None
) -> MemoryEstimate:
    """Of one run; `bits` other than the model's own show what they would save."""
    model, request = pipeline.model, run.request
    assert request.width and request.height, "a planned request has a size"
    weights = weights_in_memory(model.components, model.dtype, bits or model.bits).weights
    itemsize = getattr(mx, model.dtype).size
    tokens = pipeline.latents.tokens(request.width, request.height) + (request.text_length or 0)
    width = _width(model.config(pipeline.family.network))
    side = pipeline.tile or max(request.width, request.height)
    pixels = min(request.width, side) * min(request.height, side)
    return MemoryEstimate(
        weights,
        denoising=batch * tokens * width * TOKEN_ARRAYS * itemsize,
        decoding=pixels * _channels(model.config("vae")) * PIXEL_ARRAYS * itemsize,
    )


def available() -> int:
    """Bytes that MLX may use on this machine."""
    info: dict[str, Any] = dict(mx.device_info())
    for key in ("max_recommended_working_set_size", "memory_size", "total_memory"):
        if info.get(key):
            return int(info[key])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(total, int(text)) if text.isdecimal() else total


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
