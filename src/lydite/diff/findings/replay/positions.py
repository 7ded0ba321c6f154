"""Positions: sinusoids of timesteps, tables that are added, rotations (RoPE), buckets of T5."""

from collections.abc import Iterator, Mapping
from itertools import islice
from math import isqrt, log, pi

import numpy as np

from lydite.diff.findings.evidence import FEW, Array, Evidence
from lydite.diff.findings.replay.variants import (
    MAX_SOURCES,
    Candidate,
    Source,
    apart_of,
    fit_tolerance,
    is_replayable,
    sources,
    told_apart,
)
from lydite.diff.result import Finding

MAX_TOKENS = 4096  # of a table whose rows are looked for in another one
COLUMNS = 64  # of them compared
HEAD_WIDTHS = (128, 64, 96, 80, 40, 32, 16, 8)
BASES = (1e4, 5e5, 1e6, 1e3, 1e5, 2e3, 256.0, 100.0)
PAIRINGS = ("neighbouring numbers", "the two halves")
Table = Array  # (tokens, pairs) of complex numbers


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


def other_rotation_table(e: Evidence) -> Finding | None:
    """Cosines or sines of positions 0, 1, 2 … with another base, offset or order of pairs."""
    shape = e.port.shape
    if not e.same_shape or e.port.ndim < 2 or shape[-1] % 2 or shape[-1] < 4 or shape[-2] < 4:
        return None
    if e.port.size != shape[-1] * shape[-2] or float(np.abs(e.values[0]).max()) > 1.001:
        return None
    told = told_apart(e, _rotation_tables(shape), what="tables of rotations")
    if told is None:
        return None
    return Finding(
        "other-rotation-table",
        f"The port is a table of {told.wrong}, the reference of {told.right}; {told.leaves}.",
        f"Compute it with {told.right}.",
    )


def other_rotation(e: Evidence) -> Finding | None:
    """A rotation (RoPE) of a recorded value: other pairs, sign, positions, base, or none."""
    if not is_replayable(e) or e.port.ndim not in (3, 4) or e.port.shape[-1] % 4:
        return None
    limit = fit_tolerance(e)
    for source in sources(e):
        if source.x.shape != e.port.shape:
            continue
        for heads, pairing in _forms(e.port.shape):
            right = _rotation(heads(source.x), heads(e.values[0]), pairing, limit)
            if right is None or _is_one(right, limit):
                continue
            found = _compare_rotations(e, source, heads, pairing, right, limit)
            if found is None:
                e.ruled_out.append(f"rotations of {source.name}")
            return found
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


def _rotation_tables(shape: tuple[int, ...]) -> Iterator[Candidate]:
    tokens, width = shape[-2:]
    for function, f in (("cosines", np.cos), ("sines", np.sin)):
        for base in BASES:
            for offset in (0, 1, -1):
                angles = np.outer(
                    np.arange(tokens) + offset, base ** (-np.arange(0, width, 2) / width)
                )
                for pairs, table in (
                    ("the two halves", np.concatenate((angles, angles), -1)),
                    ("neighbouring numbers", np.repeat(angles, 2, -1)),
                ):
                    name = f"{function} with base {base:g} with pairs of {pairs}"
                    name += f" with the first position {offset}" if offset else ""
                    yield Candidate(name, f(table).reshape(shape))


def _forms(shape: tuple[int, ...]) -> Iterator[tuple["Heads", str]]:
    """How a value may be split into (batch, tokens, heads, width), and how numbers are paired."""
    if len(shape) == 4:
        for token_axis in (1, 2):
            if shape[token_axis] >= 4:
                for pairing in PAIRINGS:
                    yield Heads(shape[-1], token_axis), pairing
        return
    for width in dict.fromkeys((*HEAD_WIDTHS, shape[-1])):
        if shape[-1] % width == 0:
            for pairing in PAIRINGS:
                yield Heads(width, 1), pairing


class Heads:
    """Reads a value as (batch, tokens, heads, width)."""

    def __init__(self, width: int, token_axis: int) -> None:
        self.width, self.token_axis = width, token_axis

    def __call__(self, value: Array) -> Array:
        if value.ndim == 3:
            return value.reshape(*value.shape[:2], -1, self.width)
        return value if self.token_axis == 1 else value.swapaxes(1, 2)


def _paired(x: Array, pairing: str) -> Array:
    if pairing == PAIRINGS[0]:
        return x[..., 0::2] + 1j * x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half] + 1j * x[..., half:]


