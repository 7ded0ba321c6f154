"""Fill a model: audit, finite check, strict load; and write one in the layout of its files."""
# pyright: standard

import hashlib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from lydite.core.dtypes import NAMES, mlx_to_numpy, widen
from lydite.core.errors import WeightsError
from lydite.core.tensorfile import save as save_tensors
from lydite.weights.audit import (
    Finding,
    Ledger,
    TensorView,
    audit,
    describe_nonfinite,
    parameter,
    stored,
    unequal_copies,
)
from lydite.weights.quantized_format import DIVISOR, RANGE, SHIFT, TIMES, Formats
from lydite.weights.rules import Array, Rule, Shape, layout_of


def parameter_specs(model: nn.Module) -> dict[str, Shape]:
    """Path and shape of every parameter of a model."""
    return {path: tuple(array.shape) for path, array in parameters(model).items()}


def load(
    model: nn.Module,
    source: TensorView,
    rules: Sequence[Rule],
    *,
    where: str,
    dtype: mx.Dtype,
    keep_float32: Sequence[str] = (),
    formats: Formats | None = None,
) -> None:
    """Fill every parameter of `model` from `source`, or raise before the model has changed.

    Parameters whose path matches a pattern of `keep_float32` stay in float32. Weights that the file
    holds quantized stay so. Weights of `formats` are rounded as soon as they are read, so that the
    whole is never in memory unrounded.
    """
    expected, formats = parameter_specs(model), formats or {}
    audit(source, expected, rules, where=where).require_clean()
    found = stored(source, expected, rules)
    if found.formats and formats:
        raise WeightsError(f"{where}: the weights are quantized already; leave out --bits.")
    resolution = found.resolution
    Ledger(where, different=unequal_copies(source, resolution)).require_clean()
    weights: list[tuple[str, mx.array]] = []
    checked: set[str] = set()  # a tensor may hold several parameters
    for target, shape in found.expected.items():
        recipe = resolution.recipes.get(target)
        names = recipe.sources if recipe else ()
        read = [source.read(name) for name in names]  # stays, so that it is read once
        for name, array in zip(names, read, strict=True):
            if name not in checked:
                _require_finite(array, source.full_name(name), where)
            checked.add(name)
        array = parameter(target, shape, source, resolution, rules)
        assert array is not None  # the audit would have called it missing
        label = ", ".join(source.full_name(name) for name in names)
        if target in found.dtypes:
            weights.append((target, _packed_value(target, array, dtype, label, where)))
            continue
        keep = any(fnmatchcase(target, pattern) for pattern in keep_float32)
        value = _narrowed(array, mx.float32 if keep else dtype, label, where)
        weights += _rounded(target, value, formats)
    replace_layers(model, {**found.formats, **formats})
    model.load_weights(weights, strict=True)


def _packed_value(name: str, array: Array, dtype: mx.Dtype, label: str, where: str) -> mx.array:
    """An array of a quantized layer: integers as they are, floats in the model's dtype."""
    if array.dtype.kind in "biu":
        value = to_mlx(array)
        mx.eval(value)
        return value
    _check_input(name, array, label, where)
    # a range of activations is compared with them in float32
    wide = name.endswith((RANGE, SHIFT, TIMES))
    return _narrowed(array, mx.float32 if wide else dtype, label, where)


def _check_input(name: str, array: Array, label: str, where: str) -> None:
    """WeightsError for a rounding of inputs that no program writes."""
    values = widen(array)
    wrong = name.endswith(DIVISOR) and not (values > 0).all()
    if name.endswith(RANGE):
        wrong = not all(
            scale > 0 and 0 <= zero <= most <= 65535 and most >= 1
            for scale, zero, most in values.reshape(-1, 3).tolist()
        )
    if name.endswith(TIMES):
        wrong = not (np.diff(values) < 0).all()
    if wrong:
        raise WeightsError(
            f"{where}: {label}: {values.reshape(-1)[:3].tolist()} cannot round or divide inputs."
        )


