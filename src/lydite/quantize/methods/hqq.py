"""HQQ: offsets that make large rounding errors rare, found without any data.

Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023. Minimises the
l_p norm of the weight's error, p = 0.7, by turns of a shrinkage and a mean.
"""

import numpy as np

from lydite.quantize.grid import Floats, Grid, ScaleDtype, fit_grid, stored

POWER, FIRST, GROWTH, STEPS = 0.7, 10.0, 1.01, 20


def hqq_grid(weight: Floats, bits: int, group: int | None, store: ScaleDtype = "float16") -> Grid:
    """A grid whose offsets are HQQ's."""
    grid = fit_grid(weight, bits, group, store=store)
    values, scales = grid.grouped(weight), grid.scales[..., None]
    offsets, beta = grid.offsets[..., None], FIRST
    best, kept = np.inf, offsets
    for _ in range(STEPS):
        steps = np.clip(np.rint((values - offsets) / scales), 0, grid.most)
        error = values - (steps * scales + offsets)
        total = float(np.abs(error).mean())
        if total >= best:
            break
        best, kept = total, offsets
        size = np.maximum(np.abs(error), 1e-12)  # 0 has no such power
        shrunk = np.sign(error) * np.maximum(size - size ** (POWER - 1) / beta, 0)
        offsets = (values - shrunk - steps * scales).mean(axis=-1, keepdims=True)
        beta *= GROWTH
    return Grid(grid.scales, stored(kept[..., 0].astype(np.float32), store), bits)
