"""Positions: sinusoids of timesteps, tables that are added, buckets of T5."""

from collections.abc import Iterator
from itertools import islice
from math import isqrt, log

import numpy as np

from lydite.diff.findings.evidence import FEW, Array, Evidence
from lydite.diff.findings.replay.variants import (
    MAX_SOURCES,
    Candidate,
    apart_of,
    fit_tolerance,
    is_replayable,
    sources,
    told_apart,
)
from lydite.diff.result import Finding

MAX_TOKENS = 4096  # of a table whose rows are looked for in another one
COLUMNS = 64  # of them compared


def other_sinusoid(e: Evidence) -> Finding | None:
    """An embedding of timesteps with another order, period, shift or unit of time."""
    if not e.same_shape or e.port.ndim != 2 or e.port.shape[1] % 2 or e.port.shape[1] < 8:
        return None
    times = [
        (recorded.name, recorded.value.reshape(-1).astype(np.float64))
        for recorded in islice(e.before(), MAX_SOURCES)
        if 0 < recorded.value.size <= 64 and recorded.value.ndim <= 2
    ]
    for name, time in times:
        rows = time[: e.port.shape[0]] if time.size >= e.port.shape[0] else time[:1]
        tried = _sinusoids(np.resize(rows, e.port.shape[0]), e.port.shape[1])
        if (told := told_apart(e, tried, what=f"sinusoids of {name}")) is not None:
            return Finding(
                "other-sinusoid",
                f"The port is a sinusoid of {name} with {told.wrong}, the reference with "
                f"{told.right}; {told.leaves}.",
                f"Compute it with {told.right}.",
            )
    return None


def other_position_table(e: Evidence) -> Finding | None:
    """A recorded value plus a table of positions: transposed, displaced, or not added."""
    if not is_replayable(e) or e.port.ndim != 3 or not 4 <= e.port.shape[1] <= MAX_TOKENS:
        return None
    reference, port = e.values
    for source in sources(e):
        x = [_as_tokens(value, e.port.shape) for value in (source.x, source.own)]
        if x[0] is None or x[1] is None:
            continue
        right = reference - x[0]
        near = FEW * e.rounding * float(np.linalg.norm(reference[0]))
        if float(np.linalg.norm(right[0])) < 10 * near or not _is_constant(right, near):
            continue  # not the same for all rows of the batch
        grid = source.x.shape[2:] if source.x.ndim == 4 else _square(e.port.shape[1])
        row_near = 2 * near / e.port.shape[1] ** 0.5
        by_column = np.arange(e.port.shape[1]).reshape(grid).T.reshape(-1) if grid else None
        if by_column is not None and apart_of(port - right, x[1][:, by_column]) <= 4 * near:
            return Finding(
                "token-order",
                f"The port reads the tokens of {source.name} column by column, the reference row "
                "by row.",
                "Flatten the picture row by row.",
            )
        wrong = port - x[1]
        if not _is_constant(wrong, near):
            continue
        if (found := _other_rows(e, right[0], wrong[0], grid, row_near)) is not None:
            cause, words, fix = found
            return Finding(
                cause, f"To {source.name}, the port adds the reference's table {words}.", fix
            )
    return None


def other_buckets(e: Evidence) -> Finding | None:
    """The buckets of T5's relative positions, with another direction or other limits."""
    if not e.same_shape or min(e.port.shape, default=0) < 1:
        return None
    right, wrong = _whole_numbers(e) if e.port.ndim == 2 else _rows_of_table(e)
    if right is None or wrong is None or min(right.shape) < 4:
        return None
    tried = list(_buckets(*right.shape))
    names = [
        next((c.name for c in tried if np.array_equal(c.value, side)), None)
        for side in (right, wrong)
    ]
    if names[0] is None or names[1] is None or names[0] == names[1]:
        return None
    return Finding(
        "other-buckets",
        f"The port has buckets of relative positions {names[1]}, the reference {names[0]}.",
        f"Compute the buckets {names[0]}.",
    )


def _whole_numbers(e: Evidence) -> tuple[Array | None, Array | None]:
    """Both values, where the reference's are whole numbers."""
    right, wrong = e.values
    whole = bool((right == np.rint(right)).all()) and float(right.min()) >= 0
    return (right, wrong) if whole else (None, None)


def _rows_of_table(e: Evidence) -> tuple[Array | None, Array | None]:
    """Which row of the module's table each position has, for both values (queries, keys, width)."""
    weight = e.parameters().get("weight")
    if e.port.ndim != 3 or weight is None or weight.shape[1:] != e.port.shape[2:]:
        return None, None
    near = fit_tolerance(e) * float(np.linalg.norm(weight, axis=-1).max())
    sides = (_found_rows(value.reshape(-1, value.shape[2]), weight, near) for value in e.values)
    right, wrong = (rows.reshape(e.port.shape[:2]) for rows in sides)
    return (None, None) if min(right.min(), wrong.min()) < 0 else (right, wrong)


