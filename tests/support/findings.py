"""Evidence for tests of findings."""

from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from lydite.diff.findings import Evidence, find

Array = NDArray[Any]
FLOORS = {"f32": 6e-8, "bf16": 2e-3}
PRECISIONS = tuple(FLOORS)


def evidence(
    reference: ArrayLike,
    port: ArrayLike,
    dtype: str = "f32",
    *,
    floor: float | None = None,
    kind: str = "activation",
    dims: str | None = None,
    slot: str = "out",
    inputs: Mapping[str, tuple[Array, Array]] | None = None,
    others: Iterable[tuple[str, Array]] = (),
) -> Evidence:
    """Evidence with everything that a test does not care about filled in."""
    floor = FLOORS.get(dtype, 0.0) if floor is None else floor
    pair = (np.asarray(reference), np.asarray(port))
    return Evidence(*pair, floor, "m", slot, dtype, kind, dims, inputs or {}, lambda: others)


def recorded(value: ArrayLike, precision: str, draw: np.random.Generator) -> Array:
    """The value as a port in this precision would record it: rounded, by other kernels."""
    value = np.asarray(value, np.float64)
    if precision == "bf16":
        return value.astype(ml_dtypes.bfloat16)
    return (value * (1 + 4e-8 * draw.standard_normal(value.shape))).astype(np.float32)


def values(shape: tuple[int, ...], draw: np.random.Generator) -> Array:
    """Values as they occur: normal, with heavy tails, with large channels, or mostly positive."""
    normal = draw.standard_normal(shape)
    kind = draw.integers(4)
    if kind == 1:
        normal = draw.standard_t(6, shape)
    elif kind == 2 and len(shape) > 1:
        normal = normal * np.exp(0.7 * draw.standard_normal(shape[-1]))
    elif kind == 3:
        normal = np.maximum(normal, -0.3) + 0.1 * normal
    return (normal * 10 ** draw.uniform(-2, 2)).astype(np.float32)


def causes(e: Evidence) -> list[str]:
    """The causes found, in order."""
    return [finding.cause for finding in find(e)]
