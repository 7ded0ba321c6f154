"""Activations and norms, of the input of the module or of any recorded value."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import inf

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.norm_forms import (
    NONE,
    NORM_EPS,
    VARIANTS,
    affine_left,
    norms,
)
from lydite.diff.findings.replay.relations import with_relation
from lydite.diff.findings.replay.variants import (
    GLANCE,
    Candidate,
    Replayed,
    Source,
    allowed,
    apart_of,
    inputs_of,
    is_replayable,
    nearest_first,
    simplest,
    sources,
    told_apart,
)
from lydite.diff.result import Finding

MOST_HEADS = 64
MAX_WEIGHTS = 64  # of other norms that are tried
MAX_INPUTS = 64  # recorded values of which the port may be the norm
APART = "heads apart"
MAX_LATELY = 8  # values of which a modulated one may be the norm


def other_activation(e: Evidence) -> Finding | None:
    """The reference is one activation of a recorded value, the port another one."""
    if not is_replayable(e, least=16):
        return None
    for source in sources(e):
        if source.x.shape != e.port.shape or not _is_activation_of(e, source.x):
            continue
        told = told_apart(
            e,
            _activated(source.x),
            lambda source=source: _activated(source.own),
            what=""
            if apart_of(e.values[0], source.x) <= allowed(e)
            else "activations of " + source.name,
        )
        if told is not None:
            name = source.name
            return Finding(
                "other-activation",
                f"The port applies {told.wrong} to {name}, the reference applies {told.right}; "
                f"{told.leaves}.",
                f"Use {told.right} here." if told.wrong != NONE else f"Apply {told.right} here.",
            )
    return None


def other_norm(e: Evidence) -> Finding | None:
    """A norm of another kind, with another eps, another divisor or other groups."""
    if not is_replayable(e) or not e.slot.startswith("out") or e.port.ndim < 2:
        return None
    inputs = [source for source in inputs_of(e) if source.x.shape == e.reference.shape]
    if not e.parameters() and (found := _other_modulated_norm(e)) is not None:
        return found
    for source, channels in ((source, axis) for source in inputs for axis in (-1, 1)):
        if channels == 1 and e.port.ndim < 3:
            continue
        for known in _known_affines(e, channels) or (None,):
            best, left, scale, shift = _best_norm(e, source, channels, known)
            if not best or left > allowed(e):
                continue
            told = told_apart(
                e,
                _scaled_norms(source.x, channels, scale, shift),
                partial(_scaled_norms, source.own, channels, scale, shift),
                reference_is=best,
                what="norms of its input" + ("" if known else ", with a fitted weight"),
            )
            if told is not None:
                right = told.right
                if APART in told.wrong and APART not in right:
                    right += " over all channels, those of all heads together"
                return Finding(
                    "other-norm",
                    f"The port is a {told.wrong}, the reference a {right}, of the same input; "
                    f"{told.leaves}.",
                    f"Use a {right}.",
                )
            if known is not None:
                found = _other_affine(e, source, best, channels, known)
                found = found or _other_weight(e, source, best, channels, known)
                found = found or _norm_of_another(e, source, best, channels, known)
                if found is not None:
                    return found
    return None


def _other_modulated_norm(e: Evidence) -> Finding | None:
    """A norm with scale and shift for each row of the batch, of another kind or eps."""
    for source in _lately(e):
        best, left, scale, shift = _best_norm(e, source, -1, None, by_row=True)
        if not best or left > allowed(e):
            continue
        told = told_apart(
            e,
            _scaled_norms(source.x, -1, scale, shift),
            partial(_scaled_norms, source.own, -1, scale, shift),
            reference_is=best,
        )
        if told is not None:
            return Finding(
                "other-norm",
                f"The port modulates a {told.wrong} of {source.name}, the reference a "
                f"{told.right}; {told.leaves}.",
                f"Use a {told.right}.",
            )
    return None


def _best_norm(
    e: Evidence, source: Source, channels: int, known: "Affine | None", *, by_row: bool = False
) -> tuple[str, float, Array, Array]:
    """The norm that comes nearest to the reference, what it leaves, its scale and its shift."""
    fits = {
        c.name: (
            apart_of(e.values[0], c.value * known.scale + known.shift),
            known.scale,
            known.shift,
        )
        if known is not None
        else affine_left(c.value, e.values[0], channels, by_row=by_row)
        for c in _norms_of_input(source.x, channels)
    }
    if not fits:  # one channel, or an odd number of them
        return "", inf, np.zeros(0), np.zeros(0)
    best = simplest([(name, fit[0]) for name, fit in fits.items()])
    return best, *fits[best]


def norm_layer(e: Evidence) -> Replayed | None:
    """The norm whose output a value is, with its weight or with scale and shift that fit it.

    Of a modulated norm the reference may have recorded what it is the norm of, and no more.
    """
    if not is_replayable(e) or e.port.ndim < 3:
        return None
    values = inputs_of(e) if e.slot.startswith("out") else _lately(e)
    for source in values:
        for channels in (-1, 1) if source.x.shape == e.reference.shape else ():
            for known in _known_affines(e, channels) or (None,):
                best, left, scale, shift = _best_norm(e, source, channels, known, by_row=True)
                if not best or left > e.noise():
                    continue

                def apply(
                    x: Array, best: str = best, channels: int = channels, a: Array = scale,
                    b: Array = shift,
                ) -> Array:  # fmt: skip
                    return _norm(x, channels, best) * a + b

                return Replayed("a norm", source, e, apply, lambda _: iter(()))
    return None


def _lately(e: Evidence) -> Iterator[Source]:
    """Values of this shape that were computed last, of which a modulated value may be the norm."""
    tokens = e.port.ndim == 3 and e.port.shape[1] >= 8  # scale and shift are fitted to them
    near = (s for s in sources(e) if s.x.shape == e.port.shape)
    return islice(near, MAX_LATELY if tokens else 0)


def _norm(x: Array, channels: int, name: str) -> Array:
    return next(c.value for c in _norms_of_input(x, channels) if c.name == name)


def _scaled_norms(x: Array, channels: int, scale: Array, shift: Array) -> Iterator[Candidate]:
    return (Candidate(c.name, c.value * scale + shift) for c in _norms_of_input(x, channels))


def _other_affine(
    e: Evidence, source: Source, best: str, channels: int, known: "Affine"
) -> Finding | None:
    """That the port applies the norm's own weight and bias in another way."""
    plain = _norm(source.own, channels, best)
    weight, bias = known.scale, known.shift
    if apart_of(e.values[1], plain * weight + bias) <= allowed(e):
        return None  # the norm is right, its input is not
    tried = {
        "without its weight": plain + bias,
        "without its bias": plain * weight,
        "without its weight and bias": plain,
        "with its bias twice": plain * weight + 2 * bias,
    }
    if known.one_plus:
        tried["with its weight instead of 1 + weight"] = plain * (weight - 1) + bias
    else:
        tried["with 1 + weight instead of its weight"] = plain * (1 + weight) + bias
        tried["with weight − 1 instead of its weight"] = plain * (weight - 1) + bias
    lefts = {words: apart_of(e.values[1], value) for words, value in tried.items()}
    words = min(lefts, key=lambda words: lefts[words])
    if lefts[words] > allowed(e):
        return None
    return Finding(
        "norm-affine",
        f"The port is this norm {words}; {e.leaves(lefts[words])}.",
        "Multiply by the weight and add the bias as the reference does.",
    )


