"""Write parameters under the names and in the layout that a rule table reads."""
# pyright: standard

from collections.abc import Sequence
from pathlib import Path

import mlx.nn as nn

from lydite.core.dtypes import mlx_to_numpy
from lydite.core.tensorfile import save as save_tensors
from lydite.weights.layout import Array
from lydite.weights.load import parameters
from lydite.weights.rules import Rule, layout_of


def save(model: nn.Module, path: Path, rules: Sequence[Rule]) -> None:
    """Write every parameter of `model` to one file; `load` with the same rules reads it back.

    Undoes layouts only: the tables for diffusers' own folders rename nothing.
    """
    tensors: dict[str, Array] = {}
    for target, value in parameters(model).items():
        array, layout = mlx_to_numpy(value), layout_of(target, rules)
        tensors[target] = layout.inverse(array) if layout else array
    save_tensors(path, tensors, {"format": "pt"})
