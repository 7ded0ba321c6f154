"""Rotations of q and k by position (RoPE), and their tables."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from math import isqrt, log, pi, prod

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.norms_and_activations import other_norm
from lydite.diff.findings.replay.rotation_angles import BASES, NARROW, compare_angles, narrow
from lydite.diff.findings.replay.variants import (
    Candidate,
    Source,
    allowed,
    apart_of,
    fit_tolerance,
    inputs_of,
    is_replayable,
    sources,
    told_apart,
)
from lydite.diff.result import Finding

MAX_STREAMS = 12  # recorded values of which two may be rotated together
MAX_TOKENS = 4096  # of a table whose rows are looked for in another one
HEAD_WIDTHS = (128, 64, 96, 80, 40, 32, 16, 8)
PAIRINGS = ("neighbouring numbers", "the two halves")
Table = Array  # (tokens, pairs) of complex numbers


def other_rotation(e: Evidence) -> Finding | None:
    """A rotation (RoPE) of a recorded value: other pairs, sign, positions, base, or none."""
    if not is_replayable(e) or e.port.ndim not in (3, 4) or e.port.shape[-1] % 4:
        return None
    limit = fit_tolerance(e)
    rotatable = list(_rotatable(e))
    for source, by_row in ((s, row) for row in (False, True) for s in rotatable):
        if by_row and (e.port.ndim != 4 or len(e.port) == 1):
            continue
        for heads, pairing in _forms(e.port.shape):
            heads = heads.of_rows(e.values[0]) if by_row else heads
            right = _rotation(heads(source.x), heads(e.values[0]), pairing, limit)
            if right is None or _is_one(right, limit):
                continue
            found = _compare_rotations(e, source, heads, pairing, right, limit)
            if found is None and heads.kept is None:
                back = _turned_back(e, heads, pairing, right)
                found = _joined_otherwise(e, source, back) or _norm_before(e, source, back)
            if found is None:
                e.ruled_out.append(f"rotations of {source.name}")
            return found
    return None


def _turned_back(e: Evidence, heads: "Heads", pairing: str, table: Table) -> Array:
    """The port's value before the reference's rotation."""
    x = heads(e.values[1].astype(np.float64))
    pairs = _paired(x, pairing) * table.conj()[None, :, None]
    parts = np.real(pairs), np.imag(pairs)
    is_next = pairing == PAIRINGS[0]
    back = np.stack(parts, -1).reshape(x.shape) if is_next else np.concatenate(parts, -1)
    if e.port.ndim == 4 and heads.token_axis == 2:
        back = back.swapaxes(1, 2)
    return back.reshape(e.port.shape)


def _joined_otherwise(e: Evidence, source: Source, back: Array) -> Finding | None:
    """That the port joins two streams in the other order before it rotates them."""
    for axis in (1, 2) if " and " in source.name else ():
        own = source.own
        for by in range(1, own.shape[axis]):
            start = (slice(None),) * axis + (slice(0, 1),)
            piece = (slice(None),) * axis + (slice(by, by + 1),)
            if apart_of(back[start], own[piece]) > 0.02 * float(np.linalg.norm(own[piece])):
                continue
            left = apart_of(back, np.roll(own, -by, axis))
            if left <= allowed(e):
                first, second = source.name.split(" and ", 1)
                return Finding(
                    "parts-reordered",
                    f"The port joins {second} and {first} in this order and rotates them by the "
                    f"positions of {first} and {second}; {e.leaves(left)}.",
                    "Join the two streams (text and image) in the order of the positions.",
                )
    return None


def _norm_before(e: Evidence, source: Source, back: Array) -> Finding | None:
    """That the value which both sides rotate is another norm of the same input, or none.

    Of two streams, each has a norm of its own.
    """
    recorded = {r.name: r.value for r in e.before()}
    values = {n: recorded[n] for n in source.name.split(" and ") if n in recorded}
    start = 0
    for name, expected in values.items():
        # The value has its tokens on axis 1, or heads before tokens.
        whole = back if back.ndim == expected.ndim else back.reshape(*back.shape[:2], -1)
        if whole.ndim == 4 and whole.shape[2:] != expected.shape[2:]:
            whole = whole.swapaxes(1, 2)
        end = start + expected.shape[1]
        value, start = whole[:, start:end], end
        if value.shape != expected.shape:
            return None
        module = re.split(r" \[|, (?:call|step) ", name)[0]
        inner = replace(
            e,
            reference=expected,
            port=value,
            name=module,
            slot="out",
            inputs={},
            parameters=lambda module=module: _parameters_of(e, module),
            ruled_out=[],
        )
        if not inner.wrong:
            continue
        found = other_norm(inner) or _missing_norm(inner)
        if found is not None:
            text = f"Before the rotation, at {module}: {found.evidence}"
            return Finding(found.cause, text, found.fix)
    return None


def norm_after_rotation(e: Evidence) -> Finding | None:
    """The port rotates before this norm, which does not change with a rotation; its weight does."""
    weight = e.parameters().get("weight")
    if not is_replayable(e) or e.port.ndim not in (3, 4) or not e.slot.startswith("out"):
        return None
    if weight is None or weight.ndim != 1 or e.port.shape[-1] % weight.size or not weight.all():
        return None
    limit = fit_tolerance(e)
    scale = np.tile(weight, e.port.shape[-1] // weight.size)
    x, y = (value.astype(np.float64) / scale for value in e.values)
    for heads, pairing in _forms(e.port.shape):
        table = _rotation(heads(x), heads(y), pairing, limit) if x.shape[-1] % 4 == 0 else None
        if table is not None and not _is_one(table, limit):
            return Finding(
                "norm-after-rotation",
                f"The port rotates pairs of {pairing} before this norm: it is the norm after the "
                "rotation; the reference's norm is before the rotation.",
                "Apply the norm first, then the rotation (RoPE): the weight of the norm is not the "
                "same for the two numbers of a pair.",
            )
    return None


def _missing_norm(e: Evidence) -> Finding | None:
    """That the port has the input of the norm in its place."""
    for source in inputs_of(e):
        if apart_of(e.values[1], source.own) <= allowed(e):
            text = f"the port is {source.name}, without the norm."
            return Finding("qk-norm-missing", text, f"Apply {e.name}.")
    return None


def _parameters_of(e: Evidence, module: str) -> dict[str, Array]:
    """The parameters of another module that have the width of a head."""
    named = e.parameters_like(e.port.shape[-1:])
    split = ((path.rpartition("."), value) for path, value in named)
    return {name: value for (owner, _, name), value in split if owner == module}


def _rotatable(e: Evidence) -> Iterator[Source]:
    """Recorded values in the shape of this one: as they are, with heads apart, or two joined."""
    shape, streams = e.port.shape, list[tuple[int, Source]]()
    for source in sources(e):
        if source.x.shape == shape:
            yield source
            continue
        for axis in (1, 2) if len(shape) == 4 else ():
            if (apart := _with_heads(source, shape, axis)) is None:
                continue
            if apart.x.shape == shape:
                yield apart
            elif apart.x.shape[axis] < shape[axis]:
                streams.append((axis, apart))
    for (axis, first), (other_axis, second) in permutations(streams[:MAX_STREAMS], 2):
        if axis == other_axis and first.x.shape[axis] + second.x.shape[axis] == shape[axis]:
            yield Source(
                f"{first.name} and {second.name}",
                np.concatenate((first.x, second.x), axis),
                lambda a=first, b=second, axis=axis: np.concatenate((a.own, b.own), axis),
            )


def _with_heads(source: Source, shape: tuple[int, ...], axis: int) -> Source | None:
    """A value with its tokens on this axis and its heads beside it; None where it has others."""
    heads, width = shape[3 - axis], shape[3]

    def arranged(x: Array) -> Array:
        x = x.reshape(len(x), -1, heads, width) if x.ndim == 3 else x
        return x if x.shape[3 - axis] == heads else x.swapaxes(1, 2)

    x = source.x
    if x.ndim not in (3, 4) or len(x) != shape[0] or x.shape[-1] != width * heads ** (4 - x.ndim):
        return None
    x = arranged(x)
    if x.ndim != 4 or x.shape[3 - axis] != heads:
        return None
    return Source(source.name, x, lambda: arranged(source.own))


def other_rotation_table(e: Evidence) -> Finding | None:
    """Cosines or sines of positions 0, 1, 2 … with another base, offset or order of pairs."""
    rows = [size for size in e.port.shape[:-1] if size != 1]
    if not e.same_shape or len(rows) != 1 or rows[0] < 4:
        return None
    shape = rows[0], e.port.shape[-1]
    if shape[1] % 2 or shape[1] < 4 or float(np.abs(e.values[0]).max()) > 1.001:
        return None
    reference, port = (value.reshape(shape) for value in (e.reference, e.port))
    e = replace(e, reference=reference, port=port)
    told = told_apart(e, _rotation_tables(shape), what="tables of rotations")
    if told is None:
        return _other_angles(e)
    return Finding(
        "other-rotation-table",
        f"The port is a table of {told.wrong}, the reference of {told.right}; {told.leaves}.",
        f"Compute it with {told.right}.",
    )


def _other_angles(e: Evidence) -> Finding | None:
    """Cosines and sines of other angles: both outputs of one call, or one value and the other."""
    if e.port.ndim == 2 and (found := _other_pairs(e)) is not None:
        return found
    for other in e.beside():
        own = other.own()
        if own is None or other.value.size % e.port.size or own.size != e.port.size:
            continue
        for one, two in product(_once(other.value, e.port.shape), _once(own, e.port.shape)):
            sides = [(e.values[0], one), (e.values[1], two)]
            if sides[0][0].mean() < sides[0][1].mean():  # slow rotations have cosines of one
                sides = [side[::-1] for side in sides]
            right, wrong = (
                _distinct((cosines + 1j * sines).reshape(-1, e.port.shape[-1]))
                for cosines, sines in sides
            )
            if right.shape == wrong.shape and np.abs(np.abs((right, wrong)) - 1).max() < 2e-2:
                name = f"queries and keys (by the table {e.name})"
                return _compare_tables(name, right, wrong, max(2e-3, 8 * fit_tolerance(e)))
    return None


def _other_pairs(e: Evidence) -> Finding | None:
    """Other angles in a table that has each cosine beside its sine."""
    right, wrong = (x[:, 0::2] + 1j * x[:, 1::2] for x in e.values)
    if np.abs(np.abs((right, wrong)) - 1).max() > 2e-2:
        return None
    name = f"queries and keys (by the table {e.name})"
    return _compare_tables(name, right, wrong, max(2e-3, 8 * fit_tolerance(e)))


def _once(value: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """A table of cosines or sines in this shape: a port may keep each pair's number once."""
    width = shape[-1]
    for cut in (value[..., :width], value[..., ::2] if value.shape[-1] == 2 * width else value):
        if cut.size == prod(shape):
            yield cut.reshape(shape).astype(np.float64)


