"""Steps of samplers: sums of a sample, a prediction, an earlier prediction and noise.

A step of second order (DPM-Solver++ 2M, UniPC, Adams and Bashforth) is a·x + b·y + c·z, where z is
the prediction y of the step before; a stochastic one adds d·noise, where the noise is recorded.
Sums of two values are in `guidance`.
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
PART = re.compile(r"\(part (\d+) of the batch")
DEPENDENT = 1e-5  # eigenvalue from which values are taken for independent
LEAST = 1e-4  # of the value that a term contributes


def other_step(e: Evidence) -> Finding | None:
    """A sum of recorded values with other factors, one of them left out, or another one."""
    if not is_replayable(e) or e.port.ndim < 3:
        return None
    values = [s for s in sources(e) if s.x.size == e.port.size][:MAX_TERMS]
    reference, port = (value.reshape(-1).astype(np.float64) for value in e.values)
    limit = fit_tolerance(e) / 10
    found: Finding | None = None
    for terms in _sums(values, reference, e.sample[:GLANCE], limit):
        right = solve([term.x for term in terms], reference, limit)
        if right is None or not _contributes(terms, right, reference):
            continue
        wrong = solve([term.own for term in terms], port, limit)
        told = _told(terms, right, wrong, fit_tolerance(e)) if wrong is not None else None
        if told is None:
            told = _another_term(values, terms, right, port, limit)
        if told is not None:
            return told
        if wrong is not None and found is None:
            text = _both(terms, right, wrong)
            found = Finding("other-factors", f"{text}.", "Check the factors of the step.")
    return found


def _sums(
    values: list[Source], reference: Array, at: Array, limit: float
) -> Iterator[tuple[Source, ...]]:
    """Values that may sum up to the reference's, the fewest first.

    A sample and a prediction, with the prediction of the step before, with noise, or with both.
    """
    steps = {source.name: _step(source.name) for source in values}
    now = max(steps.values(), default=0)
    present = [source for source in values if steps[source.name] == now]
    histories = [
        (x, y, z)
        for x, y, z in permutations(values, 3)
        if steps[x.name] == now == steps[y.name] > steps[z.name]
        and STEP.sub("", y.name) == STEP.sub("", z.name)
    ]
    noises = [source for source in present if source.is_input]
    simple = [
        (x, y, noise)
        for x, y in permutations(present, 2)
        for noise in noises
        if x is not noise and not y.is_input and _same_part(x.name, y.name)
    ]
    # The sample is one of the step before, and so has the noise of that step in it.
    noisy = [
        (*terms, noise, *more)
        for terms in histories
        for noise in noises
        if noise not in terms
        for more in ((), *((z,) for z in values if _is_earlier(z, noise)))
    ]
    for terms in (*histories, *simple, *noisy):
        few = [term.x.reshape(-1)[at] for term in terms]
        if solve(few, reference[at], 4 * limit) is not None:
            yield terms


def _same_part(name: str, other: str) -> bool:
    """Whether two values are not of different parts of a batch, as with and without the prompt."""
    parts = {PART.findall(each)[0] for each in (name, other) if PART.search(each)}
    return len(parts) < 2


def _is_earlier(source: Source, other: Source) -> bool:
    """Whether a value is the one of this name in the step before."""
    same = STEP.sub("", source.name) == STEP.sub("", other.name)
    return same and _step(source.name) == _step(other.name) - 1


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
    """That one part of the sum is wrong: that of second order, or one of the terms."""
    close = max(2e-3, 10 * limit)
    names = [term.name for term in terms]
    history = _step(names[2]) < _step(names[1])
    # Of a·x + b·y + k·(y − z), the part of first order is b + c.
    parts = [np.array([f[0], f[1] + f[2], *f[2:]]) if history else f for f in (right, wrong)]
    same = np.isclose(*parts, rtol=close, atol=close / 10)
    ratios = parts[1] / parts[0]
    odd = int(np.argmin(same))
    if len(terms) == 5 and same[3]:
        # The earlier noise is in the term of second order only, as the earlier prediction is.
        if same[2] or not np.isclose(ratios[2], ratios[4], rtol=10 * close, atol=close):
            return None
        odd = 2
    elif same.sum() != len(terms) - 1:
        return None
    ratio = float(ratios[odd])
    text = _both(terms, right, wrong)
    if not history or odd != 2:
        return _other_factor(names[odd], text, ratio, close)
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


def _other_factor(name: str, text: str, ratio: float, close: float) -> Finding:
    """That one term has another factor than in the reference, or is left out."""
    if abs(ratio) < close:
        return Finding("term-missing", f"{text}: without {name}.", f"Add {name} with its factor.")
    if abs(ratio + 1) < close:
        return Finding("term-negated", f"{text}: the sign of {name} is wrong.", "Change the sign.")
    return Finding(
        "other-factors",
        f"{text}: only the factor of {name} differs, it is {ratio:.4g} × the reference's.",
        f"Check the factor of {name}: which sigmas it takes, a square root, an exponent.",
    )


def _another_term(
    values: list[Source], terms: tuple[Source, ...], right: Array, port: Array, limit: float
) -> Finding | None:
    """That the port has another value in the place of one of the terms, with the same factors."""
    for at in reversed(range(len(terms))):
        for other in values:
            if other.name in (term.name for term in terms):
                continue
            own = [term.own for term in (*terms[:at], other, *terms[at + 1 :])]
            wrong = solve(own, port, limit)
            if wrong is not None and np.allclose(wrong, right, rtol=5e-3):
                return Finding(
                    "another-value",
                    f"In this step the port takes {other.name}, the reference {terms[at].name}, "
                    "with the same factors.",
                    f"Take {terms[at].name}.",
                )
    return None


def _both(terms: Sequence[Source], right: Array, wrong: Array) -> str:
    ours, theirs = (weighted_sum(factors, [t.name for t in terms]) for factors in (wrong, right))
    return f"The port is {ours}, the reference {theirs}"


def weighted_sum(factors: Array, names: Sequence[str]) -> str:
    """A sum for people."""
    text = f"{factors[0]:.4g} · {names[0]}"
    for factor, name in zip(factors[1:], names[1:], strict=True):
        text += f" {'+' if factor >= 0 else '−'} {abs(factor):.4g} · {name}"
    return text
