"""Positions: sinusoids of timesteps, and tables that are added."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from math import isqrt, pi

import numpy as np

from lydite.diff.findings.evidence import FEW, Array, Evidence
from lydite.diff.findings.replay.rotation_angles import NARROW, narrow
from lydite.diff.findings.replay.variants import (
    MAX_SOURCES,
    Candidate,
    allowed,
    apart_of,
    is_replayable,
    sources,
    told_apart,
)
from lydite.diff.result import Finding

MAX_TOKENS = 4096  # of a table whose rows are looked for in another one
FEW_TIMES = 64  # of a run, or of a batch
COLUMNS = 64  # of them compared
ORDERS = ("cosines first", "sines first")
TURNS = (0, 1, -1)  # of the slowest frequency that are tried


def other_sinusoid(e: Evidence) -> Finding | None:
    """An embedding of timesteps with another order, period, shift or unit of time."""
    if not e.same_shape or e.port.ndim != 2 or e.port.shape[1] % 2 or e.port.shape[1] < 8:
        return None
    most = max(FEW_TIMES, min(len(e.port), MAX_TOKENS))  # each token may have a time of its own
    times = [
        (recorded.name, recorded.value.reshape(-1).astype(np.float64))
        for recorded in islice(e.before(), MAX_SOURCES)
        if 0 < recorded.value.size <= most and recorded.value.ndim <= 2
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
    times += [(f"the table {name}", table.reshape(-1)) for name, table in e.tables()]
    return next(filter(None, (_other_time(e, *time, times) for time in times)), None)


def other_joined_sinusoid(e: Evidence) -> Finding | None:
    """Sinusoids of several times side by side, of which one, the same in all rows, is wrong."""
    if not e.same_shape or e.kind != "activation" or not 2 <= e.port.ndim <= 3:
        return None
    right, wrong = (value.reshape(-1, value.shape[-1]) for value in e.values)
    near, width = 2 * FEW * e.rounding, right.shape[1]
    differ = np.flatnonzero(np.abs(right - wrong).max(0) > near)
    for size in (width // n for n in range(width // 8, 0, -1) if width % n == 0):
        first = int(differ[0]) // size * size if len(differ) else width
        if size % 2 or first == width or int(differ[-1]) >= first + size:
            continue
        part = slice(first, first + size)
        rows = right[:, part], wrong[:, part]
        if max(float(np.abs(value - value[:1]).max()) for value in rows) > near:
            continue
        reference, port = (value[:1] for value in rows)
        inner = replace(e, reference=reference, port=port, dims=None, ruled_out=[])
        found = other_sinusoid(inner) or _times_shown(inner)
        if found is not None:
            where = f"In channels {first} to {first + size - 1} of {width}: " * (size < width)
            return Finding(found.cause, where + found.evidence, found.fix)
    return None


def _times_shown(e: Evidence) -> Finding | None:
    """That both are sinusoids of times that are not recorded, but which they show."""
    for order, shift, period in product(ORDERS, (0, 1), (1e4, 1e3)):
        right, own = (times_of(v.astype(np.float64), period, shift, order) for v in e.values)
        if right is not None and own is not None and not np.allclose(right, own, 1e-4, 1e-4):
            return Finding(
                "other-time",
                f"The port is the sinusoid of {own[0]:.6g}, the reference that of {right[0]:.6g}.",
                f"Give the embedding {right[0]:.6g} here: a time, a guidance or another condition.",
            )
    return None


def _other_time(
    e: Evidence, name: str, time: Array, times: list[tuple[str, Array]]
) -> Finding | None:
    """That the port is the reference's sinusoid of another time, which the sinusoid shows."""
    count, width = e.port.shape
    rows = np.resize(time[:count] if time.size >= count else time[:1], count)
    if not rows.any():  # any value that begins with a zero would be it
        return None
    for unit, period, shift, order in product((1.0, 1000.0), (1e4, 1e3), (0, 1), ORDERS):
        if apart_of(e.values[0], sinusoid(unit * rows, width, period, shift, order)) > allowed(e):
            continue
        if (found := _rounded(e, name, unit * rows, period, shift, order)) is not None:
            return found
        own = times_of(e.values[1].astype(np.float64), period, shift, order)
        own = None if own is None else own / unit
        if own is None or np.allclose(np.sort(own), np.sort(rows), rtol=1e-4, atol=1e-4):
            return None  # the right times, perhaps in another order
        words = _relation(own, rows, name, times)
        _is_explained(e)
        differ = np.flatnonzero(~np.isclose(own, rows, rtol=1e-4, atol=1e-4))
        at = int(differ[0]) if len(differ) else 0
        where = f" in {len(differ)} of {count} rows" if len(differ) < count else ""
        return Finding(
            "other-time",
            f"The port is the sinusoid of the time {own[at]:.6g}, the reference that of "
            f"{rows[at]:.6g}{where}, which is {name}{words}.",
            f"Give the embedding {name} as it is.",
        )
    return None


