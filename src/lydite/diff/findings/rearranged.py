"""The right numbers at the wrong positions: axes, memory order, heads, even and odd channels."""

from collections.abc import Iterator
from itertools import combinations, permutations
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.findings.evidence import Evidence, apart, explanation
from lydite.diff.result import Finding

MAX_AXES = 5
GLANCE = 64  # values that exclude nearly every candidate


def transposed(e: Evidence) -> Finding | None:
    """The reference with its axes in another order."""
    reference, port = _squeezed(e)
    for order in _orders(reference.ndim):
        view = reference.transpose(order)
        if view.shape != port.shape or (left := matches(e, view)) is None:
            continue
        whole = _with_unit_axes(order, e.reference.shape, e.port.shape)
        moved = [axis for axis, source in enumerate(whole) if axis != source]
        kind = "axes {} and {} swapped".format(*moved) if len(moved) == 2 else f"axes as {whole}"
        back = tuple(int(axis) for axis in np.argsort(whole))
        return _explained(
            e,
            left,
            "transposed",
            f"equals the reference with {kind}: reference.transpose{whole}",
            f"Transpose the port's value with {back}, or the weight or input that decides its "
            "layout.",
        )
    return None


def memory_order(e: Evidence) -> Finding | None:
    """The reference's numbers read in another order, as when the strides of a view are ignored."""
    reference, port = _squeezed(e)
    orders = list(_orders(reference.ndim))
    if reference.shape != port.shape:
        orders.insert(0, tuple(range(reference.ndim)))
    for order in orders:
        view = reference.transpose(order)
        if view.shape == port.shape or (left := matches(e, view)) is None:
            back = tuple(np.argsort(order))
            sizes = [port.shape[axis] for axis in order] if port.ndim == reference.ndim else []
            if not sizes or tuple(sizes) == reference.shape:
                continue
            if (left := matches(e, reference.reshape(sizes).transpose(back))) is None:
                continue
        if order == tuple(range(reference.ndim)):
            return _explained(
                e,
                left,
                "reshaped",
                f"the same numbers in the same order, shaped {list(e.port.shape)} instead of "
                f"{list(e.reference.shape)}",
                f"Reshape it to {list(e.reference.shape)}.",
            )
        whole = _with_unit_axes(order, e.reference.shape)
        return _explained(
            e,
            left,
            "memory-order",
            f"equals the reference's memory read in another order: reference.transpose{whole} "
            f"reshaped to {list(e.port.shape)}",
            "Make the transposed view contiguous before it is read as raw memory, or transpose "
            "where the port only reshapes.",
        )
    return None


def flipped(e: Evidence) -> Finding | None:
    """The reference backwards along one axis or two."""
    if not e.same_shape:
        return None
    reference, _ = e.values
    long = [axis for axis, size in enumerate(reference.shape) if size > 2]
    for count in (1, 2):
        for axes in combinations(long, count):
            if (left := matches(e, np.flip(reference, axes))) is None:
                continue
            where = " and ".join(e.axis(axis) for axis in axes)
            colour = count == 1 and reference.shape[axes[0]] == 3 and reference.ndim > 2
            return _explained(
                e,
                left,
                "flipped",
                f"equals the reference backwards along {where}",
                "Swap red and blue: one side is RGB, the other BGR."
                if colour
                else f"Reverse {where}, or the index that runs over it.",
            )
    return None


def split_swapped(e: Evidence) -> Finding | None:
    """An axis of n·m read as m·n: heads and head size, even and odd, tiled and repeated."""
    if not e.same_shape:
        return None
    reference, _ = e.values
    for axis in reversed(range(reference.ndim)):
        before, size, after = _around(reference.shape, axis)
        for n, m in _factors(size):
            view = reference.reshape(before, n, m, after).swapaxes(1, 2)
            if (left := matches(e, view)) is not None:
                return _split_finding(e, left, axis, n, m)
    return None


def merged_wrongly(e: Evidence) -> Finding | None:
    """The last axis contains (heads, size), and heads are swapped with other axes."""
    reference = e.values[0]
    if not e.same_size or reference.ndim < 2:
        return None
    outer = [size for size in reference.shape[:-1] if size > 1]
    if not 1 <= len(outer) <= MAX_AXES - 2:
        return None
    last = len(outer)
    for n, m in _factors(reference.shape[-1]):
        split = reference.reshape(*outer, n, m)
        for order in _orders(last + 2):
            if order[:last] == tuple(range(last)) or order.index(last) + 1 == order.index(last + 1):
                continue  # only n and m are swapped, or they stay together: other hypotheses
            if (left := matches(e, split.transpose(order))) is None:
                continue
            shape = [*outer, n, m]
            return _explained(
                e,
                left,
                "heads-merged-wrongly",
                f"equals the reference with its last axis split into {n} × {m} and the axes "
                f"{shape} stored in the order {order}: {[shape[axis] for axis in order]}",
                f"Transpose heads ({n} or {m}) and positions before they are merged or after they "
                "are split; a reshape alone does not move them.",
            )
    return None