def _sinusoids(times: Array, width: int) -> Iterator[Candidate]:
    half = width // 2
    for unit in (1.0, 1000.0, 0.001):
        for period in (1e4, 1e3, 1e5, 1e2):
            for shift in (0, 1):
                angles = unit * times[:, None] * period ** (-np.arange(half) / (half - shift))
                sin, cos = np.sin(angles), np.cos(angles)
                for order, parts in (("cosines first", (cos, sin)), ("sines first", (sin, cos))):
                    name = f"{order} with period {period:g} with frequency shift {shift}"
                    name += f" with time times {unit:g}" if unit != 1 else ""
                    yield Candidate(name, np.concatenate(parts, -1))


def _as_tokens(x: Array, shape: tuple[int, ...]) -> Array | None:
    """A value as (batch, tokens, channels): as it is, or a picture read row by row."""
    if x.shape == shape:
        return x
    if x.ndim == 4 and x.shape[:2] == (shape[0], shape[2]) and x.size == np.prod(shape):
        return x.reshape(*x.shape[:2], -1).swapaxes(1, 2)
    return None


def _is_constant(table: Array, near: float) -> bool:
    return float(np.linalg.norm(table - table[:1])) <= near * len(table)


def _square(tokens: int) -> tuple[int, int] | None:
    side = isqrt(tokens)
    return (side, side) if side * side == tokens else None


def _other_rows(
    e: Evidence, right: Array, wrong: Array, grid: tuple[int, ...] | None, near: float
) -> tuple[str, str, str] | None:
    """How the table that the port adds follows from the reference's."""
    if float(np.linalg.norm(wrong, axis=-1).max()) <= near:
        if len(e.port) == 1:  # any other value may be the one; rows of a batch would tell
            return None
        return "positions-missing", "not at all", "Add the table of positions."
    known, sizes = right, grid
    for value in e.parameters().values():
        rows = value.reshape(-1, value.shape[-1]) if value.ndim in (2, 3) else np.zeros((0, 0))
        if rows.shape[1:] == right.shape[1:] and len(right) < len(rows) <= MAX_TOKENS:
            known, sizes = rows, _square(len(rows))  # of which the reference's is a part
    if sizes is None:
        return None
    places = [_found_rows(table, known, near) for table in (right, wrong)]
    both = (places[0] >= 0) & (places[1] >= 0)
    if not (places[0] >= 0).all() or not both.any():
        return None
    at, used = (np.stack(np.divmod(rows[both], sizes[1])) for rows in places)
    if both.all() and (used - at[::-1] == (used - at[::-1])[:, :1]).all() and (used != at).any():
        text = "with rows and columns exchanged"
        return "positions-transposed", text, "Exchange rows and columns of the table."
    moved = used - at
    down, along = (int(n) for n in moved[:, 0])
    if (moved != moved[:, :1]).any() or (down, along) == (0, 0) or grid is None:
        return None
    if both.sum() < (grid[0] - abs(down)) * (grid[1] - abs(along)):
        return None
    return (
        "positions-shifted",
        f"from a place {down} rows and {along} columns further",
        "Cut the table at the reference's place: its centre, or its corner.",
    )


def _found_rows(table: Array, known: Array, near: float) -> Array:
    """For each row of a table the row of a known one that it equals, or −1."""
    columns = np.linspace(0, table.shape[1] - 1, min(COLUMNS, table.shape[1])).astype(int)
    found = np.full(len(table), -1)
    for at, row in enumerate(table[:, columns]):
        apart = np.linalg.norm(known[:, columns] - row, axis=-1)
        best = int(apart.argmin())
        found[at] = best if apart[best] <= near else -1
    return found


def _buckets(queries: int, keys: int) -> Iterator[Candidate]:
    distance = np.arange(keys)[None] - np.arange(queries)[:, None]
    for count in (32, 16, 64, 8):
        for furthest in (128, 64, 32, 256, 20, 12, 16, 512):
            for words, both, sign in (
                ("of both directions", True, 1),
                ("of one direction", False, 1),
                ("of both directions with the other sign", True, -1),
                ("of one direction with the other sign", False, -1),
            ):
                if furthest <= count // 2:
                    continue
                value = _t5_bucket(sign * distance, both, count, furthest)
                yield Candidate(f"{words}, {count} up to a distance of {furthest}", value)


def _t5_bucket(distance: Array, both: bool, count: int, furthest: int) -> Array:
    """As in transformers' T5Attention: half of the buckets exact, the others logarithmic."""
    start = np.zeros_like(distance)
    if both:
        count //= 2
        start = np.where(distance > 0, count, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = count // 2
    far = np.log(np.maximum(distance, 1) / exact) / log(furthest / exact) * (count - exact)
    far = np.minimum(exact + np.trunc(far).astype(int), count - 1)
    return start + np.where(distance < exact, distance, far)
