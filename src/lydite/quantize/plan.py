"""Which layer gets what: bits and groups by path. Plain data that is printed, edited and saved."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from lydite.core.config import read_json
from lydite.core.errors import FileError, InputError, at
from lydite.weights.quantized_format import (
    FORMATS,
    GROUP,
    GROUPS,
    Format,
    Mode,
    bits_per_weight,
    is_inner,
    is_sensitive,
)
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
        """With scales and offsets."""
        return self.format(shape).bits_per_weight

    def format(self, shape: Shape) -> Format:
        """How a weight of this shape will be stored."""
        return Format(self.bits, self.stored_group(shape), self.mode)

    def stored_group(self, shape: Shape) -> int:
        """The group by which it is stored: a scale per channel is repeated."""
        inputs = prod(shape[1:])
        return self.group or max(group for group in GROUPS if inputs % group == 0)


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layers of a network that are quantized; all others stay as they are."""

    layers: dict[str, LayerPlan]

    def bits_per_weight(self, shapes: Mapping[str, Shape]) -> float:
        """Stored bits of all quantized layers over their weights."""
        return bits_per_weight(self.formats(shapes), shapes)

    def formats(self, shapes: Mapping[str, Shape], rank: int = 0) -> dict[str, Format]:
        """How the weights will be stored, those of few bits with a branch of a rank beside them."""
        formats = {
            f"{path}.weight": each.format(shapes[f"{path}.weight"])
            for path, each in self.layers.items()
        }
        return {
            path: replace(each, rank=rank if each.bits < KEPT_BITS else 0)
            for path, each in formats.items()
        }

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def uniform_plan(
    shapes: Mapping[str, Shape],
    bits: int,
    group: int,
    *,
    modulation_bits: int = KEPT_BITS,
    convolutions: bool = False,
    mode: Mode = "affine",
) -> Plan:
    """The same for every linear inside the blocks; more bits for those that compute modulation.

    A mode other than affine has its own bits and group; modulation stays affine.
    """
    if mode != "affine":
        (bits,), (group,) = FORMATS[mode]
    ranks = (2, 4) if convolutions else (2,)
    layers: dict[str, LayerPlan] = {}
    for path, shape in shapes.items():
        known = path.endswith(".weight") and is_inner(path) and len(shape) in ranks
        own = LayerPlan(bits, group, mode)
        if is_sensitive(path):
            own = LayerPlan(max(bits, modulation_bits), group if mode == "affine" else GROUP)
        if known and _fits(shape, own.group):
            layers[path.removesuffix(".weight")] = own
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
        if not _fits(shape, layer.group):
            raise FileError(
                f"{at(path)}: {name}: {shape[1]} inputs are no multiple of {layer.group or 32}."
            )
    return plan
