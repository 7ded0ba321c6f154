"""Guidance whose result is rescaled to the norm of the prompt's prediction."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.selections import patch_orders
from lydite.diff.findings.replay.variants import (
    Candidate,
    Source,
    allowed,
    apart_of,
    is_replayable,
    sources,
    told_apart,
)
from lydite.diff.result import Finding

MAX_PREDICTIONS = 6  # recorded values of the shape that are tried as predictions


def other_guidance(e: Evidence) -> Finding | None:
    """Guidance with a rescaled norm: not rescaled, over other axes, to the other prediction."""
    if not is_replayable(e) or e.port.ndim < 2:
        return None
    predictions = list(sources(e))
    for shape in dict.fromkeys(s.x.shape for s in predictions if s.x.size == e.port.size):
        values = [s for s in predictions if s.x.shape == shape][:MAX_PREDICTIONS]
        axes = (len(shape) - 1,) if len(shape) < 4 else (1, len(shape) - 1)
        for seen, (prompt, other), axis in product(
            _in_shape(e, shape), permutations(values, 2), axes
        ):
            told = _told(seen, prompt, other, axis)
            if isinstance(told, Finding):
                return told
            if told:
                return None
    return None


def _in_shape(e: Evidence, shape: tuple[int, ...]) -> Iterator[Evidence]:
    """Both values in the shape of the predictions: as they are, or as tokens made of patches."""
    if shape == e.port.shape:
        yield e
    elif (len(shape), e.port.ndim) == (3, 4):
        packed = (patch_orders(value, shape) for value in e.values)
        for right, own in zip(*packed, strict=True):
            yield replace(e, reference=right.value, port=own.value)


def _told(e: Evidence, prompt: Source, other: Source, axis: int) -> Finding | bool:
    """What the port does instead of the reference's guidance; whether the reference's is this."""
    weight = _weight(e.values[0], prompt.x, other.x, axis)
    if weight is None:
        return False
    usual = Candidate("", _rescaled(prompt.x, other.x, weight, axis))
    if apart_of(e.values[0], usual.value) > allowed(e):
        return False
    told = told_apart(
        e,
        (usual, *_variants(prompt, other, weight, axis, own=False)),
        lambda: (
            Candidate("", _rescaled(prompt.own, other.own, weight, axis)),
            *_variants(prompt, other, weight, axis, own=True),
        ),
        reference_is="",
        what="forms of guidance with a rescaled norm",
    )
    if told is None:
        return True
    return Finding(
        "other-guidance",
        f"The reference is {other.name} + {weight:.4g} × ({prompt.name} − {other.name}), "
        f"rescaled to the norm of {prompt.name} over axis {axis}; the port {told.wrong}; "
        f"{told.leaves}.",
        "Compute the guidance, and the norm it is rescaled to, as the reference.",
    )


def _weight(value: Array, prompt: Array, other: Array, axis: int) -> float | None:
    """g of other + g (prompt − other), where the value along the axis is a multiple of that."""
    size = np.linalg.norm(value, axis=axis, keepdims=True)
    if not size.all():
        return None
    unit = value / size
    start, way = (x - (x * unit).sum(axis, keepdims=True) * unit for x in (other, prompt - other))
    power = float((way * way).sum())
    if not power:
        return None
    weight = -float((start * way).sum()) / power
    left = np.linalg.norm(start + weight * way)
    is_sum = min(abs(weight), abs(weight - 1)) > 1e-2  # else it is one of the two
    return weight if is_sum and left < 1e-2 * np.linalg.norm(start) else None


def _rescaled(
    prompt: Array, other: Array, weight: float, axis: int | None, to: Array | None = None
) -> Array:
    joined = other + weight * (prompt - other)
    target = prompt if to is None else to
    target_norm, own = (np.linalg.norm(x, axis=axis, keepdims=True) for x in (target, joined))
    return joined * (target_norm / own)


def _variants(
    prompt: Source, other: Source, weight: float, axis: int, *, own: bool
) -> Iterator[Candidate]:
    a, b = (s.own if own else s.x for s in (prompt, other))
    yield Candidate("does not rescale it", b + weight * (a - b))
    flat, rest = (x.reshape(-1) for x in (a, b))
    over_all = _rescaled(flat, rest, weight, None).reshape(a.shape)
    yield Candidate("takes the norm over all axes", over_all)
    yield Candidate(f"rescales it to the norm of {other.name}", _rescaled(a, b, weight, axis, b))
    yield Candidate("adds the difference to the prompt's", _rescaled(a, b, weight + 1, axis))
    yield Candidate(f"exchanges {prompt.name} and {other.name}", _rescaled(b, a, weight, axis))
    exchanged = _rescaled(b, a, weight, axis, a)
    yield Candidate(f"exchanges {prompt.name} and {other.name} in the sum only", exchanged)
