"""How weights are stored in few bits: in files, and when a model is loaded with `--bits`.

The layout is MLX's own, which mlx-lm, mflux and DiffusionKit write too: `weight` holds integers
packed into 32-bit words, `scales` and `biases` one number for each group of inputs, so that a
weight is scale · integer + bias. The bits and the group follow from the shapes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from lydite.core.errors import InputError

if TYPE_CHECKING:  # the command line reads BITS, and starts without NumPy
    from lydite.weights.rules import Shape

Mode = Literal["affine", "mxfp4", "mxfp8", "nvfp4"]
BITS = (2, 3, 4, 5, 6, 8)  # of the affine mode
GROUPS = (32, 64, 128)
GROUP = 64  # inputs that share a scale and an offset, where nothing else is said
# What MLX has: mode -> bits, sizes of groups.
FORMATS: Mapping[Mode, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": (BITS, GROUPS),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}
# What a quantized layer may hold beside weight, scales, biases and bias.
RANGE, SHIFT, DIVISOR = "input_range", "input_shift", "input_divisor"
TIMES = "input_times"  # of ranges for groups of steps: the lowest timestep of each, descending
BIAS = "bias"  # gives back what a shift takes, in a layer that had none
LOW_RANK = ("low_rank_down", "low_rank_up")
# Weights inside the repeated blocks of a network; embeddings, first and last layers stay.
_IN_A_BLOCK = re.compile(r"(^|\.)(\w*blocks|block|layers|\w*refiner)\.\d+\..*\.weight")
# Their rounding errors add up over the steps, and they are a small part of the time.
_AT_LEAST_8 = ("*norm*.linear.weight", "*_mod.1.weight", "*adaLN_modulation*", "*time_emb_proj*")
_NEVER = ("*relative_attention_bias*", "*embed*")


@dataclass(frozen=True)
class Format:
    """How one weight is stored."""

    bits: int
    group: int = GROUP
    mode: Mode = "affine"
    rank: int = 0  # of a branch that is added at full precision
    extras: tuple[str, ...] = ()  # of RANGE, SHIFT, DIVISOR, TIMES and BIAS: those stored
    steps: int = 0  # groups of steps with a range of their own

    def __post_init__(self) -> None:
        bits, groups = FORMATS[self.mode]
        if self.bits not in bits:
            raise InputError(
                f"bits is {self.bits}; expected {', '.join(map(str, bits))} for {self.mode}."
            )
        if self.group not in groups:
            raise InputError(
                f"the group is {self.group}; expected {', '.join(map(str, groups))} for "
                f"{self.mode}."
            )

    @property
    def bits_per_weight(self) -> float:
        """With scales and offsets in 16 bits, or scales in 8 where the mode has no offsets."""
        return self.bits + (32 if self.mode == "affine" else 8) / self.group

    def shapes(self, shape: "Shape") -> dict[str, "Shape"]:
        """The arrays of a layer whose weight has this shape, by their names in the layer."""
        rows, inputs = shape[0], prod(shape[1:])
        shapes: dict[str, Shape] = {
            "weight": (rows, inputs * self.bits // 32),
            "scales": (rows, inputs // self.group),
        }
        if self.mode == "affine":
            shapes["biases"] = shapes["scales"]
        if self.rank:
            shapes |= zip(LOW_RANK, ((self.rank, inputs), (rows, self.rank)), strict=True)
        own: dict[str, Shape] = {
            RANGE: (self.steps, 3) if self.steps else (3,),
            TIMES: (self.steps,),
            BIAS: (rows,),
        }
        return shapes | {name: own.get(name, (inputs,)) for name in self.extras}

    def nbytes(self, shape: "Shape", itemsize: int) -> int:
        """What such a weight takes."""
        sizes = {name: prod(each) for name, each in self.shapes(shape).items()}
        scale = itemsize if self.mode == "affine" else 1
        total = 4 * sizes.pop("weight") + scale * sizes.pop("scales")
        return total + itemsize * sum(sizes.values())


Formats = Mapping[str, Format]  # path of a weight -> how it is stored; others are not quantized


def formats_for(bits: int, shapes: "Mapping[str, Shape]") -> dict[str, Format]:
    """Of a network that is rounded while it is loaded."""
    Format(bits)  # refuses what MLX does not have
    return {
        path: Format(max(bits, 8) if is_sensitive(path) else bits)
        for path, shape in shapes.items()
        if len(shape) == 2 and shape[1] % GROUP == 0 and is_inner(path)
    }


def is_inner(path: str) -> bool:
    """Whether a weight is one of the many inside the blocks of a network."""
    never = any(fnmatchcase(path, pattern) for pattern in _NEVER)
    return bool(_IN_A_BLOCK.search(path)) and not never


def is_sensitive(path: str) -> bool:
    """Whether a weight computes the modulation of a block, and so gets 8 bits at least."""
    return any(fnmatchcase(path, pattern) for pattern in _AT_LEAST_8)


def stored_formats(
    found: "Mapping[str, tuple[str, Shape]]", expected: "Mapping[str, Shape]"
) -> dict[str, Format]:
    """The formats of quantized weights, by the dtypes and shapes of what a file holds.

    What does not fit is left out, and then is an unexpected tensor or one of a wrong dtype.
    """
    formats: dict[str, Format] = {}
    for path, shape in expected.items():
        stem = path.removesuffix("weight")
        if path == stem or path not in found or f"{stem}scales" not in found:
            continue
        (dtype, weight), (scales_dtype, scales) = found[path], found[f"{stem}scales"]
        if dtype != "U32" or len(shape) < 2 or len(weight) != 2 or len(scales) != 2:
            continue
        inputs = prod(shape[1:])
        if not scales[1] or (32 * weight[1]) % inputs or inputs % scales[1]:
            continue
        bits, group = 32 * weight[1] // inputs, inputs // scales[1]
        mode = _mode(bits, group, affine=scales_dtype != "U8" or f"{stem}biases" in found)
        known_bits, known_groups = FORMATS[mode]
        if bits in known_bits and group in known_groups:
            _, down = found.get(stem + LOW_RANK[0], ("", ()))
            extras = tuple(n for n in (RANGE, SHIFT, DIVISOR, TIMES) if stem + n in found)
            _, ranges = found.get(stem + RANGE, ("", ()))
            steps = ranges[0] if len(ranges) == 2 else 0
            if steps and TIMES not in extras:
                extras += (TIMES,)
            if SHIFT in extras and f"{stem}bias" not in expected:
                extras += (BIAS,)
            formats[path] = Format(bits, group, mode, down[0] if down else 0, extras, steps)
    return formats


def _mode(bits: int, group: int, *, affine: bool) -> Mode:
    if affine:
        return "affine"
    return "mxfp8" if bits == 8 else "nvfp4" if group == 16 else "mxfp4"


def packed_shapes(formats: Formats, expected: "Mapping[str, Shape]") -> "dict[str, Shape]":
    """The arrays by which quantized weights are stored: path -> shape."""
    return {
        path.removesuffix("weight") + name: shape
        for path, each in formats.items()
        for name, shape in each.shapes(expected[path]).items()
    }


def bits_per_weight(formats: Formats, shapes: "Mapping[str, Shape]") -> float:
    """Stored bits of quantized layers over their weights, with all that is stored beside them."""
    stored = sum(each.nbytes(shapes[path], 2) for path, each in formats.items())
    return 8 * stored / sum(prod(shapes[path]) for path in formats)


def bytes_in_memory(
    shapes: "Mapping[str, Shape]", itemsize: int, formats: Formats | None = None
) -> int:
    """What parameters take when they are loaded."""
    formats = formats or {}
    return sum(
        formats[path].nbytes(shape, itemsize) if path in formats else prod(shape) * itemsize
        for path, shape in shapes.items()
    )


def declaration(formats: Formats) -> dict[str, Any]:
    """The entry `quantization` of a config.json, as mlx-lm writes it: the most common format, and
    those layers that differ from it."""
    each = [(f.group, f.bits, f.mode) for f in formats.values()]
    usual = max(sorted(set(each)), key=each.count)
    entry: dict[str, Any] = dict(zip(_KEYS, usual, strict=True))
    for path, own in formats.items():
        if (own.group, own.bits, own.mode) != usual:
            values = own.group, own.bits, own.mode
            entry[path.removesuffix(".weight")] = dict(zip(_KEYS, values, strict=True))
    return entry


_KEYS = ("group_size", "bits", "mode")


def contradictions(declared: Mapping[str, Any], formats: Formats) -> list[str]:
    """Where a config's `quantization` says something else than the file holds."""
    usual = {key: declared[key] for key in _KEYS if key in declared}
    if not formats:
        return [f"config.json says {usual}, and no weight of the file is quantized"]
    found: list[str] = []
    for path, own in formats.items():
        layer = path.removesuffix(".weight")
        said: Any = declared.get(layer, usual)
        if not isinstance(said, dict):
            found.append(f"{layer}: config.json says {said}, and the file holds it quantized")
            continue
        holds = {"group_size": own.group, "bits": own.bits, "mode": own.mode}
        found += [
            f"{layer}: config.json says {key} {said[key]}, the file holds {value}"
            for key, value in holds.items()
            if key in said and said[key] != value
        ]
    return found
