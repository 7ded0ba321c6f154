"""The reference shifted by a few pixels or positions."""

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.findings.evidence import FEW, PART, Evidence, apart, explanation, norm
from lydite.diff.findings.rearranged import GLANCE
from lydite.diff.result import Finding

MAX_SHIFT = 8

Moves = tuple[tuple[int, int], ...]  # (axis, by how many)


def displaced(e: Evidence) -> Finding | None:
    """port[i] = reference[i + k] along one axis or two neighbours, where both have values."""
    if not e.same_shape:
        return None
    for moves in _moves(e.port.shape):
        if not _promising(e, moves):
            continue
        reference, port = e.values
        there, here = _window(e, moves, 1), _window(e, moves, -1)
        left, lost = apart(port[here], reference[there]), apart(port[here], reference[here])
        # The overlapping part may be small compared with the rest, and has to agree by itself.
        own = norm(port[here] - float(port[here].mean(dtype=np.float64)))
        if e.explains(left, min(lost, own)) and _agree(e, left, own, port[here]):
            return _finding(e, moves, left, port[here].size / port.size)
    return None


def cropped(e: Evidence) -> Finding | None:
    """Equal but for some entries more or fewer at one end of one axis."""
    expected, actual = e.reference.shape, e.port.shape
    differ = [axis for axis, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b]
    if len(expected) != len(actual) or len(differ) != 1:
        return None
    axis, size = differ[0], min(expected[differ[0]], actual[differ[0]])
    more = abs(expected[axis] - actual[axis])
    for kept, where in ((slice(0, size), "last"), (slice(-size, None), "first")):
        window = (slice(None),) * axis + (kept,)
        reference, port = (value[window] for value in e.values)
        left, own = apart(port, reference), norm(port - float(port.mean(dtype=np.float64)))
        if not e.explains(left, own) or not _agree(e, left, own, port):
            continue
        less = actual[axis] < expected[axis]
        return explanation(
            "cropped" if less else "not-cropped",
            f"The port equals the reference {'without' if less else 'with'} {more} entries "
            f"{'' if less else 'more '}of {e.axis(axis)}, the {where} ones; {e.leaves(left)}.",
            f"{'Keep' if less else 'Remove'} the {where} {more} entries: the length of a prompt, "
            "the tokens of a template, a crop after padding, a class token.",
            left <= e.noise(),
        )
    return None


def _agree(e: Evidence, left: float, own: float, part: NDArray[Any]) -> bool:
    return left <= max(PART * own, FEW * e.rounding * norm(part))


def _window(e: Evidence, moves: Moves, side: int) -> tuple[slice, ...]:
    """The part that overlaps, seen from the reference (1) or from the port (−1)."""
    window = [slice(None)] * e.port.ndim
    for axis, by in moves:
        size, by = e.port.shape[axis], by * side
        window[axis] = slice(max(by, 0), size + min(by, 0))
    return tuple(window)


def _moves(shape: tuple[int, ...]) -> Iterator[Moves]:
    """One axis first, then pairs, near before far; half of an axis has to overlap."""
    reach = [min(MAX_SHIFT, size // 4) for size in shape]

    def steps(axis: int) -> list[int]:
        return [sign * by for by in range(1, reach[axis] + 1) for sign in (1, -1)]

    for axis in reversed(range(len(shape))):
        yield from (((axis, by),) for by in steps(axis))
    rank = len(shape)
    for first, second in ((rank - 2, rank - 1), (rank - 3, rank - 2)):
        if first < 0 or rank < 3:
            continue
        pairs = [(a, b) for a in steps(first) for b in steps(second)]
        for a, b in sorted(pairs, key=lambda pair: abs(pair[0]) + abs(pair[1])):
            yield (first, a), (second, b)


def _promising(e: Evidence, moves: Moves) -> bool:
    """Whether the values agree at sampled positions whose counterpart exists."""
    reference, port = (value.reshape(-1) for value in e.values)
    for sample in (e.sample[:GLANCE], e.sample):
        index = np.unravel_index(sample, e.port.shape)
        inside = np.ones(sample.size, bool)
        offset = 0
        for axis, by in moves:
            there = index[axis] + by
            inside &= (there >= 0) & (there < e.port.shape[axis])
            offset += by * prod(e.port.shape[axis + 1 :])
        here = sample[inside]
        if not e.promises(port[here], reference[here + offset], reference[here]):
            return False
    return True


def _finding(e: Evidence, moves: Moves, left: float, share: float) -> Finding:
    where = " and ".join(f"{by:+d} along {e.axis(axis)}" for axis, by in moves)
    space = len(moves) == 2 or (e.port.ndim >= 4 and e.role(moves[0][0]) in ("space", ""))
    what = f"The port at i equals the reference at i {where}, on the {share:.0%} where both exist"
    if space:
        fix = (
            "Pad on the other side: (0, 1, 0, 1) against 1 on every side moves a picture by a "
            "pixel, and so does another crop or alignment of a resize."
        )
        return explanation("shifted-pixels", f"{what}; {e.leaves(left)}.", fix, left <= e.noise())
    fix = (
        "Shift it back: a first token is missing or added, an index starts at 1 instead of 0, or "
        "the value of the next entry is used."
    )
    return explanation("shifted-positions", f"{what}; {e.leaves(left)}.", fix, left <= e.noise())