def _require_finite(array: Array, label: str, where: str) -> None:
    if trouble := describe_nonfinite(array):
        Ledger(where, not_finite=(Finding(label, trouble),)).require_clean()


def _narrowed(array: Array, dtype: mx.Dtype, label: str, where: str) -> mx.array:
    # A convolution copies a weight whose axes are not in order of memory, at every call.
    value = mx.contiguous(to_mlx(array).astype(dtype))
    mx.eval(value)  # one tensor at a time, so that the stored copy can be freed
    narrower = array.dtype.itemsize > value.itemsize or value.dtype == mx.float16
    if narrower and not mx.isfinite(value).all().item():
        raise WeightsError(
            f"{where}: {label}: has values beyond the range of {value.dtype}. "
            "Load the model in bfloat16 or float32."
        )
    return value


def _rounded(path: str, value: mx.array, formats: Formats) -> list[tuple[str, mx.array]]:
    chosen = formats.get(path)
    if chosen is None:
        return [(path, value)]
    parts = mx.quantize(value, group_size=chosen.group, bits=chosen.bits, mode=chosen.mode)
    mx.eval(parts)  # before the next weight is read
    stem = path.removesuffix("weight")
    return list(zip((path, f"{stem}scales", f"{stem}biases"), parts, strict=False))


def replace_layers(model: nn.Module, formats: Formats) -> None:
    """Layers by quantized ones, whose values are never computed: others take their place."""

    def settings(path: str, module: nn.Module) -> bool | dict[str, int | str]:
        chosen = formats.get(f"{path}.weight")
        if chosen is None:
            return False
        if not hasattr(module, "to_quantized"):
            kind = type(module).__name__
            raise WeightsError(f"{path}: a {kind} cannot hold a quantized weight.")
        return {"group_size": chosen.group, "bits": chosen.bits, "mode": chosen.mode}

    if not formats:
        return
    shapes = {path: shape for path, shape in parameter_specs(model).items() if path in formats}
    nn.quantize(model, class_predicate=settings)
    layers = dict(model.named_modules())
    for path, chosen in formats.items():
        layer = layers[path.removesuffix(".weight")]
        for name, shape in chosen.shapes(shapes[path]).items():
            if name not in layer:  # what a checkpoint adds to MLX's own arrays
                layer[name] = mx.zeros(shape)


def add_changes(model: nn.Module, changes: Iterable[tuple[str, Array]], *, where: object) -> None:
    """Add to parameters of `model`, in float32, what a LoRA changes; their dtypes stay."""
    weights = parameters(model)
    for path, change in changes:
        value = weights.get(path)
        if value is None or not mx.issubdtype(value.dtype, mx.floating):
            raise WeightsError(
                f"{where}: {path} is quantized or missing. Merge before the model is quantized."
            )
        total = (value.astype(mx.float32) + mx.array(change)).astype(value.dtype)
        if not mx.isfinite(total).all().item():
            raise WeightsError(f"{where}: {path} exceeds the range of {value.dtype} when merged.")
        model.update(tree_unflatten([(path, total)]))


def to_mlx(array: Array) -> mx.array:
    """A NumPy array, whatever its strides and float type, as an MLX array of the same values."""
    array = widen(array) if NAMES[array.dtype].startswith("F8") else array  # MLX has no such type
    with np.errstate(over="ignore"):  # float64 beyond float32's range is seen by the caller
        return mx.array(array.astype(np.float32) if array.dtype == np.float64 else array)


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


def save(model: nn.Module, path: Path, rules: Sequence[Rule]) -> None:
    """Write every parameter of `model` to one file; `load` with the same rules reads it back.

    Undoes layouts only: the tables for diffusers' own folders rename nothing.
    """
    tensors: dict[str, Array] = {}
    for target, value in parameters(model).items():
        array, layout = mlx_to_numpy(value), layout_of(target, rules)
        tensors[target] = layout.inverse(array) if layout else array
    save_tensors(path, tensors, {"format": "pt"})
