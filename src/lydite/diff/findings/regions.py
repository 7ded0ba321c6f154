"""Where the error is: at the border, in one head, in some channels, at the end of the sequence."""

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.findings.evidence import FEW, Evidence, axis_names
from lydite.diff.result import Finding

CLEAR = 4.0  # how many times worse the wrong part has to be than the rest
CLEAN = 0.01  # relative error of the rest at most, when the rounding is uncertain
FEWEST = 32  # values that have to agree elsewhere
THICKEST = 3  # pixels of a border
_WORST = 1e30  # relative to a reference of zero


def border(e: Evidence) -> Finding | None:
    """Wrong in the outermost rows and columns only."""
    for first in _planes(e):
        bad = _bad(e, (first, first + 1))
        if bad is None:
            continue
        height, width = bad.shape
        for thick in range(1, min(THICKEST, (min(height, width) - 1) // 4) + 1):
            if bad[thick:-thick, thick:-thick].any():
                continue
            edges = {
                "top": bad[:thick],
                "bottom": bad[-thick:],
                "left": bad[:, :thick],
                "right": bad[:, -thick:],
            }
            whole = [name for name, edge in edges.items() if edge.mean() > 0.5]
            if not whole or (len(whole) < 2 and e.role(first) != "space"):
                return None
            return Finding(
                "border",
                f"Only the outermost {thick} at the {', '.join(whole)} of axes {first} and "
                f"{first + 1} are wrong: {int(bad.sum())} of {bad.size} positions; inside, all "
                "values agree.",
                "Compare the padding: how much on which side, and zeros, reflection or "
                "replication.",
                "observed",
            )
    return None


def slice_of_axis(e: Evidence) -> Finding | None:
    """Wrong in one contiguous range of one axis only; the axis with the smallest range."""
    runs: list[tuple[float, int, int, int]] = []
    for axis in range(e.port.ndim):
        bad = _bad(e, (axis,))
        if bad is None:
            continue
        wrong = np.flatnonzero(bad)
        start, stop = int(wrong[0]), int(wrong[-1]) + 1
        if stop - start == wrong.size <= bad.size / 2:
            runs.append((wrong.size / bad.size, axis, start, stop))
    return _slice_finding(e, *min(runs)[1:]) if runs else None


def _slice_finding(e: Evidence, axis: int, start: int, stop: int) -> Finding:
    size, where, count = e.port.shape[axis], e.axis(axis), stop - start
    run = f"entry {start}" if count == 1 else f"entries {start} to {stop - 1}"
    evidence = f"Only {run} of {where}, of {size}, {'is' if count == 1 else 'are'} wrong"
    inside = np.take(e.values[1], range(start, stop), axis)
    evidence += " and zero in the port" if not inside.any() else ""
    role = e.role(axis)
    is_part = role == "channel" and start % count == size % count == 0 and 1 < count < size
    if is_part:
        evidence += f", part {start // count} of {size // count}"
    cause, look_at = _named(role, where, is_head=is_part and size // count > 2 and count >= 8)
    if role == "position" and stop == size:
        cause = "trailing-positions"
        look_at = (
            "Compare padding and mask: the last positions are padding, other tokens, or are "
            "attended to when they should not be."
        )
    elif role == "position" and start == 0:
        cause = "leading-positions"
        look_at = (
            "Look at what comes first in the sequence: the first token, a prefix, text before "
            "image tokens, the crop of a prompt template."
        )
    return Finding(cause, f"{evidence}; everything else agrees.", look_at, "observed")


def _named(role: str, where: str, *, is_head: bool) -> tuple[str, str]:
    """The name of a wrong range of an axis, and what to look at."""
    if role == "batch":
        return (
            "one-batch-row",
            "Look at what differs between batch rows: the conditional or the unconditional prompt, "
            "its mask, its pooled embedding.",
        )
    if role == "head":
        return "one-head", "Look at how heads are indexed, shared or repeated."
    if role == "channel":
        return (
            "one-head" if is_head else "channel-slice",
            "Look at what computes these channels alone: one head, one part of a fused or "
            "concatenated projection, the rotated part of a head, one chunk of modulation.",
        )
    return "axis-slice", f"Look at what treats these entries of {where} differently."


def _planes(e: Evidence) -> list[int]:
    """First axes of neighbouring pairs that may be a picture's rows and columns."""
    rank = e.port.ndim
    names = axis_names(e.dims, rank)
    if names:
        return [axis for axis in range(rank - 1) if e.role(axis) == e.role(axis + 1) == "space"]
    return [rank - 2, rank - 3] if rank >= 4 else []


def _bad(e: Evidence, axes: tuple[int, ...]) -> NDArray[np.bool_] | None:
    """Which entries of one axis or two neighbours are wrong; None unless it is clear-cut."""
    if not e.same_shape or any(e.port.shape[axis] < 2 for axis in axes):
        return None
    shape = e.port.shape
    inner = prod(shape[axes[-1] + 1 :])
    kept = tuple(shape[axis] for axis in axes)
    reference, port = (value.reshape(-1, prod(kept), inner) for value in e.values)
    wrong, size = _squares(port - reference), _squares(reference)
    with np.errstate(divide="ignore", invalid="ignore"):
        local = np.where(wrong == 0.0, 0.0, np.minimum(np.sqrt(wrong / size), _WORST))
    # The floor may be too low; a gap further up is as good, if it is wide.
    for limit, gap in ((FEW * e.rounding, CLEAR), (CLEAN, 10 * CLEAR)):
        bad = local > limit
        if not bad.any() or bad.all() or np.count_nonzero(reference[:, ~bad]) < FEWEST:
            continue
        ratio = local[bad].min() / max(local[~bad].max(), 1e-9)
        # Worse than the rest for its own size and also as such: a row of zeros is soon wrong.
        if ratio >= gap and wrong[bad].min() >= gap**2 * wrong[~bad].max():
            return bad.reshape(kept)
    return None


def _squares(values: NDArray[Any]) -> NDArray[np.float64]:
    return np.einsum("ogi,ogi->g", values, values, dtype=np.float64)
