"""Gated feed-forwards: act(a)·b with the parts exchanged, or with another activation."""

from collections.abc import Callable, Iterator
from itertools import islice, permutations
from math import erf, pi, sqrt

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence, Explanation, apart, comparable
from lydite.diff.result import Finding

NEAR = 24  # values before this one among which the two parts are searched
_erf = np.vectorize(erf, otypes=[np.float64])
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu with tanh": lambda x: 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))),
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / sqrt(2))),
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def gated_wrongly(e: Evidence) -> Finding | None:
    """The activation is on the other part, or it is another one."""
    if not e.same_shape or e.port.ndim < 2 or e.variety < 8:
        return None
    reference, port = e.values
    for (gate_name, gate), (name, other) in permutations(_parts(e), 2):
        for right, activation in ACTIVATIONS.items():
            if not _equal(e, _gated(activation, gate, other), reference):
                continue
            for wrong, tried in ACTIVATIONS.items():
                left = apart(port, _gated(tried, other, gate))
                if e.explains(left):
                    return Explanation(
                        "gate-exchanged",
                        f"The port is {wrong}({name}) · {gate_name}, the reference "
                        f"{right}({gate_name}) · {name}; {e.leaves(left)}.",
                        f"Apply the activation to {gate_name}; the other part is only multiplied.",
                        left <= e.noise(),
                    )
                left = apart(port, _gated(tried, gate, other))
                if wrong != right and e.explains(left):
                    return Explanation(
                        "other-activation",
                        f"The port is {wrong}({gate_name}) · {name}, the reference "
                        f"{right}({gate_name}) · {name}; {e.leaves(left)}.",
                        f"Use {right} for the gate.",
                        left <= e.noise(),
                    )
    return None


def _parts(e: Evidence) -> Iterator[tuple[str, Array]]:
    """Values of this shape near it: at most a few, by name once."""
    seen: dict[str, Array] = {}
    for name, value in islice(e.others(), NEAR):
        if value.shape == e.port.shape and name not in seen and len(seen) < 4:
            (seen[name],) = comparable(value)
    yield from seen.items()


def _gated(activation: Callable[[Array], Array], gate: Array, other: Array) -> Array:
    with np.errstate(over="ignore"):
        return activation(gate.astype(np.float64)) * other


def _equal(e: Evidence, value: Array, reference: Array) -> bool:
    return apart(value, reference) <= 2 * e.noise()
