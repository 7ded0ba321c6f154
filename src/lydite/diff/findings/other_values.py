"""The right value of another site: a neighbour, the input, the value without the residual."""

import re
from collections.abc import Collection, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.findings.evidence import Evidence, apart, comparable, explanation, norm
from lydite.diff.findings.rearranged import GLANCE, matches
from lydite.diff.findings.replay.relations import site, with_relation
from lydite.diff.findings.replay.variants import inputs_of
from lydite.diff.measure.distance import wide
from lydite.diff.result import Finding

MOST_OTHERS = 500
STEP = re.compile(r", step \d+$")
RIGHT_BEFORE = 4  # values that the reference computed last


def another_value(e: Evidence) -> Finding | None:
    """Equal to a reference value with another name: k for v, one block early, before the norm."""
    for name, other in chain(islice(e.others(), MOST_OTHERS), _of_earlier_steps(e)):
        if other.shape != e.port.shape:  # heads may be an axis, or not
            if other.size != e.port.size or other.shape[:2] != e.port.shape[:2] or other.ndim < 3:
                continue
            other = other.reshape(e.port.shape)
        if not _promising(e, other):
            continue
        (value,) = comparable(other)
        left = matches(e, value)
        if left is not None:
            taken = "" if name.startswith(f"{e.name} [in") else _input_that_is(e, other)
            own_input = e.slot.startswith("out") and (name.startswith(f"{e.name} [in") or taken)
            found = explanation(
                "another-value",
                f"The port equals the reference's {name}{taken}; {e.leaves(left)}.",
                f"{e.name} is not applied: the port passes its input on, or records that."
                if own_input
                else f"What the reference does between {name} and {e.name} is missing, or the port "
                f"records {name} as {e.name}{_siblings(e.name, name)}."
                if name in _just_before(e)
                else f"Check which value is used: the port computes {name}, or records it as "
                f"{e.name}{_siblings(e.name, name)}.",
                left <= e.noise(),
            )
            return with_relation(e, found, name, site(e))
    return None


def _of_earlier_steps(e: Evidence) -> Iterator[tuple[str, NDArray[Any]]]:
    """The reference's values of earlier steps that a port may have kept."""
    for each in e.before():
        if STEP.search(each.name) and each.value.size == e.port.size:
            yield each.name, each.value


def _just_before(e: Evidence) -> Collection[str]:
    """The values that the reference computes right before this one."""
    at_end = (each.name for each in e.before() if ", step " not in each.name)
    return tuple(islice(dict.fromkeys(at_end), RIGHT_BEFORE))


def _input_that_is(e: Evidence, value: NDArray[Any]) -> str:
    """That a value is also what the module takes."""
    if not e.slot.startswith("out"):
        return ""
    same = any(np.array_equal(source.x, value) for source in inputs_of(e))
    return f", which {e.name} takes" if same else ""


def _siblings(name: str, other: str) -> str:
    """What else two values of one module may be: exchanged weights."""
    parents = [re.split(r" \[|, call ", path)[0].rpartition(".")[0] for path in (name, other)]
    return "; or the weights of the two are exchanged" if parents[0] == parents[1] != "" else ""


def passed_through(e: Evidence) -> Finding | None:
    """The output is the input."""
    for slot, (_, own) in e.inputs.items():
        if not e.slot.startswith("out") or own.shape != e.port.shape or not _promising(e, own):
            continue
        (value,) = comparable(own)
        left = matches(e, value)
        if left is not None and left <= e.noise():
            return explanation(
                "passed-through",
                f"The port's output equals its own {slot}; {e.leaves(left)}.",
                "The operation does nothing: a weight left at its initial value, a branch not "
                "taken, or the input recorded as output.",
            )
    return None


def residual_wrong(e: Evidence) -> Finding | None:
    """The input is missing from the output, or added once too often."""
    if not e.same_shape or not e.slot.startswith("out"):
        return None
    reference, port = e.values
    for slot, (right, _) in e.inputs.items():
        if right.shape != e.port.shape:
            continue
        (value,) = comparable(right)
        for sign, cause, word in ((-1, "residual-missing", "minus"), (1, "residual-twice", "plus")):
            if abs(apart(port, reference) / max(norm(value), 1e-300) - 1) > 0.5:
                continue
            left = apart(port, reference + sign * value)
            if e.explains(left):
                return explanation(
                    cause,
                    f"The port equals the reference {word} {slot}; {e.leaves(left)}.",
                    f"{'Add the residual' if sign < 0 else 'Add the residual only once'}: the "
                    f"output contains {slot} {'once' if sign < 0 else 'twice'} "
                    f"{'in the reference' if sign < 0 else 'in the port'}.",
                    left <= e.noise(),
                )
    return None


def _promising(e: Evidence, other: NDArray[Any]) -> bool:
    """Whether a few of its values equal the port's, so that a full read is worthwhile."""
    reference, port = e.values
    sample = e.sample[:GLANCE]
    values = np.nan_to_num(wide(other[np.unravel_index(sample, other.shape)]))
    right = reference.reshape(-1)[sample] if e.same_shape else None
    return e.promises(port.reshape(-1)[sample], values, right)
