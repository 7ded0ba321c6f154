"""Steps of samplers: sums of a sample, a prediction and an earlier prediction.

A step of second order (DPM-Solver++ 2M, UniPC, Adams and Bashforth) is a·x + b·y + c·z, where z is
the prediction y of the step before. Sums of two values are in `guidance`.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.variants import (
    GLANCE,
    Source,
    fit_tolerance,
    is_replayable,
    sources,
)
from lydite.diff.result import Finding

MAX_TERMS = 12  # recorded values that a step may be a sum of
STEP = re.compile(r", step (\d+)")
DEPENDENT = 1e-5  # eigenvalue from which values are taken for independent
LEAST = 1e-4  # of the value that a term contributes


def other_step(e: Evidence) -> Finding | None:
    """A sum of three recorded values with other factors, one of them left out, or another one."""
    if not is_replayable(e) or e.port.ndim < 3:
        return None
    values = [s for s in sources(e) if s.x.size == e.port.size][:MAX_TERMS]
    reference, port = (value.reshape(-1).astype(np.float64) for value in e.values)
    limit = fit_tolerance(e) / 10
    found: Finding | None = None
    for terms in _triples(values, reference, e.sample[:GLANCE], limit):
        right = solve([term.x for term in terms], reference, limit)
        if right is None or not _contributes(terms, right, reference):
            continue
        wrong = solve([term.own for term in terms], port, limit)
        told = _told(terms, right, wrong, fit_tolerance(e)) if wrong is not None else None
        if told is None:
            told = _other_history(values, terms, right, port, limit)
        if told is not None:
            return told
        if wrong is not None and found is None:
            names = [term.name for term in terms]
            ours, theirs = (weighted_sum(factors, names) for factors in (wrong, right))
            text = f"The port is {ours}, the reference {theirs}."
            found = Finding("other-factors", text, "Check the factors of the step.")
    return found


def _triples(
    values: list[Source], reference: Array, at: Array, limit: float
) -> Iterator[tuple[Source, ...]]:
    """A sample, a prediction and the prediction of the step before that may sum up to the value."""
    steps = {source.name: _step(source.name) for source in values}
    now = max(steps.values(), default=0)
    for x, y, z in permutations(values, 3):
        if steps[x.name] != now or steps[y.name] != now or steps[z.name] >= now:
            continue
        if STEP.sub("", y.name) != STEP.sub("", z.name):
            continue
        few = [term.x.reshape(-1)[at] for term in (x, y, z)]
        if solve(few, reference[at], 4 * limit) is not None:
            yield x, y, z


def _step(name: str) -> int:
    match = STEP.search(name)
    return int(match[1]) if match else 0


def solve(
    values: Sequence[Array], target: Array, limit: float, dependent: float = DEPENDENT
) -> Array | None:
    """The factors of a sum of values; None where it is no such sum, or the values depend.

    They do where the smallest eigenvalue of their products, each of length 1, is `dependent`.
    """
    columns = np.stack([value.reshape(-1) for value in values], -1)
    sizes = np.linalg.norm(columns, axis=0)
    if not sizes.all():
        return None
    gram = (columns / sizes).T @ (columns / sizes)
    if np.linalg.eigvalsh(gram)[0] < dependent:
        return None
    factors = np.linalg.solve(gram, (columns / sizes).T @ target) / sizes
    left = float(np.linalg.norm(target - columns @ factors))
    return factors if left <= limit * float(np.linalg.norm(target)) else None


def _contributes(terms: tuple[Source, ...], factors: Array, value: Array) -> bool:
    """Whether each term is in the sum."""
    sizes = [abs(f) * float(np.linalg.norm(t.x)) for f, t in zip(factors, terms, strict=True)]
    return min(sizes) > 10 * LEAST * float(np.linalg.norm(value))


def _told(terms: tuple[Source, ...], right: Array, wrong: Array, limit: float) -> Finding | None:
    """That the part of first order is right and that of second order is not."""
    close = max(2e-3, 10 * limit)
    # Of a·x + b·y + k·(y − z), the part of first order is b + c.
    first, own = ((f[0], f[1] + f[2]) for f in (right, wrong))
    ratio = float(wrong[2] / right[2])
    if not np.allclose(first, own, rtol=close, atol=close / 10) or abs(ratio - 1) < close:
        return None
    names = [term.name for term in terms]
    ours, theirs = (weighted_sum(factors, names) for factors in (wrong, right))
    text = f"The port is {ours}, the reference {theirs}"
    if abs(ratio) < close:
        return Finding(
            "history-missing",
            f"{text}: a step of first order, without the earlier prediction.",
            f"Add the term of second order: it takes {names[2]}.",
        )
    words = f"the term of second order is {ratio:.4g} × the reference's"
    hints = {
        -1.0: ("term-negated", "its sign is wrong", "Change the sign of the term."),
        2.0: ("second-order-term", "a factor 0.5 is missing", "Multiply it by 0.5."),
        0.5: ("second-order-term", "a factor 0.5 is too many", "Do not multiply it by 0.5."),
    }
    for number, (cause, hint, fix) in hints.items():
        if abs(ratio / number - 1) < close:
            return Finding(cause, f"{text}: {words}; {hint}.", fix)
    return Finding(
        "second-order-term",
        f"{text}: {words}.",
        "Check the coefficient of the term: the ratio r0 of the two steps (or its inverse), and "
        "the solver's type (midpoint or heun, bh1 or bh2).",
    )


def _other_history(
    values: list[Source], terms: tuple[Source, ...], right: Array, port: Array, limit: float
) -> Finding | None:
    """That the port keeps another value of the step before."""
    for other in values:
        if other.name in (term.name for term in terms):
            continue
        wrong = solve([terms[0].own, terms[1].own, other.own], port, limit)
        if wrong is not None and np.allclose(wrong, right, rtol=5e-3):
            return Finding(
                "another-value",
                f"In the term of second order the port takes {other.name}, the reference "
                f"{terms[2].name}, the earlier prediction.",
                f"Keep {terms[2].name} in the history.",
            )
    return None


def weighted_sum(factors: Array, names: Sequence[str]) -> str:
    """A sum for people."""
    text = f"{factors[0]:.4g} · {names[0]}"
    for factor, name in zip(factors[1:], names[1:], strict=True):
        text += f" {'+' if factor >= 0 else '−'} {abs(factor):.4g} · {name}"
    return text
