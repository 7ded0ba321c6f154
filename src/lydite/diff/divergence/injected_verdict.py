"""A run on the reference's values: which modules are wrong on the right inputs.

A value is recorded and then replaced, but only where it is passed on: code that continues with its
own copy keeps the error, for example in a residual sum. A value that is right except for an error
of an earlier value is not wrong itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lydite.diff.measure.aligned import Layouts, align_values, measure_pair
from lydite.diff.measure.axes import best_fit, possible_fits
from lydite.diff.measure.rows import Comparison
from lydite.diff.pairing.paired_events import Pair
from lydite.diff.preconditions import GateResult
from lydite.diff.result import Row

MAX_KEPT = 64  # errors kept to be recognized in later values
Error = NDArray[np.float64]


def drop_propagated_errors(
    rows: Sequence[Row], pairs: Sequence[Pair], traces: Comparison, layouts: Layouts
) -> list[Row]:
    """The rows; those whose error is an earlier value's are not wrong."""
    known: list[tuple[Row, Error]] = []
    result: list[Row] = []
    for row, pair in zip(rows, pairs, strict=True):
        if row.wrong and row.error is not None:
            values = align_values(pair, traces.reference, traces.port, layouts)
            if values.reference is not None and values.port is not None:
                expected = values.reference.astype(np.float64)
                error = values.port.astype(np.float64) - expected
                allowed = (row.limit or 0.0) * float(np.linalg.norm(expected))
                source = _source_of(row, error, allowed, known)
                if source is not None:
                    row = replace(row, wrong=False, note=f"same error as {source.name}")
                elif len(known) < MAX_KEPT:
                    known.append((row, error))
        result.append(row)
    return result


def wrong_sites(
    rows: Sequence[Row], failed: Iterable[GateResult], traces: Comparison
) -> tuple[Row, ...]:
    """Each site that is wrong on the right inputs, where it first is: tables first, then values."""
    tables = [
        _gate_row(result, result.pair, traces) for result in failed if result.pair is not None
    ]
    first: dict[tuple[str, str], Row] = {}
    for row in (*tables, *(row for row in rows if row.wrong)):
        first.setdefault((row.site, row.slot), row)
    return tuple(first.values())


def _source_of(
    row: Row, error: Error, allowed: float, known: Iterable[tuple[Row, Error]]
) -> Row | None:
    """The earlier row with this error, up to rounding."""
    for earlier, earlier_error in known:
        if (earlier.site, earlier.slot) == (row.site, row.slot):
            continue  # the same code at another step
        fits = possible_fits(earlier_error.shape, error.shape)
        fit, _ = best_fit(fits, earlier_error, error)
        if fit is not None and float(np.linalg.norm(error - fit.apply(earlier_error))) <= allowed:
            return earlier
    return None


def _gate_row(failed: GateResult, pair: Pair, traces: Comparison) -> Row:
    """A table or an input as a row."""
    values = align_values(pair, traces.reference, traces.port, Layouts())
    measured = measure_pair(pair, values)
    row = Row.of(pair.event, pair.port_event)
    error = measured.error if measured else None
    return replace(row, error=error, wrong=True, note=failed.gate.detail)
