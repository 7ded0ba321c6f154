"""A decoded value as a picture: in another range, not clamped, or rounded."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.variants import (
    GLANCE,
    Candidate,
    apart_of,
    is_replayable,
    sources,
    told_apart,
)
from lydite.diff.result import Finding

MAX_PIXELS = 2**15  # numbers of a picture that are compared
RANGES: dict[str, Callable[[Array], Array]] = {
    "x / 2 + 0.5": lambda x: x / 2 + 0.5,
    "x": lambda x: x,
    "(x + 1) · 127.5": lambda x: (x + 1) * 127.5,
    "255 · x": lambda x: 255 * x,
    "x + 0.5": lambda x: x + 0.5,
    "x / 2": lambda x: x / 2,
    "x + 1": lambda x: x + 1,
    "2 · x − 1": lambda x: 2 * x - 1,
    "x / 255": lambda x: x / 255,
    "x / 127.5 − 1": lambda x: x / 127.5 - 1,
    "sigmoid(x)": lambda x: 1 / (1 + np.exp(-x)),
    "tanh(x)": np.tanh,
}
LIMITS: dict[str, tuple[float, float] | None] = {
    "": None,
    " clamped to 0 … 1": (0.0, 1.0),
    " clamped to −1 … 1": (-1.0, 1.0),
    " clamped to 0 … 255": (0.0, 255.0),
}
DEPTHS: dict[str, Callable[[Array], Array]] = {
    "": lambda x: x,
    " rounded to 8 bits": lambda x: np.round(x * 255) / 255,
    " rounded down to 8 bits": lambda x: np.floor(x * 255) / 255,
    " rounded to whole numbers": np.round,
    " rounded down to whole numbers": np.floor,
}


def other_range(e: Evidence) -> Finding | None:
    """A picture (3 channels) from a decoded value, with another range, clamp or rounding."""
    shape = e.port.shape
    if not is_replayable(e) or e.port.ndim < 3 or 3 not in (shape[-3], shape[-1]):
        return None
    every = np.linspace(0, e.port.size - 1, min(e.port.size, MAX_PIXELS)).astype(int)
    few = e.sample[:GLANCE]
    expected = e.values[0].reshape(-1)
    for source in sources(e):
        if source.x.shape != shape:
            continue
        x, own = source.x.reshape(-1), source.own.reshape(-1)
        near = 1e-3 * float(np.linalg.norm(expected[few]))
        right = next(
            (c.name for c in _forms(x[few]) if apart_of(expected[few], c.value) < near), ""
        )
        if not right:
            continue
        seen = replace(e, reference=expected[every], port=e.values[1].reshape(-1)[every])
        tried = list(_forms(x[every]))
        told = told_apart(
            seen,
            tried,
            lambda own=own: _forms(own[every]),
            what=f"ranges of {source.name}" if right != "x" else "",
        )
        if told is not None:
            return Finding(
                "other-range",
                f"The port is {told.wrong}, where x is {source.name}, the reference {told.right}; "
                f"{told.leaves}.",
                f"Compute {told.right}.",
            )
    return None


def _forms(x: Array) -> Iterator[Candidate]:
    for (words, value), (limits, bounds), (depth, rounded) in product(
        ((words, f(x)) for words, f in RANGES.items()), LIMITS.items(), DEPTHS.items()
    ):
        if bounds is None and "whole" in depth:
            continue
        cut = value if bounds is None else np.clip(value, *bounds)
        yield Candidate(words + limits + depth, rounded(cut))
