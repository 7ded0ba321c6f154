"""Lydite runs, verifies and quantizes diffusion models on MLX."""

from typing import TYPE_CHECKING, Any

from lydite.core.device import prepare_mlx
from lydite.core.request import Request

if TYPE_CHECKING:
    from lydite.pipelines.pipeline import Pipeline

__version__ = "0.1.0"
__all__ = ["Request", "__version__", "open"]


def open(model: str = "embedded", **options: Any) -> "Pipeline":
    """A pipeline for a diffusers folder, a single file, a hub id or the embedded model.

    Options are those of `lydite.pipelines.pipeline.Pipeline.open`: components, dtype, low_memory.
    """
    from lydite.pipelines.pipeline import Pipeline

    return Pipeline.open(model, **options)


prepare_mlx()
