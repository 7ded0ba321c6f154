"""Tokens that are sums of recorded tokens and rows of parameters: embeddings with positions.

A class token, a table of positions, types of tokens: which terms each token has on both sides.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import mode

import ml_dtypes
import numpy as np

from lydite.diff.findings.evidence import FEW, Array, Evidence
from lydite.diff.findings.replay.variants import is_replayable, sources
from lydite.diff.result import Finding

MAX_VALUES = 12  # recorded values whose tokens may be terms
MAX_TABLES = 12  # parameters whose rows may be
MAX_ROWS = 1024  # of a table
MAX_TOKENS = 48  # of a value that are explained
MAX_SIZE = 2**21  # numbers of a recorded value
NEAR = 2e-6  # relative error of a sum of two terms
NARROW = {" in float16": np.float16, " in bfloat16": ml_dtypes.bfloat16}

Terms = tuple[tuple[str, int], ...]  # names, and rows relative to the token; empty: zero


@dataclass(frozen=True, eq=False)
class Atoms:
    """Rows that may be terms of a token: their names, places and values."""

    names: list[str]
    places: list[int]
    values: Array  # (rows, width)

    @property
    def lengths(self) -> Counter[str]:
        """How many rows each has."""
        return Counter(self.names)

    def terms(self, token: Array, at: int, limit: float, like: Terms) -> Terms | None:
        """The one or two rows that a token is the sum of, if possible those named."""
        size = float(np.linalg.norm(token))
        if size == 0.0:
            return ()
        found = [self._named(rows, at) for rows in self._sums(token, limit * size)]
        if not found:
            return None
        return like if like in found else min(found, key=len)

    def _named(self, rows: tuple[int, ...], at: int) -> Terms:
        return tuple(sorted((self.names[n], self.places[n] - at) for n in rows))

    def _sums(self, token: Array, limit: float) -> Iterator[tuple[int, ...]]:
        """Rows, and pairs of them, whose sum is near the token."""
        alone = np.linalg.norm(self.values - token, axis=1) <= limit
        yield from ((int(n),) for n in np.flatnonzero(alone))
        direction = np.random.default_rng(0).standard_normal(len(token))
        direction /= np.linalg.norm(direction)
        along = self.values @ direction
        order = np.argsort(along)
        rest = float(token @ direction) - along
        first = np.searchsorted(along[order], rest - limit)
        last = np.searchsorted(along[order], rest + limit)
        for n in np.flatnonzero(last > first):
            for m in order[first[n] : last[n]]:
                if n < m and np.linalg.norm(self.values[n] + self.values[m] - token) <= limit:
                    yield (int(n), int(m))


def other_terms(e: Evidence) -> Finding | None:
    """Tokens with a term missing, with another row of a table, or in another order."""
    if not is_replayable(e, least=16) or e.port.ndim != 3 or e.port.shape[2] < 8:
        return None
    _, count, width = e.port.shape
    apart = np.linalg.norm(e.values[1] - e.values[0], axis=(1, 2))
    row = int(apart.argmax())
    tables = list(_tables(e, width))
    if not tables:
        return None
    known, own = (_atoms(e, row, tables, own=side) for side in (False, True))
    limit = max(NEAR, FEW * e.rounding)
    at = np.unique(np.linspace(0, count - 1, min(count, MAX_TOKENS)).astype(int))
    pairs: list[tuple[int, Terms, Terms]] = []
    right: Terms | None = ()
    for token in at:
        right = known.terms(e.values[0][row, token], int(token), limit, right)
        if right is None:
            return None
        wrong = own.terms(e.values[1][row, token], int(token), limit, right)
        if wrong is None:
            return None
        pairs.append((int(token), right, wrong))
    differ = [pair for pair in pairs if pair[1] != pair[2]]
    if not differ or not any(len(right) > 1 for _, right, _ in pairs):
        return None
    return _finding(differ, {**known.lengths, **own.lengths})


def _tables(e: Evidence, width: int) -> Iterator[tuple[str, Array]]:
    """Parameters of the module, and of those inside, with rows of the width of a token."""
    for name, value in islice(e.parameters_inside(width), MAX_TABLES):
        rows = value.reshape(-1, width)
        if len(rows) <= MAX_ROWS:
            yield name, rows
            for words, dtype in NARROW.items():
                yield name + words, rows.astype(dtype).astype(np.float64)


def _atoms(e: Evidence, row: int, tables: list[tuple[str, Array]], *, own: bool) -> Atoms:
    """Tokens of recorded values in one row of the batch, and rows of the tables."""
    named: list[tuple[str, Array]] = []
    for source in sources(e):
        tokens = _tokens(source.own if own else source.x, row, e.port.shape)
        if tokens is not None and len(named) < MAX_VALUES:
            named.append((source.name, tokens))
    named += tables
    keep: dict[bytes, tuple[str, int, Array]] = {}
    for name, rows in named:
        for place, value in enumerate(rows):
            keep.setdefault(value.astype(np.float32).tobytes(), (name, place, value))
    names, places, values = zip(*keep.values(), strict=True)
    return Atoms(list(names), list(places), np.array(values, np.float64))


def _tokens(value: Array, row: int, shape: tuple[int, ...]) -> Array | None:
    """The tokens that a recorded value has in one row of the batch; those of a picture too."""
    batch, _, width = shape
    if value.ndim < 3 or len(value) not in (1, batch) or value.size > MAX_SIZE:
        return None
    value = value[row if len(value) == batch else 0]
    if value.ndim == 2:
        return value if value.shape[1] == width else None
    return value.reshape(width, -1).T if len(value) == width else None


def _finding(differ: list[tuple[int, Terms, Terms]], lengths: Mapping[str, int]) -> Finding:
    first, right, wrong = differ[0]
    theirs, ours = (_words(terms, first) for terms in (right, wrong))
    text = f"Token {first} is {ours} in the port, {theirs} in the reference"
    text += f"; so are {len(differ) - 1} other tokens." if len(differ) > 1 else "."
    names, used = ({name for name, _ in terms} for terms in (right, wrong))
    missing = [term for term in right if term not in wrong]
    if set(wrong) < set(right):
        lost = _words(tuple(missing), first)
        return Finding(
            "term-missing",
            text,
            f"Add {lost}: it is missing from the sum, or zero because it was not loaded.",
        )
    rounded = {name for name in used if name.endswith(tuple(NARROW))} - names
    if rounded and {re.sub(r" in \w*float16$", "", name) for name in used} == names:
        return Finding("rounded", text, "Keep the table in the reference's precision.")
    if names == used and len(missing) < len(right):
        by = mode(dict(b)[n] - at for _, a, b in differ for n, at in a if dict(b).get(n, at) != at)
        return Finding(
            "other-positions",
            text,
            f"Take the rows of {missing[0][0]} from the reference's place: they are displaced by "
            f"{by:+d} position{'s' if abs(by) > 1 else ''} (offset, or rows in another order).",
        )
    order = {name for _, terms, _ in differ for name, _ in terms} == {
        name for _, _, terms in differ for name, _ in terms
    }
    if order:
        fix = f"Make token {first} of {theirs}: the tokens are joined in another order."
        return Finding("parts-reordered", text, fix)
    fix = f"Make token {first} of {theirs}."
    for name in used - names:
        for wanted in names - used:
            if lengths[name] > lengths[wanted]:
                fix = f"Add {wanted}, not the first rows of {name}: that is cropped, not resized."
    return Finding("another-value", text, fix)


def _words(terms: Terms, at: int) -> str:
    """The terms of a token for people."""
    return " + ".join(f"row {at + place} of {name}" for name, place in terms) or "zero"
