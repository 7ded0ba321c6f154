"""Which weights are rounded to few bits while a model is loaded, and what they then take."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING

from lydite.core.errors import InputError

if TYPE_CHECKING:  # the command line reads BITS, and starts without NumPy
    from lydite.weights.rules import Shape

BITS = (2, 3, 4, 5, 6, 8)  # MLX's affine formats
GROUP = 64  # inputs of a linear that share a scale and an offset
# Linears inside the repeated blocks of a network; embeddings, first and last layers stay.
_IN_A_BLOCK = re.compile(r"(^|\.)(\w*blocks|block|layers|\w*refiner)\.\d+\..*\.weight")
# Their rounding errors add up over the steps, and they are a small part of the time.
_AT_LEAST_8 = ("*norm*.linear.weight", "*_mod.1.weight", "*adaLN_modulation*", "*time_emb_proj*")
_NEVER = ("*relative_attention_bias*", "*embed*")


@dataclass(frozen=True)
class Quantization:
    """Rounding to the nearest of 2^bits values in each group of inputs."""

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise InputError(f"bits is {self.bits}; expected {', '.join(map(str, BITS))}.")

    def bits_of(self, path: str, shape: "Shape") -> int | None:
        """How many bits a weight gets; None: it stays as it is."""
        if len(shape) != 2 or shape[1] % GROUP or not _IN_A_BLOCK.search(path):
            return None
        if any(fnmatchcase(path, pattern) for pattern in _NEVER):
            return None
        sensitive = any(fnmatchcase(path, pattern) for pattern in _AT_LEAST_8)
        return max(self.bits, 8) if sensitive else self.bits


def bytes_in_memory(
    shapes: "Mapping[str, Shape]", itemsize: int, quantization: Quantization | None = None
) -> int:
    """What parameters take when they are loaded."""
    total = 0
    for path, shape in shapes.items():
        bits = quantization.bits_of(path, shape) if quantization else None
        size = prod(shape)
        if bits is None:
            total += size * itemsize
        else:  # and a scale and an offset for each group
            total += size * bits // 8 + 2 * (size // GROUP) * itemsize
    return total
