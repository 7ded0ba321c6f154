"""Attention as a function of q, k and v: scale, cap, bias, mask, rotation and order of heads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import exp
from typing import Any

import ml_dtypes
import numpy as np

from lydite.diff.findings.evidence import Array

FAR = -1e30  # a score that hides a key
GLANCE_ROWS = 24  # queries that a form is tried with first, and fitted to
MAX_FITTED = 2**20  # scores that are computed again and again in a fit
CAPS = (8.0, 30.0, 100.0)  # where the search for a cap of the scores begins


@dataclass(frozen=True)
class Stream:
    """q, k and v of one stream, each (batch, heads, tokens, width of a head)."""

    q: Array
    k: Array
    v: Array
    raw: "Stream | None" = None  # q and k before their norms


@dataclass(frozen=True, eq=False)
class Rotation:
    """Angles of tokens as complex numbers (tokens, pairs); which numbers are a pair."""

    table: Array
    halves: bool
    of: str = "qk"
    keys: Array | None = None  # other angles for k
    lengths: tuple[int, ...] = ()  # of the streams that the tokens are

    def apply(self, x: Array, part: str) -> Array:
        """q, k or v (batch, heads, tokens, width) rotated; numbers behind the pairs are not."""
        if part not in self.of:
            return x
        table = self.keys if part == "k" and self.keys is not None else self.table
        width = 2 * table.shape[-1]
        x, rest = x[..., :width], x[..., width:]
        half = width // 2
        a, b = (x[..., :half], x[..., half:]) if self.halves else (x[..., 0::2], x[..., 1::2])
        turned = (a + 1j * b) * table
        if self.halves:
            return np.concatenate((turned.real, turned.imag, rest), -1)
        pairs = np.stack((turned.real, turned.imag), -1).reshape(x.shape)
        return np.concatenate((pairs, rest), -1)


@dataclass(frozen=True)
class Cap:
    """Scores capped by c · tanh(score / c)."""

    size: float
    place: str = "before the mask"

    def __call__(self, scores: Array) -> Array:
        within = scores if self.place == "without dividing" else scores / self.size
        return self.size * np.tanh(within)


@dataclass(frozen=True, eq=False)
class Form:
    """How attention is computed from the streams."""

    streams: tuple[Stream, ...]
    scale: float = 1.0  # relative to 1/√(width of a head)
    shown: Array | None = None  # which keys a query sees, as (…, queries, keys)
    masked_by: str = "recorded"  # or causal
    axis: int = -1
    bias: Array | None = None
    rotation: Rotation | None = None
    kept: Array | None = None  # by which the probabilities are multiplied
    cap: Cap | None = None
    rounded: tuple[str, Any] | None = None  # scores or probabilities, and the type they are in
    zero_unseeing: bool = False  # queries that see no key give zero, not the mean of all values
    hidden: float = FAR  # the score of a key that is not seen

    @property
    def head(self) -> int:
        """The width of a head."""
        return self.streams[0].q.shape[-1]

    @property
    def tokens(self) -> tuple[int, int]:
        """How many queries and keys there are."""
        return sum(s.q.shape[2] for s in self.streams), sum(s.k.shape[2] for s in self.streams)

    def parts(self) -> tuple[Array, Array, Array]:
        """q, k and v of the streams together, rotated."""
        q, k, v = (np.concatenate([getattr(s, part) for s in self.streams], 2) for part in "qkv")
        if self.rotation is None:
            return q, k, v
        turn = self.rotation.apply
        return turn(q, "q"), turn(k, "k"), turn(v, "v")

    def heads(self, queries: Array | None = None) -> Array:
        """(batch, heads, tokens, width of a head) of the streams together, or of some queries."""
        q, k, v = self.parts()
        q = q if queries is None else q[:, :, queries]
        raw = q @ k.swapaxes(-1, -2)
        return self.weighted(raw * self.head**-0.5, v, queries)

    def weighted(self, scores: Array, v: Array, queries: Array | None = None) -> Array:
        """What the scores (batch, heads, queries, keys), divided by √(width), make of v."""

        def at(table: Array) -> Array:
            return table if queries is None or table.shape[-2] == 1 else table[..., queries, :]

        cap = self.cap
        if cap is not None and cap.place == "before the scale":
            root = self.head**0.5
            scores = cap(scores * root) / root
        scores = scores * self.scale
        if cap is not None and cap.place in ("before the mask", "without dividing"):
            scores = cap(scores)
        scores = scores if self.bias is None else scores + at(self.bias)
        scores = scores if self.shown is None else np.where(at(self.shown), scores, self.hidden)
        if cap is not None and cap.place == "after the mask":
            scores = cap(scores)
        scores = self._rounded("scores", scores)
        scores = np.exp(scores - scores.max(self.axis, keepdims=True))
        scores = self._rounded("probabilities", scores / scores.sum(self.axis, keepdims=True))
        if self.zero_unseeing and self.shown is not None:
            scores = scores * at(self.shown).any(-1, keepdims=True)
        return (scores if self.kept is None else scores * at(self.kept)) @ v

    def _rounded(self, what: str, values: Array) -> Array:
        if self.rounded is None or self.rounded[0] != what:
            return values
        lowest = float(ml_dtypes.finfo(self.rounded[1]).min)  # a row that sees no key stays finite
        with np.errstate(over="ignore"):
            values = np.maximum(values, lowest).astype(np.float32)
            return values.astype(self.rounded[1]).astype(np.float64)

    def result(self, queries: Array | None = None) -> Array:
        """(batch, tokens, width)."""
        return merged(self.heads(queries))


def merged(x: Array) -> Array:
    """(batch, heads, tokens, width of a head) as (batch, tokens, width)."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def glance(rows: slice) -> tuple[Array, Array]:
    """A few of the queries that a value has: their places in the value, and in the attention."""
    count = rows.stop - rows.start
    at = np.unique(np.linspace(0, count - 1, GLANCE_ROWS).astype(int))
    return at, at + rows.start


