"""Tokens that are taken from recorded values, one by one: which value and which of its tokens.

Streams may be joined with another length in each row of the batch, and padded with zeros.
"""

from dataclasses import dataclass
from itertools import islice

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.variants import Source, fit_tolerance, is_replayable, sources
from lydite.diff.result import Finding

MAX_VALUES = 64  # recorded values in which tokens are looked for
MAX_TOKENS = 2048
COLUMNS = 64  # of a token that are compared
ZEROS = "zeros"


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens of one row of the batch, and what they are."""

    start: int
    count: int
    name: str
    first: int

    def __str__(self) -> str:
        if self.name == ZEROS:
            return "zeros"
        return f"tokens {self.first} to {self.first + self.count - 1} of {self.name}"


def other_tokens(e: Evidence) -> Finding | None:
    """Tokens of recorded values joined in another order, of other values, or at other places."""
    if not is_replayable(e) or e.port.ndim != 3 or not 4 <= e.port.shape[1] <= MAX_TOKENS:
        return None
    batch, _, width = e.port.shape
    alike = (s for s in sources(e) if s.x.ndim == 3 and s.x.shape[::2] == (batch, width))
    values = [s for s in islice(alike, MAX_VALUES) if 2 <= s.x.shape[1] <= MAX_TOKENS]
    columns = np.linspace(0, width - 1, min(width, COLUMNS)).astype(int)
    limit = fit_tolerance(e)
    for row in range(batch if values else 0):
        known, own = ([x[row][:, columns] for x in side] for side in _sides(values))
        names = [source.name for source in values]
        right = _runs(e.values[0][row][:, columns], names, known, limit)
        if right is None or len({run.name for run in right} - {ZEROS}) < 2:
            return None
        wrong = _runs(e.values[1][row][:, columns], names, own, limit)
        if wrong is None:
            return None
        if right != wrong:
            return _finding(row, right, wrong)
    return None


def _sides(values: list[Source]) -> tuple[list[Array], list[Array]]:
    return [source.x for source in values], [source.own for source in values]


def _runs(tokens: Array, names: list[str], known: list[Array], limit: float) -> list[Run] | None:
    """What the tokens of one row are; None where one is nothing that is recorded."""
    starts = np.cumsum([0, *(len(k) for k in known)])
    table = np.concatenate(known)
    runs: list[Run] = []
    ahead = -1  # the place of the token after the last one
    for at, token in enumerate(tokens):
        size = float(np.linalg.norm(token))
        near = np.flatnonzero(np.linalg.norm(table - token, axis=1) <= limit * size)
        name, place = ZEROS, -1
        if size:
            if not near.size:
                return None
            best = ahead if ahead in near else int(near[0])
            which = int(np.searchsorted(starts, best, "right")) - 1
            name, place = names[which], best - int(starts[which])
            ahead = best + 1
        last = runs[-1] if runs else Run(0, 0, "", 0)
        if last.name == name and (name == ZEROS or place == last.first + last.count):
            runs[-1] = Run(last.start, last.count + 1, name, last.first)
        else:
            runs.append(Run(at, 1, name, place))
    return runs


def _finding(row: int, right: list[Run], wrong: list[Run]) -> Finding:
    theirs, ours = next(
        (a, b) for a, b in zip([*right, right[-1]], [*wrong, wrong[-1]], strict=False) if a != b
    )
    used, wanted = ({run.name for run in runs} - {ZEROS} for runs in (wrong, right))
    order = ", ".join(dict.fromkeys(run.name for run in right if run.name != ZEROS))
    text = (
        f"In row {row} of the batch, from token {ours.start} on, the port has {ours}, the "
        f"reference, from token {theirs.start} on, {theirs}."
    )
    if used == wanted:
        return Finding("parts-reordered", text, f"Join the streams in the order {order}.")
    missing = ", ".join(sorted(wanted - used))
    return Finding("another-value", text, f"Take the tokens of {missing}, which the port skips.")
