"""One offset or one factor per channel, per row, per batch row: a bias, a weight, a norm."""

from collections.abc import Callable, Iterator
from math import floor, log10, prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.findings.evidence import MOST, Evidence, Explanation
from lydite.diff.findings.sums import Sums, affine, scale, shift, sums
from lydite.diff.result import Finding

Array = NDArray[Any]
# Words for people, and the value seen as (outer, group, inner).
Grouping = tuple[str, Callable[[Array], Array]]
Fit = Callable[[Sums], tuple[Array, float]]

BIG = 2**20  # values from which a sample is fitted first
FEWEST = 4  # values for every fitted number
WILDEST = 100.0  # times the typical factor
_COLUMNS, _GROUPS = 64, 4096


def shifted_per_channel(e: Evidence) -> Finding | None:
    """The reference plus one number per channel."""
    if (fit := _best(e, shift, _channels(e), 1)) is None:
        return None
    words, offsets, left = fit
    return Explanation(
        "shifted-per-channel",
        f"The port is the reference plus one number per entry of {words}, "
        f"{_range(offsets)}; {e.leaves(left)}.",
        f"Look for a bias of {offsets.size} numbers that is missing, zero, or added twice.",
        left <= e.noise(),
    )


def scaled_per_channel(e: Evidence) -> Finding | None:
    """The reference times one number per channel."""
    if (fit := _best(e, scale, _channels(e), 1)) is None:
        return None
    words, factors, left = fit
    return Explanation(
        "scaled-per-channel",
        f"The port is the reference times one number per entry of {words}, "
        f"{_range(factors)}; {e.leaves(left)}.",
        f"Look for a weight of {factors.size} numbers that is missing or left at 1: a norm's "
        "weight, 1 + weight where the checkpoint stores weight − 1, a scale or gate of modulation.",
        left <= e.noise(),
    )


def affine_per_channel(e: Evidence) -> Finding | None:
    """The reference times one number per channel plus another."""

    def fitted(s: Sums) -> tuple[Array, float]:
        factors, _, left = affine(s)
        return factors, left

    if (fit := _best(e, fitted, _channels(e), 2)) is None:
        return None
    words, factors, left = fit
    return Explanation(
        "affine-per-channel",
        f"The port is the reference times one number and plus another per entry of {words}, "
        f"factors {_range(factors)}; {e.leaves(left)}.",
        f"Look for weight and bias of {factors.size} numbers, of a norm or of modulation, that are "
        "missing, doubled, or each other's.",
        left <= e.noise(),
    )


def scaled_per_row(e: Evidence) -> Finding | None:
    """The reference times one number per row: another divisor of a norm or softmax."""
    if (fit := _best(e, scale, _rows(e), 1)) is None:
        return None
    _, factors, left = fit
    return Explanation(
        "scaled-per-row",
        f"The port is the reference times one number per row of {e.port.shape[-1]}, "
        f"{_range(factors)}; {e.leaves(left)}.",
        "Look at what the row is divided by: epsilon and its place, n or n − 1, the rms or the "
        "standard deviation, the sum of a softmax, or a factor per token.",
        left <= e.noise(),
    )


def affine_per_row(e: Evidence) -> Finding | None:
    """The reference times one number per row plus another: the mean was not removed, or was."""

    def fitted(s: Sums) -> tuple[Array, float]:
        factors, _, left = affine(s)
        return factors, left

    if (fit := _best(e, fitted, _rows(e), 2)) is None:
        return None
    _, factors, left = fit
    return Explanation(
        "affine-per-row",
        f"The port is the reference times one number and plus another per row of "
        f"{e.port.shape[-1]}, factors {_range(factors)}; {e.leaves(left)}.",
        "Look for RMSNorm where the reference has LayerNorm, or the reverse: one removes the mean.",
        left <= e.noise(),
    )


def _range(numbers: Array) -> str:
    """The smallest to the largest, with enough digits to tell them apart."""
    low, high = float(numbers.min()), float(numbers.max())
    size = max(abs(low), abs(high))
    digits = 3 if low == high or not size else max(3, 2 - floor(log10((high - low) / size)))
    return f"{low:.{min(digits, 8)}g} to {high:.{min(digits, 8)}g}"


def _channels(e: Evidence) -> Iterator[Grouping]:
    """Axes that may be channels; of a batch also the channels of every row for itself."""
    shape = e.port.shape
    last = len(shape) - 1
    for axis in dict.fromkeys((last, 1, *range(last))) if last else ():
        if axis == 1 and last == 2 and not _says_channels(e):
            continue  # tokens: what varies over them is no weight
        if axis < last - 1 or axis == last or prod(shape[:axis]) > 1:  # else it is a row
            yield e.axis(axis), _by_axis(axis)
    if last > 1 and shape[0] > 1:
        for axis in (last, 1) if last > 2 else (last,):
            yield f"batch row and {e.axis(axis)}", _by_row_and_axis(axis)


def _says_channels(e: Evidence) -> bool:
    """Whether the trace says that the middle one of three axes holds channels."""
    return (e.dims or "").split()[1:2] == ["c"]


def _by_axis(axis: int) -> Callable[[Array], Array]:
    def grouped(value: Array) -> Array:
        shape = value.shape
        return value.reshape(prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]))

    return grouped


def _by_row_and_axis(axis: int) -> Callable[[Array], Array]:
    def grouped(value: Array) -> Array:
        return np.moveaxis(value, axis, 1).reshape(1, value.shape[0] * value.shape[axis], -1)

    return grouped


def _rows(e: Evidence) -> Iterator[Grouping]:
    if e.port.ndim > 1:
        yield "row", lambda value: value.reshape(1, -1, value.shape[-1])


def _best(
    e: Evidence, fit: Fit, groupings: Iterator[Grouping], free: int
) -> tuple[str, Array, float] | None:
    """Words, numbers and what is left of the first grouping whose fit accounts for the error."""
    if not e.same_shape:
        return None
    for words, grouped in groupings:
        reference, port = (grouped(value) for value in e.values)
        outer, groups, inner = port.shape
        if outer * inner < FEWEST * free or groups < 2:
            continue
        if port.size >= BIG and not _promising(reference, port, fit):
            continue
        s = sums(reference, port)
        numbers, squares = fit(s)
        # What a fit of pure noise would also remove is not to its credit.
        left = sqrt(squares * s.n / (s.n - free))
        typical = 1.0 if fit is shift else float(np.median(np.abs(numbers)))
        if fit is not shift and float(np.abs(numbers).max()) > WILDEST * typical:
            continue  # no weight of a network: a fit of noise
        if e.explains(left, sqrt(s.spread), free=free * groups, scale=typical):
            return words, numbers, left
    return None


def _promising(reference: Array, port: Array, fit: Fit) -> bool:
    """Whether the fit does well on some columns of some groups."""
    draw = np.random.default_rng(0)
    step = -(-port.shape[1] // _GROUPS)
    reference, port = reference[:, ::step], port[:, ::step]
    outer = draw.integers(port.shape[0], size=_COLUMNS)
    inner = draw.integers(port.shape[2], size=_COLUMNS)
    # (columns, group, 1): what sums() wants
    s = sums(reference[outer, :, inner][..., None], port[outer, :, inner][..., None])
    return fit(s)[1] <= MOST**2 * min(float(s.dd.sum()), s.spread)
