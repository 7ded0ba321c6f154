"""Write a quantized model: a diffusers folder whose network is stored as mlx-lm stores one.

`weight`, `scales` and `biases` of each quantized layer, and an entry `quantization` in the
network's config.json. Everything else is copied as it is.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.core.checkpoint import open_checkpoint
from lydite.core.config import read_json
from lydite.core.dtypes import NUMPY_DTYPES
from lydite.core.errors import FileError, InputError, at
from lydite.core.files import make_folder, require_space, write_atomic
from lydite.core.tensorfile import save
from lydite.pipelines.model import Component
from lydite.pipelines.model_files import DEFAULTS, INDEX
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize.quantized_weight import QuantizedWeight
from lydite.weights.audit import parameter
from lydite.weights.quantized_format import declaration
from lydite.weights.rules import layout_of, resolve

WEIGHTS = "diffusion_pytorch_model.safetensors"
TEXTS = (".json", ".txt", ".model")
SCALES = ("scales", "biases", "low_rank_down", "low_rank_up")


def check_exportable(pipeline: Pipeline) -> None:
    """InputError for a model that cannot be written again."""
    folder = pipeline.model.path
    if not (folder / INDEX).is_file() or pipeline.components is not None:
        raise InputError(
            f"{at(folder)}: only whole folders in diffusers' layout can be written again. Save "
            "the model with diffusers' save_pretrained first."
        )
    if pipeline.model.components[pipeline.family.network].formats:
        raise InputError(f"{at(folder)}: the network is quantized already. Give the original.")


def export(
    pipeline: Pipeline,
    weights: Mapping[str, QuantizedWeight],
    folder: Path,
    tick: Callable[[str], None] = lambda name: None,
) -> None:
    """Write the model with these layers to a folder that is not there yet."""
    source, name = pipeline.model.path, pipeline.family.network
    component = pipeline.model.components[name]
    require_space(folder.parent, _size(pipeline))
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed here
    make_folder(folder)
    for path in _files(pipeline):
        tick(str(path))
        make_folder(folder / path.parent)
        shutil.copyfile(source / path, folder / path)
    make_folder(folder / name)
    config = read_json(source / name / "config.json")
    formats = {f"{path}.weight": weight.format for path, weight in weights.items()}
    config["quantization"] = declaration(formats)
    if any(weight.quantize_input for weight in weights.values()):
        config["quantization"]["quantize_input"] = True  # MLX's own word for it
    tick(f"{name}/{WEIGHTS}")
    write_atomic(folder / name / "config.json", json.dumps(config, indent=2).encode() + b"\n")
    save(folder / name / WEIGHTS, network_tensors(component, weights), {"format": "mlx"})


def network_tensors(
    component: Component, weights: Mapping[str, QuantizedWeight]
) -> dict[str, NDArray[Any]]:
    """Every tensor of the network's file: packed layers, and the others as they were stored."""
    tensors: dict[str, NDArray[Any]] = {}
    with component.scope() as scope:
        resolution = resolve(scope.tensors, component.rules)
        for target, shape in component.expected.items():
            layer, _, part = target.rpartition(".")
            array = parameter(target, shape, scope, resolution, component.rules)
            assert array is not None, "the model was loaded"
            if layer in weights and part in ("weight", "bias"):
                if part == "weight":
                    scales = "BF16" if array.dtype == NUMPY_DTYPES["BF16"] else "F16"
                    tensors |= _packed(layer, weights[layer], scales)
                else:
                    bias = weights[layer].bias
                    assert bias is not None
                    tensors[target] = bias.astype(array.dtype)
                continue
            layout = layout_of(target, component.rules)
            tensors[target] = np.array(layout.inverse(array) if layout else array)
    for layer, weight in weights.items():  # a shift of the input needs a bias
        if weight.bias is not None:
            tensors.setdefault(f"{layer}.bias", weight.bias)
    return tensors


def _packed(layer: str, weight: QuantizedWeight, scales: str) -> dict[str, NDArray[Any]]:
    arrays = {name: array for name, array in weight.arrays().items() if name != "bias"}
    return {
        f"{layer}.{name}": array.astype(NUMPY_DTYPES[scales])
        if name in SCALES and array.dtype != np.uint8
        else array
        for name, array in arrays.items()
    }


def _files(pipeline: Pipeline) -> list[Path]:
    """What is copied: the index, configs, tokenizers, and the weights that are used of the other
    networks."""
    source, network = pipeline.model.path, pipeline.family.network
    found = [Path(name) for name in (INDEX, DEFAULTS) if (source / name).is_file()]
    used: set[Path] = set()
    for name, component in pipeline.model.components.items():
        if name != network:
            with open_checkpoint(component.path) as checkpoint:
                used |= {path.resolve() for path in checkpoint.files}
    named = [name for name in read_json(source / INDEX) if (source / name).is_dir()]
    for name in named:
        paths = sorted((source / name).iterdir()) if name != network else []
        found += [
            path.relative_to(source)
            for path in paths
            if path.suffix in TEXTS or path.resolve() in used
        ]
    return found


def _size(pipeline: Pipeline) -> int:
    """Of the copied files, and at most of the network."""
    source = pipeline.model.path
    network = source / pipeline.family.network
    try:
        copied = sum((source / path).stat().st_size for path in _files(pipeline))
        return copied + sum(path.stat().st_size for path in network.glob("*.safetensors"))
    except OSError as error:
        raise FileError(f"{at(source)}: cannot be read ({error.strerror}).") from error
