"""Lydite runs, verifies and quantizes diffusion models on MLX.

    pipe = lydite.open("embedded")
    for picture in pipe.generate(lydite.Request("a red star", steps=16), seeds=[1, 2]):
        picture.save(f"star_{picture.seed}.png", overwrite=True)

`lydite.open` has the models, `lydite.Request` the settings of a picture; docs/python.md has more.
"""

from typing import TYPE_CHECKING, Any

from lydite.core.device import prepare_mlx
from lydite.core.request import Request

if TYPE_CHECKING:
    from pathlib import Path

    from lydite.pipelines.pipeline import Pipeline

__version__ = "0.1.0"
__all__ = ["Request", "__version__", "open"]


def open(model: "Path | str" = "embedded", **options: Any) -> "Pipeline":
    """A pipeline for a diffusers folder, a single file, a hub id or the embedded model.

    No weight is read yet. The options are those of `lydite.pipelines.pipeline.Pipeline.open`:

    components: a diffusers folder for what a single file lacks.
    dtype: of the networks: auto (float32 on a CPU, bfloat16 elsewhere), float32, bfloat16, float16.
    low_memory: load and free the networks one after the other.
    bits: round the weights of transformers and large text encoders while they are read.
    tile: decode larger pictures in overlapping squares of so many pixels a side.
    loras: pairs of a file and its weight.
    refiner: Stable Diffusion XL: a second model, which runs the last steps.
    embeddings: pairs of a file of textual inversion and its word, or None for the file's own.
    fetch: False: nothing is downloaded.
    """
    from lydite.pipelines.pipeline import Pipeline

    return Pipeline.open(model, **options)


prepare_mlx()