def _is_explained(e: Evidence) -> None:
    """Forget the sinusoids that were ruled out."""
    e.ruled_out[:] = [entry for entry in e.ruled_out if "sinusoids of" not in entry]


def _rounded(
    e: Evidence, name: str, times: Array, period: float, shift: int, order: str
) -> Finding | None:
    """That times, frequencies or angles were rounded to 16 bits before the sines were taken."""
    rates = _rates(e.port.shape[1], period, shift)
    for kind, dtype in NARROW.items():
        low_times, low_rates = narrow(times, dtype), narrow(rates, dtype)
        angles = {
            "angles": narrow(np.outer(times, rates), dtype),
            "time": np.outer(low_times, rates),
            "frequencies": np.outer(times, low_rates),
            "time and frequencies": np.outer(low_times, low_rates),
            "time, frequencies and angles": narrow(np.outer(low_times, low_rates), dtype),
        }
        for what, used in angles.items():
            left = apart_of(e.values[1], _waves(used, order))
            if left <= allowed(e):
                _is_explained(e)
                return Finding(
                    "sinusoid-rounded",
                    f"The port is the sinusoid of {name} with the {what} rounded to {kind} (lower "
                    f"precision); {e.leaves(left)}.",
                    "Compute the sinusoid of the time in float32.",
                )
    return None


def _relation(own: Array, right: Array, name: str, times: list[tuple[str, Array]]) -> str:
    """How the port's times follow from the right ones, for people."""
    alike = (n for n, t in times if n != name and t.size == own.size and np.allclose(t, own, 1e-4))
    entries = (
        f"entry {at} of {n}: the time of another step"
        for n, t in times
        for at in np.flatnonzero(np.isclose(t, own[0], 1e-4))
        if n.startswith("the table ") and np.ptp(own) <= 1e-4 * abs(own[0])
    )
    other = next(alike, "") or next(entries, "")
    ratios = own / np.where(right, right, 1.0)
    forms = {
        ", rounded down to a whole number": np.floor(right),
        ", rounded to a whole number": np.round(right),
        ", rounded down to a whole number of 1000": np.floor(1000 * right) / 1000,
        ", rounded to a whole number of 1000": np.round(1000 * right) / 1000,
        ", plus 1 (off by one)": right + 1,
        ", minus 1 (off by one)": right - 1,
        ", subtracted from 1000": 1000 - right,
        ": the inverse of it": 1 / np.where(right, right, 1.0),
    }
    found = next((w for w, t in forms.items() if np.allclose(own, t, rtol=1e-4, atol=1e-4)), "")
    if not found and other:
        return f"; the port's is {other}"
    ratio = ratios[int(np.argmax(right != 0))]
    if not found and np.allclose(own, right * ratio, rtol=1e-4, atol=1e-4):
        found = f", times {ratio:.4g}"
    return f"; the port's is that{found}" if found else ""


def sinusoid(times: Array, width: int, period: float, shift: int, order: str) -> Array:
    """Cosines and sines of times with falling frequencies, (times, width)."""
    return _waves(np.outer(times, _rates(width, period, shift)), order)


def _rates(width: int, period: float, shift: int) -> Array:
    half = width // 2
    return period ** (-np.arange(half) / (half - shift))


def _waves(angles: Array, order: str) -> Array:
    parts = np.cos(angles), np.sin(angles)
    return np.concatenate(parts if order == "cosines first" else parts[::-1], -1)


def times_of(value: Array, period: float, shift: int, order: str) -> Array | None:
    """The times of a table of sinusoids; None where it is none."""
    half = value.shape[1] // 2
    parts = value[:, :half], value[:, half:]
    cosines, sines = parts if order == "cosines first" else parts[::-1]
    angles = np.arctan2(sines, cosines)
    rates = _rates(value.shape[1], period, shift)
    size = float(np.linalg.norm(value))
    times, left = np.zeros(len(value)), np.full(len(value), np.inf)
    for turn in TURNS:  # of the slowest frequency
        tried = _unwound(angles, rates, turn)
        apart = np.linalg.norm(
            value - sinusoid(tried, value.shape[1], period, shift, order), axis=1
        )
        is_nearer = (apart < left / 10) & (left > 1e-5 * size)
        # Frequencies that divide each other show several times: the whole one.
        is_nearer |= (apart < 10 * left) & _is_whole(tried) & ~_is_whole(times)
        times, left = np.where(is_nearer, tried, times), np.where(is_nearer, apart, left)
    return times if float(np.linalg.norm(left)) <= 1e-3 * size else None


def _is_whole(times: Array) -> Array:
    return np.abs(times - np.round(times)) < 1e-3


