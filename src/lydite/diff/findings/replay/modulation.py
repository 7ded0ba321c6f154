"""A norm with scale and shift from a table of chunks (adaptive layer norm)."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.norms_and_activations import norms
from lydite.diff.findings.replay.variants import (
    Candidate,
    Source,
    allowed,
    apart_of,
    fit_tolerance,
    is_replayable,
    nearest,
    simplest,
    sources,
    told_apart,
)
from lydite.diff.result import Finding


@dataclass(frozen=True)
class Table:
    """A table in chunks of the value's width: one row for each row of the batch."""

    name: str
    parts: list[Array]
    own: list[Array]  # the port's


def other_modulation(e: Evidence) -> Finding | None:
    """A norm times (1 + scale) plus shift, with other chunks of the table or without the 1."""
    if not is_replayable(e) or e.port.ndim != 3 or e.port.shape[1] < 4:
        return None
    tables = list(chunk_tables(e))
    reference, port = e.values
    limit = fit_tolerance(e)
    for source in sources(e) if tables else ():
        if source.x.shape != e.port.shape:
            continue
        right = _scale_and_shift(source.x, reference, limit)
        wrong = _scale_and_shift(source.own, port, limit) if right else None
        if right is None:
            continue
        if wrong is None:
            if (found := _other_modulated(e, source, right)) is not None:
                return found
            continue
        name = source.name
        for table, other in product(tables, tables):
            expected = _named_chunks(right, table.parts, limit)
            used = _named_chunks(wrong, other.own, limit) if expected else None
            if expected is None or used is None or (expected == used and other is table):
                continue
            if other is not table:
                return Finding(
                    "another-value",
                    f"The port modulates {name} with the chunks of {other.name}, the reference "
                    f"with those of {table.name}.",
                    f"Use {table.name}, computed anew in each step.",
                )
            return Finding(
                _modulation_cause(expected, used),
                f"The port is {name} · {used[0]} + {used[1]}, the reference {name} · {expected[0]} "
                f"+ {expected[1]}, with the chunks of {table.name}.",
                f"Multiply by {expected[0]} and add {expected[1]}.",
            )
    return None


def _other_modulated(e: Evidence, normed: Source, right: tuple[Array, Array]) -> Finding | None:
    """That the modulated value is another norm of the right input, or the norm of another one."""
    scale, shift = (value[:, None] for value in right)
    values = [s for s in sources(e) if s.x.shape == e.port.shape and s.name != normed.name]
    for source in values:
        lefts = [(c.name, apart_of(normed.x, c.value)) for c in norms(source.x, -1)]
        kind = simplest(lefts)
        if dict(lefts)[kind] > e.noise():
            continue
        told = told_apart(
            e,
            (Candidate(c.name, c.value * scale + shift) for c in norms(source.x, -1)),
            lambda source=source: (
                Candidate(c.name, c.value * scale + shift) for c in norms(source.own, -1)
            ),
            reference_is=kind,
        )
        if told is not None:
            return Finding(
                "other-norm",
                f"The port modulates a {told.wrong} of {source.name}, the reference a "
                f"{told.right}; {told.leaves}.",
                f"Use a {told.right}.",
            )
        for other in values:
            value = next(c.value for c in norms(other.own, -1) if c.name == kind)
            if other is not source and apart_of(e.values[1], value * scale + shift) <= allowed(e):
                return Finding(
                    "another-input",
                    f"The port modulates the norm of {other.name}, the reference that of "
                    f"{source.name}.",
                    f"Compute the norm from {source.name}.",
                )
        return None
    return None


def chunk_tables(e: Evidence) -> Iterator[Table]:
    """Tables near the value, in chunks of its width."""
    batch, width = e.port.shape[0], e.port.shape[-1]
    for source in sources(e):
        value = source.x
        if value.size % (batch * width) or not 2 <= value.size // (batch * width) <= 12:
            continue
        if value.shape[0] == batch and value.shape[-1] % width == 0 and value.shape[-1] > width:
            count = value.size // (batch * width)
            parts, own = (np.split(v.reshape(batch, -1), count, -1) for v in (value, source.own))
            yield Table(source.name, parts, own)


def _scale_and_shift(x: Array, value: Array, limit: float) -> tuple[Array, Array] | None:
    """What turns x into the value, one number each per row of the batch and channel."""
    mean, expected = x.mean(1, keepdims=True), value.mean(1, keepdims=True, dtype=np.float64)
    power = ((x - mean) ** 2).sum(1, keepdims=True)
    if not power.all():
        return None
    scale = ((x - mean) * (value - expected)).sum(1, keepdims=True) / power
    shift = expected - scale * mean
    left = float(np.linalg.norm(value - x * scale - shift))
    return (scale[:, 0], shift[:, 0]) if left <= limit * float(np.linalg.norm(value)) else None


def _named_chunks(
    fit: tuple[Array, Array], parts: list[Array], limit: float
) -> tuple[str, str] | None:
    """Which chunks a scale and a shift are."""
    scale, shift = fit
    scales = {f"(1 + chunk {n})": 1 + part for n, part in enumerate(parts)}
    scales |= {f"chunk {n}": part for n, part in enumerate(parts)}
    shifts = {f"chunk {n}": part for n, part in enumerate(parts)}
    limit = max(3e-3, 8 * limit)
    first, second = nearest(scale, scales, limit), nearest(shift, shifts, limit)
    return (first, second) if first and second else None


def _modulation_cause(right: tuple[str, str], wrong: tuple[str, str]) -> str:
    plain = right[0].strip("()").removeprefix("1 + ")
    if wrong == (plain, right[1]):
        return "one-plus-missing"
    exchanged = wrong[1] == plain and right[1] in wrong[0]
    return "scale-shift-exchanged" if exchanged else "other-chunks"
