"""A norm with scale and shift from a table of chunks (adaptive layer norm)."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.norm_forms import norms
from lydite.diff.findings.replay.relations import with_relation
from lydite.diff.findings.replay.variants import (
    Candidate,
    Source,
    allowed,
    apart_of,
    fit_tolerance,
    is_replayable,
    nearest,
    nearest_first,
    simplest,
    sources,
    told_apart,
)
from lydite.diff.result import Finding

MAX_CHUNKS = 12
NOTHING = "nothing"  # in the place of a scale or shift
MAX_PARAMETERS = 64  # that are tried as a part of a table


@dataclass(frozen=True)
class Table:
    """A table in chunks of the value's width: one row for each row of the batch."""

    name: str
    parts: list[Array]
    own: list[Array]  # the port's


def other_modulation(e: Evidence) -> Finding | None:
    """A value times (1 + scale) plus shift, with other chunks of the table or without the 1."""
    if not is_replayable(e) or e.port.ndim != 3 or e.port.shape[1] < 4:
        return None
    tables = list(chunk_tables(e))
    reference, port = e.values
    limit = fit_tolerance(e)
    values = list(_modulatable(e)) if tables else []
    # The value itself under another name is modulated by nothing: it may be, where no other is.
    values.sort(key=lambda source: apart_of(reference, source.x) <= e.noise())
    for source in values:
        right = _scale_and_shift(source.x, reference, limit)
        wrong = _scale_and_shift(source.own, port, limit) if right else None
        if right is None:
            continue
        name = source.name
        for table, other in product(tables, tables):
            expected = _named_chunks(right, table.parts, limit, lacking=True) if wrong else None
            used = _named_chunks(wrong, other.own, limit, lacking=True) if wrong else None
            if expected is None or used is None or (expected == used and other is table):
                continue
            if expected == (NOTHING, NOTHING) or (other is not table and used == expected[::-1]):
                continue
            if other is not table and NOTHING not in used:
                found = Finding(
                    "another-value",
                    f"The port modulates {name} with the chunks of {other.name}, the reference "
                    f"with those of {table.name}.",
                    f"Use {table.name}{', computed anew in each step' * _of_a_step(other.name)}.",
                )
                return with_relation(e, found, *_different_terms(other.name, table.name))
            return Finding(
                _modulation_cause(expected, used),
                f"The port is {_words(name, used)}, the reference {_words(name, expected)}, with "
                f"the chunks of {table.name}.",
                f"Compute {_words(name, expected)}.",
            )
        if (found := _other_modulated(e, source, right)) is not None:
            return found
    return None


def _different_terms(used: str, right: str) -> tuple[str, str]:
    """Of two sums the first terms that differ."""
    terms = zip(used.split(" + "), right.split(" + "), strict=False)
    return next((pair for pair in terms if pair[0] != pair[1]), (used, right))


def _of_a_step(name: str) -> bool:
    """Whether a name is that of a value of another step or call."""
    return bool(re.search(r", (step|call) \d+", name))


def _words(name: str, chunks: tuple[str, str]) -> str:
    """A value with its scale and shift for people."""
    if chunks == (NOTHING, NOTHING):
        return f"{name}, not modulated"
    text = name if chunks[0] == NOTHING else f"{name} · {chunks[0]}"
    return text if chunks[1] == NOTHING else f"{text} + {chunks[1]}"


def _modulatable(e: Evidence) -> Iterator[Source]:
    """Recorded values of the value's shape, and the first and the last tokens of longer ones."""
    longer: list[Source] = []
    for source in sources(e):
        if source.x.shape == e.port.shape:
            yield source
        elif source.x.ndim == 3 and source.x.shape[::2] == e.port.shape[::2]:
            longer.append(source)
    count = e.port.shape[1]
    for source in (s for s in longer if s.x.shape[1] > count):
        for first in (0, source.x.shape[1] - count):
            cut = slice(first, first + count)
            name = f"tokens {first} to {first + count - 1} of {source.name}"
            yield Source(name, source.x[:, cut], lambda s=source, cut=cut: s.own[:, cut])