def _unwound(angles: Array, rates: Array, turn: int) -> Array:
    """The times with these angles: each frequency tells more digits than the one below."""
    times = (angles[:, -1] + 2 * pi * turn) / rates[-1]
    for n in reversed(range(len(rates) - 1)):
        turns = np.round((times * rates[n] - angles[:, n]) / (2 * pi))
        times = (angles[:, n] + 2 * pi * turns) / rates[n]
    return times


def other_position_table(e: Evidence) -> Finding | None:
    """A table of positions, or a recorded value plus one: transposed, displaced, or not added."""
    if e.same_shape and e.port.ndim in (2, 3) and 4 <= e.port.shape[-2] <= MAX_TOKENS:
        right, port = (x.reshape(-1, x.shape[-1]) for x in e.values)
        if (found := _other_sincos("", right, port)) is not None:
            return found
    if not is_replayable(e) or e.port.ndim != 3 or not 4 <= e.port.shape[1] <= MAX_TOKENS:
        return None
    reference, port = e.values
    for source in sources(e):
        if source.x.shape != e.port.shape:
            continue
        x = source.x, source.own
        right = reference - x[0]
        near = FEW * e.rounding * float(np.linalg.norm(reference[0]))
        if float(np.linalg.norm(right[0])) < 10 * near or not _is_constant(right, near):
            continue  # not the same for all rows of the batch
        grid = source.grid or _square(e.port.shape[1])
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
        if (found := _other_sincos(source.name, right[0], wrong[0])) is not None:
            return found
        if (found := _other_rows(e, right[0], wrong[0], grid, row_near)) is not None:
            cause, words, fix = found
            return Finding(
                cause, f"To {source.name}, the port adds the reference's table {words}.", fix
            )
    return None


def _other_sincos(name: str, right: Array, wrong: Array) -> Finding | None:
    """Sines and cosines of rows and columns: in another order, or of other positions."""
    theirs, ours = _sincos(right), _sincos(wrong)
    if theirs is None or ours is None:
        return None
    (order, places), (own_order, own) = theirs, ours
    words, cause = "", "other-position-table"
    close = 1e-3 * max(float(np.abs(places).max()), 1.0)
    if order != own_order:
        words = f"with {own_order}, the reference with {order}"
    elif np.abs(own - places[::-1]).max() <= close:
        cause = "positions-transposed"
        words = "with the rows where the reference has the columns: x and y are exchanged"
    elif np.abs(own - places).max() > close:
        fits = [np.polyfit(a, b, 1) for a, b in zip(places, own, strict=True)]
        lines = [a * fit[0] + fit[1] for fit, a in zip(fits, places, strict=True)]
        if np.abs(np.stack(lines) - own).max() <= close:
            factors = " and ".join(dict.fromkeys(f"{fit[0]:.4g}" for fit in fits))
            words = f"of positions times {factors}"
            if max(abs(fit[1]) for fit in fits) > close:
                words += f", plus {fits[0][1]:.4g}"
            words += ": the scale of the grid (interpolation_scale, base size) differs"
    if not words:
        return None
    where = f"To {name}, both add sines and cosines" if name else "Both are sines and cosines"
    verb = "adds them" if name else "has them"
    text = f"{where} of rows and columns; the port {verb} {words}."
    return Finding(cause, text, "Compute the table of positions as the reference.")


def _sincos(table: Array) -> tuple[str, Array] | None:
    """The order of sines and cosines, and the two positions of each token."""
    half = table.shape[1] // 2
    if table.shape[1] % 4 or half < 8:
        return None
    for order in reversed(ORDERS):
        parts = [times_of(part, 1e4, 0, order) for part in (table[:, :half], table[:, half:])]
        if parts[0] is not None and parts[1] is not None:
            return order, np.stack([part for part in parts if part is not None])
    return None


def _sinusoids(times: Array, width: int) -> Iterator[Candidate]:
    for unit, period, shift, order in product(
        (1.0, 1000.0, 0.001), (1e4, 1e3, 1e5, 1e2), (0, 1), ORDERS
    ):
        name = f"{order} with period {period:g} with frequency shift {shift}"
        name += f" with time times {unit:g}" if unit != 1 else ""
        yield Candidate(name, sinusoid(unit * times, width, period, shift, order))


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
    places = [found_rows(table, known, near) for table in (right, wrong)]
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


def found_rows(table: Array, known: Array, near: float) -> Array:
    """For each row of a table the row of a known one that it equals, or −1."""
    columns = np.linspace(0, table.shape[1] - 1, min(COLUMNS, table.shape[1])).astype(int)
    found = np.full(len(table), -1)
    for at, row in enumerate(table[:, columns]):
        apart = np.linalg.norm(known[:, columns] - row, axis=-1)
        best = int(apart.argmin())
        found[at] = best if apart[best] <= near else -1
    return found