def _other_weight(
    e: Evidence, source: Source, best: str, channels: int, known: "Affine"
) -> Finding | None:
    """That the port has the weight of another norm."""
    plain = _norm(source.own, channels, best)
    shape = [1] * e.port.ndim
    shape[channels] = -1
    bias = e.parameters().get("bias")
    others = nearest_first(e.parameters_like((e.port.shape[channels],)), e.name)
    for name, other in others[:MAX_WEIGHTS]:
        weight = other + known.one_plus
        shift = 0.0 if bias is None else e.values[1] - plain * weight.reshape(shape)
        if bias is not None:  # another norm's bias too: the same in all rows
            axes = tuple(a for a in range(e.port.ndim) if a != channels % e.port.ndim)
            shift = np.mean(shift, axes, keepdims=True)
        if apart_of(e.values[1], plain * weight.reshape(shape) + shift) <= allowed(e):
            return Finding(
                "another-parameter",
                f"The port is this norm with the weight of another norm, {name}.",
                "Load the module's own parameters, or check which layer is computed.",
            )
    return None


def _norm_of_another(
    e: Evidence, source: Source, best: str, channels: int, known: "Affine"
) -> Finding | None:
    """That the port is this norm of another value."""
    for other in islice(sources(e), MAX_INPUTS):
        if other.x.shape != source.x.shape or apart_of(source.own, other.own) <= allowed(e):
            continue
        value = _norm(other.own, channels, best) * known.scale + known.shift
        if (left := apart_of(e.values[1], value)) <= allowed(e):
            found = Finding(
                "another-input",
                f"The port is this norm of {other.name}, the reference of {source.name}; "
                f"{e.leaves(left)}.",
                f"Give it {source.name}.",
            )
            return with_relation(e, found, other.name, source.name)
    return None


