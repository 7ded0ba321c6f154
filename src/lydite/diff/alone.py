"""A run on the reference's values: which places go wrong by themselves.

A value is recorded and then replaced, but only where it is handed over: code that goes on with its
own copy takes the error along, into a residual sum, say. What is right but for an error that was
seen before is that place's doing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.axes import best_fit, possible_fits
from lydite.diff.calls import Pair
from lydite.diff.gates import GateResult
from lydite.diff.result import Row
from lydite.diff.rows import Sides
from lydite.diff.values import Layouts, measure_pair, see

MOST = 64  # wrong values whose errors are kept to be recognised
Error = NDArray[np.float64]


def without_echoes(
    rows: Sequence[Row], pairs: Sequence[Pair], sides: Sides, layouts: Layouts
) -> list[Row]:
    """The rows, with those taken for right whose error is that of another place before them."""
    known: list[tuple[Row, Error]] = []
    result: list[Row] = []
    for row, pair in zip(rows, pairs, strict=True):
        seen = see(pair, sides.reference, sides.port, layouts) if row.wrong else None
        if seen and seen.reference is not None and seen.port is not None and row.error is not None:
            theirs, ours = (x.astype(np.float64) for x in (seen.reference, seen.port))
            room = (row.limit or 0.0) * float(np.linalg.norm(theirs))
            source = _heard(row, ours - theirs, room, known)
            if source is not None:
                row = replace(row, wrong=False, note=f"carries the error of {source.name} on")
            elif len(known) < MOST:
                known.append((row, ours - theirs))
        result.append(row)
    return result


def sources(rows: Sequence[Row], failed: Iterable[GateResult], sides: Sides) -> tuple[Row, ...]:
    """Each place that goes wrong by itself, where it first does: tables and inputs, then values."""
    found = [_gated(each, each.pair, sides) for each in failed if each.pair is not None]
    found += [row for row in rows if row.wrong]
    first: dict[tuple[str, str], Row] = {}
    for row in found:
        first.setdefault((row.site, row.place), row)
    return tuple(first.values())


def _heard(row: Row, error: Error, room: float, known: Iterable[tuple[Row, Error]]) -> Row | None:
    """The place whose error this is, but for what rounding may do."""
    for before, echo in known:
        if (before.site, before.place) == (row.site, row.place):
            continue  # the same code at another step
        fit, _ = best_fit(possible_fits(echo.shape, error.shape), echo, error)
        if fit is not None and float(np.linalg.norm(error - fit.apply(echo))) <= room:
            return before
    return None


def _gated(failed: GateResult, pair: Pair, sides: Sides) -> Row:
    """A table or an input as a row."""
    theirs, ours = pair.site, pair.port_site
    found = measure_pair(pair, see(pair, sides.reference, sides.port, Layouts()))
    about: dict[str, Any] = {"error": found.error if found else None, "floor": None, "limit": None}
    return Row(
        theirs.name,
        ours.name,
        theirs.slot,
        theirs.step,
        theirs.call,
        theirs.kind,
        tuple(theirs.shape),
        ours.dtype,
        **about,
        wrong=True,
        note=failed.gate.detail,
    )