def _distinct(table: Table) -> Table:
    """One column for each pair of numbers that is rotated."""
    half = table.shape[1] // 2
    for once, again in ((table[:, :half], table[:, half:]), (table[:, ::2], table[:, 1::2])):
        if once.shape == again.shape and np.abs(once - again).max() < 1e-6:
            return once
    return table


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

    def __init__(self, width: int, token_axis: int, kept: Array | None = None) -> None:
        self.width, self.token_axis, self.kept = width, token_axis, kept

    def __call__(self, value: Array) -> Array:
        if value.ndim == 3:
            return value.reshape(*value.shape[:2], -1, self.width)
        value = value if self.token_axis == 1 else value.swapaxes(1, 2)
        return value if self.kept is None else value.reshape(1, -1, *value.shape[2:])[:, self.kept]

    def of_rows(self, value: Array) -> "Heads":
        """The same with all rows of the batch as one: each may have positions of its own.

        Tokens that are zero in this value are left out: padding.
        """
        tokens = self(value)
        kept = np.flatnonzero(np.abs(tokens).max((2, 3)).reshape(-1) > 0)
        return Heads(self.width, self.token_axis, kept)


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
            found = _mixed_pairs(e, name, x, y, pairing, right)
            found = found or _rounded_table(e, name, x, y, pairing, right)
            found = found or _norm_after(e, name, x, y, pairing, right, limit)
            return found or _other_rows(name, x, y, pairing, right, limit)
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
    return _compare_tables(name, right, wrong, max(2e-3, 8 * limit))


