"""What people use today, as judges: one fixed rule for every value, in the reference's order.

`fixed_rule` is msProbe's kind: cosine below 0.99, or a largest difference above 1. `allclose` is
what a notebook does: 1e-3 for float32, 1e-2 for half precision. Both are helped along: names are
equal, and another order of axes and axes of one are put right here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.trace.events import Event
from lydite.trace.store import Trace

Rule = Callable[[NDArray[np.float64], NDArray[np.float64], str], bool]  # ours, theirs, dtype


@dataclass(frozen=True)
class Simple:
    """As much of a verdict as a fixed rule can give."""

    verdict: str
    site: str | None = None
    place: str | None = None
    step: int | None = None
    flagged: int = 0
    compared: int = 0


def fixed_rule(reference: Path, port: Path, floor: Path | None = None) -> Simple:
    """Wrong where the cosine is below 0.99 or the largest difference above 1."""

    def wrong(a: NDArray[np.float64], b: NDArray[np.float64], dtype: str) -> bool:
        norms = float(np.linalg.norm(a) * np.linalg.norm(b))
        cosine = float(np.vdot(a, b)) / norms if norms else float(np.array_equal(a, b))
        return cosine < 0.99 or bool(np.abs(a - b).max(initial=0.0) > 1)

    return _walk(reference, port, wrong)


def allclose(reference: Path, port: Path, floor: Path | None = None) -> Simple:
    """Wrong where numpy.allclose says so: 1e-3, 1e-2 in half precision, one level of a pixel."""

    def wrong(a: NDArray[np.float64], b: NDArray[np.float64], dtype: str) -> bool:
        tolerance = 1e-2 if dtype in ("bf16", "f16") else 1e-3
        if dtype == "u8":  # a pixel on the border between two levels
            return bool(np.abs(a - b).max(initial=0.0) > 1)
        return not np.allclose(a, b, rtol=tolerance, atol=tolerance)

    return _walk(reference, port, wrong)


def aligned(theirs: NDArray[Any], ours: NDArray[Any]) -> NDArray[Any] | None:
    """The reference's value in the port's axis order, or None where no known one fits."""
    wanted = [size for size in ours.shape if size != 1]
    if [size for size in theirs.shape if size != 1] == wanted:
        return theirs.reshape(ours.shape)
    if theirs.ndim == ours.ndim and theirs.shape[1:] == ours.shape[1:] and len(ours) == 1:
        return theirs[:1]  # every row of a batch alike
    if theirs.ndim > 2 and ours.ndim > 1 and theirs.size == ours.size:
        last = np.moveaxis(theirs, 1, -1)  # channels first to channels last
        if last.shape[-1] == ours.shape[-1]:
            return last.reshape(ours.shape)
    return None


def _walk(reference: Path, port: Path, wrong: Rule) -> Simple:
    with Trace.open(reference) as theirs, Trace.open(port) as ours:
        first: Event | None = None
        flagged = compared = 0
        for event in theirs.events:
            other = ours.find(*event.place)
            if other is None or event.kind == "selftest":
                continue
            mine = ours.read(other).astype(np.float64)
            matched = aligned(theirs.read(event).astype(np.float64), mine)
            if matched is None:  # an input that means something else on this side
                continue
            compared += 1
            if wrong(mine, matched, other.dtype):
                first = first or event
                flagged += 1
    if first is None:
        return Simple("agree", compared=compared)
    return Simple("diverge", first.name, first.port, first.step, flagged, compared)
