"""Metrics of a picture against the picture it should equal: PSNR, SSIM, MS-SSIM.

All take two pictures (H, W, 3) of 8 bits and compute in float64; a difference of uint8 would wrap.
"""

import numpy as np
from numpy.typing import NDArray

from lydite.core.errors import InputError
from lydite.pipelines.picture import Pixels

Floats = NDArray[np.float64]
PEAK = 255.0
MOST_PSNR = 100.0  # dB, of equal pictures, whose PSNR has no number
K1, K2 = 0.01, 0.03  # Wang et al. 2004
SIGMA, TAPS = 1.5, 11  # of the Gaussian window
SCALES = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)  # Wang et al. 2003: weights, finest first
SMALLEST_SSIM = TAPS
SMALLEST_MS_SSIM = TAPS * 2 ** (len(SCALES) - 1)  # 176: the coarsest scale has 11
STRIP = 64  # rows that are filtered at a time, so that they stay in the processor's cache


def psnr(one: Pixels, other: Pixels) -> float:
    """Peak signal-to-noise ratio in dB over all channels, at most `MOST_PSNR`."""
    _check_pair(one, other)
    error = float(np.mean(np.square(one.astype(np.int32) - other), dtype=np.float64))
    if error == 0:
        return MOST_PSNR
    return min(10 * float(np.log10(PEAK**2 / error)), MOST_PSNR)


def ssim(one: Pixels, other: Pixels) -> float:
    """Structural similarity: Gaussian window, places where it fits inside, mean of the channels."""
    _check_pair(one, other, SMALLEST_SSIM, "SSIM")
    similarity, _ = _similarities(one.astype(np.float64), other.astype(np.float64))
    return float(similarity.mean())


def ms_ssim(one: Pixels, other: Pixels) -> float:
    """SSIM over five scales, each half as large as the one before; mean of the channels."""
    _check_pair(one, other, SMALLEST_MS_SSIM, "MS-SSIM")
    a, b = one.astype(np.float64), other.astype(np.float64)
    product = np.ones(one.shape[2])
    for scale, weight in enumerate(SCALES):
        last = scale == len(SCALES) - 1
        similarity, contrast = _similarities(a, b)
        product *= (similarity if last else contrast).clip(0) ** weight
        if not last:
            a, b = _half(a), _half(b)
    return float(product.mean())


def _check_pair(one: Pixels, other: Pixels, smallest: int = 1, metric: str = "a metric") -> None:
    if one.shape != other.shape:
        raise InputError(
            f"the pictures of a pair are {one.shape[1]}×{one.shape[0]} and "
            f"{other.shape[1]}×{other.shape[0]} pixels; expected one size."
        )
    if min(one.shape[:2]) < smallest:
        raise InputError(
            f"{metric} of {one.shape[1]}×{one.shape[0]} pixels; expected at least {smallest} a "
            "side."
        )


def _similarities(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Mean SSIM of each channel, and the mean of its contrast and structure terms alone."""
    c1, c2 = (K1 * PEAK) ** 2, (K2 * PEAK) ** 2
    rows = a.shape[0] - TAPS + 1
    similarity, contrast = np.zeros(a.shape[2]), np.zeros(a.shape[2])
    for first in range(0, rows, STRIP):
        part = slice(first, min(first + STRIP, rows) + TAPS - 1)
        x, y = a[part], b[part]
        mean_x, mean_y = blur(x, WINDOW), blur(y, WINDOW)
        spread = blur(x * x + y * y, WINDOW) - mean_x**2 - mean_y**2  # both variances
        shared = blur(x * y, WINDOW) - mean_x * mean_y
        term = (2 * shared + c2) / (spread + c2)
        contrast += term.sum(axis=(0, 1))
        term *= (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
        similarity += term.sum(axis=(0, 1))
    count = rows * (a.shape[1] - TAPS + 1)
    return similarity / count, contrast / count


def gaussian(sigma: float, taps: int) -> Floats:
    """The weights of a Gaussian window, an odd number of them, with the sum 1."""
    weights = np.exp(-0.5 * ((np.arange(taps) - taps // 2) / sigma) ** 2)
    return weights / weights.sum()


def blur(x: Floats, window: Floats) -> Floats:
    """A symmetric window over rows and columns, at the places where it fits."""
    return _blur_along(_blur_along(x, window, 0), window, 1)


def _blur_along(x: Floats, window: Floats, axis: int) -> Floats:
    length, half = x.shape[axis] - window.size + 1, window.size // 2

    def shifted(start: int) -> Floats:
        return x[(slice(None),) * axis + (slice(start, start + length),)]

    blurred = shifted(half) * window[half]
    for tap in range(half):
        blurred += (shifted(tap) + shifted(window.size - 1 - tap)) * window[tap]
    return blurred


def _half(x: Floats) -> Floats:
    """The mean of each 2 × 2 pixels; a last odd row or column is left out."""
    height, width = x.shape[0] // 2 * 2, x.shape[1] // 2 * 2
    x = x[:height, :width]
    return (x[::2, ::2] + x[1::2, ::2] + x[::2, 1::2] + x[1::2, 1::2]) / 4


WINDOW = gaussian(SIGMA, TAPS)
