"""A low-rank branch at 16 bits beside a weight in few bits: it takes over what rounds worst.

Li et al., "SVDQuant: Absorbing Outliers by Low-Rank Components for 4-Bit Diffusion Models", ICLR
2025, arXiv 2411.05007. The weight is up · down + residual, and the residual is rounded. By turns
the branch is fitted to what rounding left over, and what it leaves over is rounded again. The turns
round to nearest, whatever rounds the residual in the end: branches that were fitted to outputs,
with GPTQ in every turn, were no better.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lydite.quantize.grid import Floats, Grid, ScaleDtype, stored
from lydite.weights.quantized_format import LOW_RANK

TURNS = 6


class Branch(NamedTuple):
    """weight = up · down + residual."""

    down: Floats  # (rank, inputs)
    up: Floats  # (rows, rank)
    residual: Floats

    def extras(self, divisor: Floats | None = None) -> dict[str, Floats]:
        """What a layer stores of it.

        The branch takes the input before it is shifted and divided; where the weight has taken over
        a divisor, `down` gives it back.
        """
        down = self.down if divisor is None else self.down / divisor
        return dict(zip(LOW_RANK, (down, self.up), strict=True))


def low_rank(
    weight: Floats,
    grid_of: Callable[[Floats], Grid],
    rank: int,
    *,
    store: ScaleDtype = "float16",
    turns: int = TURNS,
) -> Branch:
    """The branch and the residual to round, of the turn with the least error."""
    rank = min(rank, *weight.shape)
    best, kept = np.inf, None
    rounded = np.zeros_like(weight)
    for _ in range(turns):
        down, up = (stored(part, store) for part in _factors(weight - rounded, rank))
        residual = (weight - up @ down).astype(np.float32)
        grid = grid_of(residual)
        rounded = grid.values(grid.round(residual))
        error = float(np.square(residual - rounded).sum())
        if kept is not None and error >= best:
            break
        best, kept = error, Branch(down, up, residual)
    assert kept is not None
    return kept


def _factors(weight: Floats, rank: int) -> tuple[Floats, Floats]:
    """The best approximation of a rank, as down and up."""
    if weight.shape[0] > weight.shape[1]:
        up, down = _factors(weight.T, rank)
        return down.T, up.T
    matrix = weight.astype(np.float64)
    _, vectors = np.linalg.eigh(matrix @ matrix.T)  # the largest last
    up = vectors[:, -rank:]
    down = up.T @ matrix
    sizes = np.sqrt(np.maximum(np.linalg.norm(down, axis=1), 1e-20))  # shared by both parts
    return (down / sizes[:, None]).astype(np.float32), (up * sizes).astype(np.float32)