def extra_norm(e: Evidence) -> Finding | None:
    """The port normalizes a value that the reference leaves as it is."""
    if not is_replayable(e) or e.port.ndim != 3 or e.port.shape[1] < 8:
        return None
    for source in sources(e):
        if source.x.shape != e.port.shape or apart_of(e.values[0], source.x) > allowed(e):
            continue
        fits = {c.name: affine_left(c.value, e.values[1], -1)[0] for c in norms(source.own, -1)}
        kind = simplest(list(fits.items()))
        if fits[kind] <= allowed(e):
            return Finding(
                "norm-extra",
                f"The port is a {kind.partition(' with ')[0]} of {source.name} with a weight for "
                "each channel; the reference is that value itself.",
                "Remove the norm.",
            )
    return None


@dataclass(frozen=True, eq=False)
class Affine:
    """Scale and shift of a norm, shaped for its value; the scale may be 1 + weight, as Gemma's."""

    scale: Array
    shift: Array
    one_plus: bool = False


def _known_affines(e: Evidence, channels: int) -> tuple[Affine, ...]:
    """What a module's weight and bias may mean; empty where they are not known."""
    parameters = e.parameters()
    weight = parameters.get("weight")
    if weight is None or weight.shape != (e.port.shape[channels],):
        return ()
    bias = parameters.get("bias", np.zeros_like(weight))
    shape = [1] * e.port.ndim
    shape[channels] = -1
    scale, shift = weight.reshape(shape), bias.reshape(shape)
    return Affine(scale, shift), Affine(1 + scale, shift, one_plus=True)


def _activated(x: Array) -> Iterator[Candidate]:
    return (Candidate(label, f(x)) for label, f in VARIANTS.items())


def _is_activation_of(e: Evidence, x: Array) -> bool:
    """Whether some activation of a few values gives the reference's."""
    at = e.sample[:GLANCE]
    values, expected = x.reshape(-1)[at], e.values[0].reshape(-1)[at]
    size = float(np.linalg.norm(expected))
    return any(apart_of(f(values), expected) <= 0.02 * size for f in VARIANTS.values())


def _norms_of_input(x: Array, channels: int) -> Iterator[Candidate]:
    """All norms, also of each head of a projection apart."""
    yield from norms(x, channels)
    width = x.shape[-1]
    if channels != -1 or x.ndim != 3:
        return
    for heads in (n for n in range(2, MOST_HEADS + 1) if width % n == 0 and width // n >= 4):
        split = x.reshape(*x.shape[:2], heads, -1)
        for eps in NORM_EPS[:2]:
            root = np.sqrt((split * split).mean(-1, keepdims=True) + eps)
            words = f"RMS norm with eps {eps:g} with each of {heads} {APART}"
            yield Candidate(words, (split / root).reshape(x.shape))
