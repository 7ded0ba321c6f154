"""Sums of two values and of their products, from which every linear fit follows in closed form."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Sums:
    """One entry per group: r is the reference, p the port, d their difference."""

    n: int  # values in a group
    r: Array
    p: Array
    rr: Array
    pp: Array
    rp: Array
    dd: Array

    @property
    def total(self) -> "Sums":
        """All groups as one."""
        n = self.n * self.r.size
        parts = (self.r, self.p, self.rr, self.pp, self.rp, self.dd)
        return Sums(n, *(part.sum(keepdims=True) for part in parts))

    @property
    def spread(self) -> float:
        """Σ (p − mean of its group)²: what varies at all inside the groups."""
        return float(np.maximum(self.pp - self.p**2 / self.n, 0.0).sum())


def sums(reference: Array, port: Array) -> Sums:
    """Sums over the outer axes of (outer, group, inner), in float64."""

    def of(a: Array, b: Array) -> Array:
        return np.einsum("ogi,ogi->g", a, b, dtype=np.float64)

    difference = port - reference
    return Sums(
        reference.shape[0] * reference.shape[2],
        np.einsum("ogi->g", reference, dtype=np.float64),
        np.einsum("ogi->g", port, dtype=np.float64),
        of(reference, reference),
        of(port, port),
        of(reference, port),
        of(difference, difference),
    )


def shift(s: Sums) -> tuple[Array, float]:
    """b of p = r + b per group, and what is left, squared."""
    b = (s.p - s.r) / s.n
    # Not from dd: a difference rounded to float32 is too coarse to cancel against.
    return b, _left(s.rr + s.pp - 2 * s.rp - s.n * b**2)


def scale(s: Sums) -> tuple[Array, float]:
    """a of p = a·r per group, and what is left, squared."""
    a = _ratio(s.rp, s.rr)
    return a, _left(s.pp - a * s.rp)


def affine(s: Sums) -> tuple[Array, Array, float]:
    """a and b of p = a·r + b per group, and what is left, squared."""
    rr, pp, rp = s.rr - s.r**2 / s.n, s.pp - s.p**2 / s.n, s.rp - s.r * s.p / s.n
    a = _ratio(rp, rr)
    return a, (s.p - a * s.r) / s.n, _left(pp - a * rp)


def _ratio(above: Array, below: Array) -> Array:
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _left(squares: Array) -> float:
    return float(np.maximum(squares, 0.0).sum())
