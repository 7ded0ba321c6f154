"""A value whose channels, the numbers along its last axis, are in another order.

A port may keep the rows of a layer's weight in an order of its own: those of a patch, of heads.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST = 4096  # channels that are compared with each other
FEWEST = 8  # numbers of a channel that show which one it is
ROWS = 256  # numbers of a channel that are compared

Array = NDArray[Any]


def in_order_of(reference: Array, port: Array) -> Array | None:
    """The port's value with its channels in the reference's order; None where they are others."""
    count = port.shape[-1] if port.ndim > 1 else 0
    if port.size != reference.size or reference.shape[-1:] != (count,) or not 2 <= count <= MOST:
        return None
    own, right = (x.reshape(-1, count) for x in (port, reference))
    if len(own) < FEWEST:
        return None
    order = _order(own, right)
    return None if order is None else own[:, order].reshape(reference.shape)


def _order(own: Array, right: Array) -> Array | None:
    """For each channel of the reference the nearest of the port's, if each is that of one."""
    step = -(-len(own) // ROWS)
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = (x[::step].astype(np.float64) for x in (right, own))
        apart = np.square(a).sum(0)[:, None] + np.square(b).sum(0) - 2 * a.T @ b
    if not np.isfinite(apart).all():
        return None
    order = apart.argmin(1)
    same = np.arange(len(order))
    return order if (np.sort(order) == same).all() and (order != same).any() else None


def moves(before: Array, after: Array) -> Array | None:
    """Where in the one value each number of the other is; None where they have other numbers."""
    if before.size != after.size:
        return None
    a, b = before.reshape(-1), after.reshape(-1)
    first, second = np.argsort(a), np.argsort(b)
    if not np.array_equal(a[first], b[second]) or (np.diff(a[first]) == 0).any():
        return None
    at = np.empty(len(a), int)
    at[second] = first
    return at
