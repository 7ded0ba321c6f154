"""The grid on which the weights of one layer lie: scale, offset, round, pack, and back.

A weight (rows, inputs) is cut into groups along its inputs; each group has a scale and an offset of
its own, so that a weight is scale · integer + offset, as in MLX. A grid per channel has one group
for each row; it is exported by repeating its scale for groups that MLX has.

In mxfp4, mxfp8 and nvfp4 the integers are codes of small floating-point numbers, and there are no
offsets: a weight is scale · number.
"""

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lydite.core.errors import InputError
from lydite.quantize.range_search import Range, range_search
from lydite.weights.quantized_format import FORMATS, Mode

Floats = NDArray[np.float32]
Integers = NDArray[np.uint8]
ScaleDtype = Literal["float16", "bfloat16", "float32"]
WORD = 32  # bits of the integers into which MLX packs


@dataclass(frozen=True, eq=False)
class Grid:
    """2 ** bits values for each group of a weight; scales and offsets are (rows, groups)."""

    scales: Floats
    offsets: Floats
    bits: int
    mode: Mode = "affine"

    @property
    def most(self) -> int:
        """The largest integer."""
        return 2**self.bits - 1

    def grouped(self, weight: Floats) -> Floats:
        """(rows, inputs) to (rows, groups, inputs of a group)."""
        return weight.reshape(*self.scales.shape, -1)

    def position(self, weight: Floats) -> Floats:
        """Where weights lie on the grid, as real numbers: (rows, groups, inputs of a group)."""
        return (self.grouped(weight) - self.offsets[..., None]) / self.scales[..., None]

    def codes(self, position: NDArray[np.floating]) -> Integers:
        """The integers whose values are nearest to positions."""
        if self.mode == "affine":
            return np.clip(np.rint(position), 0, self.most).astype(np.uint8)
        number = _NUMBERS[self.bits]
        largest = float(ml_dtypes.finfo(number).max)
        return np.clip(position, -largest, largest).astype(number).view(np.uint8)

    def positions(self, codes: Integers) -> Floats:
        """Where integers lie on the grid."""
        number = np.uint8 if self.mode == "affine" else _NUMBERS[self.bits]
        return codes.view(number).astype(np.float32)

    def round(self, weight: Floats) -> Integers:
        """The nearest integers, (rows, inputs)."""
        return self.codes(self.position(weight)).reshape(weight.shape)

    def values(self, integers: Integers) -> Floats:
        """The weights that integers stand for."""
        grouped = self.positions(integers.reshape(*self.scales.shape, -1))
        return (self.scales[..., None] * grouped + self.offsets[..., None]).reshape(integers.shape)

    def stored_scales(self) -> NDArray[np.float32] | NDArray[np.uint8]:
        """As MLX stores them: numbers, or codes of floating-point numbers."""
        if self.mode == "affine":
            return self.scales
        return self.scales.astype(_SCALES[self.mode]).view(np.uint8)

    def regrouped(self, inputs: int, group: int) -> "Grid":
        """The same grid with smaller groups, which repeat the scales of larger ones."""
        groups = inputs // group
        repeats, rest = divmod(groups, self.scales.shape[1])
        if rest or inputs % group:
            raise InputError(f"a grid of {self.scales.shape[1]} groups has no groups of {group}.")
        scales, offsets = (np.repeat(x, repeats, axis=1) for x in (self.scales, self.offsets))
        return Grid(scales, offsets, self.bits, self.mode)


# Of the modes without offsets: what codes of so many bits stand for, and the codes of scales.
_NUMBERS = {4: ml_dtypes.float4_e2m1fn, 8: ml_dtypes.float8_e4m3fn}
_SCALES = {
    "mxfp4": ml_dtypes.float8_e8m0fnu,
    "mxfp8": ml_dtypes.float8_e8m0fnu,
    "nvfp4": ml_dtypes.float8_e4m3fn,
}


def float_grid(weight: Floats, mode: Mode) -> Grid:
    """A grid of a mode without offsets, with the scales that MLX takes."""
    (bits,), (group,) = FORMATS[mode]
    _, codes, *_ = mx.quantize(mx.array(weight), group, bits, mode)
    scales = np.array(codes).view(_SCALES[mode]).astype(np.float32)
    scales = np.where(scales > 0, scales, np.float32(1))  # of a group of zeros
    return Grid(scales, np.zeros_like(scales), bits, mode)


def fit_grid(
    weight: Floats,
    bits: int,
    group: int | None,
    *,
    search: Range = "minmax",
    store: ScaleDtype = "float16",
) -> Grid:
    """A grid for a weight; `group` None: one group for each row.

    Scales and offsets are rounded to the dtype they are stored in before anything is rounded with
    them.
    """
    rows = weight.shape[0]
    grouped = weight.reshape(rows, -1, group or weight[0].size)
    low, high = range_search(grouped, bits, search)
    scales = stored((high - low) / (2**bits - 1), store)
    scales = np.where(scales > 0, scales, np.float32(1))  # of a group whose weights are all equal
    return Grid(scales, stored(low, store), bits)


def stored(values: Floats, dtype: ScaleDtype) -> Floats:
    """Float32 numbers as they are after they have been stored."""
    if dtype == "float32":
        return values.astype(np.float32)
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    import ml_dtypes

    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def pack(integers: Integers, bits: int) -> NDArray[np.uint32]:
    """Integers (rows, inputs) as MLX packs them: a stream of bits, lowest first, in words."""
    rows, inputs = integers.shape
    if (inputs * bits) % WORD:
        raise InputError(f"{inputs} inputs in {bits} bits fill no whole words of {WORD} bits.")
    singles = np.unpackbits(integers[..., None], axis=-1, count=bits, bitorder="little")
    packed = np.packbits(singles.reshape(rows, -1), axis=-1, bitorder="little")
    return packed.view("<u4")


def unpack(words: NDArray[np.uint32], bits: int) -> Integers:
    """The inverse of `pack`."""
    rows = words.shape[0]
    singles = np.unpackbits(
        np.ascontiguousarray(words).view(np.uint8).reshape(rows, -1), axis=-1, bitorder="little"
    )
    return np.packbits(singles.reshape(rows, -1, bits), axis=-1, bitorder="little")[..., 0]