def _other_modulated(e: Evidence, normed: Source, right: tuple[Array, Array]) -> Finding | None:
    """That the modulated value is another norm of the right input, or the norm of another one."""
    scale, shift = (value[:, None] for value in right)
    others = [s for s in _modulatable(e) if s.name != normed.name]
    values = [s for s in others if not s.name.startswith("tokens ")]
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
        normed_others = [
            (other, next(c.value for c in norms(other.own, -1) if c.name == kind))
            for other in others
        ]
        # A norm's result has the same norm as what it was computed from: that comes first.
        normed_others.sort(key=lambda each: _is_normed(each[0].own, each[1]))
        for other, value in normed_others:
            if other is not source and apart_of(e.values[1], value * scale + shift) <= allowed(e):
                found = Finding(
                    "another-input",
                    f"The port modulates the norm of {other.name}, the reference that of "
                    f"{source.name}.",
                    f"Compute the norm from {source.name}.",
                )
                return with_relation(e, found, other.name, source.name)
        break
    for other in others:
        if apart_of(e.values[1], other.own * scale + shift) <= allowed(e):
            found = Finding(
                "another-input",
                f"The port modulates {other.name}, the reference {normed.name}.",
                f"Modulate {normed.name}.",
            )
            return with_relation(e, found, other.name, normed.name)
    for other in norms(normed.own, -1):
        if apart_of(e.values[1], other.value * scale + shift) <= allowed(e):
            return Finding(
                "norm-extra",
                f"The port modulates a {other.name.partition(' with ')[0]} of {normed.name}, the "
                "reference that value itself, without a norm.",
                "Remove the norm before the modulation.",
            )
    return None


def _is_normed(value: Array, norm: Array) -> bool:
    """Whether a norm does not change a value, but for its eps."""
    return apart_of(value, norm) <= 1e-2 * float(np.linalg.norm(norm))


def chunk_tables(e: Evidence) -> Iterator[Table]:
    """Tables near the value, in chunks of its width, also with a parameter added to them."""
    batch, width = e.port.shape[0], e.port.shape[-1]
    for source in sources(e):
        value = source.x
        if value.shape == (batch, width):  # alone, or the same for all chunks plus a parameter
            yield Table(source.name, [value], [source.own])
            yield from _with_parameters(e, source.name, [value], [source.own])
        if value.size % (batch * width) or not 2 <= value.size // (batch * width) <= MAX_CHUNKS:
            continue
        count = value.size // (batch * width)
        is_wide = value.shape[-1] % width == 0 and value.shape[-1] > width
        if value.shape[0] == batch and (is_wide or value.shape == (batch, count, width)):
            both = [v.reshape(batch, -1) for v in (value, source.own)]
            for name, cut in (
                (source.name, lambda v, n=count: np.split(v, n, -1)),
                (f"{source.name}, read with the chunks as the inner axis", partial(_inner, count)),
            ):
                parts, own = (cut(v) for v in both)
                yield Table(name, parts, own)
                yield from _with_parameters(e, name, parts, own)


def _inner(count: int, value: Array) -> list[Array]:
    """Every nth number of each row, as a chunk each."""
    return [value[:, n::count] for n in range(count)]


def _with_parameters(
    e: Evidence, name: str, parts: list[Array], own: list[Array]
) -> Iterator[Table]:
    """A table plus a parameter of the model (scale_shift_table), the nearest module's first."""
    width = e.port.shape[-1]
    counts = (len(parts),) if len(parts) > 1 else range(2, MAX_CHUNKS + 1)
    shapes = [shape for n in counts for shape in ((n, width), (1, n, width))]
    found = [entry for shape in shapes for entry in e.parameters_like(shape)]
    for parameter, value in nearest_first(found, e.name)[:MAX_PARAMETERS]:
        rows = value.reshape(-1, width)
        for words, order in _row_orders(len(rows)):
            sides = (
                [side[n % len(side)] + rows[row] for n, row in enumerate(order)]
                for side in (parts, own)
            )
            yield Table(f"{name} + {parameter}{words}", *sides)


def _row_orders(count: int) -> Iterator[tuple[str, list[int]]]:
    """The rows of a parameter in order, and with shift and scale exchanged in each half or third.

    Shift, scale and gate for attention, then for the feed-forward; or shift and scale alone.
    """
    yield "", list(range(count))
    group = 3 if count % 3 == 0 else 2
    if count % group == 0 and count // group <= 2:
        firsts = range(0, count, group)
        order = [n for at in firsts for n in (at + 1, at, *range(at + 2, at + group))]
        yield f" with the rows in the order {order}: shift and scale exchanged", order
    if group == 3 and count == 6:
        yield " with its halves exchanged", [3, 4, 5, 0, 1, 2]