def patch_order(e: Evidence) -> Finding | None:
    """Patches flattened in another order: channel, row and column of a patch."""
    if not e.same_shape:
        return None
    reference, _ = e.values
    size = reference.shape[-1] if reference.ndim > 1 else 0
    for p in (2, 4, 8, 14, 16):
        if size % (p * p) or size // (p * p) < 2:
            continue
        for words in (("row", "column", "channel"), ("channel", "row", "column")):
            sizes = [size // (p * p) if word == "channel" else p for word in words]
            split = reference.reshape(-1, *sizes)
            for order in _orders(3):
                if words[order[1]] == "channel":
                    continue  # never between row and column
                if (left := matches(e, split.transpose(0, *(axis + 1 for axis in order)))) is None:
                    continue
                was, now = " ".join(words), " ".join(words[axis] for axis in order)
                return _explained(
                    e,
                    left,
                    "patch-order",
                    f"equals the reference with the last axis, patches of {p} × {p}, in the order "
                    f"({now}) instead of ({was})",
                    f"Flatten a patch as ({was}).",
                )
    return None


def matches(e: Evidence, view: NDArray[Any]) -> float | None:
    """What is left when the port is the view read in C order, or None when it is not.

    A few positions of the view are tried first: transposing a gigabyte costs nothing until read.
    """
    reference, port = e.values
    if view.size != port.size:
        return None
    for sample in (e.sample[:GLANCE], e.sample):
        right = reference.reshape(-1)[sample] if e.same_shape else None
        other = view[np.unravel_index(sample, view.shape)]
        if not e.promises(port.reshape(-1)[sample], other, right):
            return None
    left = apart(port.reshape(view.shape), view)
    return left if e.explains(left) else None


def _explained(e: Evidence, left: float, cause: str, what: str, fix: str) -> Finding:
    return explanation(cause, f"The port {what}; {e.leaves(left)}.", fix, left <= e.noise())


def _split_finding(e: Evidence, left: float, axis: int, n: int, m: int) -> Finding:
    where, size = e.axis(axis), e.port.shape[axis]
    if axis < e.port.ndim - 1:
        return _explained(
            e,
            left,
            "interleaved",
            f"equals the reference with {where} of {size} read as {n} × {m} and stored as "
            f"{m} × {n}",
            f"Repeat instead of tiling along {where}, or the reverse: a a b b or a b a b.",
        )
    if 2 in (n, m):
        expected, actual = ("halves", "even and odd") if n == 2 else ("even and odd", "halves")
        return _explained(
            e,
            left,
            "even-odd",
            f"equals the reference with the {size} channels of {where} in another order: in the "
            f"reference the two parts are {expected} channels, in the port {actual} (interleaved "
            f"{'in the port' if n == 2 else 'in the reference'})",
            f"Use {expected} channels: of {size}, i goes with "
            f"{'i + ' + str(size // 2) if n == 2 else 'i + 1'} (sines and cosines, rotary "
            "embedding, gated MLP).",
        )
    return _explained(
        e,
        left,
        "heads-swapped",
        f"equals the reference with {where} of {size} split as {m} × {n} instead of {n} × {m}",
        f"Reshape {where} to ({n}, {m}), not ({m}, {n}): heads first, then the size of a head.",
    )


def _squeezed(e: Evidence) -> tuple[NDArray[Any], NDArray[Any]]:
    """Both without axes of length 1; empty when they cannot be rearrangements."""
    reference, port = (np.squeeze(value) for value in e.values)
    if not e.same_size or reference.ndim > MAX_AXES:
        empty = np.zeros(0)
        return empty, empty
    return reference, port


def _orders(rank: int) -> Iterator[tuple[int, ...]]:
    """Every order of the axes but the given one, those that move the fewest first."""
    orders = permutations(range(rank))
    next(orders)
    yield from sorted(orders, key=lambda order: sum(a != b for a, b in enumerate(order)))


def _with_unit_axes(
    order: tuple[int, ...], shape: tuple[int, ...], wanted: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The order of all axes: longer ones as given, axes of length 1 where they fit."""
    long = [axis for axis, size in enumerate(shape) if size > 1]
    units = [axis for axis, size in enumerate(shape) if size == 1]
    target = wanted if len(wanted) == len(shape) else shape
    moving = iter(order)
    whole: list[int] = []
    for position, size in enumerate(target):
        if size > 1:
            whole.append(long[next(moving)])
        else:
            whole.append(units.pop(units.index(position) if position in units else 0))
    return tuple(whole)


def _around(shape: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    return prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])


def _factors(size: int) -> Iterator[tuple[int, int]]:
    """Every n × m of a size, both at least two."""
    for n in range(2, size // 2 + 1):
        if size % n == 0:
            yield n, size // n