def _mixed_pairs(
    e: Evidence, name: str, x: Array, y: Array, pairing: str, table: Table
) -> Finding | None:
    """That cosines and sines are in the order of one pairing, and the numbers turned of another."""
    other = next(p for p in PAIRINGS if p != pairing)
    for turned, ordered in ((other, pairing), (pairing, other)):
        if apart_of(y, _turned(x, turned, ordered, table)) <= allowed(e):
            return Finding(
                "rotation-pairs",
                f"The port turns pairs of {turned} of {name} with a table for pairs of "
                f"{ordered}; the reference rotates pairs of {pairing}.",
                f"Take pairs of {pairing} (rotate_half), and repeat each cosine and sine for these "
                "pairs.",
            )
    return None


def _turned(x: Array, pairing: str, ordered: str, table: Table) -> Array:
    """x · cos + turned x · sin, with the numbers of each pair in the table in an order."""
    c, s = np.real(table), np.imag(table)
    if ordered == PAIRINGS[0]:
        c, s = (np.repeat(part, 2, -1) for part in (c, s))
    else:
        c, s = (np.concatenate([part, part], -1) for part in (c, s))
    half = x.shape[-1] // 2
    if pairing == PAIRINGS[0]:
        turned = np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    else:
        turned = np.concatenate([-x[..., half:], x[..., :half]], -1)
    return x * c[None, :, None] + turned * s[None, :, None]


