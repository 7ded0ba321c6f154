"""Variant replay: the operation computed again from recorded values, in every known variant.

A cause is named only when one variant gives the reference's value and another one the port's, both
up to rounding. So a value that was computed from something else names nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from math import inf, isfinite, prod

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence, comparable
from lydite.diff.findings.feed_forward import ACTIVATIONS
from lydite.diff.result import Finding

SHARE = 0.02  # of the error that a variant may leave
CLOSER = 3.0  # times the least: what other variants may leave that cannot be told apart from it
MAX_SOURCES = 250  # recorded values that an operation may have taken
MAX_VALUES = 2**22  # of a value that is computed again
GLANCE = 256  # values tried first
NORM_EPS = (1e-6, 1e-5, 1e-12, 1e-8, 1e-3, 1e-2, 1e-1)
VARIANTS: dict[str, Callable[[Array], Array]] = {
    **ACTIVATIONS,
    "quick gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "tanh": np.tanh,
    "no activation": lambda x: x,
}


@dataclass(frozen=True)
class Candidate:
    """A variant of an operation and what it gives."""

    name: str
    value: Array


def other_activation(e: Evidence) -> Finding | None:
    """The reference is one activation of a recorded value, the port another one."""
    if not _is_replayable(e):
        return None
    for name, x in _sources(e):
        if x.shape != e.port.shape or not _is_activation_of(e, x):
            continue
        tried = (Candidate(label, f(x)) for label, f in VARIANTS.items())
        found = told_apart(e, tried)
        if found is not None:
            right, wrong, left = found
            return Finding(
                "other-activation",
                f"The port is {wrong}({name}), the reference {right}({name}); {left}.",
                f"Use {right} here." if wrong != "no activation" else f"Apply {right} here.",
            )
    return None


def other_norm(e: Evidence) -> Finding | None:
    """A norm of another kind, with another eps, another divisor or other groups."""
    if not _is_replayable(e) or not e.slot.startswith("out") or e.port.ndim < 2:
        return None
    reference, _ = e.values
    inputs = [right for right, _ in e.inputs.values() if right.shape == e.reference.shape]
    for x, channels in ((x.astype(np.float64), axis) for x in inputs for axis in (-1, 1)):
        if channels == 1 and e.port.ndim < 3:
            continue
        plain = list(_norms(x, channels))
        fits = [_affine_left(c.value, reference, channels) for c in plain]
        best = _simplest([(c.name, fit[0]) for c, fit in zip(plain, fits, strict=True)])
        left, scale, shift = next(f for c, f in zip(plain, fits, strict=True) if c.name == best)
        if left > SHARE * e.lost:
            continue
        tried = (Candidate(c.name, c.value * scale + shift) for c in plain)
        if (found := told_apart(e, tried, reference_is=best)) is not None:
            right, wrong, text = found
            return Finding(
                "other-norm",
                f"The port is a {wrong}, the reference a {right}, of the same input; {text}.",
                f"Use a {right}.",
            )
    return None


def other_modulation(e: Evidence) -> Finding | None:
    """A norm times (1 + scale) plus shift, with other chunks of the table or without the 1."""
    if not _is_replayable(e) or e.port.ndim != 3 or e.port.shape[1] < 4:
        return None
    chunks = list(_chunks(e))
    reference, port = e.values
    for name, x in _sources(e) if chunks else ():
        if x.shape != e.port.shape:
            continue
        right, wrong = (_scale_and_shift(x, value) for value in (reference, port))
        if right is None or wrong is None:
            continue
        for table, parts in chunks:
            expected, used = (_named_chunks(fit, parts) for fit in (right, wrong))
            if expected is None or used is None or expected == used:
                continue
            return Finding(
                _modulation_cause(expected, used),
                f"The port is {name} · {used[0]} + {used[1]}, the reference {name} · {expected[0]} "
                f"+ {expected[1]}, with the chunks of {table}.",
                f"Multiply by {expected[0]} and add {expected[1]}.",
            )
    return None


def other_residual(e: Evidence) -> Finding | None:
    """x + gate · y without the gate, with another gate, without x or without y."""
    if not _is_replayable(e) or e.port.ndim != 3 or e.port.shape[1] < 4:
        return None
    reference, port = e.values
    chunks = list(_chunks(e))
    values = [(name, x) for name, x in _sources(e) if x.shape == e.port.shape]
    for (x_name, x), (y_name, y) in _ordered_pairs(values):
        gate = _factors(y, reference - x)
        if gate is None:
            continue
        right = _gate_name(gate, chunks)
        if right == "0":  # the value is x itself
            continue
        for base, missing in ((x, ""), (np.zeros_like(x), x_name)):
            used = _factors(y, port - base)
            wrong = _gate_name(used, chunks) if used is not None else None
            if right is None or wrong is None or (right == wrong and not missing):
                continue
            cause = "residual-missing" if missing else "gate-missing" if wrong == "1" else (
                "branch-missing" if wrong == "0" else "other-gate"
            )  # fmt: skip
            ours = f"{wrong} · {y_name}" if missing else f"{x_name} + {wrong} · {y_name}"
            return Finding(
                cause,
                f"The port is {ours}, the reference {x_name} + {right} · {y_name}.",
                f"Add {right} · {y_name} to {x_name}.",
            )
    return None


def other_combination(e: Evidence) -> Finding | None:
    """A sum of two recorded values, with other factors: guidance, a step of a sampler."""
    if not _is_replayable(e) or e.port.ndim < 3:
        return None
    reference, port = (value.reshape(-1).astype(np.float64) for value in e.values)
    sources = [(name, x.reshape(-1)) for name, x in _sources(e) if x.size == e.port.size]
    at = e.sample[:GLANCE]
    for (a_name, a), (b_name, b) in combinations(sources, 2):
        if _solve(a[at], b[at], reference[at]) is None:
            continue
        right, wrong = (_solve(a, b, value) for value in (reference, port))
        if right is None or wrong is None or np.allclose(right, wrong, rtol=1e-3, atol=1e-4):
            continue
        if min(np.abs([*right, *wrong])) < 1e-3:
            continue  # one of the two is not in the sum
        ours, theirs = (_combination(f, a_name, b_name) for f in (wrong, right))
        if np.allclose(right, wrong[::-1], rtol=1e-3, atol=1e-4):
            cause, fix = "terms-exchanged", f"Exchange {a_name} and {b_name}."
        elif np.allclose(np.abs(right), np.abs(wrong), rtol=1e-3, atol=1e-4):
            cause, fix = "term-negated", "Check the sign."
        else:
            cause, fix = "other-factors", "Check the factors of the two."
        return Finding(cause, f"The port is {ours}, the reference {theirs}.", fix)
    return None


def other_sinusoid(e: Evidence) -> Finding | None:
    """An embedding of timesteps with another order, period, shift or unit of time."""
    if not e.same_shape or e.port.ndim != 2 or e.port.shape[1] % 2 or e.port.shape[1] < 8:
        return None
    times = [
        (name, value.reshape(-1).astype(np.float64))
        for name, value in islice(e.before(), MAX_SOURCES)
        if 0 < value.size <= 64 and value.ndim <= 2
    ]
    for name, time in times:
        rows = time[: e.port.shape[0]] if time.size >= e.port.shape[0] else time[:1]
        tried = _sinusoids(np.resize(rows, e.port.shape[0]), e.port.shape[1])
        if (found := told_apart(e, tried)) is not None:
            right, wrong, left = found
            return Finding(
                "other-sinusoid",
                f"The port is a sinusoid of {name} with {wrong}, the reference with {right}; "
                f"{left}.",
                f"Compute it with {right}.",
            )
    return None


def _sinusoids(times: Array, width: int) -> Iterator[Candidate]:
    half = width // 2
    for unit in (1.0, 1000.0, 0.001):
        for period in (1e4, 1e3, 1e5, 1e2):
            for shift in (0, 1):
                angles = unit * times[:, None] * period ** (-np.arange(half) / (half - shift))
                sin, cos = np.sin(angles), np.cos(angles)
                for order, parts in (("cosines first", (cos, sin)), ("sines first", (sin, cos))):
                    name = f"{order} with period {period:g} with frequency shift {shift}"
                    name += f" with time times {unit:g}" if unit != 1 else ""
                    yield Candidate(name, np.concatenate(parts, -1))


def _is_replayable(e: Evidence) -> bool:
    size = e.port.size
    return e.same_shape and e.kind == "activation" and 64 <= size <= MAX_VALUES and e.variety > 5


def _sources(e: Evidence) -> Iterator[tuple[str, Array]]:
    """Recorded values of the reference that the operation may have taken, each array once.

    Of a batch that the port runs in parts, each part.
    """
    seen: set[tuple[tuple[int, ...], bytes]] = set()
    inputs = ((f"its {slot}", right) for slot, (right, _) in e.inputs.items())
    for name, value in (*inputs, *islice(e.before(), MAX_SOURCES)):
        parts = [value]
        if value.ndim == e.port.ndim and value.shape[1:] == e.port.shape[1:]:
            count, rest = divmod(value.shape[0], e.port.shape[0])
            parts = np.split(value, count) if count > 1 and not rest else parts
        for row, part in enumerate(parts):
            head = np.ascontiguousarray(part.reshape(-1)[:16]).tobytes()
            if part.size and (part.shape, head) not in seen:
                seen.add((part.shape, head))
                (array,) = comparable(part)
                number = "" if len(parts) == 1 else f" (part {row} of the batch)"
                yield name + number, array.astype(np.float64)


def told_apart(
    e: Evidence, tried: Iterable[Candidate], *, reference_is: str | None = None
) -> tuple[str, str, str] | None:
    """The variants that give the reference's value and the port's, and what is left."""
    reference, port = e.values
    lefts = [(c.name, apart_of(reference, c.value), apart_of(port, c.value)) for c in tried]
    right = reference_is or _simplest([(name, left) for name, left, _ in lefts])
    wrong = _simplest([(name, left) for name, _, left in lefts], like=right)
    of_right = next(entry for entry in lefts if entry[0] == right)
    of_wrong = next(entry for entry in lefts if entry[0] == wrong)
    allowed = max(SHARE * e.lost, min(e.noise(), e.lost / 4))
    fits = max(of_right[1], of_wrong[2]) <= allowed
    return (right, wrong, e.leaves(of_wrong[2])) if fits and right != wrong else None


def apart_of(value: Array, other: Array) -> float:
    """‖value − other‖; infinite where the shapes differ or a value is not finite."""
    if value.shape != other.shape:
        return inf
    left = float(np.linalg.norm(value - other))
    return left if isfinite(left) else inf


def _simplest(lefts: list[tuple[str, float]], like: str = "") -> str:
    """Of the variants that leave about the least, the one most like another, else the first.

    Many variants differ only where the value does not show it: eps in a row of large variance.
    """
    least = min(left for _, left in lefts)
    near = [name for name, left in lefts if left <= CLOSER * least]
    words = like.split(" with ")
    return max(near, key=lambda name: (name == like, _common(name.split(" with "), words)))


def _common(parts: list[str], others: list[str]) -> int:
    return sum(part in others for part in parts)


def _is_activation_of(e: Evidence, x: Array) -> bool:
    """Whether some activation of a few values gives the reference's."""
    at = e.sample[:GLANCE]
    values, expected = x.reshape(-1)[at], e.values[0].reshape(-1)[at]
    size = float(np.linalg.norm(expected))
    return any(apart_of(f(values), expected) <= 0.02 * size for f in VARIANTS.values())


