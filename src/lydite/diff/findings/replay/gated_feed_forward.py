"""Gated feed-forwards: act(a) · b with the parts exchanged, another activation, or a sum."""

from collections.abc import Callable, Iterator
from itertools import islice, permutations
from math import erf, pi, sqrt

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.variants import (
    GLANCE,
    Candidate,
    Source,
    apart_of,
    is_replayable,
    sources,
    told_apart,
)
from lydite.diff.result import Finding

MAX_PARTS = 4  # values before this one among which the two parts are searched
NEAR = 40  # values before this one that are looked at
_erf = np.vectorize(erf, otypes=[np.float64])
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu with tanh": lambda x: 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))),
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / sqrt(2))),
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "quick gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
}


def _tanh_gelu(factor: float, cubic: float) -> Callable[[Array], Array]:
    return lambda x: 0.5 * x * (1 + np.tanh(factor * (x + cubic * x**3)))


ROOT, CUBIC = sqrt(2 / pi), 0.044715
FACTORS = {"2/π": 2 / pi, "√2/π": sqrt(2) / pi, "√(π/2)": sqrt(pi / 2), "1": 1.0}
OTHER_NUMBERS: dict[str, Callable[[Array], Array]] = {  # activations with a wrong constant
    f"gelu with tanh and a constant of {cubic:.6g}, not {CUBIC},": _tanh_gelu(ROOT, cubic)
    for cubic in (0.0044715, 0.44715, 0.04715, 0.0447, 0.045, 0.0)
} | {
    f"gelu with tanh and a factor of {words}, not √(2/π),": _tanh_gelu(factor, CUBIC)
    for words, factor in FACTORS.items()
}


def other_gate(e: Evidence) -> Finding | None:
    """The reference is act(a) · b of two recorded values, the port another form of them."""
    if not is_replayable(e, least=16) or e.port.ndim < 2:
        return None
    for gate, other in _parts(e):
        if not _is_gated(e, gate.x, other.x):
            continue
        names = gate.name, other.name
        told = told_apart(
            e,
            _gated(gate.x, other.x, *names),
            lambda gate=gate, other=other, names=names: _gated(gate.own, other.own, *names),
            what=f"gates of {gate.name}",
        )
        if told is None:
            return None
        exchanged = told.wrong.endswith(f"({other.name}) · {gate.name}")
        return Finding(
            "gate-exchanged" if exchanged else "other-activation",
            f"The port is {told.wrong}, the reference {told.right}; {told.leaves}.",
            f"Apply the activation to {gate.name}; the other part is only multiplied."
            if exchanged
            else f"Compute {told.right}.",
        )
    return None


def _parts(e: Evidence) -> Iterator[tuple[Source, Source]]:
    """Values that may be the gate and the other part: halves of one value, or two values."""
    near: list[Source] = []
    for source in islice(sources(e), NEAR):
        axis = _doubled(source.x.shape, e.port.shape)
        if axis is not None:
            first, second = (_half(source, number, axis) for number in (0, 1))
            yield from ((first, second), (second, first))
        elif source.x.shape == e.port.shape and len(near) < MAX_PARTS:
            near.append(source)
    yield from ((a, b) for a, b in permutations(near, 2))


def _doubled(shape: tuple[int, ...], half: tuple[int, ...]) -> int | None:
    """The axis of channels that has twice the length: the last, or that of a picture."""
    for axis in (-1, 1) if len(shape) == len(half) > 2 else (-1,):
        twice = list(half)
        twice[axis] *= 2
        if shape == tuple(twice):
            return axis
    return None


def _half(source: Source, number: int, axis: int) -> Source:
    name = f"the {('first', 'second')[number]} half of {source.name}"
    x = np.split(source.x, 2, axis)[number]
    return Source(name, x, lambda: np.split(source.own, 2, axis)[number])


def _gated(gate: Array, other: Array, name: str, other_name: str) -> Iterator[Candidate]:
    for label, f in ACTIVATIONS.items():
        active = f(gate)
        yield Candidate(f"{label}({name}) · {other_name}", active * other)
        yield Candidate(f"{label}({name}) + {other_name}", active + other)
        yield Candidate(f"{label}({other_name}) · {name}", f(other) * gate)
    for label in ("silu", "gelu with tanh", "gelu"):
        words = f"{label}({name} · {other_name}), of the product, not of {name} alone"
        yield Candidate(words, ACTIVATIONS[label](gate * other))
    for words, f in OTHER_NUMBERS.items():
        yield Candidate(f"{words}({name}) · {other_name}", f(gate) * other)
    yield Candidate(f"{name} · {other_name}", gate * other)
    joined = np.concatenate((gate, other), -1)
    for label in ("silu", "gelu with tanh", "gelu"):
        value = ACTIVATIONS[label](joined[..., 0::2]) * joined[..., 1::2]
        words = f"{label}(every second number) · the others, of {name} and {other_name} joined"
        yield Candidate(f"{words}: the fused value read interleaved, not as two halves", value)


def _is_gated(e: Evidence, gate: Array, other: Array) -> bool:
    """Whether the reference is some activation of one value times the other, at a few places."""
    at = e.sample[:GLANCE]
    a, b, expected = (value.reshape(-1)[at] for value in (gate, other, e.values[0]))
    size = float(np.linalg.norm(expected))
    return any(apart_of(f(a) * b, expected) <= 0.02 * size for f in ACTIVATIONS.values())
