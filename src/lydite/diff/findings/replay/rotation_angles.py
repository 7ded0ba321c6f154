"""Positions and frequencies that tables of rotations show, and how those of two tables differ.

The angle of a pair is a frequency times a position. Pairs that turn with the same positions are an
axis (of text, of rows, of columns); in an axis the frequencies fall from pair to pair.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import log, pi
from typing import Any

import ml_dtypes
import numpy as np

from lydite.diff.findings.evidence import Array
from lydite.diff.result import Finding

SAME = 0.02  # positions or pairs of positions that are no farther apart are equal
LIKE = 2e-3  # relative difference of frequencies that are taken for equal
BASES = (1e4, 5e5, 1e6, 1e3, 1e5, 2e3, 256.0, 100.0)
TURNS = (0, 1, -1, 2, -2, 3, -3)  # of the slowest pair of an axis that are tried
MAX_TOLD = 4  # runs of pairs that are listed
LEAST = 1e-4  # distance of two rotations that is no rounding
FARTHEST = 256  # position in an axis of a single pair, whose angles wrap
NARROW: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
MAX_AXES = 4  # of positions: index, time, row, column
MAX_BASE = 2e7  # of all models known; a larger one comes from pairs of several axes


@dataclass(frozen=True, eq=False)
class Axis:
    """Pairs that turn with the same positions."""

    pairs: tuple[int, ...]
    rates: Array  # radians per position, of each pair
    places: Array  # positions of the tokens
    counted: bool = True  # whether the unit of the positions is known

    @property
    def moves(self) -> bool:
        """Whether the axis has other positions than 0."""
        return bool(self.places.any())

    @property
    def words(self) -> str:
        """The pairs for people."""
        return _listed(self.pairs, "pair")


def compare_angles(name: str, right: Array, wrong: Array) -> Finding | None:
    """Which positions or frequencies of the port's table (tokens, pairs) differ."""
    close = max(LEAST, *(10 * float(np.abs(np.abs(table) - 1).max()) for table in (right, wrong)))
    axes = _axes(right, close)
    if axes is None:
        return None
    if (found := _rounded(name, axes, right, wrong)) is not None:
        return found
    unsure = [a for a in axes if not a.counted and _differs(right, wrong, a.pairs, close)]
    if unsure:
        return _other_axis(name, unsure[0], right, wrong, close)
    moved: list[tuple[Axis, Array]] = []
    turning: list[tuple[Axis, Array]] = []
    crossed: list[tuple[int, Axis, Axis]] = []
    for axis in axes:
        columns = wrong[:, axis.pairs]
        places = _places_of(columns, axis.rates, close)
        if places is not None:
            if np.abs(places - axis.places).max() > SAME:
                moved.append((axis, places))
            continue
        both = zip(columns.T, axis.rates, strict=True)
        rates = [_rate(column, axis.places, close, float(rate)) for column, rate in both]
        known = np.array([np.nan if rate is None else rate for rate in rates])
        if not np.isnan(known).any():
            turning.append((axis, known))
            continue
        for pair, rate in zip(axis.pairs, rates, strict=True):
            if rate is None:
                other = next((a for a in axes if _turns_with(wrong[:, pair], a, close)), None)
                if other is None:
                    return None
                crossed.append((pair, axis, other))
    if crossed:
        return _crossed(name, crossed[0])
    if turning:
        return _other_rates(name, turning)
    return _other_places(name, moved, len(axes)) if moved else None


def _axes(table: Array, close: float) -> list[Axis] | None:
    """The axes of a table: of a known base, or as its tokens count; None where a pair fits none."""
    counted = _counted_axes(table, close)
    bases = [_base(axis.rates) for axis in counted or ()]
    for base in dict.fromkeys((*(round(b, 3) for b in bases if b), *BASES)):
        if (axes := _axes_of_base(table, base, close)) is not None:
            return axes
    return counted


def _axes_of_base(table: Array, base: float, close: float) -> list[Axis] | None:
    """Axes with the frequencies base^(−n / pairs) and whole positions, each as wide as possible."""
    axes: list[Axis] = []
    pair = 0
    while pair < table.shape[1]:
        for width in range(table.shape[1] - pair, 0, -1):
            pairs = tuple(range(pair, pair + width))
            rates = base ** (-np.arange(width) / width)
            places = _places_of(table[:, pairs], rates, close)
            if places is None or (width == 1 and places.any()):
                continue
            if float(np.abs(places - np.round(2 * places) / 2).max()) < SAME / 10:
                axes.append(Axis(pairs, rates, places))
                break
        else:
            return None
        pair += width
    return axes


