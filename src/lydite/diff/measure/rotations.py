"""Tables of rotations in the forms that programs keep them in, read as complex numbers.

Cosines and sines apart, each once or for both numbers of a pair; each cosine beside its sine, as
complex numbers are read; matrices of two by two.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ONE = 2e-2  # by how much squares of bfloat16 cosines and sines miss one
MOST = 2**20  # numbers of a table

Array = NDArray[Any]


def rotations(parts: Sequence[Array]) -> Array | None:
    """The rotations of one value, or of cosines and sines: (tokens, pairs); None for others."""
    if any(part.size > MOST or part.dtype.kind not in "fV" or part.ndim < 2 for part in parts):
        return None
    values = [part.astype(np.float64) for part in parts]
    forms = _of_two(*values) if len(values) == 2 else _of_one(values[0])
    for cosines, sines in forms:
        table = cosines + 1j * sines
        if table.size and np.abs(np.abs(table) ** 2 - 1).max() < ONE and np.ptp(cosines) > ONE:
            return _tokens(table)
    return None


def _of_one(value: Array) -> Iterator[tuple[Array, Array]]:
    """Cosines and sines of matrices, or side by side."""
    if value.shape[-2:] == (2, 2) and value.ndim > 3:
        cosines, sines = value[..., 0, 0], value[..., 1, 0]
        if np.array_equal(cosines, value[..., 1, 1]) and np.array_equal(sines, -value[..., 0, 1]):
            yield cosines, sines
    if value.shape[-1] == 2 and value.ndim > 2:
        yield value[..., 0], value[..., 1]
    if value.shape[-1] % 2 == 0:
        yield value[..., 0::2], value[..., 1::2]


def _of_two(cosines: Array, sines: Array) -> Iterator[tuple[Array, Array]]:
    """Cosines and sines, once for each pair."""
    if cosines.shape != sines.shape:
        return
    half = cosines.shape[-1] // 2
    for cut, rest in ((slice(0, None, 2), slice(1, None, 2)), (slice(0, half), slice(half, None))):
        if all(np.array_equal(x[..., cut], x[..., rest]) for x in (cosines, sines)):
            yield cosines[..., cut], sines[..., cut]
    yield cosines, sines


def _tokens(table: Array) -> Array:
    """A table as (tokens, pairs), without a batch or heads that only repeat it."""
    while table.ndim > 2 and (table == table[:1]).all():
        table = table[0]
    return table.reshape(-1, table.shape[-1])


def are_same_angles(one: Array, other: Array) -> bool:
    """Whether each pair of one table is one of the other's, in another order or backwards."""
    if one.shape != other.shape:
        return False
    columns = [np.sort(np.abs(np.angle(table)), 0).T for table in (one, other)]
    apart = np.stack([np.abs(columns[1] - column).max(-1) for column in columns[0]])
    return bool(max(apart.min(0).max(), apart.min(1).max()) < ONE)
