"""Modulation, gates, residuals, and sums of two recorded values: guidance, a step of a sampler."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice, product

import numpy as np

from lydite.diff.findings.evidence import FEW, Array, Evidence
from lydite.diff.findings.replay.norms_and_activations import norms
from lydite.diff.findings.replay.variants import (
    GLANCE,
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

MAX_PARAMETERS = 16  # that may be missing from a sum


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
    tables = list(_tables(e))
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


def other_residual(e: Evidence) -> Finding | None:
    """x + gate · y without the gate, with another gate, without x or without y."""
    if not is_replayable(e):
        return None
    reference, port = e.values
    limit = fit_tolerance(e)
    values = [source for source in sources(e) if source.x.shape == e.port.shape]
    if e.port.ndim != 3 or e.port.shape[1] < 4:
        return _other_term(e, values)
    tables = list(_tables(e))
    for x, y in _ordered_pairs(values):
        gate = _factors(y.x, reference - x.x, limit)
        if gate is None:
            continue
        right = _gate_name(gate, {t.name: t.parts for t in tables}, limit)
        if right in ("0", None):  # the value is x itself
            continue
        own = {t.name: t.own for t in tables}
        term = _term(right, y.name)
        fix = f"Add {term} to {x.name}."
        for base, name in ((x.own, x.name), (np.zeros_like(x.own), "")):
            used = _factors(y.own, port - base, limit)
            wrong = _gate_name(used, own, limit) if used is not None else None
            if wrong is None or (right == wrong and name):
                continue
            cause = "residual-missing" if not name else "gate-missing" if wrong == "1" else (
                "branch-missing" if wrong == "0" else "other-gate"
            )  # fmt: skip
            ours = [name] if name else []
            ours += [] if wrong == "0" else [_term(wrong, y.name)]
            text = f"The port is {' + '.join(ours) or '0'}, the reference {x.name} + {term}."
            return Finding(cause, text, fix)
        factors = {"1": np.ones_like(gate)}
        factors |= {f"chunk {n} of {t.name}": p for t in tables for n, p in enumerate(t.own)}
        scaled = factors[right][:, None]
        sums = (
            {f"{_term(right, x.name)} + {y.name}": scaled * x.own + y.own} if right != "1" else {}
        )
        sums |= {
            f"{other.name} + {term}": other.own + scaled * y.own
            for other in values
            if other.name not in (x.name, y.name)
        }
        for words, value in sums.items():
            if apart_of(port, value) <= allowed(e):
                text = f"The port is {words}, the reference {x.name} + {term}."
                return Finding("other-sum", text, fix)
    return _missing_term(e, values, tables, limit) or _other_term(e, values)


def _term(gate: str, name: str) -> str:
    return name if gate == "1" else f"{gate} · {name}"


def _other_term(e: Evidence, values: list[Source]) -> Finding | None:
    """A sum of two recorded values with one term missing, or with another value in its place."""
    reference, port = e.values
    limit = e.noise()
    at = e.sample[:GLANCE]
    flat = [(s, s.x.reshape(-1)[at]) for s in values]
    expected = reference.reshape(-1)[at]
    size = float(np.linalg.norm(expected))
    for (x, a), (y, b) in combinations(flat, 2):
        if float(np.linalg.norm(expected - a - b)) > 0.02 * size:
            continue
        if apart_of(reference, x.x + y.x) > limit:
            continue
        for kept, lost in ((x, y), (y, x)):
            right = f"the reference {kept.name} + {lost.name}."
            if apart_of(port, kept.own) <= allowed(e):
                fix = f"Add {lost.name}."
                return Finding("residual-missing", f"The port is {kept.name}, {right}", fix)
            for other in values:
                if other is not lost and apart_of(port, kept.own + other.own) <= allowed(e):
                    return Finding(
                        "other-sum",
                        f"The port is {kept.name} + {other.name}, {right}",
                        f"Add {lost.name}, not {other.name}.",
                    )
        return None
    return None


def sum_gate(e: Evidence, x: Source, y: Source) -> tuple[str, Array, dict[str, Array]] | None:
    """The gate of a reference that is x + gate · y, and all gates that it might have been."""
    limit = max(1e-5, FEW * e.rounding)
    gate = _factors(
        y.x.reshape(len(y.x), -1, y.x.shape[-1]),
        (e.values[0] - x.x).reshape(len(y.x), -1, y.x.shape[-1]),
        limit,
    )
    if gate is None:
        return None
    shape = (len(gate), *(1,) * (e.port.ndim - 2), gate.shape[-1])
    tables = {t.name: t.parts for t in _tables(e)}
    right = _gate_name(gate, tables, limit)
    if right in ("0", None):
        return None
    gates = {"": np.ones(shape)}
    for table, parts in tables.items():
        gates |= {f"chunk {n} of {table} · ": p.reshape(shape) for n, p in enumerate(parts)}
    name = "" if right == "1" else f"{right} · "
    return (name, gates[name], gates)


def _missing_term(
    e: Evidence, values: list[Source], tables: list[Table], limit: float
) -> Finding | None:
    """That the two sides differ by a recorded value, with or without a gate."""
    reference, port = e.values
    least = e.noise() / max(float(np.linalg.norm(reference - port)), 1e-300)
    if least > 0.1:
        return None
    for shape in ((1, *e.port.shape[1:]), e.port.shape[1:]):
        for name, parameter in islice(e.parameters_like(shape), MAX_PARAMETERS):
            if float(np.linalg.norm(reference - port - parameter)) <= e.noise():
                return Finding(
                    "branch-missing",
                    f"The reference is the port's value plus the parameter {name}.",
                    f"Add {name}.",
                )
    for y in values:
        gate = _factors(y.x, reference - port, max(limit, least))
        name = (
            _gate_name(gate, {t.name: t.parts for t in tables}, limit) if gate is not None else ""
        )
        if name and name != "0":
            term = _term(name, y.name)
            return Finding(
                "residual-missing" if y.name.startswith(f"{e.name} [in") else "branch-missing",
                f"The reference is the port's value plus {term}.",
                f"Add {term}.",
            )
    return None


def other_combination(e: Evidence) -> Finding | None:
    """A sum of two recorded values, with other factors: guidance, a step of a sampler."""
    if not is_replayable(e) or e.port.ndim < 3:
        return None
    reference, port = (value.reshape(-1).astype(np.float64) for value in e.values)
    values = [source for source in sources(e) if source.x.size == e.port.size]
    at = e.sample[:GLANCE]
    limit = fit_tolerance(e)
    for a, b in combinations(values, 2):
        x, y = a.x.reshape(-1), b.x.reshape(-1)
        if _solve(x[at], y[at], reference[at], limit) is None:
            continue
        right = _solve(x, y, reference, limit)
        if right is None or min(np.abs(right)) < 1e-3:
            continue  # one of the two is not in the sum
        wrong = _solve(a.own.reshape(-1), b.own.reshape(-1), port, limit)
        names = a.name, b.name
        if wrong is None:
            if (found := _in_some_channels(e, a, b, right, limit)) is not None:
                return found
            continue
        close = max(1e-3, 4 * limit)
        if np.allclose(right, wrong, rtol=close, atol=close / 10) or min(np.abs(wrong)) < 1e-3:
            continue
        if np.isclose(wrong[0] * right[1], wrong[1] * right[0], rtol=close):
            continue  # the whole sum has a factor, which `scaled` and `negated` name
        ours, theirs = (_combination(f, *names) for f in (wrong, right))
        if np.allclose(right, wrong[::-1], rtol=close, atol=close / 10):
            cause, fix = "terms-exchanged", f"Exchange {a.name} and {b.name}."
        elif np.allclose(np.abs(right), np.abs(wrong), rtol=close, atol=close / 10):
            cause, fix = "term-negated", "Check the sign."
        else:
            cause, fix = "other-factors", "Check the factors of the two."
        return Finding(cause, f"The port is {ours}, the reference {theirs}.", fix)
    return None


def _in_some_channels(
    e: Evidence, a: Source, b: Source, right: Array, limit: float
) -> Finding | None:
    """That the sum is taken in some channels only, the others are one of the two values."""
    if a.own.shape != e.port.shape or b.own.shape != e.port.shape:
        return None
    for axis in (1, e.port.ndim - 1):
        names: list[str] = []
        forms = {"sum": right[0] * a.own + right[1] * b.own, a.name: a.own, b.name: b.own}
        for channel in range(e.port.shape[axis]):
            port = e.values[1].take(channel, axis)
            tried = {name: form.take(channel, axis) for name, form in forms.items()}
            names.append(nearest(port, tried, max(3e-3, limit)) or "")
        if "" in names or not 0 < names.count("sum") < len(names):
            continue
        summed = [channel for channel, name in enumerate(names) if name == "sum"]
        other = next(name for name in names if name != "sum")
        return Finding(
            "guided-in-part",
            f"In the port only channels {_numbers(summed)} of {e.axis(axis)} are "
            f"{_combination(right, a.name, b.name)}, as in the reference; the others are {other}.",
            "Combine the two in all channels.",
        )
    return None


def _numbers(numbers: list[int]) -> str:
    """0–2 for neighbours, else a list."""
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1:
        return f"{numbers[0]}–{numbers[-1]}"
    return ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")


def _tables(e: Evidence) -> Iterator[Table]:
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


def _ordered_pairs(values: list[Source]) -> Iterator[tuple[Source, Source]]:
    for x in values:
        yield from ((x, y) for y in values if y.name != x.name)


def _factors(y: Array, value: Array, limit: float) -> Array | None:
    """value = a · y with one a per row of the batch and channel; None where it is not so."""
    power = (y * y).sum(1)
    if not power.all():
        return None
    a = (y * value).sum(1) / power
    left = float(np.linalg.norm(value - a[:, None] * y))
    size = float(np.linalg.norm(value))
    return a if left <= limit * size or size <= limit / 10 * float(np.linalg.norm(y)) else None


def _gate_name(gate: Array, tables: dict[str, list[Array]], limit: float) -> str | None:
    """What a factor is: one, nothing, or a chunk of a table."""
    named = {"1": np.ones_like(gate), "0": np.zeros_like(gate)}
    if float(np.abs(gate).max()) < limit:
        return "0"
    for table, parts in tables.items():
        named |= {f"chunk {n} of {table}": part for n, part in enumerate(parts)}
    return nearest(gate, named, max(3e-3, 8 * limit))


def _solve(a: Array, b: Array, value: Array, limit: float) -> Array | None:
    """The two factors of value = f·a + g·b; None where it is no such sum, or a is b."""
    aa, bb, ab = float(a @ a), float(b @ b), float(a @ b)
    determinant = aa * bb - ab * ab
    if determinant < 1e-6 * aa * bb:
        return None
    av, bv = float(a @ value), float(b @ value)
    factors = np.array([bb * av - ab * bv, aa * bv - ab * av]) / determinant
    left = float(np.linalg.norm(value - factors[0] * a - factors[1] * b))
    size = float(np.linalg.norm(value))
    return factors if left <= limit * size else None


def _combination(factors: Array, a: str, b: str) -> str:
    sign = "+" if factors[1] >= 0 else "−"
    return f"{factors[0]:.4g} · {a} {sign} {abs(factors[1]):.4g} · {b}"