def _counted_axes(table: Array, close: float) -> list[Axis] | None:
    """The axes of a table whose neighbouring tokens mostly differ by one position."""
    steps = [_step(column, close) for column in table.T]
    axes: list[Axis] = []
    pair = 0
    while pair < len(steps):
        if steps[pair] is None and float(np.abs(table[:, pair] - 1).max()) < close:
            still = np.zeros(len(table))  # nothing turns in this pair
            axes.append(Axis((pair,), np.ones(1), still))
            pair += 1
            continue
        axis = _axis_from(table, steps, pair, close)
        if axis is None:
            return None
        axes.append(axis)
        pair += len(axis.pairs)
    return axes


def _axis_from(
    table: Array, steps: Sequence[float | None], first: int, close: float
) -> Axis | None:
    """The longest run of pairs from one on whose angles fall and have the same positions."""
    count = 1
    while first + count < len(steps):
        step, last = steps[first + count], steps[first + count - 1]
        if step is not None and (last is None or step > last * (1 + LIKE)):
            break
        count += 1
    for used in range(count, 0, -1):
        known = [(p, step) for p in range(first, first + used) if (step := steps[p]) is not None]
        if not known:
            continue
        rates = np.array([step for _, step in known])
        places = _places_of(table[:, [p for p, _ in known]], rates, close)
        if places is None:
            continue
        pairs = tuple(range(first, first + used))
        fitted = [_rate(table[:, p], places, close) for p in pairs]
        if all(rate is not None for rate in fitted):
            rates = np.array(fitted, float)
            return Axis(pairs, rates, places, used > 1 and abs(rates[0] - 1) < SAME)
    return None


def _step(column: Array, close: float) -> float | None:
    """The angle of one position: the most frequent turn from a token to the next that is not 0."""
    angles = np.abs(np.angle(column[1:] * column[:-1].conj()))
    angles = np.sort(angles[angles >= close])
    if not angles.size:
        return None
    runs = np.split(angles, np.flatnonzero(np.diff(angles) > close) + 1)
    return float(np.median(max(runs, key=len)))


def _places_of(columns: Array, rates: Array, close: float) -> Array | None:
    """The positions at which pairs of these frequencies have these angles; None if there are none.

    Each faster pair tells more digits than the slower one before it.
    """
    if len(rates) == 1:
        return _whole(columns[:, 0], float(rates[0]), close)
    order, angles = np.argsort(rates), np.angle(columns)
    chosen, rank = np.zeros(len(columns)), np.full(len(columns), 2)
    for turn in TURNS:  # of the slowest pair
        places = (angles[:, order[0]] + 2 * pi * turn) / rates[order[0]]
        for pair in order[1:]:
            turns = np.round((places * rates[pair] - angles[:, pair]) / (2 * pi))
            places = (angles[:, pair] + 2 * pi * turns) / rates[pair]
        left = np.abs(np.exp(1j * np.outer(places, rates)) - columns).max(1)
        whole = np.round(2 * places) / 2
        is_whole = np.abs(whole - places) < SAME / 4
        ranks = np.where(left >= 4 * close, 2, np.where(is_whole, 0, 1))
        chosen = np.where(ranks < rank, np.where(is_whole, whole, places), chosen)
        rank = np.minimum(rank, ranks)
    return chosen if (rank < 2).all() else None


def _whole(column: Array, rate: float, close: float) -> Array | None:
    """Whole positions of an axis of one pair, the smallest that fit."""
    tried = np.array(sorted(range(-FARTHEST, FARTHEST + 1), key=abs))
    apart = np.abs(np.exp(1j * rate * tried)[None] - column[:, None]) < close
    return tried[apart.argmax(1)].astype(float) if apart.any(1).all() else None


