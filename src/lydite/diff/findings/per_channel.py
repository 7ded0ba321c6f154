"""One offset or one factor per channel, per row, per batch row: a bias, a weight, a norm."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import floor, log10, prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.findings.evidence import MOST, Evidence, explanation
from lydite.diff.findings.linear_fit import Sums, affine, scale, shift, sums
from lydite.diff.result import Finding

Array = NDArray[Any]
Fit = Callable[[Sums], tuple[Array, float]]

BIG = 2**20  # values from which a sample is fitted first
FEWEST = 4  # values for every fitted number
WILDEST = 100.0  # times the typical factor
_COLUMNS, _GROUPS = 64, 4096


@dataclass(frozen=True)
class Grouping:
    """Which values share a fitted number."""

    words: str  # for people: "channel (axis 2)"
    detail: str  # "192 channels"
    reshape: Callable[[Array], Array]  # to (outer, group, inner)


def shifted_per_channel(e: Evidence) -> Finding | None:
    """The reference plus one number per channel."""
    if (fit := _best(e, shift, _channels(e), 1)) is None:
        return None
    group, offsets, left = fit
    return explanation(
        "shifted-per-channel",
        f"port = reference + b, with b per {group.words} from {_range(offsets)}; {e.leaves(left)}.",
        f"Look for a bias ({group.detail}) that is missing, zero, or added twice, or for a "
        "constant added to the input of a linear layer.",
        left <= e.noise(),
    )


def scaled_per_channel(e: Evidence) -> Finding | None:
    """The reference times one number per channel."""
    if (fit := _best(e, scale, _channels(e), 1)) is None:
        return None
    group, factors, left = fit
    return explanation(
        "scaled-per-channel",
        f"port = a·reference, with a per {group.words} from {_range(factors)}; {e.leaves(left)}.",
        f"Look for a scale ({group.detail}) that is missing or left at 1: a norm's weight, "
        "1 + weight where the checkpoint stores weight − 1, a scale or gate of modulation.",
        left <= e.noise(),
    )


def affine_per_channel(e: Evidence) -> Finding | None:
    """The reference times one number per channel plus another."""
    if (fit := _best(e, _factors, _channels(e), 2)) is None:
        return None
    group, factors, left = fit
    return explanation(
        "affine-per-channel",
        f"port = a·reference + b, with a and b per {group.words}, a from {_range(factors)}; "
        f"{e.leaves(left)}.",
        f"Look for a per-channel scale and shift ({group.detail}), of a norm or of modulation, "
        "that are missing, applied twice, or swapped with each other.",
        left <= e.noise(),
    )


def scaled_per_row(e: Evidence) -> Finding | None:
    """The reference times one number per row: another divisor of a norm or softmax."""
    if (fit := _best(e, scale, _rows(e), 1)) is None:
        return None
    _, factors, left = fit
    return explanation(
        "scaled-per-row",
        f"port = a·reference, with a per row of {e.port.shape[-1]} from {_range(factors)}; "
        f"{e.leaves(left)}.",
        "Check what the row is divided by: epsilon and where it is added, n or n − 1, the rms or "
        "the standard deviation, the sum of a softmax, or a factor per token.",
        left <= e.noise(),
    )


def affine_per_row(e: Evidence) -> Finding | None:
    """The reference times one number per row plus another: the mean was not removed, or was."""
    if (fit := _best(e, _factors, _rows(e), 2)) is None:
        return None
    _, factors, left = fit
    return explanation(
        "affine-per-row",
        f"port = a·reference + b, with a and b per row of {e.port.shape[-1]}, a from "
        f"{_range(factors)}; {e.leaves(left)}.",
        "Check what a row is shifted and divided by: RMSNorm where the reference has LayerNorm, or "
        "the reverse (one removes the mean); a mean or a standard deviation over other axes.",
        left <= e.noise(),
    )


def _factors(s: Sums) -> tuple[Array, float]:
    factors, _, left = affine(s)
    return factors, left


def _range(numbers: Array) -> str:
    """The smallest to the largest, with enough digits to tell them apart."""
    low, high = float(numbers.min()), float(numbers.max())
    size = max(abs(low), abs(high))
    digits = 3 if low == high or not size else max(3, 2 - floor(log10((high - low) / size)))
    return f"{low:.{min(digits, 8)}g} to {high:.{min(digits, 8)}g}"


def _channels(e: Evidence) -> Iterator[Grouping]:
    """Axes that may be channels; also the channels of each batch row separately."""
    shape = e.port.shape
    last = len(shape) - 1
    for axis in dict.fromkeys((last, 1, *range(last))) if last > 0 else ():
        if axis == 1 and last == 2 and not _says_channels(e):
            continue  # tokens: a number per token is not a weight
        if axis < last - 1 or axis == last or prod(shape[:axis]) > 1:  # else it is a row
            yield _grouping(e, axis, _by_axis(axis))
    if last > 1 and shape[0] > 1:
        for axis in (last, 1) if last > 2 else (last,):
            yield _grouping(e, axis, _by_row_and_axis(axis), per_batch_row=True)


def _grouping(
    e: Evidence, axis: int, reshape: Callable[[Array], Array], *, per_batch_row: bool = False
) -> Grouping:
    is_channel = e.role(axis) == "channel" or axis == e.port.ndim - 1
    words = f"channel ({e.axis(axis)})" if is_channel else f"entry of {e.axis(axis)}"
    detail = f"{e.port.shape[axis]} {'channels' if is_channel else 'entries'}"
    if per_batch_row:
        words, detail = f"batch row and {words}", f"{detail}, different for each batch row"
    return Grouping(words, detail, reshape)


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
        yield Grouping("row", "", lambda value: value.reshape(1, -1, value.shape[-1]))


def _best(
    e: Evidence, fit: Fit, groupings: Iterator[Grouping], free: int
) -> tuple[Grouping, Array, float] | None:
    """The first grouping whose fit explains the error, its numbers and what is left."""
    if not e.same_shape:
        return None
    for group in groupings:
        reference, port = (group.reshape(value) for value in e.values)
        outer, groups, inner = port.shape
        if outer * inner < FEWEST * free or groups < 2:
            continue
        if port.size >= BIG and not _promising(reference, port, fit):
            continue
        s = sums(reference, port)
        numbers, squares = fit(s)
        left = sqrt(squares)
        typical = 1.0 if fit is shift else float(np.median(np.abs(numbers)))
        if fit is not shift and float(np.abs(numbers).max()) > WILDEST * typical:
            continue  # not a weight of a network: a fit of noise
        if e.explains(left, sqrt(s.spread), free=free * groups, scale=typical):
            return group, numbers, left
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
