"""Layers while they are quantized: finished ones, and ones whose inputs are rounded on trial."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from lydite.models.layers import QuantizedLinear
from lydite.quantize.grid import Grid, Integers, pack
from lydite.weights.quantized_format import GROUPS, TIMES, Format

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight in few bits, and what its layer holds beside it."""

    integers: Integers  # (rows, inputs)
    grid: Grid
    bias: Floats | None = None
    extras: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    quantize_input: bool = False  # to the format of the weight

    @property
    def group(self) -> int:
        """The group by which it is stored: its own, or the largest of MLX's that divides it."""
        own = self.integers.shape[1] // self.grid.scales.shape[1]
        return (
            own
            if self.grid.mode != "affine"
            else max(group for group in GROUPS if own % group == 0)
        )

    @property
    def format(self) -> Format:
        extras = tuple(name for name in self.extras if name.startswith("input"))
        rank = len(self.extras["low_rank_down"]) if "low_rank_down" in self.extras else 0
        steps = len(self.extras.get(TIMES, ()))
        return Format(self.grid.bits, self.group, self.grid.mode, rank, extras, steps)

    def values(self) -> Floats:
        """The weights that the integers stand for."""
        return self.grid.values(self.integers)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """As they are stored in a layer."""
        grid = self.grid.regrouped(self.integers.shape[1], self.group)
        arrays: dict[str, NDArray[Any]] = {
            "weight": pack(self.integers, self.grid.bits),
            "scales": grid.stored_scales(),
            **self.extras,
        }
        if grid.mode == "affine":
            arrays["biases"] = grid.offsets
        return arrays if self.bias is None else {**arrays, "bias": self.bias}

    def layer(self) -> nn.Module:
        """In float32."""
        rows, inputs = self.integers.shape
        bias, chosen = self.bias is not None, self.format
        layer = QuantizedLinear(inputs, rows, bias, chosen.group, chosen.bits, chosen.mode)
        for name, array in self.arrays().items():
            layer[name] = mx.array(array)
        layer.quantize_input = self.quantize_input
        return layer


def layer_at(net: nn.Module, path: str) -> nn.Module:
    """The layer of a network at a path."""
    holder, name = _holder(net, path)
    return holder[name]


def exchange_layer(net: nn.Module, path: str, layer: nn.Module) -> nn.Module:
    """Put a layer into a network, and return the one that was there."""
    holder, name = _holder(net, path)
    before, holder[name] = holder[name], layer
    return before


def _holder(net: nn.Module, path: str) -> tuple[Any, int | str]:
    """The module or list that holds a layer, and the layer's name in it."""
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    holder: Any = net
    for part in parents:
        holder = holder[part]
    return holder, last
