"""Equal parts of an axis in another order: halves, chunks, heads, batch rows."""

from collections.abc import Iterable, Iterator
from math import log2, prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.findings.evidence import FEW, Evidence, explanation, norm
from lydite.diff.result import Finding

MOST_CHUNKS = 9  # of adaLN: six for one stream, nine with dual attention
MOST_ENTRIES = 64  # of a short axis whose every entry is a part
_COLUMNS = 256


def parts_reordered(e: Evidence) -> Finding | None:
    """Every part of the port is a part of the reference, but another one."""
    return _reordered(e, _chunks(e))


def entries_reordered(e: Evidence) -> Finding | None:
    """Every entry of a short axis is one of the reference's, but another one."""
    return _reordered(e, ((a, n) for a, n in enumerate(e.port.shape) if 2 <= n <= MOST_ENTRIES))


def _reordered(e: Evidence, splits: Iterable[tuple[int, int]]) -> Finding | None:
    if not e.same_shape:
        return None
    for axis, count in splits:
        source = _sources(e, axis, count)
        if source is None or source == tuple(range(count)):
            continue
        left = _left(e, axis, source)
        if e.explains(left, choices=count * log2(count)):
            return _finding(e, axis, source, left)
    return None


def _chunks(e: Evidence) -> Iterator[tuple[int, int]]:
    """Axis and number of parts, the last axis first, few parts first."""
    shape = e.port.shape
    for axis in (len(shape) - 1, *range(len(shape) - 1)) if shape else ():
        for count in range(2, MOST_CHUNKS + 1):
            single = count == shape[axis] and axis not in (0, len(shape) - 1)
            if shape[axis] % count == 0 and not single:
                yield axis, count


def _sources(e: Evidence, axis: int, count: int) -> tuple[int, ...] | None:
    """For each part of the port the part of the reference that it equals, by a sample."""
    reference, port = (_parts(value, axis, count) for value in e.values)
    draw = np.random.default_rng(0)
    outer = draw.integers(reference.shape[0], size=_COLUMNS)
    inner = draw.integers(reference.shape[2], size=_COLUMNS)
    expected = reference[outer, :, inner].T.astype(np.float64)  # (count, columns)
    actual = port[outer, :, inner].T.astype(np.float64)
    apart = np.square(actual[:, None] - expected[None]).sum(-1)  # (actual, expected)
    own = np.diagonal(apart)
    clean = (FEW * e.rounding) ** 2 * np.square(expected).sum(-1)
    stays = own <= np.maximum(clean, 1.01 * apart.min(axis=1))
    if not (stays | (apart.min(axis=1) < 0.25 * own)).all():
        return None
    source = [i if stay else -1 for i, stay in enumerate(stays)]
    for i, row in enumerate(apart):
        if source[i] < 0:  # of equal parts of the reference, one that is not used yet
            near = np.flatnonzero(row <= np.maximum(clean, 1.01 * row.min()))
            source[i] = int(next((j for j in near if j not in source), near[0]))
    return tuple(source)


def _left(e: Evidence, axis: int, source: tuple[int, ...]) -> float:
    reference, port = (_parts(value, axis, len(source)) for value in e.values)
    return sqrt(sum(norm(port[:, i] - reference[:, j]) ** 2 for i, j in enumerate(source)))


def _parts(value: NDArray[Any], axis: int, count: int) -> NDArray[Any]:
    shape = value.shape
    return value.reshape(prod(shape[:axis]), count, -1)


def _finding(e: Evidence, axis: int, source: tuple[int, ...], left: float) -> Finding:
    where, count, size = e.axis(axis), len(source), e.port.shape[axis]
    entries = count == size and count > 1
    words = {"batch": "batch rows", "head": "heads"}
    what = words.get(e.role(axis), "entries") if entries else "chunks"
    moved = [(i, j) for i, j in enumerate(source) if i != j]
    listed = ", ".join(f"{i} = {j}" for i, j in moved[:8]) + (" …" if len(moved) > 8 else "")
    order = f"{count} {what} of {where} are in another order (port = reference: {listed})"
    swaps = [f"{i} and {j}" for i, j in moved if i < j and source[j] == i]
    if 2 * len(swaps) == len(moved):
        order = f"{what} {', '.join(swaps[:8])} of {where} are swapped"
    if len(set(source)) < count:
        cause = "parts-repeated"
        fix = f"Check which {what} are used: one is used twice, another never."
    elif entries and e.role(axis) == "batch":
        cause = "batch-swapped"
        fix = "Swap the rows: conditional and unconditional may be stacked in the other order."
    elif count == 2:
        cause, order = "halves-swapped", f"the two halves of {where} are swapped"
        fix = (
            f"Swap the halves of {where}: sine and cosine, scale and shift, gate and up, mean and "
            "log-variance are in the other order."
        )
    else:
        cause = "parts-reordered"
        fix = (
            f"Split {where} in the reference's order: take {what} "
            f"{tuple(int(i) for i in np.argsort(source))} of the port's."
            if count <= MOST_CHUNKS
            else f"Put the {what} of {where} in the reference's order."
        )
    return explanation(
        cause,
        f"In the port, {order}; {e.leaves(left)}.",
        fix,
        left <= e.noise(),
    )
