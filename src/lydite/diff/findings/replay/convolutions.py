"""Convolutions, from the input and the parameters of the module, at some pixels."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from typing import Any

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence, comparable
from lydite.diff.findings.replay.convolution_form import MODES, Form, unpadded, usual_form
from lydite.diff.findings.replay.linear import (
    MAX_WEIGHT,
    NARROW,
    linear_layer,
    narrow,
    other_bias,
    others,
    told,
)
from lydite.diff.findings.replay.variants import (
    Candidate,
    Replayed,
    Source,
    allowed,
    apart_of,
    fit_tolerance,
    inputs_of,
    sources,
)
from lydite.diff.result import Finding

MAX_PIXELS = 160
MAX_EARLIER = 16  # values whose frames may be put before a layer's own


def other_convolution(e: Evidence) -> Finding | None:
    """A convolution with other padding, stride or groups, or its weight in another order."""
    layer = convolution(e)
    return told(layer) if layer is not None else None


def convolution(e: Evidence) -> Replayed | None:
    """The convolution whose output a value is, where its weight and an input are known."""
    if not e.slot.startswith("out") or not e.same_shape or e.kind != "activation":
        return None
    parameters = e.parameters()
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or not 3 <= weight.ndim <= 5 or weight.size > MAX_WEIGHT:
        return None
    if e.port.ndim != weight.ndim or e.port.shape[1] != weight.shape[0]:
        return None
    for source in inputs_of(e):
        x = source.x
        if x.ndim != weight.ndim or x.shape[1] % weight.shape[1] or len(x) != len(e.port):
            continue
        at = _pixels(e.port.shape[2:])
        places = (slice(None), slice(None), *at.T)
        output = replace(e, reference=e.reference[places], port=e.port[places])
        usual = _usual(output, source, at, weight, bias)
        if usual is None:
            continue
        source, usual = _before_padding(output, source, at, usual)

        def variants(x: Array, at: Array = at, usual: Form = usual) -> Iterator[Candidate]:
            yield from _convolutions(e, x, at, usual)
            yield from _paddings(e, x, at, usual)

        def apply(x: Array, at: Array = at, usual: Form = usual) -> Array:
            return usual.at(x, at)

        return Replayed("a convolution", source, output, apply, variants)
    return None


def part_of_bias(e: Evidence) -> Finding | None:
    """A layer with another bias: what is added is the same everywhere."""
    layer = linear_layer(e) or convolution(e)
    if layer is None:
        return None
    e = layer.output
    added = e.values[1] - layer.apply(layer.source.own)
    axes = tuple(axis for axis in range(added.ndim) if axis != 1)
    bias = e.parameters().get("bias")
    if bias is None or added.ndim < 2 or bias.shape != (added.shape[1],):
        return None
    mean = added.mean(axes)
    shape = [1 if axis != 1 else -1 for axis in range(added.ndim)]
    if added.size < 2 * mean.size or apart_of(added, mean.reshape(shape) + 0 * added) > allowed(e):
        return None
    off = np.flatnonzero(np.abs(mean) > 1e-3 * float(np.abs(bias).max()))
    own = bias + mean
    is_zero = float(np.abs(own[off]).max(initial=0.0)) < 1e-3 * float(np.abs(bias).max())
    words = "zero" if is_zero else "another one"
    given = e.values[1] - added
    is_alike = np.ptp(given, axes).max() <= fit_tolerance(e) * np.abs(given).max()
    # Where the layer gives the same everywhere, so is what another input changes.
    if not off.size or (is_alike and not is_zero):
        return None
    return Finding(
        "other-bias",
        f"The port is {layer.what} of {layer.source.name} with another bias: it is {words} in "
        f"{len(off)} of {len(bias)} entries, the first of them {off[0]}.",
        "Load the whole bias of this layer.",
    )


def _usual(
    e: Evidence, source: Source, at: Array, weight: Array, bias: Array | None
) -> Form | None:
    """The strides, paddings and frames of earlier calls that give the reference."""
    own = (x for name, x in _earlier(e, source.x) if name.partition(" [")[0] == e.name)

    def fits(form: Form) -> bool:
        return apart_of(e.values[0], form.at(source.x, at)) <= allowed(e)

    frames = list(islice(own, 4)) if weight.ndim == 5 and weight.shape[2] > 1 else []
    return usual_form(source.x, at, weight, bias, frames, fits, e.values[0])


def _before_padding(e: Evidence, source: Source, at: Array, usual: Form) -> tuple[Source, Form]:
    """The input without its border, where the reference pads it before the layer."""
    core, padding = unpadded(source.x)
    if np.any(usual.before) or usual.earlier is not None or source.x[core].size == source.x.size:
        return source, usual
    form = replace(usual, before=padding.before, mode=padding.mode)
    if apart_of(e.values[0], form.at(source.x[core], at)) > allowed(e):
        return source, usual
    inner = Source(f"{source.name} without its padding", source.x[core], lambda: source.own[core])
    return inner, form


def _earlier(e: Evidence, x: Array) -> Iterator[tuple[str, Array]]:
    """Recorded values that are frames like those of an input, the layer's own first."""
    if x.ndim != 5:
        return
    like = (*x.shape[:2], *x.shape[3:])
    values = [r for r in e.before() if r.value.ndim == 5]
    values.sort(key=lambda r: r.name.partition(" [")[0] != e.name)
    for recorded in values:
        value = recorded.value
        if (*value.shape[:2], *value.shape[3:]) == like:
            (value,) = comparable(value)
            if not np.array_equal(value, x):
                yield recorded.name, value.astype(np.float64)


