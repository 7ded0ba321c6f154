"""What people use today, as judges: one fixed rule for every value, in the reference's order.

`fixed_rule` is msProbe's kind: cosine below 0.99, or a largest difference above 1. `allclose` is
what a notebook does: 1e-3 for float32, 1e-2 for half precision. Both get help: names are equal, and
another order of axes and axes of length one are corrected here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.trace.events import Event
from lydite.trace.reader import Trace

Rule = Callable[[NDArray[np.float64], NDArray[np.float64], str], bool]  # port, reference, dtype


@dataclass(frozen=True)
class Simple:
    """As much of a verdict as a fixed rule can give."""

    verdict: str
    site: str | None = None
    slot: str | None = None
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


def aligned(reference: NDArray[Any], port: NDArray[Any]) -> NDArray[Any] | None:
    """The reference's value in the port's axis order, or None where no known one fits."""
    wanted = [size for size in port.shape if size != 1]
    if [size for size in reference.shape if size != 1] == wanted:
        return reference.reshape(port.shape)
    if reference.ndim == port.ndim and reference.shape[1:] == port.shape[1:] and len(port) == 1:
        return reference[:1]  # every row of a batch alike
    if reference.ndim > 2 and port.ndim > 1 and reference.size == port.size:
        last = np.moveaxis(reference, 1, -1)  # channels first to channels last
        if last.shape[-1] == port.shape[-1]:
            return last.reshape(port.shape)
    return None


def _walk(reference: Path, port: Path, wrong: Rule) -> Simple:
    with Trace.open(reference) as reference_trace, Trace.open(port) as port_trace:
        first: Event | None = None
        flagged = compared = 0
        for event in reference_trace.events:
            other = port_trace.find(*event.id)
            if other is None or event.kind == "selftest":
                continue
            value = port_trace.read(other).astype(np.float64)
            expected = aligned(reference_trace.read(event).astype(np.float64), value)
            if expected is None:  # an input that means something else in the port
                continue
            compared += 1
            if wrong(value, expected, other.dtype):
                first = first or event
                flagged += 1
    if first is None:
        return Simple("agree", compared=compared)
    return Simple("diverge", first.name, first.slot, first.step, flagged, compared)
