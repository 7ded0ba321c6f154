"""Rows of a verdict for people: numbers in few letters, and which row the verdict is about."""

from collections.abc import Sequence
from math import inf, isfinite, isnan

from lydite.diff.result import Row, Verdict


def number(value: float | None) -> str:
    """A number in three digits; what is not known is nothing."""
    if value is None:
        return ""
    if not isfinite(value):
        return "NaN" if isnan(value) else "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e3 <= abs(value) < 1e5:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.3g}" if 1e-3 <= abs(value) < 1e3 else f"{value:.2e}"
    mantissa, letter, power = text.partition("e")
    text = mantissa + (f"e{int(power)}" if letter else "")
    return text.replace("-", "−", 1) if text.startswith("-") else text


def ratio(row: Row) -> float | None:
    """The error in units of rounding; None where there is nothing to measure."""
    if row.error is None:
        return inf if row.wrong else None
    if not isfinite(row.error):
        return inf
    if not row.floor:
        return 0.0 if row.error == 0 else inf
    return row.error / row.floor


def times(row: Row) -> str:
    """The ratio for people; `shape` where two shapes cannot be compared."""
    if row.error is None:
        return "shape" if row.wrong else ""
    found = ratio(row)
    if found is None or not isfinite(found):
        return "∞ ×"
    return f"{found:.1f} ×" if 0.05 <= found < 100 else f"{number(found)} ×"


def first_wrong(verdict: Verdict) -> int | None:
    """The index of the row the verdict is about; a verdict at a gate has none."""
    here = (verdict.site, verdict.place, verdict.step)
    at = [
        index
        for index, row in enumerate(verdict.rows)
        if row.wrong and (row.site, row.place, row.step) == here
    ]
    same = [index for index in at if verdict.rows[index].error == verdict.error]
    return next(iter([*same, *at]), None)


def closest(rows: Sequence[Row]) -> int | None:
    """The agreeing row with the largest error in units of rounding."""
    known = [index for index, row in enumerate(rows) if row.error is not None and not row.wrong]
    return max(known, key=lambda index: ratio(rows[index]) or 0.0, default=None)


def short(name: str, most: int) -> str:
    """A name cut in its middle: the ends tell scope and module."""
    if len(name) <= most:
        return name
    tail = most * 2 // 3
    return f"{name[: most - tail - 1]}…{name[-tail:]}"


def described(row: Row, most: int = 100) -> str:
    """Place and numbers of a row, one fact a line."""
    where = short(row.name, most)
    lines = [f"{where}, step {row.step}"]
    if row.error is None:
        lines.append("the shapes differ" if row.wrong else "nothing to measure")
    else:
        lines.append(f"error {number(row.error)} = {times(row)} rounding")
    if row.floor is not None and row.limit is not None:
        lines.append(f"rounding {number(row.floor)}, limit {number(row.limit)}")
    return "\n".join(lines)
