"""What lies between two recorded values: the operation that a port leaves out or does too much."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from lydite.diff.findings.evidence import FEW, Array, Evidence
from lydite.diff.findings.replay.norm_forms import NONE, VARIANTS, affine_left, norms
from lydite.diff.findings.replay.variants import Source, apart_of, fit_tolerance, sources

MAX_TERMS = 64  # recorded values that may have been added
MAX_SIZE = 2**21  # numbers of a value that norms are tried with
MIN_ROWS = 8  # of a value whose scale and shift per channel are fitted
MIN_GATED = 4  # the same of a gate alone


@np.errstate(all="ignore")  # an activation of large numbers may overflow
def missing_operation(e: Evidence, used: Array, wanted: Array) -> str:
    """What makes the reference's value from the one that the port uses, or the reverse, in words.

    Empty where no known operation does.
    """
    if used.shape != wanted.shape or used.size > MAX_SIZE:
        return ""
    used, wanted = used.astype(np.float64), wanted.astype(np.float64)
    if kind := _norm(e, used, wanted):
        return f"a {kind} lies between the two: the norm is missing in the port"
    if kind := _norm(e, wanted, used):
        return f"the port takes the normed value ({kind}), the reference the value before the norm"
    if kind := _activation(e, used, wanted):
        return f"{kind} lies between the two: the activation is missing in the port"
    if kind := _activation(e, wanted, used):
        return f"the port takes it after the activation {kind}, the reference before it"
    if kind := _activated_norm(e, used, wanted):
        return f"{kind} lies between the two: norm and activation are missing in the port"
    if kind := _activated_norm(e, wanted, used):
        return f"the port takes the normed value ({kind}), the reference the value before the norm"
    if term := _term(e, wanted - used, wanted):
        return (
            f"{term} is not added in the port before this: a residual or a branch is missing from "
            "the sum, or is added after it"
        )
    if term := _term(e, used - wanted, wanted):
        return f"the port has already added {term}; the reference takes the value before that sum"
    if term := _term(e, wanted - used, wanted, gated=True):
        return (
            f"the two differ by {term} times a gate: a residual or a branch is added to one of "
            "them only"
        )
    if line := _line(e, used, wanted):
        return f"the reference is {line}, where x is the port's: a scale or a shift is missing"
    return ""


def exchanged_layers(e: Evidence, used: Source) -> str:
    """The layers of the same size that take a value in the reference, in words.

    A layer that seems to be given another one's input may have that one's parameters.
    """
    weight = e.parameters().get("weight")
    if weight is None:
        return ""
    alike = {name.rpartition(".")[0] for name, _ in e.parameters_like(weight.shape)}
    for recorded in e.before():
        module, _, slot = recorded.name.partition(" [")
        if not slot.startswith("in") or module == e.name or module not in alike:
            continue
        if recorded.value.size == used.x.size and np.array_equal(
            np.sort(recorded.value, axis=None), np.sort(used.x, axis=None)
        ):
            return (
                f"that is what {module} takes, a layer of the same size: or the two layers have "
                "their weights exchanged"
            )
    return ""


def _norm(e: Evidence, x: Array, value: Array) -> str:
    """The kind of norm that a value is of x, with any weight and bias; empty if it is none."""
    if x.ndim == 3 and x.shape[1] >= MIN_ROWS:
        kind = _norm_of_channels(e, x, value)
        return kind or _group_norm(e, x.swapaxes(1, 2), value.swapaxes(1, 2))
    if x.ndim < 4:
        return ""
    rows = (v.reshape(len(v), -1, v.shape[-1]) for v in (x, value))
    return _group_norm(e, x, value) or _norm_of_channels(e, *rows)


def _norm_of_channels(e: Evidence, x: Array, value: Array) -> str:
    """The norm of the last axis that a value is, also with another scale in each row."""
    limit = fit_tolerance(e) * float(np.linalg.norm(value))
    if affine_left(x, value, -1, by_row=True)[0] <= limit:  # a scale and a shift alone
        return ""
    for norm in norms(x, -1):
        if affine_left(norm.value, value, -1, by_row=True)[0] <= limit:
            return norm.name.partition(" with ")[0]
    return ""


def _group_norm(e: Evidence, x: Array, value: Array) -> str:
    """The norm of a picture (batch, channels, …) that a value is, with a recorded weight.

    Of one picture any scale and shift per channel would be a group norm with some weight.
    """
    limit = fit_tolerance(e) * float(np.linalg.norm(value))
    for norm in norms(x, 1):
        left, scale, _ = affine_left(norm.value, value, 1)
        if left <= limit and _is_weight(e, scale.reshape(-1)):
            return norm.name.partition(" with ")[0]
    return ""


def _is_weight(e: Evidence, scale: Array) -> bool:
    known = [np.ones_like(scale), *(value for _, value in e.parameters_like(scale.shape))]
    size = float(np.linalg.norm(scale))
    return any(apart_of(scale, value) <= 1e-3 * size for value in known)


def _activation(e: Evidence, x: Array, value: Array) -> str:
    limit = fit_tolerance(e) * float(np.linalg.norm(value))
    for name, f in VARIANTS.items():
        if name != NONE and apart_of(f(x), value) <= limit:
            return name
    return ""


def _activated_norm(e: Evidence, x: Array, value: Array) -> str:
    """The activation and the norm of x that a value is, with the norm recorded between the two."""
    for source in _alike(e, value):
        kind = _activation(e, source.x, value)
        norm = _norm(e, x, source.x) if kind else ""
        if norm:
            return f"{kind} of a {norm}"
    return ""


def _term(e: Evidence, rest: Array, whole: Array, *, gated: bool = False) -> str:
    """The recorded value that a difference is; or it times a gate per channel."""
    size = float(np.linalg.norm(rest))
    limit = max(fit_tolerance(e) * size, FEW * e.rounding * float(np.linalg.norm(whole)))
    if size <= 10 * limit or (gated and (rest.ndim != 3 or rest.shape[1] < MIN_GATED)):
        return ""
    for source in _alike(e, rest):
        value = source.x
        if gated:
            power = (value**2).sum(1, keepdims=True)
            value = (value * rest).sum(1, keepdims=True) / np.maximum(power, 1e-300) * value
        if apart_of(value, rest) <= limit:
            return source.name
    row = None if gated else _one_per_row(rest, limit)
    if row is None:
        return ""
    limit *= (row.size / rest.size) ** 0.5
    return next((s.name for s in _alike(e, row) if apart_of(s.x, row) <= limit), "")


def _one_per_row(value: Array, limit: float) -> Array | None:
    """What a picture or tokens have at all places: (batch, channels), as an embedding of time."""
    if value.ndim not in (3, 4):
        return None
    places = (1,) if value.ndim == 3 else (2, 3)
    mean = value.mean(places, keepdims=True)
    return mean.reshape(len(value), -1) if apart_of(value, mean + 0 * value) <= limit else None


def _alike(e: Evidence, value: Array) -> Iterator[Source]:
    return islice((s for s in sources(e) if s.x.shape == value.shape), MAX_TERMS)


def _line(e: Evidence, x: Array, value: Array) -> str:
    """A factor and a shift, one number each; empty where none gives the value."""
    if x.size < MIN_ROWS or not np.ptp(x):
        return ""
    factor, shift = np.polyfit(x.reshape(-1), value.reshape(-1), 1)
    if apart_of(factor * x + shift, value) > fit_tolerance(e) * float(np.linalg.norm(value)):
        return ""
    return f"{factor:.5g} · x" if abs(shift) < 1e-6 else f"{factor:.5g} · x {shift:+.5g}"
