"""Noise on a surface that should be even, against the number of steps.

The rounding errors of a quantized network add up over the steps, and show first where a picture
should have no detail. The measure is the standard deviation of a picture minus its blur.
"""

import numpy as np

from lydite.core.errors import InputError
from lydite.evaluate.paired import blur, gaussian
from lydite.pipelines.picture import Pixels

SIGMA = 4.0  # pixels: coarser than noise, finer than a gradient
WINDOW = gaussian(SIGMA, 25)


def residual_noise(pixels: Pixels) -> float:
    """The standard deviation of what a blur removes, in steps of 1/255."""
    if min(pixels.shape[:2]) < WINDOW.size:
        raise InputError(
            f"a picture of {pixels.shape[1]}×{pixels.shape[0]} pixels; the flat-field test needs "
            f"{WINDOW.size} a side."
        )
    x, edge = pixels.astype(np.float64), WINDOW.size // 2
    return float((x[edge:-edge, edge:-edge] - blur(x, WINDOW)).std())
