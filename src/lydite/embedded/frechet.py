"""The Fréchet distance between two sets of pictures, of which each is a vector of features."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lydite.core.errors import InputError


def frechet_distance(one: ArrayLike, other: ArrayLike) -> float:
    """|m₁ - m₂|² + tr(C₁ + C₂ - 2·(C₁C₂)^½) of the Gaussians fitted to features (N, D) and (M, D).

    FID is this on Inception's features; distances on the judge's are on a scale of their own.
    """
    first, second = (np.asarray(features, np.float64) for features in (one, other))
    if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[1]:
        raise InputError(
            f"features are {first.shape} and {second.shape}; expected (N, D) and (M, D)."
        )
    if min(len(first), len(second)) < 2:
        raise InputError(f"{len(first)} and {len(second)} pictures; a spread needs two or more.")
    apart = first.mean(axis=0) - second.mean(axis=0)
    a, b = _root_of_covariance(first), _root_of_covariance(second)
    # With C = RᵀR, the trace of (C₁C₂)^½ is the sum of the singular values of R₁R₂ᵀ: no square
    # root of a matrix that rounding, or too few pictures, has made singular.
    shared = np.linalg.svd(a @ b.T, compute_uv=False).sum()
    distance = (apart**2).sum() + (a**2).sum() + (b**2).sum() - 2 * shared
    return max(float(distance), 0.0)  # equal sets end a rounding below


def _root_of_covariance(features: NDArray[np.float64]) -> NDArray[np.float64]:
    """R with RᵀR the covariance."""
    centred = features - features.mean(axis=0)
    return np.linalg.qr(centred, mode="r") / np.sqrt(len(features) - 1)
