"""Sums of a stream and a branch, with or without a gate from a table of chunks."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, islice

import numpy as np

from lydite.diff.findings.affine import negated, scaled
from lydite.diff.findings.evidence import FEW, Array, Evidence
from lydite.diff.findings.parts import parts_reordered
from lydite.diff.findings.rearranged import flipped, memory_order, split_swapped, transposed
from lydite.diff.findings.replay.modulation import Table, chunk_tables
from lydite.diff.findings.replay.norm_forms import NONE, VARIANTS
from lydite.diff.findings.replay.relations import with_relation
from lydite.diff.findings.replay.variants import (
    GLANCE,
    Source,
    allowed,
    apart_of,
    fit_tolerance,
    inputs_of,
    is_replayable,
    nearest,
    sources,
)
from lydite.diff.result import Finding

OF_BRANCH = (transposed, split_swapped, flipped, parts_reordered, memory_order, negated, scaled)
MAX_PARAMETERS = 16  # that may be missing from a sum


def other_residual(e: Evidence) -> Finding | None:
    """x + gate · y without the gate, with another gate, without x or without y."""
    if not is_replayable(e):
        return None
    reference, port = e.values
    limit = fit_tolerance(e)
    values = [source for source in sources(e) if source.x.shape == e.port.shape]
    if e.port.ndim != 3 or e.port.shape[1] < 4:
        return _other_term(e, values) or _left_out(e, values)
    tables = list(chunk_tables(e))
    for x, y in _ordered_pairs(values):
        gate = _factors(y.x, reference - x.x, limit)
        if gate is None:
            continue
        named = gates_of(tables, gate)
        right = _gate_name(gate, named, limit)
        if right in ("0", None):  # the value is x itself
            continue
        own = gates_of(tables, gate, own=True)
        term = _term(right, y.name)
        fix = f"Add {term} to {x.name}."
        for base, name in ((x.own, x.name), (np.zeros_like(x.own), "")):
            used = _factors(y.own, port - base, limit)
            wrong = _gate_name(used, own, limit) if used is not None else None
            if wrong == right and name and used is not None:  # the port's own gate may be another
                wrong = _gate_name(used, named, limit)
            if wrong is None or (right == wrong and name):
                continue
            # The stream is older than the branch that is computed from it.
            is_stream = right == "1" and values.index(y) > values.index(x)
            lost = "residual-missing" if is_stream else "branch-missing"
            cause = "residual-missing" if not name else "gate-missing" if wrong == "1" else (
                lost if wrong == "0" else "other-gate"
            )  # fmt: skip
            ours = [name] if name else []
            ours += [] if wrong == "0" else [_term(wrong, y.name)]
            text = f"The port is {' + '.join(ours) or '0'}, the reference {x.name} + {term}."
            return Finding(cause, text, fix)
        scaled = own[right][:, None]
        sums = [(f"{_term(right, x.name)} + {y.name}", scaled * x.own + y.own, "", x, x)]
        both = f"{right} · ({x.name} + {y.name}), gated as a whole"
        sums.append((both, scaled * (x.own + y.own), "", x, x))
        for other in values:
            if other.name not in (x.name, y.name):
                ours = f"{other.name} + {term}", f"{x.name} + {_term(right, other.name)}"
                why = _replaced(values, x, y, other), _replaced(values, y, x, other)
                sums.append((ours[0], other.own + scaled * y.own, why[0], other, x))
                sums.append((ours[1], x.own + scaled * other.own, why[1], other, y))
        for words, value, why, used, lost_one in sums:
            if apart_of(port, value) <= allowed(e):
                text = f"The port is {words}, the reference {x.name} + {term}{why}."
                found = Finding("other-sum", text, fix)
                return with_relation(e, found, used.name, lost_one.name)
        for label, f in VARIANTS.items():
            if label != NONE and apart_of(port, x.own + scaled * f(y.own)) <= allowed(e):
                used = _term(right, f"{label}({y.name})")
                text = f"The port adds {used} to {x.name}, the reference {term}."
                return Finding("activation-extra", text, f"{fix[:-1]}, without an activation.")
    return _missing_term(e, values, tables, limit) or _other_term(e, values)


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
    named = gates_of(list(chunk_tables(e)), gate)
    right = _gate_name(gate, named, limit)
    if right in ("0", None):
        return None
    gates = {"" if n == "1" else f"{n} · ": g.reshape(shape) for n, g in named.items() if n != "0"}
    name = "" if right == "1" else f"{right} · "
    return (name, gates[name], gates)


def rearranged_branch(e: Evidence) -> Finding | None:
    """What is added to the input of the module is the reference's in another order, or scaled."""
    if not is_replayable(e) or not e.slot.startswith("out"):
        return None
    for source in inputs_of(e):
        if source.x.shape != e.port.shape:
            continue
        right, wrong = (v - s for v, s in zip(e.values, (source.x, source.own), strict=True))
        size = float(np.linalg.norm(right))
        if size <= 1e-3 * e.norms[0] or float(np.linalg.norm(wrong)) <= 1e-3 * e.norms[0]:
            continue
        branch = replace(
            e, reference=right, port=wrong, inputs={}, floor=e.rounding * e.norms[0] / size
        )
        for hypothesis in OF_BRANCH:
            found = hypothesis(branch)
            if found is not None and found.confidence == "certain":
                text = f"This is about what is added to {source.name}. {found.evidence}"
                return Finding(found.cause, text, found.fix)
    return None