def _rate(column: Array, places: Array, close: float, usual: float | None = None) -> float | None:
    """The frequency with which a pair turns at these positions; None where there is none.

    Positions far from each other have many: the usual one, if it is one of them.
    """
    if float(np.abs(column - 1).max()) < close / 8:
        return 0.0
    if usual is not None and np.abs(np.exp(1j * usual * places) - column).max() < close:
        return usual
    by = np.diff(places)
    turns = column[1:] * column[:-1].conj()
    unit = np.flatnonzero(np.abs(np.abs(by) - 1) < SAME)
    if unit.size:
        guess = float(np.angle((turns[unit] ** np.sign(by[unit])).mean()))
    else:
        near = np.where(places, np.abs(places), np.inf)
        at = int(near.argmin())
        guess = float(np.angle(column[at]) / places[at]) if np.isfinite(near[at]) else 0.0
    for far in (8.0, np.inf):  # near positions first: the angles of far ones wrap
        use = (np.abs(places) <= far) & (places != 0)
        if use.any():
            rest = np.angle(column[use] * np.exp(-1j * guess * places[use]))
            guess += float((rest * places[use]).sum() / (places[use] ** 2).sum())
    left = np.abs(np.exp(1j * guess * places) - column)
    return guess if float(left.max()) < 4 * close else None


def _turns_with(column: Array, axis: Axis, close: float) -> bool:
    return axis.moves and _rate(column, axis.places, close) is not None


def _differs(right: Array, wrong: Array, pairs: tuple[int, ...], close: float) -> bool:
    return float(np.abs(right[:, pairs] - wrong[:, pairs]).max()) > close


# What is told of the difference.


def _other_axis(name: str, axis: Axis, right: Array, wrong: Array, close: float) -> Finding:
    """That the angles of an axis differ, where its frequencies are not known."""
    apart = np.abs(right[:, axis.pairs] - wrong[:, axis.pairs]).max(1)
    tokens = np.flatnonzero(apart > close).tolist()
    return Finding(
        "rotation-positions",
        f"The port rotates {_listed(tokens, 'token')} of {name} by other angles in {axis.words}: "
        "the positions of this axis differ, or its frequencies.",
        "Compute the positions (ids) and the frequencies of this axis as the reference.",
    )


def _rounded(name: str, axes: list[Axis], right: Array, wrong: Array) -> Finding | None:
    """That positions, frequencies or angles were rounded to 16 bits before the sines were taken."""
    lost = float(np.linalg.norm(wrong - right))
    for (kind, dtype), what in product(
        NARROW.items(), ("frequencies", "positions", "angles", "positions and frequencies")
    ):
        table = np.ones_like(right)
        for axis in axes:
            places, rates = axis.places, axis.rates
            places = narrow(places, dtype) if "positions" in what else places
            rates = narrow(rates, dtype) if "frequencies" in what else rates
            angles = np.outer(places, rates)
            angles = narrow(angles, dtype) if what == "angles" else angles
            table[:, axis.pairs] = np.exp(1j * angles)
        if float(np.linalg.norm(wrong - table)) < 0.1 * lost:
            return Finding(
                "rotation-rounded",
                f"The port rotates {name} by the reference's angles with the {what} rounded to "
                f"{kind} (lower precision).",
                f"Compute {what} of RoPE in float32; do not cast them with the model.",
            )
    return None


def narrow(x: Array, dtype: Any) -> Array:
    """Numbers rounded to a type of 16 bits."""
    return x.astype(np.float32).astype(dtype).astype(np.float64)


def _crossed(name: str, found: tuple[int, Axis, Axis]) -> Finding:
    pair, axis, other = found
    return Finding(
        "rotation-axes",
        f"The port rotates pair {pair} of {name} with the positions of the axis of {other.words}, "
        f"the reference with those of the axis of {axis.words}: the axes have other widths or "
        "another order.",
        "Check the widths of the axes (axes_dim) and their order.",
    )


