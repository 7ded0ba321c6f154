"""Checks of stored values and shapes: finite, not constant, not huge, one latent shape."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.settings import BLOCKS
from lydite.calibrate.store.shards import Entry
from lydite.core.dtypes import FLOAT_NAMES, NAMES, widen

MOST = 1e6  # of a sigma or a timestep


@dataclass(frozen=True)
class ValueLimits:
    """Limits of plausible values.

    A latent starts as sigma × noise: up to 60 for sigma 14.6, 4 in flow models.
    """

    absmax: float = 1e4
    spread: float = 1e-6  # between the least and the largest value


class LatentShapes:
    """Checks that the latents of a set have one shape, with the proportions of its pictures.

    Pictures have the size of the run, and the noise levels of samples are possible ones.
    """

    def __init__(self, conditions: Mapping[str, Any]) -> None:
        self._size = _size(conditions)
        self._labels: dict[tuple[int, ...], list[str]] = {}  # the samples of each shape

    def problem(self, entry: Entry) -> str | None:
        """What is wrong with a sample or a picture, by its shard's header."""
        if entry.kind == "picture":
            return self._picture_problem(entry)
        for name, value, least in (("sigma", entry.sigma, 0), ("timestep", entry.timestep, -MOST)):
            if value is not None and not least <= value <= MOST:
                return f"{name} is {value:g}; expected {least:g} to {MOST:g}"
        x = entry.tensors.get("x")
        if x is None:
            needed = self._size is not None or self._labels
            found = ", ".join(sorted(entry.tensors)) or "nothing"
            return f"expected a latent x, found {found:.80}" if needed else None
        if x.dtype not in FLOAT_NAMES:
            return f"x: expected floats, found {x.dtype}"
        if self._size is not None and not _fits(x.shape, self._size):
            return (
                f"x: expected height, width and channels of a latent for {self._size[1]}×"
                f"{self._size[0]} pixels, found shape {list(x.shape)}"
            )
        self._labels.setdefault(x.shape, []).append(entry.label)
        return None

    def _picture_problem(self, entry: Entry) -> str | None:
        pixels = entry.tensors.get("pixels")
        if self._size is None or (pixels and pixels.shape == (*self._size, 3)):
            return None
        found = list(pixels.shape) if pixels else "none"
        return f"pixels: expected shape {[*self._size, 3]}, found {found}"

    def odd_shapes(self) -> Iterator[tuple[str, str]]:
        """The samples so far whose shape differs from most, each with the reason."""
        usual = max(self._labels, key=lambda shape: len(self._labels[shape]), default=())
        for shape, labels in self._labels.items():
            if shape != usual:
                why = f"x: shape {list(shape)}, most of the set have {list(usual)}"
                yield from ((label, why) for label in labels)


def _size(conditions: Mapping[str, Any]) -> tuple[int, int] | None:
    """Height and width in pixels; None where they are not known, or do not apply."""
    if BLOCKS in conditions:  # what modules take has shapes of its own
        return None
    height, width = conditions.get("height"), conditions.get("width")
    if isinstance(height, int) and isinstance(width, int) and height > 0 and width > 0:
        return height, width
    return None


def _fits(shape: tuple[int, ...], size: tuple[int, int]) -> bool:
    """Whether each position stands for a square of pixels; how large is decided by the model."""
    if len(shape) != 3 or 0 in shape:
        return False
    high, wide = (pixels / count for pixels, count in zip(size, shape[:2], strict=True))
    return high == wide and high.is_integer()


def value_problems(arrays: Mapping[str, NDArray[Any]], limits: ValueLimits) -> Iterator[str]:
    """What is wrong with the values of an item, one text per tensor."""
    for name, array in arrays.items():
        checked = array.size and (NAMES[array.dtype] in FLOAT_NAMES or array.dtype == np.uint8)
        if checked and (why := _value_problem(array, limits)):
            yield f"{name}: {why}"


def _value_problem(array: NDArray[Any], limits: ValueLimits) -> str | None:
    values = widen(array)
    least, most = float(values.min()), float(values.max())  # both NaN if any value is
    if not math.isfinite(least - most):
        nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
        return f"{nan} NaN and {inf} Inf among {values.size} values"
    largest = max(-least, most)
    if largest > limits.absmax:
        return f"values up to {largest:.4g}, expected at most {limits.absmax:.4g}"
    if array.size > 1 and most - least < limits.spread:
        return f"all values are {most:.4g}"
    return None
