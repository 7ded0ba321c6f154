"""Rows of a verdict for people: short numbers, and which row the verdict is about."""

from collections.abc import Sequence
from math import inf, isfinite, isnan

from lydite.diff.result import Row, Verdict


def number(value: float | None, digits: int = 3) -> str:
    """A number in `digits` digits; nothing when it is unknown."""
    if value is None:
        return ""
    if not isfinite(value):
        return "NaN" if isnan(value) else "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e3 <= abs(value) < 1e5:
        text = f"{value:,.{max(0, digits - 4)}f}"
    elif 1e-3 <= abs(value) < 1e3:
        text = f"{value:.{digits}g}"
    else:
        text = f"{value:.{digits - 1}e}"
    mantissa, letter, power = text.partition("e")
    text = mantissa + (f"e{int(power)}" if letter else "")
    return text.replace("-", "−", 1) if text.startswith("-") else text


def ratio(row: Row) -> float | None:
    """Error ÷ rounding; None where there is nothing to measure."""
    if row.error is None:
        return inf if row.wrong else None
    if not isfinite(row.error):
        return inf
    if not row.floor:
        return 0.0 if row.error == 0 else inf
    return row.error / row.floor


def times(row: Row) -> str:
    """Error ÷ rounding for people; `shape` where the shapes differ."""
    if row.error is None:
        return "shape" if row.wrong else ""
    value = ratio(row)
    if value is None or not isfinite(value):
        return "∞ ×"
    return f"{value:.1f} ×" if 0.05 <= value < 100 else f"{number(value)} ×"


def first_wrong(verdict: Verdict) -> int | None:
    """The index of the row the verdict is about; None for a failed gate."""
    here = (verdict.site, verdict.slot, verdict.step)
    at = [
        index
        for index, row in enumerate(verdict.rows)
        if row.wrong and (row.site, row.slot, row.step) == here
    ]
    same = [index for index in at if verdict.rows[index].error == verdict.error]
    return next(iter([*same, *at]), None)


def closest(rows: Sequence[Row]) -> int | None:
    """The agreeing row with the largest error ÷ rounding."""
    known = [index for index, row in enumerate(rows) if row.agrees]
    return max(known, key=lambda index: ratio(rows[index]) or 0.0, default=None)


def short(name: str, most: int) -> str:
    """A name shortened in the middle: the ends show scope and module."""
    if len(name) <= most:
        return name
    tail = most * 2 // 3
    return f"{name[: most - tail - 1]}…{name[-tail:]}"


def described(row: Row, most: int = 100) -> str:
    """Site and numbers of a row, one per line."""
    where = short(row.name, most)
    lines = [f"{where}, step {row.step}"]
    if row.error is None:
        lines.append("the shapes differ" if row.wrong else "not compared")
    else:
        lines.append(f"error {number(row.error)} = {times(row)} rounding")
    if row.floor is not None and row.limit is not None:
        lines.append(f"rounding {number(row.floor)}, limit {number(row.limit)}")
    return "\n".join(lines)