def _other_rates(name: str, turning: list[tuple[Axis, Array]]) -> Finding:
    """That the positions are the reference's and the frequencies are not."""
    axis, own = max(turning, key=lambda entry: len(entry[0].pairs))
    bases = _base(axis.rates), _base(own)
    text = f"The port rotates {name} with other frequencies at the same positions: "
    fix = "Compute the frequencies as the reference: base (rope_theta), scaling, and the width by "
    fix += "which the exponents are divided."
    if bases[0] and bases[1] and abs(log(bases[0] / bases[1])) > 0.05:
        theirs, ours = f"{bases[0]:.4g}", f"{bases[1]:.4g}"
        width = 2 * len(axis.pairs)
        text += f"in an axis of {width} numbers its base is {ours}, the reference's {theirs}."
        fix = f"Use the base {theirs} (rope_theta), and divide the exponents by the width of the "
        return Finding("rotation-base", text, f"{fix}axis, not of the head.")
    ratios = [
        (pair, float(ours / theirs) if theirs else np.inf)
        for axis, own in turning
        for pair, ours, theirs in zip(axis.pairs, own, axis.rates, strict=True)
    ]
    runs = [(_listed([pair for pair, _ in run], "pair"), factor) for factor, run in _runs(ratios)]
    text += ", ".join(
        f"{factor} × the reference's in {pairs}" if factor != "0" else f"{pairs} not rotated"
        for pairs, factor in runs[:MAX_TOLD]
    )
    return Finding("rotation-base", f"{text}{' …' if len(runs) > MAX_TOLD else '.'}", fix)


def _runs(ratios: list[tuple[int, float]]) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """Neighbouring pairs that turn faster by the same factor; pairs that are right are left out."""
    for factor, run in groupby(ratios, key=lambda entry: f"{entry[1]:.3g}"):
        if factor != "1":
            yield factor, list(run)


def _base(rates: Array) -> float | None:
    """θ of frequencies θ^(−n / pairs)."""
    if len(rates) < 2 or min(rates) <= 0 or abs(rates[0] - 1) > SAME:
        return None
    slope = np.log(rates[0] / rates[-1]) / (len(rates) - 1)
    even = np.abs(np.log(rates) + slope * np.arange(len(rates)) - np.log(rates[0])).max() < SAME
    base = float(np.exp(slope * len(rates)))
    return base if even and base <= MAX_BASE else None


def _other_places(name: str, moved: list[tuple[Axis, Array]], count: int) -> Finding:
    """That the frequencies are the reference's and the positions are not."""
    parts: list[str] = []
    is_offset = True
    for axis, places in moved:
        off = np.flatnonzero(np.abs(places - axis.places) > SAME)
        token = int(off[0])
        by = places[off] - axis.places[off]
        where = f" in the axis of {axis.words}" if count > 1 else ""
        even = float(np.ptp(by)) < SAME
        is_offset = is_offset and even and len(off) == len(places)
        at = "all tokens" if len(off) == len(places) else _listed(off.tolist(), "token")
        text = f"{at} have other positions{where}: token {token} has {places[token]:.4g}, in the "
        text += f"reference {axis.places[token]:.4g}"
        parts.append(text + law_of_positions(places[off], axis.places[off]))
    return Finding(
        "rotation-offset" if is_offset else "rotation-positions",
        f"The port rotates {name} with the reference's frequencies at other positions: "
        f"{'; '.join(parts)}.",
        "Compute the positions (ids) as the reference: where each stream and each axis (index, "
        "row, column) starts, their order, and their scale.",
    )


def law_of_positions(places: Array, right: Array) -> str:
    """How positions follow from the right ones, in words."""
    by = places - right
    near = SAME * max(float(np.abs(right).max()), 1.0) / 4
    if not places.any():
        return ": the port's are all 0"
    if not right.any():
        return ": the reference's are all 0"
    if float(np.ptp(by)) < SAME:
        return f": displaced by {by[0]:+.4g} (offset)"
    factor = float((places * right).sum() / (right * right).sum())
    if float(np.abs(places - factor * right).max()) < near:
        return f": times {factor:.4g}"
    if np.unique(right).size > 2:
        slope, start = np.polyfit(right, places, 1)
        if float(np.abs(places - slope * right - start).max()) < near:
            return f": times {slope:.4g}, plus {start:.4g}"
    for kind, dtype in NARROW.items():
        if float(np.abs(places - narrow(right, dtype)).max()) < SAME:
            return f": rounded to {kind}"
    if float(np.abs(places - np.trunc(right)).max()) < SAME:
        return ": rounded down"
    if float(np.abs(np.sort(places) - np.sort(right)).max()) < SAME:
        return ": in another order"
    return ""


def _listed(numbers: Sequence[int], word: str) -> str:
    """pair 3, pairs 3 to 5, or the first of several."""
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{word}s {numbers[0]} to {numbers[-1]}"
    return f"{len(numbers)} {word}s from {numbers[0]} on"
