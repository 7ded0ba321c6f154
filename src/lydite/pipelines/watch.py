"""Looking at a run from outside: NaN checks with the name of the place, forced timing, shapes.

A pipeline calls `watch(place, array)` at each boundary; the default does nothing.
"""

import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lydite.core.errors import NotFiniteError

Watch = Callable[[str, mx.array], None]


def unwatched(place: str, array: mx.array) -> None:
    """Do nothing: the array stays lazy."""


class Debugger:
    """The three modes of `--debug`. Lines go to `report`; NaN stops the run with an exception."""

    def __init__(self, modes: set[str], report: Callable[[str], None]) -> None:
        self._modes = modes
        self._report = report
        self._last = time.perf_counter()

    def __call__(self, place: str, array: mx.array) -> None:
        facts: list[str] = []
        if "timing" in self._modes:
            mx.eval(array)  # MLX is lazy: without this the time would be charged elsewhere
            now = time.perf_counter()
            facts.append(f"{(now - self._last) * 1000:9.2f} ms")
        if "shapes" in self._modes:
            facts.append(f"{tuple(array.shape)} {str(array.dtype).removeprefix('mlx.core.')}")
        if facts:
            self._report(f"{place:<32} {'  '.join(facts)}")
        if "nan" in self._modes:
            require_finite(place, array)
        self._last = time.perf_counter()


def require_finite(place: str, array: mx.array) -> None:
    """Raise NotFiniteError with counts and statistics when `array` holds NaN or Inf."""
    if mx.isfinite(array).all().item():
        return
    values = np.array(array.astype(mx.float32))
    nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    raise NotFiniteError(
        f"{place}: {nan} of {values.size} values are NaN, {inf} are Inf; {_statistics(values)}. "
        "Everything checked before this place was finite."
    )


def _statistics(values: NDArray[np.float32]) -> str:
    finite = values[np.isfinite(values)].astype(np.float64)
    if not finite.size:
        return "none is finite"
    return (
        f"of the finite ones min {finite.min():.4g}, max {finite.max():.4g}, "
        f"mean {finite.mean():.4g}, std {finite.std():.4g}"
    )