def other_modulated_input(e: Evidence) -> Finding | None:
    """The layer takes a value times (1 + scale) plus shift, with other chunks or without the 1."""
    if e.layer is None or e.port.ndim != 3 or e.port.shape[1] < 4:
        return None
    tables = list(chunk_tables(e))
    limit = fit_tolerance(e)
    values = [s for s in sources(e) if s.x.shape == e.port.shape] if tables else []
    for source in values:
        fit = _scale_and_shift(source.x, e.values[0], limit)
        named = (
            [(t, _named_chunks(fit, t.parts, limit, lacking=True)) for t in tables] if fit else []
        )
        right = next(((t, names) for t, names in named if names and names[0] != NOTHING), None)
        if right is None or fit is None:
            continue
        table, (scale, shift) = right
        usual = f"{_words(source.name, (scale, shift))}, with the chunks of {table.name}"
        others = list(_modulated(source, scale, table, tables, shifted=shift != NOTHING))
        tried = [Candidate(usual, e.values[0]), *others]
        told = told_apart(
            e, [c for c in tried if c.name != usual or c is tried[0]], reference_is=usual
        )
        if told is not None:
            used = re.search(
                r" · (\(1 \+ chunk \d+\)|chunk \d+)(?: \+ (chunk \d+))?, with", told.wrong
            )
            cause = "modulation-missing"
            if used is not None:
                cause = _modulation_cause((scale, shift), (used[1], used[2] or NOTHING))
            found = Finding(
                cause,
                f"The port takes {told.wrong}, the reference {usual}; {told.leaves}.",
                f"Compute {_words(source.name, (scale, shift))}.",
            )
            other = told.wrong.partition(", with the chunks of ")[2] or table.name
            return with_relation(e, found, *_different_terms(other, table.name))
        return _other_value_modulated(e, source, values, fit)
    return None


def _other_value_modulated(
    e: Evidence, right: Source, values: list[Source], fit: tuple[Array, Array]
) -> Finding | None:
    """The layer takes another recorded value with the right scale and shift: a norm is missing."""
    scale, shift = (part[:, None] for part in fit)
    tried = [Candidate(s.name, s.x * scale + shift) for s in values if s.name != right.name]
    told = told_apart(e, [Candidate(right.name, e.values[0]), *tried], reference_is=right.name)
    if told is None:
        return None
    found = Finding(
        "another-input",
        f"The port modulates {told.wrong}, the reference {right.name}; {told.leaves}.",
        f"Modulate {right.name}.",
    )
    return with_relation(e, found, told.wrong, right.name)


def _modulated(
    source: Source, scale: str, right: Table, tables: list[Table], *, shifted: bool
) -> Iterator[Candidate]:
    """A value modulated with any two chunks of the right table, and with all others as it is."""
    x = source.x
    count = len(right.parts)
    scale_at = int(re.sub(r"\D", "", scale.replace("1 + ", "")))
    plain = "1 + " not in scale

    def candidate(table: Table, first: int, second: int | None, one: bool) -> Candidate:
        value = x * (table.parts[first][:, None] + one)
        value = value if second is None else value + table.parts[second][:, None]
        factor = f"(1 + chunk {first})" if one else f"chunk {first}"
        chunks = factor, NOTHING if second is None else f"chunk {second}"
        return Candidate(f"{_words(source.name, chunks)}, with the chunks of {table.name}", value)

    seconds = [*range(count), None] if shifted else [None, *range(count)]
    for first, second, one in product(range(count), seconds, (not plain, plain)):
        yield candidate(right, first, second, one)
    for table in (t for t in tables if t is not right and scale_at < len(t.parts)):
        for second in range(min(len(table.parts), count)) if shifted else (None,):
            yield candidate(table, scale_at, second, not plain)
    yield Candidate(f"{source.name}, not modulated", x)


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
    fit: tuple[Array, Array], parts: list[Array], limit: float, *, lacking: bool = False
) -> tuple[str, str] | None:
    """Which chunks a scale and a shift are; where they may be lacking, also a 1 and a 0."""
    scale, shift = fit
    scales = {f"(1 + chunk {n})": 1 + part for n, part in enumerate(parts)}
    scales |= {f"chunk {n}": part for n, part in enumerate(parts)}
    shifts = {f"chunk {n}": part for n, part in enumerate(parts)}
    limit = max(3e-3, 8 * limit)
    first, second = nearest(scale, scales, limit), nearest(shift, shifts, limit)
    if lacking:
        size = limit * max(float(np.abs(part).max()) for part in parts)
        first = NOTHING if float(np.abs(scale - 1).max()) <= size else first
        second = NOTHING if float(np.abs(shift).max()) <= size else second
    return (first, second) if first and second else None


def _modulation_cause(right: tuple[str, str], wrong: tuple[str, str]) -> str:
    plain = right[0].strip("()").removeprefix("1 + ")
    if wrong == (NOTHING, NOTHING):
        return "modulation-missing"
    if NOTHING in wrong and NOTHING not in right:
        return "shift-missing" if wrong[1] == NOTHING else "scale-missing"
    if wrong == (plain, right[1]):
        return "one-plus-missing"
    exchanged = wrong[1] == plain and right[1] in wrong[0]
    return "scale-shift-exchanged" if exchanged else "other-chunks"
