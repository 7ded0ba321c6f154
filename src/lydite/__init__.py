"""Lydite runs and verifies diffusion models on MLX, and collects calibration data."""

import sys
from typing import TYPE_CHECKING, Any

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


class _LoadBlasBeforeMLX:
    """Loads a fast BLAS at the moment MLX is imported, by whomever; see lydite.core.fast_blas."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "mlx.core":
            sys.meta_path.remove(self)
            from lydite.core.fast_blas import preload

            preload()


sys.meta_path.insert(0, _LoadBlasBeforeMLX())