def _convolutions(e: Evidence, x: Array, at: Array, usual: Form) -> Iterator[Candidate]:
    weight, bias = usual.weight, usual.bias
    outputs, inputs, *kernel = weight.shape

    def result(**changed: Any) -> Array:
        return replace(usual, **changed).at(x, at)

    yield Candidate("as it is", result())
    yield from other_bias(lambda b: result(bias=b), bias)
    yield Candidate("with a dilation of 2", result(dilation=2))
    half = (*x.shape[:2], *(n // 2 for n in x.shape[2:]))
    small = next((s for s in sources(e) if s.x.shape == half), None)
    if small is not None and usual.stride == 1:
        value = usual.at(small.x, at // 2)
        yield Candidate(f"computed from {small.name}, before it is enlarged, not after", value)
    spatial = tuple(range(2, weight.ndim))
    if max(kernel) > 1:
        yield Candidate("with its kernel flipped", result(weight=np.flip(weight, spatial)))
    if len(kernel) == 3 and kernel[0] > 1:
        turned = np.flip(weight, 2)
        yield Candidate("with its kernel flipped in time", result(weight=turned))
    if len(kernel) > 1 and kernel[-1] == kernel[-2] > 1:
        turned = weight.swapaxes(-1, -2)
        yield Candidate("with its kernel transposed", result(weight=turned))
        yield Candidate(
            "with its kernel transposed and flipped", result(weight=np.flip(turned, spatial))
        )
    if outputs == inputs:
        yield Candidate("with inputs and outputs exchanged", result(weight=weight.swapaxes(0, 1)))
    if max(kernel) > 1 < inputs:
        last = np.moveaxis(weight, 1, -1)
        for stored, raw in (
            (
                "channels first read as channels last",
                np.moveaxis(weight.reshape(last.shape), -1, 1),
            ),
            ("channels last read as channels first", last.reshape(weight.shape)),
        ):
            yield Candidate(f"with its weight in another order: {stored}", result(weight=raw))
    for name, dtype in NARROW.items():
        rounded = replace(usual, weight=narrow(weight, dtype))
        yield Candidate(f"with its weight in {name}", rounded.at(x, at))
        yield Candidate(f"with its input in {name}", usual.at(narrow(x, dtype), at))
        low = rounded.at(narrow(x, dtype), at)
        yield Candidate(f"with its weight and input in {name}", low)
        yield Candidate(f"with its weight, input and result in {name}", narrow(low, dtype))
    for name, other, shift in others(e, weight, bias):
        words = f"with the parameters of {name}"
        yield Candidate(words, result(weight=other, bias=shift))


def _paddings(e: Evidence, x: Array, at: Array, usual: Form) -> Iterator[Candidate]:
    """Other paddings, and other frames of earlier calls."""
    kernel = usual.weight.shape[2:]
    space = range(len(kernel))[-2:]
    befores = np.broadcast_to(usual.before, len(kernel))
    for before in range(max(kernel[a] for a in space) + 1):
        form = usual
        for axis in space:
            form = form.padded(axis, min(before, kernel[axis]))
        if before != befores[-1]:
            words = f"padded by {before} instead of {befores[-1]} at the start"
            yield Candidate(words, form.at(x, at))
    for mode, words in MODES.items():
        form = usual
        for axis in space:
            form = form.padded(axis, mode=mode)
        yield Candidate(f"padded with {words}", form.at(x, at))
    if len(kernel) == 3 and kernel[0] > 1:
        yield from _other_frames(e, x, at, usual)


def _other_frames(e: Evidence, x: Array, at: Array, usual: Form) -> Iterator[Candidate]:
    """What is put before the first frame: numbers, or frames of earlier calls (a cache)."""
    count = usual.weight.shape[2] - 1
    first = int(np.broadcast_to(usual.before, 3)[0])
    whole = replace(usual, earlier=None)
    for before, mode in product(range(count, -1, -1), MODES):
        words = f"with {before} frames of padding in front in time ({MODES[mode]})"
        words += ", not causal: the rest is behind" if before < count else ", causal"
        if usual.earlier is not None:
            words += ", without the frames of earlier calls (the cache is not used)"
        yield Candidate(words, whole.padded(0, before, mode).at(x, at))
    if usual.earlier is not None:
        frames = usual.earlier
        yield Candidate(
            "with the frames of earlier calls in reverse order (cache)",
            replace(usual, earlier=frames[:, :, ::-1]).at(x, at),
        )
        for kept in range(1, frames.shape[2]):
            for part, words in ((frames[:, :, -kept:], "last"), (frames[:, :, :kept], "first")):
                form = replace(usual, earlier=part).padded(0, first + frames.shape[2] - kept)
                words = f"with only the {words} {kept} of the frames of earlier calls (cache)"
                yield Candidate(words, form.at(x, at))
    for lost in range(1, count + 1) if not first and usual.earlier is None else ():
        words = (
            f"with {lost} frames of zeros in the place of the first (no earlier call's, no cache)"
        )
        gone = x * (np.arange(x.shape[2]) >= lost)[:, None, None]
        yield Candidate(words, usual.at(gone, at))
    for name, frames in islice(_earlier(e, x), MAX_EARLIER):
        part = frames[:, :, -count:]
        form = replace(usual, earlier=part).padded(0, count - part.shape[2], "zeros")
        if usual.earlier is None or not np.array_equal(part, usual.earlier):
            words = f"with the last frames of {name} in front of it (an earlier call's, a cache)"
            yield Candidate(words, form.at(x, at))


def _pixels(sizes: tuple[int, ...]) -> Array:
    """Corners, places on the border, and others, as (places, axes)."""
    draw = np.random.default_rng(0)
    corners = np.array(list(product(*((0, size - 1) for size in sizes))))
    some = np.stack([draw.integers(size, size=MAX_PIXELS) for size in sizes], -1)
    for axis, size in enumerate(sizes):
        some[axis::8, axis] = 0
        some[axis + 4 :: 8, axis] = size - 1
    return np.unique(np.concatenate((corners, some)), axis=0)
