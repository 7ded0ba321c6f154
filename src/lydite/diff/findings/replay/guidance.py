"""Sums of two recorded values: guidance, also with a rescaled norm, and steps of samplers."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations, product

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.sampler_steps import solve, weighted_sum
from lydite.diff.findings.replay.selections import patch_orders
from lydite.diff.findings.replay.variants import (
    GLANCE,
    Candidate,
    Source,
    allowed,
    apart_of,
    fit_tolerance,
    is_replayable,
    nearest,
    sources,
    told_apart,
)
from lydite.diff.result import Finding

NEARLY_PARALLEL = 5e-7  # as `DEPENDENT`: predictions with and without the prompt are nearly one
MAX_PREDICTIONS = 6  # recorded values of the shape that are tried as predictions


def other_combination(e: Evidence) -> Finding | None:
    """A sum of two recorded values, with other factors: guidance, a step of a sampler."""
    if not is_replayable(e) or e.port.ndim < 3:
        return None
    reference, port = (value.reshape(-1).astype(np.float64) for value in e.values)
    values = [source for source in _terms(e) if source.x.size == e.port.size]
    at = e.sample[:GLANCE]
    limit = fit_tolerance(e)
    for a, b in combinations(values, 2):
        x, y = a.x.reshape(-1), b.x.reshape(-1)
        if solve((x[at], y[at]), reference[at], limit, NEARLY_PARALLEL) is None:
            continue
        right = solve((x, y), reference, limit, NEARLY_PARALLEL)
        if right is None or min(np.abs(right)) < 1e-3:
            continue  # one of the two is not in the sum
        wrong = solve((a.own, b.own), port, limit, NEARLY_PARALLEL)
        names = a.name, b.name
        if wrong is None:
            found = _in_some_channels(e, a, b, right, limit) or _of_other_parts(e, a, b, right)
            if found is not None:
                return found
            continue
        close = max(1e-3, 4 * limit)
        if np.allclose(right, wrong, rtol=close, atol=close / 10):
            continue
        found = _other_weight(names, right, wrong, close)
        found = found or _other_deviation((a, b), right, wrong, close)
        if found is not None:
            return found
        if min(np.abs(wrong)) < 1e-3:
            continue
        if np.isclose(wrong[0] * right[1], wrong[1] * right[0], rtol=close):
            continue  # the whole sum has a factor, which `scaled` and `negated` name
        ours, theirs = (weighted_sum(f, names) for f in (wrong, right))
        if np.allclose(right, wrong[::-1], rtol=close, atol=close / 10):
            cause, fix = "terms-exchanged", f"Exchange {a.name} and {b.name}."
        elif np.allclose(np.abs(right), np.abs(wrong), rtol=close, atol=close / 10):
            cause, fix = "term-negated", "Check the sign."
        else:
            cause = "other-factors"
            fix = (
                "Check what the factors come from: the schedule (betas, alphas or sigmas of this "
                "step and the next), the prediction type, the scale of guidance."
            )
        return Finding(cause, f"The port is {ours}, the reference {theirs}.", fix)
    return None


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


def _terms(e: Evidence) -> Iterator[Source]:
    """Recorded values of any part of which the value may be a sum: halves of batch and channels."""
    for source in sources(e):
        yield source
    for source in sources(e):
        for words, part in _halves(source.x.shape, e.port.shape):
            x, own = source.x[part], source.own[part]
            yield Source(f"{source.name} ({words})", x, lambda own=own: own)


def _halves(
    shape: tuple[int, ...], wanted: tuple[int, ...]
) -> Iterator[tuple[str, tuple[slice, ...]]]:
    """Where values of the wanted shape lie in one with twice the channels, and twice the batch."""
    if len(shape) != len(wanted) or len(shape) < 3 or shape[2:-1] != wanted[2:-1]:
        return
    axes = [axis for axis in (1, len(shape) - 1) if shape[axis] == 2 * wanted[axis]]
    if len(axes) != 1 or shape[0] not in (wanted[0], 2 * wanted[0]):
        return
    axis, size = axes[0], wanted[axes[0]]
    if any(shape[a] != wanted[a] for a in range(1, len(shape)) if a != axis):
        return
    for (channels, cut), row in product(
        (
            ("first half of the channels", slice(size)),
            ("second half of the channels", slice(size, None)),
            ("every second channel", slice(0, None, 2)),
            ("every second channel from 1", slice(1, None, 2)),
        ),
        range(shape[0] // wanted[0]),
    ):
        part = [slice(None)] * len(shape)
        part[0], part[axis] = slice(row * wanted[0], (row + 1) * wanted[0]), cut
        words = channels if shape[0] == wanted[0] else f"part {row} of the batch, {channels}"
        yield words, tuple(part)


def _other_weight(
    names: tuple[str, str], right: Array, wrong: Array, close: float
) -> Finding | None:
    """That the two are predictions with and without the prompt, guided with another weight."""
    if abs(right.sum() - 1) > close or abs(wrong.sum() - 1) > close:
        return None
    prompted = int(right[1] > right[0])  # the one with the larger factor
    first, second = names[1 - prompted], names[prompted]
    stems = [re.sub(r", call \d+", "", name.partition(" (part")[0]) for name in names]
    if stems[0] != stems[1] and not any(re.search("uncond|neg", name) for name in names):
        return None  # other sums have factors that add up to one: steps of samplers
    weight, own = float(right[prompted]), float(wrong[prompted])
    sum_of = f"{first} + w · ({second} − {first})"
    words = f"The reference is guided with the weight w = {weight:.4g}: {sum_of}; "
    cause, fix = "guidance-weight", f"Use the weight {weight:.4g}."
    if abs(own - 1) < close or abs(own) < close:
        cause = "guidance-missing"
        words += f"the port is {second if abs(own) > 0.5 else first}, without guidance."
        fix = "Apply the guidance."
    elif abs(own - (1 - weight)) < close:
        cause = "guidance-exchanged"
        words += "in the port the two predictions are exchanged."
        fix = "Exchange the predictions with and without the prompt."
    else:
        words += f"the port with w = {own:.4g}"
        one = ", one more: the difference is added to the prediction with the prompt"
        less = ", one less: the weight is counted from 1"
        words += one if abs(own - weight - 1) < close else ""
        words += less if abs(own - weight + 1) < close else ""
        words += "."
    return Finding(cause, words, fix)


def _other_deviation(
    terms: tuple[Source, Source], right: Array, wrong: Array, close: float
) -> Finding | None:
    """Guidance of which a part is brought to the deviation of the prompt's (guidance_rescale)."""
    prompted = int(right[1] > right[0])
    prompt, other = terms[prompted], terms[1 - prompted]
    if prompt.name.partition(" (part")[0] != other.name.partition(" (part")[0]:
        return None
    weights, factors = [], []
    for terms_factors in (right, wrong):
        factors.append(float(terms_factors.sum()))
        if abs(factors[-1]) < close:
            return None
        weights.append(float(terms_factors[prompted]) / factors[-1])
    guided = other.x + weights[0] * (prompt.x - other.x)
    way = float(prompt.x.std() / guided.std()) - 1
    part = (factors[0] - 1) / way if abs(way) > close else 0.0
    if not close < part < 1 + close:
        return None
    usual = f"a part of {part:.3g} of it rescaled to the deviation of {prompt.name}"
    formula = f"{other.name} + {weights[0]:.4g} · ({prompt.name} − {other.name})"
    cause, fix = "other-guidance", "Compute the guidance as the reference."
    if abs(weights[1] - weights[0]) < close * abs(weights[0]):
        own = (factors[1] - 1) / way
        words = f"the port rescales a part of {own:.3g}"
        if abs(factors[1] - 1) < close:
            words = "the port does not rescale it"
        fix = "Rescale the guided prediction as the reference (guidance_rescale)."
    elif abs(weights[1] + weights[0] - 1) < close * abs(weights[0]):
        cause, words = "guidance-exchanged", "in the port the two predictions are exchanged"
        fix = "Exchange the predictions with and without the prompt."
    else:
        cause, words = "guidance-weight", f"the port has the weight {weights[1]:.4g}"
    return Finding(cause, f"The reference is guided: {formula}, {usual}; {words}.", fix)


