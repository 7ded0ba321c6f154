"""Whether stored values look like what a network is given: finite, varying, not huge."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.core.dtypes import FLOAT_NAMES, NAMES, widen


@dataclass(frozen=True)
class Healthy:
    """The ranges. A latent starts as sigma × noise: up to 60 for sigma 14.6, 4 in flow models."""

    absmax: float = 1e4
    spread: float = 1e-6  # between the least and the largest value


def complaints(arrays: Mapping[str, NDArray[Any]], healthy: Healthy) -> Iterator[str]:
    """What is wrong with the values of an item, one sentence a tensor."""
    for name, array in arrays.items():
        judged = array.size and (NAMES[array.dtype] in FLOAT_NAMES or array.dtype == np.uint8)
        if judged and (why := _complaint(array, healthy)):
            yield f"{name}: {why}"


def _complaint(array: NDArray[Any], healthy: Healthy) -> str | None:
    values = widen(array)
    least, most = float(values.min()), float(values.max())  # both NaN if any value is
    if not math.isfinite(least - most):
        nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
        return f"{nan} NaN and {inf} Inf among {values.size} values"
    largest = max(-least, most)
    if largest > healthy.absmax:
        return f"values up to {largest:.4g}, expected at most {healthy.absmax:.4g}"
    if array.size > 1 and most - least < healthy.spread:
        return f"all values are {most:.4g}"
    return None
