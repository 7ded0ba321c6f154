"""Which layer gets what: bits and groups by path. Plain data that is printed, edited and saved."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from lydite.core.config import read_json
from lydite.core.errors import FileError, InputError, at
from lydite.weights.quantize import FORMATS, GROUPS, Format, Mode, is_inner, is_sensitive
from lydite.weights.rules import Shape

KEPT_BITS = 8  # of layers that compute modulation, unless a plan says something else


class LayerPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one linear. A group of 0 is one scale for each output channel."""

    bits: int
    group: int = 64
    mode: Mode = "affine"

    def __post_init__(self) -> None:
        bits, groups = FORMATS[self.mode]
        per_channel = self.group == 0 and self.mode == "affine"
        if self.bits not in bits or (self.group not in groups and not per_channel):
            raise ValueError(
                f"{self.mode} with bits {self.bits}, group {self.group}: MLX has no such format"
            )

    def bits_per_weight(self, shape: Shape) -> float:
        """With scales and offsets in 16 bits."""
        group = self.stored_group(shape)
        return self.bits + 32 / group

    def stored_group(self, shape: Shape) -> int:
        """The group by which it is stored: a scale per channel is repeated."""
        inputs = prod(shape[1:])
        return self.group or max(group for group in GROUPS if inputs % group == 0)


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layers of a network that are quantized; all others stay as they are."""

    layers: dict[str, LayerPlan]

    def bits_per_weight(self, shapes: Mapping[str, Shape]) -> float:
        """Stored bits of all quantized layers over their weights."""
        sizes = {path: _size(shapes, path) for path in self.layers}
        bits = sum(
            plan.bits_per_weight(shapes[f"{path}.weight"]) * sizes[path]
            for path, plan in self.layers.items()
        )
        return bits / sum(sizes.values())

    def formats(self, shapes: Mapping[str, Shape]) -> dict[str, Format]:
        """How the weights will be stored."""
        return {
            f"{path}.weight": Format(each.bits, each.stored_group(shapes[f"{path}.weight"]))
            for path, each in self.layers.items()
        }

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def _size(shapes: Mapping[str, Shape], path: str) -> int:
    return prod(shapes[f"{path}.weight"])


def uniform_plan(
    shapes: Mapping[str, Shape],
    bits: int,
    group: int,
    *,
    modulation_bits: int = KEPT_BITS,
    convolutions: bool = False,
) -> Plan:
    """The same for every linear inside the blocks; more bits for those that compute modulation."""
    ranks = (2, 4) if convolutions else (2,)
    layers: dict[str, LayerPlan] = {}
    for path, shape in shapes.items():
        known = path.endswith(".weight") and is_inner(path) and len(shape) in ranks
        if known and _fits(shape, group):
            own = max(bits, modulation_bits) if is_sensitive(path) else bits
            layers[path.removesuffix(".weight")] = LayerPlan(own, group)
    if not layers:
        raise InputError(f"no linear of the network has inputs for groups of {group or 32}.")
    return Plan(layers)


def _fits(shape: Shape, group: int) -> bool:
    return prod(shape[1:]) % (group or min(GROUPS)) == 0


def read_plan(path: Path, shapes: Mapping[str, Shape]) -> Plan:
    """A plan that fits a network, or FileError."""
    raw: Any = read_json(path)
    try:
        plan = msgspec.convert(raw, Plan)
    except msgspec.ValidationError as error:
        raise FileError(f"{at(path)}: not a quantization plan ({error}).") from error
    if not plan.layers:
        raise FileError(f"{at(path)}: the plan has no layers.")
    for name, layer in plan.layers.items():
        shape = shapes.get(f"{name}.weight")
        # convolutions outside the blocks are MLX's own, which cannot hold a packed kernel
        fits = shape is not None and (
            len(shape) == 2 or (len(shape) == 4 and is_inner(f"{name}.weight"))
        )
        if shape is None or not fits:
            raise FileError(f"{at(path)}: {name[:200]}: the network has no such layer.")
        if layer.mode != "affine":
            raise FileError(f"{at(path)}: {name}: quantize writes affine, found {layer.mode}.")
        if not _fits(shape, layer.group):
            raise FileError(
                f"{at(path)}: {name}: {shape[1]} inputs are no multiple of {layer.group or 32}."
            )
    return plan