def _rotation(x: Array, y: Array, pairing: str, limit: float) -> Table | None:
    """The rotation of every token and pair, equal for all heads; None where y is no rotation."""
    a, b = _paired(x, pairing), _paired(y, pairing)
    power = (np.abs(a) ** 2).sum((0, 2))
    if a.shape[0] * a.shape[2] < 2 or not power.all():
        return None
    table = (b * a.conj()).sum((0, 2)) / power
    left = float(np.linalg.norm(b - table[None, :, None] * a))
    unit = float(np.abs(np.abs(table) - 1).max()) < max(1e-3, 8 * limit)
    return table if unit and left <= limit * float(np.linalg.norm(b)) else None


def _is_one(table: Table, limit: float) -> bool:
    return float(np.abs(table - 1).max()) < max(1e-3, 8 * limit)


def _compare_rotations(
    e: Evidence, source: Source, heads: Heads, pairing: str, right: Table, limit: float
) -> Finding | None:
    x, y = heads(source.own), heads(e.values[1])
    wrong = _rotation(x, y, pairing, limit)
    name = source.name
    if wrong is None:
        other = next(p for p in PAIRINGS if p != pairing)
        if _rotation(x, y, other, limit) is None:
            return None
        return Finding(
            "rotation-pairs",
            f"The port rotates pairs of {other} of {name}, the reference pairs of {pairing}.",
            f"Rotate pairs of {pairing}.",
        )
    if _is_one(wrong, limit):
        return Finding(
            "rotation-missing",
            f"The port does not rotate {name}; the reference rotates pairs of {pairing}.",
            "Apply the rotation (RoPE) here.",
        )
    close = max(2e-3, 8 * limit)
    if float(np.abs(wrong - right.conj()).max()) < close:
        return Finding(
            "rotation-sign",
            f"The port rotates {name} by the negative angles of the reference.",
            "Change the sign of the sines.",
        )
    tokens = len(right)
    for shift in (s for n in range(1, min(tokens // 2, 65)) for s in (n, -n)):
        a, b = (wrong[:-shift], right[shift:]) if shift > 0 else (wrong[-shift:], right[:shift])
        if float(np.abs(a - b).max()) < close:
            return Finding(
                "rotation-offset",
                f"The port rotates token n of {name} as the reference rotates token n + {shift}."
                if shift > 0
                else f"The port rotates token n of {name} as the reference token n − {-shift}.",
                "Check the first position: the offset, or counting from 1.",
            )
    columns = _lookup(wrong.T, right.T, close)
    if columns is not None:
        return Finding(
            "rotation-axes",
            f"The port uses the reference's angles of {name} for other pairs: pair {columns[0][0]} "
            f"has those of pair {columns[0][1]}.",
            "Check the order of the axes (time, height, width) and of the frequencies.",
        )
    rows = _lookup(wrong, right, close)
    if rows is not None:
        side = isqrt(tokens)
        grid = np.arange(side * side).reshape(side, side)
        transposed = side * side == tokens and all(b == grid.T.reshape(-1)[a] for a, b in rows)
        return Finding(
            "rotation-axes" if transposed else "rotation-positions",
            f"The port rotates tokens of {name} with the angles of other tokens: token "
            f"{rows[0][0]} with those of token {rows[0][1]}"
            + (", rows and columns exchanged." if transposed else "."),
            "Exchange height and width." if transposed else "Check the positions of the tokens.",
        )
    if (found := _displaced_positions(name, right, wrong, close)) is not None:
        return found
    if (found := _other_frequencies(name, right, wrong, close)) is not None:
        return found
    bases = [base_of(table) for table in (right, wrong)]
    if bases[0] and bases[1] and abs(log(bases[0] / bases[1])) > 0.05:
        return Finding(
            "rotation-base",
            f"The port rotates {name} with the base {bases[1]:.4g}, the reference with "
            f"{bases[0]:.4g}.",
            f"Use the base {bases[0]:.4g} (rope_theta).",
        )
    return None


def _displaced_positions(name: str, right: Table, wrong: Table, close: float) -> Finding | None:
    """That all tokens are rotated by one further angle in each pair: the positions begin elsewhere.

    The angle has to be that of a whole number of positions, in half positions at most.
    """
    further = wrong * right.conj()
    if float(np.abs(further - further[0]).max()) >= close:
        return None
    columns = [p for p in range(right.shape[1]) if abs(further[0, p] - 1) >= close]
    steps = [_step(right[:, p], close) for p in columns]
    moved = [
        float(np.angle(further[0, p]) / np.angle(step))
        for p, step in zip(columns, steps, strict=True)
        if step is not None and abs(np.angle(further[0, p])) < pi / 2
    ]
    words = ""
    if moved and all(abs(2 * m - round(2 * m)) < 0.02 for m in moved):
        each = dict.fromkeys(round(2 * m) / 2 for m in moved)
        words = f" by {' or '.join(f'{m:+g}' for m in each)}" if len(each) <= 2 else ""
    return Finding(
        "rotation-offset",
        f"The port rotates all tokens of {name} by the same further angle: its positions are "
        f"displaced{words} against the reference's.",
        "Check the first position of each axis: counting from 0 or 1, centred or not, after the "
        "other stream or not.",
    )


def _step(column: Array, close: float) -> complex | None:
    """The rotation of one position: the smallest between two tokens, if it does not wrap."""
    turns = column[1:] * column[:-1].conj()
    turns = turns[np.abs(turns - 1) >= close]
    if not turns.size:
        return None
    step = complex(turns[np.abs(np.angle(turns)).argmin()])
    return step if step.imag > 0 else step.conjugate()


def _other_frequencies(name: str, right: Table, wrong: Table, close: float) -> Finding | None:
    """That the positions are the reference's, with other frequencies: another base or width."""
    rates: dict[int, tuple[float, float]] = {}  # by pair, per position
    for pair in range(right.shape[1]):
        step, own = _step(right[:, pair], close), _step(wrong[:, pair], close)
        if step is None or own is None:  # no rotation, or one too slow to be seen
            if abs(np.angle(step or own or 1.0)) > 10 * close:
                return None
            continue
        positions = np.angle(right[:, pair]) / np.angle(step)
        if np.abs(positions - np.rint(positions)).max() > 0.02:
            continue  # angles that wrap do not show the positions
        turned = np.exp(1j * np.angle(own) * np.rint(positions))
        if float(np.abs(turned - wrong[:, pair]).max()) >= max(close, 2e-2):
            return None
        rates[pair] = float(np.angle(step)), float(np.angle(own))
    bases = _bases(rates, right.shape[1])
    if bases is None or all(abs(a / b - 1) < 1e-2 for a, b in rates.values()):
        return None
    theirs, ours = f"{bases[0]:.4g}", f"{bases[1]:.4g}"
    return Finding(
        "rotation-base",
        f"The port rotates {name} with other frequencies: in an axis of {2 * bases[2]} numbers its "
        f"base is {ours}, the reference's {theirs}.",
        f"Use the base {theirs} (rope_theta), and divide the exponents by the width of the axis, "
        "not of the head.",
    )


def _bases(rates: Mapping[int, tuple[float, float]], total: int) -> tuple[float, float, int] | None:
    """Both bases in the axis that shows the most frequencies, and how many pairs it has.

    In an axis the frequencies fall from pair to pair; the next one begins with a higher one.
    """
    pairs = list(rates)
    starts = [p for n, p in enumerate(pairs) if n == 0 or rates[p][0] > rates[pairs[n - 1]][0]]
    widths = [end - start for start, end in zip(starts, [*starts[1:], total], strict=True)]
    for start, width in sorted(zip(starts, widths, strict=True), key=lambda run: -run[1]):
        if start + 1 in rates and start + 1 not in starts:
            first, second = rates[start], rates[start + 1]
            return (first[0] / second[0]) ** width, (first[1] / second[1]) ** width, width
    return None


def _lookup(wrong: Table, right: Table, close: float) -> list[tuple[int, int]] | None:
    """Which row each row equals; None unless all are rows of the other, not all in place."""
    if len(wrong) > MAX_TOKENS:
        return None
    near: list[int] = []
    for at, row in enumerate(wrong):
        distance = np.abs(right - row).max(-1)
        best = at if distance[at] < close else int(distance.argmin())
        if distance[best] >= close:
            return None
        near.append(best)
    if len(set(near)) < len(near):
        return None
    return [(a, b) for a, b in enumerate(near) if a != b] or None


def base_of(table: Table) -> float | None:
    """θ of frequencies θ^(−n / pairs) at positions that count up by one."""
    steps = table[1:] / table[:-1]
    if float(np.abs(steps - steps[:1]).max()) > 1e-2:
        return None
    angles = np.abs(np.angle(steps.mean(0)))
    pairs = len(angles)
    use = [n for n in range(1, pairs) if 1e-4 < angles[n] < pi / 2]
    if len(use) < 2:
        return None
    slope = np.polyfit(use, np.log(angles[use]), 1)[0]
    return float(np.exp(-slope * pairs))


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
