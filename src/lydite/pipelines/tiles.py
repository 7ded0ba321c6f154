"""A picture decoded in overlapping squares, whose seams are blended.

Reference: diffusers 0.42.1, `tiled_decode` of AutoencoderKL and AutoencoderKLQwenImage. A quarter
of a tile overlaps its neighbours, where the one fades into the other.
"""

from typing import Any

import mlx.core as mx

from lydite.core.errors import InputError

SMALLEST = 16  # latents of a side of a tile


def check_tile(pixels: int, factor: int) -> int:
    """The side of a tile, or InputError: it is a multiple of four latents."""
    unit = 4 * factor
    if pixels < SMALLEST * factor or pixels % unit:
        raise InputError(
            f"tile is {pixels}; expected a multiple of {unit} pixels from {SMALLEST * factor}."
        )
    return pixels


def decode_tiles(vae: Any, latents: mx.array, pixels: int, factor: int) -> mx.array:
    """`vae.decode` of latents (1, h, w, C), tile by tile where a side is longer than `pixels`.

    `factor` is how many pixels of a side one of the latents has.
    """
    _, height, width, _ = latents.shape
    side = pixels // factor
    if max(height, width) <= side:
        return vae.decode(latents)
    step = side - side // 4
    blend = pixels // 4
    above: list[mx.array] = []
    rows: list[mx.array] = []
    for top in range(0, height, step):
        tiles: list[mx.array] = []
        for left in range(0, width, step):
            tile = vae.decode(latents[:, top : top + side, left : left + side])
            mx.eval(tile)  # one tile's activations at a time
            tiles.append(tile)
        row: list[mx.array] = []
        for column, tile in enumerate(tiles):
            if above:
                tile = _faded(above[column], tile, blend, axis=1)
            if column:
                tile = _faded(tiles[column - 1], tile, blend, axis=2)
            tiles[column] = tile
            row.append(tile[:, : pixels - blend, : pixels - blend])
        rows.append(mx.concatenate(row, axis=2))
        mx.eval(rows[-1])
        above = tiles
    return mx.concatenate(rows, axis=1)


def _faded(before: mx.array, tile: mx.array, extent: int, axis: int) -> mx.array:
    """`tile` whose first rows or columns come out of the last ones of `before`."""
    extent = min(extent, before.shape[axis], tile.shape[axis])
    first, rest = mx.split(tile, [extent], axis=axis)
    last = mx.split(before, [before.shape[axis] - extent], axis=axis)[1]
    shape = [1, 1, 1, 1]
    shape[axis] = extent
    weight = (mx.arange(extent, dtype=mx.float32) / extent).reshape(shape).astype(tile.dtype)
    return mx.concatenate([last * (1 - weight) + first * weight, rest], axis=axis)
