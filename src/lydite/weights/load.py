"""The one door into a model: audit, finite check, strict load."""
# pyright: standard

import hashlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from lydite.core.dtypes import NAMES, widen
from lydite.core.errors import WeightsError
from lydite.weights.audit import Ledger, audit, describe_nonfinite
from lydite.weights.layout import Array, Shape
from lydite.weights.rules import Rule, filling, resolve
from lydite.weights.source import Scope


def parameter_specs(model: nn.Module) -> dict[str, Shape]:
    """Path and shape of every parameter of a model."""
    return {path: tuple(array.shape) for path, array in parameters(model).items()}


def load(
    model: nn.Module,
    source: Scope,
    rules: Sequence[Rule],
    *,
    where: str,
    dtype: mx.Dtype,
    keep_float32: Sequence[str] = (),
) -> Ledger:
    """Fill every parameter of `model` from `source`, or raise before the model has changed.

    Parameters whose path matches a pattern of `keep_float32` stay in float32.
    """
    expected = parameter_specs(model)
    ledger = audit(source, expected, rules, where=where)
    ledger.require_clean()
    recipes = resolve(source.tensors, rules).recipes
    weights: list[tuple[str, mx.array]] = []
    for target, shape in expected.items():
        recipe = recipes.get(target)
        if recipe is None:
            fill = filling(target, rules)
            assert fill is not None  # the audit would have called it missing
            array = fill.make(shape)
        else:
            array = recipe.build([source.read(name) for name in recipe.sources])
            if trouble := describe_nonfinite(array):
                label = source.full_name(recipe.sources[0])
                raise WeightsError(f"{where}: {label}: {trouble}; the checkpoint is damaged.")
        wanted = mx.float32 if any(fnmatchcase(target, each) for each in keep_float32) else dtype
        value = to_mlx(array).astype(wanted)
        mx.eval(value)  # one tensor at a time, so that the stored copy can go
        weights.append((target, value))
    model.load_weights(weights, strict=True)
    return ledger


def to_mlx(array: Array) -> mx.array:
    """A NumPy array, whatever its strides and float type, as an MLX array of the same values."""
    if NAMES[array.dtype].startswith("F8"):  # MLX has no such type
        array = widen(array)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    return mx.array(array)


def parameter_hash(model: nn.Module) -> str:
    """A hash over every parameter's path, dtype and bytes: equal exactly when the weights are."""
    total = hashlib.sha256()
    for path, array in sorted(parameters(model).items()):
        total.update(f"{path} {array.dtype} {array.shape}\n".encode())
        total.update(np.array(array.view(mx.uint8)).tobytes())
    return total.hexdigest()


def parameters(model: nn.Module) -> dict[str, mx.array]:
    """Every parameter by its path."""
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))