def fitted(form: Form, rows: slice, value: Array, *, capped: bool) -> Form | None:
    """The form with the scale, and the cap, that come nearest to a value (batch, rows, width)."""
    at, queries = glance(rows)
    q, k, v = form.parts()
    scores = q[:, :, queries] @ k.swapaxes(-1, -2) * form.head**-0.5
    if scores.size > MAX_FITTED:
        return None
    expected = value[:, at].astype(np.float64)

    def changed(logs: Array) -> Form:
        cap = Cap(exp(logs[1]), form.cap.place if form.cap else Cap.place) if capped else form.cap
        return replace(form, scale=exp(logs[0]), cap=cap)

    def left(logs: Array) -> Array:
        return (merged(changed(logs).weighted(scores, v, queries)) - expected).reshape(-1)

    starts = [
        np.array([log, *([np.log(cap)] if capped else [])])
        for log in np.linspace(-4.5, 4.5, 7 if capped else 19)
        for cap in (CAPS if capped else (0.0,))
    ]
    best = min(starts, key=lambda logs: float(np.linalg.norm(left(logs))))
    return changed(_descended(left, best))


def _descended(left: Callable[[Array], Array], at: Array) -> Array:
    """The least of ‖left‖ near a point, by Levenberg and Marquardt."""
    now, damping = left(at), 1e-3
    for _ in range(40):
        steps = 1e-5 * np.eye(len(at))
        slopes = np.stack([(left(at + step) - left(at - step)) / 2e-5 for step in steps], -1)
        squares = slopes.T @ slopes
        damped = squares + damping * np.diag(np.maximum(np.diag(squares), 1e-12))
        move = np.clip(-np.linalg.solve(damped, slopes.T @ now), -1.0, 1.0)
        then = left(at + move)
        if not np.linalg.norm(then) < np.linalg.norm(now):
            damping *= 10
            if damping > 1e8:
                break
            continue
        at, now, damping = at + move, then, damping / 10
        if np.abs(move).max() < 1e-9:
            break
    return at


def divisors(number: int) -> Iterator[int]:
    """Whole numbers that divide it."""
    return (n for n in range(1, number + 1) if number % n == 0)