def _replaced(values: list[Source], lost: Source, kept: Source, other: Source) -> str:
    """Which term of a sum is another value. The residual is older than the branch made from it."""
    term = "residual" if values.index(lost) > values.index(kept) else "branch"
    return f": its {term} is {other.name}, not {lost.name}"


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
            right = f"the reference {kept.name} + {lost.name}"
            if apart_of(port, kept.own) <= allowed(e):
                fix = f"Add {lost.name}."
                return Finding("residual-missing", f"The port is {kept.name}, {right}.", fix)
            for other in values:
                if other is not lost and apart_of(port, kept.own + other.own) <= allowed(e):
                    why = _replaced(values, lost, kept, other)
                    found = Finding(
                        "other-sum",
                        f"The port is {kept.name} + {other.name}, {right}{why}.",
                        f"Add {lost.name}, not {other.name}.",
                    )
                    return with_relation(e, found, other.name, lost.name)
        return None
    return None


def _left_out(e: Evidence, values: list[Source]) -> Finding | None:
    """That what a part of the module gives is missing from a sum of three or more."""
    reference, port = e.values
    for source in (s for s in values if s.name.startswith(f"{e.name}.")):
        size = float(np.linalg.norm(source.x))
        if size > 1e-3 * e.norms[0] and apart_of(reference - port, source.x) <= allowed(e):
            return Finding(
                "branch-missing",
                f"The reference is the port's value plus {source.name}.",
                f"Add {source.name}: {source.name.rpartition('.')[2]} is missing from the sum.",
            )
    return None


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
        name = _gate_name(gate, gates_of(tables, gate), limit) if gate is not None else ""
        if name and name != "0":
            term = _term(name, y.name)
            return Finding(
                "residual-missing" if y.name.startswith(f"{e.name} [in") else "branch-missing",
                f"The reference is the port's value plus {term}.",
                f"Add {term}.",
            )
    return None


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


def gates_of(tables: list[Table], like: Array, *, own: bool = False) -> dict[str, Array]:
    """What a factor of a branch may be: one, nothing, a chunk of a table or a function of it."""
    named = {"1": np.ones_like(like), "0": np.zeros_like(like)}
    for table in tables:
        for n, part in enumerate(table.own if own else table.parts):
            named[f"chunk {n} of {table.name}"] = part
            named[f"tanh(chunk {n} of {table.name})"] = np.tanh(part)
    for table in tables:
        for n, part in enumerate(table.own if own else table.parts):
            named[f"sigmoid(chunk {n} of {table.name})"] = 1 / (1 + np.exp(-part))
            named[f"(1 + chunk {n} of {table.name})"] = 1 + part
    return named


def _gate_name(gate: Array, named: dict[str, Array], limit: float) -> str | None:
    """What a factor is: one, nothing, or a chunk of a table."""
    if float(np.abs(gate).max()) < limit:
        return "0"
    return nearest(gate, named, max(3e-3, 8 * limit))
