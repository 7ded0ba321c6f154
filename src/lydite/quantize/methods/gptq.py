"""GPTQ: round column by column, and let the columns that follow make up for the error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
ICLR 2023, arXiv 2210.17323. The grids are fitted before the first column, so that columns can be
taken in the order of their inputs' size, whatever their groups.
"""

import numpy as np
from numpy.typing import NDArray

from lydite.quantize.grid import Floats, Grid, Integers

DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it
COLUMNS = 128  # updated at once


def gptq(weight: Floats, hessian: NDArray[np.float64], grid: Grid) -> tuple[Integers, Floats]:
    """Integers whose outputs are close to those of `weight` for inputs x with the sum of x·xᵀ.

    And the weights that were rounded: those that make up for the errors of the columns before.
    """
    rows, inputs = weight.shape
    order = np.argsort(-np.diag(hessian), kind="stable")
    factor = _inverse_factor(hessian[np.ix_(order, order)])
    width = inputs // grid.scales.shape[1]
    scales = np.repeat(grid.scales, width, axis=1)[:, order]
    offsets = np.repeat(grid.offsets, width, axis=1)[:, order]
    rest = weight[:, order].astype(np.float64)
    chosen = np.empty((rows, inputs), np.uint8)
    made_up = np.empty((rows, inputs), np.float32)
    for start in range(0, inputs, COLUMNS):
        stop = min(start + COLUMNS, inputs)
        errors = np.zeros((rows, stop - start))
        for column in range(start, stop):
            made_up[:, column] = rest[:, column]
            steps = (rest[:, column] - offsets[:, column]) / scales[:, column]
            steps = np.clip(np.rint(steps), 0, grid.most)
            chosen[:, column] = steps
            rounded = steps * scales[:, column] + offsets[:, column]
            error = (rest[:, column] - rounded) / factor[column, column]
            rest[:, column + 1 : stop] -= np.outer(error, factor[column, column + 1 : stop])
            errors[:, column - start] = error
        rest[:, stop:] -= errors @ factor[start:stop, stop:]
    back = np.argsort(order)
    return chosen[:, back], made_up[:, back]


def _inverse_factor(hessian: NDArray[np.float64]) -> NDArray[np.float64]:
    """The upper triangular U with UᵀU = H⁻¹; inputs that never occur get a diagonal of 1."""
    damped = hessian.copy()
    diagonal = np.einsum("ii->i", damped)  # a view
    diagonal[diagonal == 0] = 1
    diagonal += DAMPING * diagonal.mean()
    return np.asarray(np.linalg.cholesky(np.linalg.inv(damped)).T, np.float64)
