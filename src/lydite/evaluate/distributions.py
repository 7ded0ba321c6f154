"""Distances between two sets of pictures, of which each picture is a vector of features.

FID, sFID and CLIP-FID are `frechet_distance` on features of Inception and CLIP, KID is
`kernel_distance`, CMMD is `gaussian_mmd` on CLIP's. All compute in float64.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lydite.core.errors import InputError

Floats = NDArray[np.float64]
Features = NDArray[Any]  # (N, D), in memory or mapped from a file; read in pieces
NEIGHBOUR = 3  # precision and recall: the radius of a picture is its distance to this neighbour
CMMD_SIGMA, CMMD_SCALE = 10.0, 1000.0
SCORE_PARTS = 10  # the Inception score is a mean over this many parts of a set
PIECE = 2048  # rows whose distances to all others are in memory at a time


@dataclass
class Moments:
    """Mean and covariance of features, accumulated batch by batch."""

    count: int
    mean: Floats  # (D)
    scatter: Floats  # (D, D), the sum of (x − mean)(x − mean)ᵀ

    @classmethod
    def empty(cls, width: int) -> Self:
        return cls(0, np.zeros(width), np.zeros((width, width)))

    @classmethod
    def of(cls, features: ArrayLike) -> Self:
        """Of features (N, D)."""
        x = np.asarray(features)
        if x.ndim != 2:
            raise InputError(f"features are {x.shape}; expected (N, D).")
        moments = cls.empty(x.shape[1])
        moments.add(x)
        return moments

    def add(self, features: ArrayLike) -> None:
        """Take in features (N, D): Chan's update, which loses no digits to large means."""
        x = np.asarray(features, np.float64)
        if x.ndim != 2 or x.shape[1] != self.mean.size or not np.isfinite(x).all():
            raise InputError(f"features are {x.shape}; expected (N, {self.mean.size}), all finite.")
        if not len(x):
            return
        mean = x.mean(axis=0)
        apart = mean - self.mean
        total = self.count + len(x)
        centred = x - mean
        self.scatter += centred.T @ centred
        self.scatter += np.outer(apart, apart) * (self.count * len(x) / total)
        self.mean += apart * (len(x) / total)
        self.count = total

    @property
    def covariance(self) -> Floats:
        """With n − 1."""
        return self.scatter / (self.count - 1)


def frechet_distance(one: Moments, other: Moments) -> float:
    """|m₁ − m₂|² + tr(C₁ + C₂ − 2·(C₁C₂)^½) of the Gaussians with these moments."""
    if one.mean.shape != other.mean.shape:
        raise InputError(
            f"features of {one.mean.size} and of {other.mean.size} numbers; expected one network."
        )
    if min(one.count, other.count) < 2:
        raise InputError(f"{one.count} and {other.count} pictures; a spread needs two or more.")
    apart = one.mean - other.mean
    # (C₁C₂)^½ has the trace of (RC₂R)^½ with R the root of C₁, which is symmetric: no root of a
    # matrix that rounding, or too few pictures, has made singular.
    values, vectors = np.linalg.eigh(one.covariance)
    root = (vectors * np.sqrt(_without_rounding(values))) @ vectors.T
    products = np.linalg.eigvalsh(root @ other.covariance @ root)
    shared = np.sqrt(_without_rounding(products)).sum()
    distance = apart @ apart + np.trace(one.covariance) + np.trace(other.covariance) - 2 * shared
    return max(float(distance), 0.0)  # equal sets end a rounding below


def _without_rounding(values: NDArray[Any]) -> NDArray[Any]:
    """Eigenvalues that are 0 but for rounding as 0: a root would make them large."""
    least = values.max(initial=0.0) * values.size * np.finfo(np.float64).eps
    return np.where(values > least, values, 0.0)


def kernel_distance(one: Features, other: Features) -> float:
    """KID: the unbiased squared MMD with the kernel (x·y / D + 1)³, of all pictures of both sets.

    Bińkowski et al. 2018. Other tools take the mean over random parts of the sets, which estimates
    the same value with more noise. It can be a little below 0.
    """
    n, m = _check_sets(one, other)

    def total(a: Features, b: Features) -> float:
        return sum(float(((x @ y.T / x.shape[1] + 1) ** 3).sum()) for x, y in _blocks(a, b))

    def diagonal(a: Features) -> float:
        parts = (np.square(x).sum(axis=1) / x.shape[1] + 1 for x in _pieces(a))
        return sum(float((part**3).sum()) for part in parts)

    first = (total(one, one) - diagonal(one)) / (n * (n - 1))
    second = (total(other, other) - diagonal(other)) / (m * (m - 1))
    return first + second - 2 * total(one, other) / (n * m)


