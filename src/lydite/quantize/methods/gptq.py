"""GPTQ: round column by column, and let the columns that follow make up for the error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
ICLR 2023, arXiv 2210.17323. The grids are fitted before the first column, so that columns can be
taken in the order of their inputs' size, whatever their groups.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lydite.quantize.grid import Floats, Grid, Integers

DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it
COLUMNS = 128  # updated at once


@dataclass(frozen=True, eq=False)
class Inputs:
    """What GPTQ knows of the inputs of linears: the same for all linears of one input."""

    order: NDArray[np.int64]  # of columns, the largest inputs first
    factor: NDArray[np.float64]  # upper triangular U with UᵀU = H⁻¹, in that order


def prepare_inputs(hessian: NDArray[np.float64]) -> Inputs:
    """From the sum of x·xᵀ over inputs x."""
    order = np.argsort(-np.diag(hessian), kind="stable")
    return Inputs(order, _inverse_factor(hessian[np.ix_(order, order)]))


def gptq(weight: Floats, known: Inputs, grid: Grid) -> tuple[Integers, Floats]:
    """Integers whose outputs are close to those of `weight`.

    And the weights that were rounded: those that make up for the errors of the columns before.
    """
    rows, inputs = weight.shape
    order, factor = known.order, known.factor
    groups = order // (inputs // grid.scales.shape[1])
    # A column of the weight is a row of these, so that its numbers lie side by side in memory.
    scales, offsets = (
        np.ascontiguousarray(each.T, np.float64) for each in (grid.scales, grid.offsets)
    )
    rest = np.ascontiguousarray(weight.T[order], np.float64)
    chosen = np.empty((inputs, rows), np.uint8)
    made_up = np.empty((inputs, rows), np.float32)
    for start in range(0, inputs, COLUMNS):
        stop = min(start + COLUMNS, inputs)
        errors = np.empty((stop - start, rows))
        for column in range(start, stop):
            values, before = rest[column], slice(start, column)
            values -= factor[before, column] @ errors[: column - start]
            scale, offset = scales[groups[column]], offsets[groups[column]]
            codes = grid.codes((values - offset) / scale)
            chosen[column], made_up[column] = codes, values
            rounded = grid.positions(codes) * scale + offset
            errors[column - start] = (values - rounded) / factor[column, column]
        rest[stop:] -= factor[start:stop, stop:].T @ errors
    back = np.argsort(order)
    return chosen[back].T, made_up[back].T


def _inverse_factor(hessian: NDArray[np.float64]) -> NDArray[np.float64]:
    """The upper triangular U with UᵀU = H⁻¹; inputs that never occur get a diagonal of 1."""
    damped = hessian[::-1, ::-1].copy()  # of the reversed H, U is the reversed inverse of L
    diagonal = np.einsum("ii->i", damped)  # a view
    diagonal[diagonal == 0] = 1
    diagonal += DAMPING * diagonal.mean()
    return _inverse_triangle(np.asarray(np.linalg.cholesky(damped), np.float64))[::-1, ::-1]


def _inverse_triangle(lower: NDArray[np.float64]) -> NDArray[np.float64]:
    """The inverse of a lower triangular matrix, by halves; NumPy has no function for it."""
    if len(lower) <= COLUMNS:
        return np.asarray(np.linalg.inv(lower), np.float64)
    half = len(lower) // 2
    first, last = _inverse_triangle(lower[:half, :half]), _inverse_triangle(lower[half:, half:])
    found = np.zeros_like(lower)
    found[:half, :half], found[half:, half:] = first, last
    found[half:, :half] = -last @ (lower[half:, :half] @ first)
    return found