def _rounded_table(
    e: Evidence, name: str, x: Array, y: Array, pairing: str, table: Table
) -> Finding | None:
    """That the port's cosines and sines have 16 bits."""
    usual = apart_of(y, _turned(x, pairing, pairing, table))
    for kind, dtype in NARROW.items():
        low = narrow(np.real(table), dtype) + 1j * narrow(np.imag(table), dtype)
        left = apart_of(y, _turned(x, pairing, pairing, low))
        if left <= min(allowed(e), usual / 4):
            return Finding(
                "rotation-rounded",
                f"The port rotates {name} with the reference's cosines and sines rounded to {kind} "
                f"(lower precision); {e.leaves(left)}.",
                "Keep the cosines and sines of RoPE in float32, and rotate in float32.",
            )
    return None


def _norm_after(
    e: Evidence, name: str, x: Array, y: Array, pairing: str, table: Table, limit: float
) -> Finding | None:
    """That the port rotates before the norm: by the same angles, but for the norm's weight."""
    module = re.split(r" \[|, (?:call|step) ", name)[0]
    weight = e.parameters_of(module).get("weight")
    if weight is None or weight.shape != x.shape[-1:] or not weight.all():
        return None
    own = _rotation(x / weight, y / weight, pairing, limit)
    if own is None or float(np.abs(own - table).max()) > max(2e-3, 8 * limit):
        return None
    return Finding(
        "norm-after-rotation",
        f"The port rotates pairs of {pairing} before the norm {module} and norms the result, the "
        "reference rotates after the norm.",
        "Apply the norm first, then the rotation (RoPE): the weight of the norm is not the same "
        "for the two numbers of a pair.",
    )


def _compare_tables(name: str, right: Table, wrong: Table, close: float) -> Finding | None:
    """How the angles of the port's rotations differ from the reference's."""
    if float(np.abs(wrong - 1j * right.conj()).max()) < close:
        return Finding(
            "sines-cosines-exchanged",
            f"The port rotates {name} with the cosines in the place of the sines.",
            "Exchange sines and cosines.",
        )
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
    if (found := compare_angles(name, right, wrong)) is not None:
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


def _other_rows(
    name: str, x: Array, y: Array, pairing: str, right: Table, limit: float
) -> Finding | None:
    """That each row of the batch has positions of its own: counted by its mask."""
    close = max(2e-3, 8 * limit)
    used: list[tuple[int, int, int]] = []
    for row in range(len(x) if len(x) > 1 and len(right) <= MAX_TOKENS else 0):
        table = _rotation(x[row : row + 1], y[row : row + 1], pairing, limit)
        if table is None:
            return None
        for token, angles in enumerate(table):
            apart = np.abs(right - angles).max(-1)
            place = token if apart[token] < close else int(apart.argmin())
            if apart[place] >= close:
                return None
            if place != token:
                used.append((row, token, place))
    if not used:
        return None
    row, token, place = used[0]
    return Finding(
        "rotation-positions",
        f"The port rotates tokens of {name} with the angles of other tokens, not the same in each "
        f"row of the batch: in row {row}, token {token} with those of token {place}.",
        "Check the positions of the tokens: whether padding is counted.",
    )


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
    slope, start = np.polyfit(use, np.log(angles[use]), 1)
    expected = np.exp(slope * np.arange(pairs) + start)
    shown = expected < pi / 2
    apart = np.abs(angles - expected)[shown]
    if (apart > 1e-2 * expected[shown] + 2e-4).any() or abs(start) > 0.02:
        return None  # frequencies that do not fall from 1 by one factor: of several axes
    return float(np.exp(-slope * pairs))
