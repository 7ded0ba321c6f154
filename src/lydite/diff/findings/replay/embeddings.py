"""Rows of a table that ids choose: the table read in another order, other rows, another table."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.variants import (
    Candidate,
    inputs_of,
    is_replayable,
    told_apart,
)
from lydite.diff.result import Finding

MAX_TABLES = 16  # of the same shape
AS_IT_IS = "as it is"


def other_embedding(e: Evidence) -> Finding | None:
    """An embedding whose table is reshaped, of another module, or read at other rows."""
    table = e.parameters().get("weight")
    if table is None or table.ndim != 2 or not e.slot.startswith("out"):
        return None
    if not is_replayable(e) or table.shape[1] != e.port.shape[-1]:
        return None
    for source in inputs_of(e):
        ids = source.x.astype(np.int64)
        is_index = bool((ids == source.x).all()) and 0 <= ids.min() <= ids.max() < len(table)
        if not is_index or ids.shape != e.port.shape[:-1]:
            continue
        told = told_apart(
            e, _embedded(e, ids, table), reference_is=AS_IT_IS, what="forms of an embedding"
        )
        if told is not None:
            return Finding(
                "other-embedding",
                f"The port is the rows of {e.name}.weight {told.wrong}; {told.leaves}.",
                "Load the table in the reference's order, and take the rows of the ids.",
            )
    return None


def _embedded(e: Evidence, ids: Array, table: Array) -> Iterator[Candidate]:
    yield Candidate(AS_IT_IS, table[ids])
    reshaped = table.reshape(table.shape[::-1]).T
    words = "of a table that was reshaped to its transpose, where its axes have to be transposed"
    yield Candidate(words, reshaped[ids])
    yield Candidate("of the table in reverse order", table[::-1][ids])
    for by in (1, -1):
        rows = np.clip(ids + by, 0, len(table) - 1)
        yield Candidate(f"at ids that are {by:+d}, off by one", table[rows])
    for name, other in islice(e.parameters_like(table.shape), MAX_TABLES):
        yield Candidate(f"in the place of which it has those of {name}", other[ids])


def added_positions(e: Evidence) -> Finding | None:
    """The port adds what is the same in each row of the batch: positions, sinusoids."""
    if not is_replayable(e) or e.port.ndim != 3 or len(e.port) < 2 or e.port.shape[1] < 4:
        return None
    reference, port = e.values
    added = (port - reference).astype(np.float64)
    table = added.mean(0)
    left = float(np.linalg.norm(added - table))
    where = np.linalg.norm(table, axis=-1) > 0.1 * np.sqrt(np.square(table).sum(-1).max())
    varies = float(np.linalg.norm((reference - reference.mean(0))[:, where])) > 0.1 * e.norms[0]
    by_place = float(np.linalg.norm(table - table.mean(0))) > 0.1 * float(np.linalg.norm(table))
    if left > e.noise() or not e.explains(left, free=table.size) or not varies or not by_place:
        return None
    what = "a table of positions"
    if _is_sinusoid(table):
        what = "sinusoids of the positions (cosines and sines)"
    return Finding(
        "positions-added",
        f"The port is the reference plus {what}: what it adds is the same in each row of the "
        f"batch, and another at each position; {e.leaves(left)}.",
        "Do not add positions here.",
    )


def _is_sinusoid(table: Array) -> bool:
    """Whether a table has cosines and sines of the same angles, side by side or in halves."""
    half = table.shape[1] // 2
    if table.shape[1] % 2:
        return False
    halves = table[:, :half] ** 2 + table[:, half:] ** 2
    pairs = table[:, 0::2] ** 2 + table[:, 1::2] ** 2
    return any(float(np.abs(x - 1).max()) < 1e-2 for x in (halves, pairs))