def gaussian_mmd(one: Features, other: Features) -> float:
    """CMMD of CLIP embeddings, which are normalized here.

    Jayasumana et al. 2024: the biased squared MMD with a Gaussian kernel of σ = 10, times 1000.
    """
    n, m = _check_sets(one, other)

    def total(a: Features, b: Features) -> float:
        scale = -1 / (2 * CMMD_SIGMA**2)
        return sum(
            float(np.exp(scale * _squared_distances(_unit(x), _unit(y))).sum())
            for x, y in _blocks(a, b)
        )

    within = total(one, one) / n**2 + total(other, other) / m**2
    return CMMD_SCALE * (within - 2 * total(one, other) / (n * m))


def precision_recall(pictures: Features, real: Features) -> tuple[float, float]:
    """Share of pictures near a real one, and of real ones near a picture.

    Kynkäänniemi et al. 2019: near is nearer than the third neighbour in the own set.
    """
    counts = _check_sets(pictures, real)
    if min(counts) <= NEIGHBOUR:
        raise InputError(
            f"{counts[0]} and {counts[1]} pictures; precision and recall need more than "
            f"{NEIGHBOUR}."
        )
    return _covered(pictures, real), _covered(real, pictures)


def inception_score(logits: Features) -> tuple[float, float]:
    """Mean and standard deviation over parts, in the order of the pictures.

    Salimans et al. 2016. Of fewer pictures than parts, each picture is a part.
    """
    scores: list[float] = []
    for part in np.array_split(np.arange(len(logits)), min(SCORE_PARTS, len(logits))):
        x = np.asarray(logits[part[0] : part[-1] + 1], np.float64)
        log_p = x - x.max(axis=1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(axis=1, keepdims=True))
        p = np.exp(log_p)
        divergence = (p * (log_p - np.log(p.mean(axis=0) + 1e-300))).sum(axis=1)
        scores.append(float(np.exp(divergence.mean())))
    return float(np.mean(scores)), float(np.std(scores))


def _covered(features: Features, by: Features) -> float:
    """Share of the features that lie within the radius of a vector of `by`."""
    radii = [_radii(x, by) for x in _pieces(by)]
    inside = 0
    for x in _pieces(features):
        near = np.zeros(len(x), bool)
        for y, radius in zip(_pieces(by), radii, strict=True):
            near |= (_squared_distances(x, y) <= radius).any(axis=1)
        inside += int(near.sum())
    return inside / len(features)


def _radii(x: Floats, by: Features) -> Floats:
    """The squared distance of each x to its third neighbour beside itself; x is part of `by`."""
    nearest = np.full((len(x), NEIGHBOUR + 1), np.inf)
    for y in _pieces(by):
        distances = np.concatenate([nearest, _squared_distances(x, y)], axis=1)
        nearest = np.partition(distances, NEIGHBOUR, axis=1)[:, : NEIGHBOUR + 1]
    return nearest.max(axis=1)


def _squared_distances(x: Floats, y: Floats) -> Floats:
    squares = np.square(x).sum(axis=1)[:, None] + np.square(y).sum(axis=1) - 2 * (x @ y.T)
    return squares.clip(0)


def _unit(x: Floats) -> Floats:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def _pieces(features: Features) -> Iterator[Floats]:
    for first in range(0, len(features), PIECE):
        yield np.asarray(features[first : first + PIECE], np.float64)


def _blocks(one: Features, other: Features) -> Iterator[tuple[Floats, Floats]]:
    return ((x, y) for x in _pieces(one) for y in _pieces(other))


def _check_sets(one: Features, other: Features) -> tuple[int, int]:
    if one.shape[1] != other.shape[1]:
        raise InputError(
            f"features of {one.shape[1]} and of {other.shape[1]} numbers; expected one network."
        )
    if min(len(one), len(other)) < 2:
        raise InputError(f"{len(one)} and {len(other)} pictures; expected two or more of each.")
    return len(one), len(other)
