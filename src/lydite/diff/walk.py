"""The first divergence: the first wrong value that is the port's doing and not the dump's.

A wrong computation spoils what is computed from it. A value that differs while its own module's
output agrees was recorded at another stage (before a norm instead of after it), or is not used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from lydite.diff.result import Row
from lydite.diff.rows import scope

MARGIN = 3.0  # limits: what an estimate may be off by
DILUTED = 0.1  # of an error: what is left in the module around it if it was not a wrong dump
FOLLOWING = 4  # agreeing values after a misplaced one that prove the computation went on rightly


@dataclass(frozen=True)
class Walk:
    """Where the port first goes wrong, and which rows were set aside on the way."""

    first: int | None
    last_agreement: int | None
    aside: tuple[int, ...]  # wrong rows that are not the bug


def walk(
    rows: Sequence[Row], is_elsewhere: Callable[[int], bool], *, estimated: bool = False
) -> Walk:
    """Walk in order of execution; `is_elsewhere` says whether a row's value is another stage's.

    With `estimated` the limits are no more than that: a value a little above, after which nothing
    is, is set aside.
    """
    aside: list[int] = []
    for index, row in enumerate(rows):
        if not row.wrong:
            continue
        elsewhere = _goes_on(rows, index) and (row.error is None or is_elsewhere(index))
        marginal = estimated and _is_marginal(rows, index)
        if elsewhere or marginal or _is_mended(rows, index):
            aside.append(index)
        else:
            return Walk(index, _last_agreement(rows, index), tuple(aside))
    return Walk(None, None, tuple(aside))


def first_alone(rows: Sequence[Row]) -> Walk:
    """The first wrong row of a run on the reference's values, where nothing spreads."""
    first = next((index for index, row in enumerate(rows) if row.wrong), None)
    return Walk(first, None if first is None else _last_agreement(rows, first), ())


def _is_marginal(rows: Sequence[Row], index: int) -> bool:
    """Whether a value is little above its limit, and nothing after it above its own."""
    here, later = rows[index], rows[index + 1 :]
    if here.error is None or not here.limit or here.error > MARGIN * here.limit:
        return False
    compared = [row for row in later if row.error is not None]
    return bool(compared) and not any(
        row.wrong and (row.error is None or row.error > MARGIN * (row.limit or 0.0))
        for row in later
    )


def _is_mended(rows: Sequence[Row], index: int) -> bool:
    """Whether nothing after this value is wrong, and a module around it gives what it should."""
    here, later = rows[index], rows[index + 1 :]
    if any(row.wrong for row in later):
        return False
    return any(
        row.place.startswith("out")
        and row.error is not None
        and row.error <= DILUTED * (here.error or inf)
        and _holds(row.site, here.site)
        for row in later
        if row.step == here.step
    )


def _holds(outer: str, inner: str) -> bool:
    """Whether one name is a module around the other: `net/blocks.2` around `net/blocks.2.norm`."""
    return inner.startswith((f"{outer}.", f"{outer}/"))


def _goes_on(rows: Sequence[Row], index: int) -> bool:
    """Whether the values right after this one, in the same component, agree."""
    here = rows[index]
    scoped = any("/" in row.site for row in rows)  # else the trace is one component
    following = [
        row
        for row in rows[index + 1 :]
        if (not scoped or scope(row) == scope(here))
        and row.site != here.site
        and row.error is not None
    ][:FOLLOWING]
    return bool(following) and not any(row.wrong for row in following)


def _last_agreement(rows: Sequence[Row], index: int) -> int | None:
    before = [at for at in range(index) if not rows[at].wrong and rows[at].error is not None]
    return before[-1] if before else None