def _norms(x: Array, channels: int) -> Iterator[Candidate]:
    """Norms of the last axis; of groups of channels where these are on axis 1."""
    if channels == -1:
        yield from _standardized(x, (-1,), "layer norm")
        for eps in NORM_EPS:
            root = np.sqrt((x * x).mean(-1, keepdims=True) + eps)
            yield Candidate(f"RMS norm with eps {eps:g}", x / root)
        return
    count, size = x.shape[:2]
    for groups in (n for n in (1, 2, 4, 8, 16, 32, 64) if size % n == 0 and n < size):
        for words in ("", " of every nth channel"):
            split = x.reshape(count, groups, size // groups, -1)
            if words:
                split = x.reshape(count, size // groups, groups, -1).swapaxes(1, 2)
            flat = split.reshape(count, groups, -1)
            for norm in _standardized(flat, (-1,), f"group norm of {groups} groups{words}"):
                value = norm.value.reshape(split.shape)
                value = value.swapaxes(1, 2) if words else value
                yield Candidate(norm.name, value.reshape(x.shape))


def _standardized(x: Array, axes: tuple[int, ...], name: str) -> Iterator[Candidate]:
    centred = x - x.mean(axes, keepdims=True)
    variance = (centred * centred).mean(axes, keepdims=True)
    count = prod(x.shape[axis] for axis in axes)
    for eps in NORM_EPS:
        yield Candidate(f"{name} with eps {eps:g}", centred / np.sqrt(variance + eps))
        outside = centred / (np.sqrt(variance) + eps)
        yield Candidate(f"{name} with eps {eps:g} with the root before eps", outside)
    unbiased = centred / np.sqrt(variance * count / (count - 1) + 1e-6) if count > 1 else centred
    yield Candidate(f"{name} with n − 1 as divisor", unbiased)


def _affine_left(x: Array, value: Array, channels: int) -> tuple[float, Array, Array]:
    """The error of the best weight and bias per channel, and these two."""
    axes = tuple(axis for axis in range(x.ndim) if axis != channels % x.ndim)
    mean, expected = x.mean(axes, keepdims=True), value.mean(axes, keepdims=True, dtype=np.float64)
    power = ((x - mean) ** 2).sum(axes, keepdims=True)
    scale = ((x - mean) * (value - expected)).sum(axes, keepdims=True) / np.maximum(power, 1e-300)
    shift = expected - scale * mean
    return float(np.linalg.norm(value - x * scale - shift)), scale, shift


def _chunks(e: Evidence) -> Iterator[tuple[str, list[Array]]]:
    """Tables near the value, in chunks of its width: one row for each row of the batch."""
    batch, width = e.port.shape[0], e.port.shape[-1]
    for name, value in _sources(e):
        if value.size % (batch * width) or not 2 <= value.size // (batch * width) <= 12:
            continue
        if value.shape[0] == batch and value.shape[-1] % width == 0 and value.shape[-1] > width:
            yield name, np.split(value.reshape(batch, -1), value.size // (batch * width), -1)


def _scale_and_shift(x: Array, value: Array) -> tuple[Array, Array] | None:
    """What turns x into the value, one number each per row of the batch and channel."""
    mean, expected = x.mean(1, keepdims=True), value.mean(1, keepdims=True, dtype=np.float64)
    power = ((x - mean) ** 2).sum(1, keepdims=True)
    if not power.all():
        return None
    scale = ((x - mean) * (value - expected)).sum(1, keepdims=True) / power
    shift = expected - scale * mean
    left = float(np.linalg.norm(value - x * scale - shift))
    return (scale[:, 0], shift[:, 0]) if left <= 1e-4 * float(np.linalg.norm(value)) else None


def _named_chunks(fit: tuple[Array, Array], parts: list[Array]) -> tuple[str, str] | None:
    """Which chunks a scale and a shift are."""
    scale, shift = fit
    scales = {f"(1 + chunk {n})": 1 + part for n, part in enumerate(parts)}
    scales |= {f"chunk {n}": part for n, part in enumerate(parts)}
    shifts = {f"chunk {n}": part for n, part in enumerate(parts)}
    first, second = _nearest(scale, scales), _nearest(shift, shifts)
    return (first, second) if first and second else None


def _modulation_cause(right: tuple[str, str], wrong: tuple[str, str]) -> str:
    plain = right[0].strip("()").removeprefix("1 + ")
    if wrong == (plain, right[1]):
        return "one-plus-missing"
    exchanged = wrong[1] == plain and right[1] in wrong[0]
    return "scale-shift-exchanged" if exchanged else "other-chunks"


def _ordered_pairs(
    values: list[tuple[str, Array]],
) -> Iterator[tuple[tuple[str, Array], tuple[str, Array]]]:
    for x in values:
        yield from ((x, y) for y in values if y[0] != x[0])


def _factors(y: Array, value: Array) -> Array | None:
    """value = a · y with one a per row of the batch and channel; None where it is not so."""
    power = (y * y).sum(1)
    if not power.all():
        return None
    a = (y * value).sum(1) / power
    left = float(np.linalg.norm(value - a[:, None] * y))
    size = float(np.linalg.norm(value))
    return a if left <= 1e-4 * size or size <= 1e-5 * float(np.linalg.norm(y)) else None


def _gate_name(gate: Array, chunks: list[tuple[str, list[Array]]]) -> str | None:
    """What a factor is: one, nothing, or a chunk of a table."""
    named = {"1": np.ones_like(gate), "0": np.zeros_like(gate)}
    if float(np.abs(gate).max()) < 1e-4:
        return "0"
    for table, parts in chunks:
        named |= {f"chunk {n} of {table}": part for n, part in enumerate(parts)}
    return _nearest(gate, named)


def _nearest(value: Array, named: dict[str, Array]) -> str | None:
    """The name of the array that this one is, up to rounding of a fit."""
    size = max(float(np.linalg.norm(value)), 1e-300)
    name, left = min(
        ((name, float(np.linalg.norm(value - other)) / size) for name, other in named.items()),
        key=lambda entry: entry[1],
    )
    return name if left < 3e-3 else None


def _solve(a: Array, b: Array, value: Array) -> Array | None:
    """The two factors of value = f·a + g·b; None where it is no such sum, or a is b."""
    aa, bb, ab = float(a @ a), float(b @ b), float(a @ b)
    determinant = aa * bb - ab * ab
    if determinant < 1e-6 * aa * bb:
        return None
    av, bv = float(a @ value), float(b @ value)
    factors = np.array([bb * av - ab * bv, aa * bv - ab * av]) / determinant
    left = float(np.linalg.norm(value - factors[0] * a - factors[1] * b))
    size = float(np.linalg.norm(value))
    return factors if left <= 1e-4 * size else None


def _combination(factors: Array, a: str, b: str) -> str:
    sign = "+" if factors[1] >= 0 else "−"
    return f"{factors[0]:.4g} · {a} {sign} {abs(factors[1]):.4g} · {b}"