def _of_other_parts(e: Evidence, a: Source, b: Source, right: Array) -> Finding | None:
    """The same sum of other channels of the same values."""
    stems = [source.name.rpartition(", ")[0] for source in (a, b)]
    if not all(stems) or "of the batch" not in a.name:
        return None
    parts = [
        {
            words: source
            for source in _terms(e)
            for start, _, words in [source.name.rpartition(", ")]
            if start == stem
        }
        for stem in stems
    ]
    for words, x in parts[0].items():
        y = parts[1].get(words)
        if y is None:
            continue
        value = (right[0] * x.own + right[1] * y.own).reshape(e.port.shape)
        if apart_of(e.values[1], value) <= allowed(e):
            used, wanted = (source.name.rpartition(", ")[2].rstrip(")") for source in (x, a))
            return Finding(
                "another-chunk",
                f"The port takes the {used} of {stems[0].partition(' (')[0]}, the reference the "
                f"{wanted}; both combine the batch in the same way.",
                f"Take the {wanted}.",
            )
    return None


def _in_some_channels(
    e: Evidence, a: Source, b: Source, right: Array, limit: float
) -> Finding | None:
    """That the sum is taken in some channels only, the others are one of the two values."""
    if a.own.shape != e.port.shape or b.own.shape != e.port.shape:
        return None
    for axis in (1, e.port.ndim - 1):
        names: list[str] = []
        forms = {"sum": right[0] * a.own + right[1] * b.own, a.name: a.own, b.name: b.own}
        for channel in range(e.port.shape[axis]):
            port = e.values[1].take(channel, axis)
            tried = {name: form.take(channel, axis) for name, form in forms.items()}
            names.append(nearest(port, tried, max(3e-3, limit)) or "")
        if "" in names or not 0 < names.count("sum") < len(names):
            continue
        summed = [channel for channel, name in enumerate(names) if name == "sum"]
        other = next(name for name in names if name != "sum")
        return Finding(
            "guided-in-part",
            f"In the port only channels {_numbers(summed)} of {e.axis(axis)} are "
            f"{weighted_sum(right, (a.name, b.name))}, as in the reference; the others are "
            f"{other}.",
            "Combine the two in all channels.",
        )
    return None


def _numbers(numbers: list[int]) -> str:
    """0–2 for neighbours, else a list."""
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1:
        return f"{numbers[0]}–{numbers[-1]}"
    return ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")
