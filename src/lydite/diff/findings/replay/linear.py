"""Linear layers, from the input and the parameters of the module; large ones at some rows."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, permutations
from typing import Any

import ml_dtypes
import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.quantized_weight import quantized
from lydite.diff.findings.replay.variants import (
    Candidate,
    Replayed,
    allowed,
    apart_of,
    inputs_of,
    told_apart,
)
from lydite.diff.result import Finding

MAX_ROWS = 256  # of an input that are computed
MAX_WEIGHT = 2**24  # numbers of a weight that is computed with
MAX_SOLVED = 1024  # inputs of a layer whose weight is computed from its values
SPARE_ROWS = 16  # more than a layer has inputs
ALIKE = 0.95  # cosine of two errors that have one cause
LEAST_ERRORS = 64  # numbers that show it
MOST_HEADS = 64
MAX_OTHERS = 64  # parameters of the same shape that are tried
FUSED = re.compile(r"(.*[._/])(q|k|v)((?:_proj)?)$")  # to_q, q_proj
NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
FIXES = {
    "without its bias": ("bias-missing", "Add the bias."),
    "with its bias twice": ("bias-twice", "Add the bias once."),
    "with its bias subtracted": ("bias-negated", "Add the bias; it is subtracted."),
    "with its weight transposed": ("weight-transposed", "Transpose the weight when loading it."),
    "with its weight in another order": ("weight-reordered", "Move the axes of the weight; a "
     "reshape does not move them."),
    "with its kernel transposed": ("weight-transposed", "Exchange height and width of the kernel."),
    "with its kernel flipped": ("kernel-flipped", "Do not flip the kernel: torch's convolution is "
     "a correlation."),
    "with its kernel flipped in time": ("kernel-flipped", "Do not reverse the kernel in time."),
    "with inputs and outputs exchanged": ("weight-transposed", "Exchange the first two axes of the "
     "weight."),
}  # fmt: skip


def other_linear(e: Evidence) -> Finding | None:
    """A linear layer with its weight transposed, its bias missing, or another's parameters."""
    layer = linear_layer(e)
    return told(layer) if layer is not None else None


def other_weight(e: Evidence) -> Finding | None:
    """That the port is a linear layer of the right input with another weight, which it shows."""
    layer = linear_layer(e)
    if layer is None or not layer.source.is_known:  # the input itself may be another one
        return None
    weight, bias = (e.parameters().get(name) for name in ("weight", "bias"))
    x = layer.source.own.reshape(-1, layer.source.own.shape[-1])
    y = e.values[1].reshape(len(x), -1).astype(np.float64)
    if weight is None or weight.shape != (y.shape[1], x.shape[1]) or x.shape[1] > MAX_SOLVED:
        return None
    if len(x) < x.shape[1] + SPARE_ROWS:  # any value would be a linear layer of so few rows
        return None
    design = np.concatenate((x, np.ones((len(x), 1))), -1)[: 4 * MAX_SOLVED]
    y = y[: len(design)]
    solved, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    left = float(np.linalg.norm(design @ solved - y))
    share = 1 - design.shape[1] / len(design)  # of an error that a fit leaves
    if rank < design.shape[1] or left > share**0.5 * allowed(e):
        return None
    apart = float(np.linalg.norm(solved[:-1].T - weight) / np.linalg.norm(weight))
    if apart < 1e-3:
        return None
    if float(np.linalg.norm(solved[:-1])) < 1e-3 * float(np.linalg.norm(weight)):
        return Finding(
            "all-zero",
            "The port is this layer with a weight of zeros: its bias alone, or zeros.",
            "Load the weight of this layer, and check that its input is not zero.",
        )
    given = np.zeros(len(weight)) if bias is None else bias
    is_shifted = float(np.abs(solved[-1] - given).max()) > 1e-3 * max(
        float(np.abs(given).max()), 1e-3
    )
    words = " and bias" if is_shifted else ""
    return Finding(
        "weights-differ",
        f"The port is a linear layer of the same input with another weight{words}: "
        f"the weight that it shows is {apart:.2g} × the reference's away from it, and none of its "
        "known rearrangements.",
        "Check how the weight of this layer is loaded: it may have kept its initial values, or be "
        "another layer's.",
    )


def linear_layer(e: Evidence) -> Replayed | None:
    """The linear layer whose output a value is, where its weight and an input are known."""
    if not e.slot.startswith("out") or not e.same_shape or e.kind != "activation":
        return None
    parameters = e.parameters()
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or weight.ndim != 2 or weight.size > MAX_WEIGHT:
        return None
    parts: list[str] = []
    if e.port.shape[-1] in (2 * len(weight), 3 * len(weight)):
        weight, bias, parts = _joined(e, weight, bias)
    for source in inputs_of(e):
        if source.x.shape[-1] != weight.shape[1] or e.port.shape[-1] != weight.shape[0]:
            continue
        if source.x.shape[:-1] != e.port.shape[:-1]:
            continue
        rows = np.arange(e.port.size // e.port.shape[-1])
        if len(rows) > MAX_ROWS:
            rows = np.random.default_rng(0).choice(rows, MAX_ROWS, replace=False)
        output = replace(
            e,
            reference=e.reference.reshape(-1, e.port.shape[-1])[rows],
            port=e.port.reshape(-1, e.port.shape[-1])[rows],
        )

        def variants(x: Array, rows: Array = rows) -> Iterator[Candidate]:
            flat = x.reshape(-1, x.shape[-1])[rows]
            yield from _linear(e, flat, weight, bias)
            yield from _other_parts(flat, weight, bias, parts)
            yield from _others_fused(e, flat, bias, parts)
            for words, moved in _other_heads(x):
                y = moved.reshape(-1, x.shape[-1])[rows] @ weight.T
                yield Candidate(words, y if bias is None else y + bias)

        def apply(x: Array, rows: Array = rows) -> Array:
            y = x.reshape(-1, x.shape[-1])[rows] @ weight.T
            return y if bias is None else y + bias

        if "part " in source.name and apart_of(output.values[0], apply(source.x)) > allowed(e):
            continue  # another part of the batch
        return Replayed("a linear layer", source, output, apply, variants)
    return None


def _joined(
    e: Evidence, weight: Array, bias: Array | None
) -> tuple[Array, Array | None, list[str]]:
    """Weight and bias of q, k and v (or k and v) as one layer, where a port computes them so."""
    match = FUSED.match(e.name)
    if match is None:
        return weight, bias, []
    parts = ["q", "k", "v"][-(e.port.shape[-1] // len(weight)) :]
    names = [f"{match[1]}{part}{match[3]}" for part in parts]
    weights = dict(e.parameters_like(weight.shape)) | {f"{e.name}.weight": weight}
    biases = (
        dict(e.parameters_like(bias.shape)) | {f"{e.name}.bias": bias} if bias is not None else {}
    )
    rows = [weights.get(f"{name}.weight") for name in names]
    shifts = [biases.get(f"{name}.bias") for name in names]
    if any(row is None for row in rows) or (bias is not None and any(b is None for b in shifts)):
        return weight, bias, []
    joined = np.concatenate([row for row in rows if row is not None])
    shift = np.concatenate([b for b in shifts if b is not None]) if bias is not None else None
    return joined, shift, parts


def _other_parts(
    x: Array, weight: Array, bias: Array | None, parts: list[str]
) -> Iterator[Candidate]:
    """q, k and v of a layer for all three in another order."""
    count = len(parts)
    for order in permutations(range(count)) if count else ():
        if order != tuple(range(count)):
            rows = x @ np.concatenate([np.split(weight, count)[n] for n in order]).T
            words = f"with its parts in the order {', '.join(parts[n] for n in order)}"
            if bias is not None:
                yield Candidate(
                    f"{words}, except for the bias: not {', '.join(parts)}", rows + bias
                )
                rows = rows + np.concatenate([np.split(bias, count)[n] for n in order])
            yield Candidate(f"{words}: not {', '.join(parts)}", rows)
    for left_out in range(count if bias is not None else 0):
        some = np.array(bias, copy=True).reshape(count, -1)
        some[left_out] = 0
        value = x @ weight.T + some.reshape(-1)
        yield Candidate(f"without the bias of its part {parts[left_out]}", value)


def _others_fused(
    e: Evidence, x: Array, bias: Array | None, parts: list[str]
) -> Iterator[Candidate]:
    """q, k and v of another module, as one layer, where both have no bias."""
    match = FUSED.match(e.name)
    if match is None or not parts or bias is not None:
        return
    own = e.parameters().get("weight")
    weights = dict(e.parameters_like(own.shape)) if own is not None else {}
    for path in weights:
        other = FUSED.match(path.removesuffix(".weight"))
        if other is None or other[2] != parts[0] or other[1] == match[1]:
            continue
        names = [f"{other[1]}{part}{other[3]}.weight" for part in parts]
        if all(name in weights for name in names):
            value = x @ np.concatenate([weights[name] for name in names]).T
            yield Candidate(f"with the parameters of {other[1]}{'/'.join(parts)}", value)


def told(layer: Replayed) -> Finding | None:
    source, what = layer.source, layer.what
    told = told_apart(
        layer.output,
        layer.variants(source.x),
        lambda: layer.variants(source.own),
        reference_is="as it is",
        what=f"forms of {what}",
    )
    if told is None:
        return _rounded_weight(layer)
    cause, fix = FIXES.get(told.wrong.partition(": ")[0], ("", ""))
    if not cause and told.wrong.startswith("with the parameters of"):
        cause, fix = "another-parameter", "Load the module's own parameters."
    if not cause and told.wrong.startswith("without the bias of its part"):
        cause, fix = "bias-missing", "Add the bias of each of q, k and v that has one."
    if not cause and "quantized to" in told.wrong:
        cause, fix = "quantized", "Load the weight in the reference's precision."
    if not cause and "of its weight in another order" in told.wrong:
        cause, fix = (
            "weight-reordered",
            "Move the axes of the weight (heads, channels) when loading.",
        )
    if (not cause and "of its input joined" in told.wrong) or "of its input split" in told.wrong:
        cause, fix = "heads-not-moved", "Move the axis of heads before the reshape (transpose)."
    if not cause and told.wrong.startswith("with its parts"):
        cause, fix = "qkv-exchanged", "Join the weights of q, k and v in the reference's order."
    if not cause and told.wrong.endswith(tuple(f" in {name}" for name in NARROW)):
        cause, fix = "rounded", "Load the weight, and compute, in the reference's precision."
    if not cause and ("earlier call" in told.wrong or "in time (" in told.wrong):
        cause, fix = (
            "other-cache",
            (
                "Put the reference's frames before the first one: the last ones of the call "
                "(chunk) before, or its padding."
            ),
        )
    if not cause and "before it is enlarged" in told.wrong:
        cause, fix = "other-order", "Enlarge the picture (upsampling) first, then convolve it."
    if not cause:
        cause, fix = "other-padding", "Use the reference's padding and stride."
    return Finding(
        cause,
        f"The port is {what} of {source.name} {told.wrong}, unlike the reference; {told.leaves}.",
        fix,
    )


def _rounded_weight(layer: Replayed) -> Finding | None:
    """That the error has the direction and the size of that of a weight in 16 bits.

    An input that the port does not record may have rounding of its own, which hides the rest.
    """
    values = {c.name: c.value for c in layer.variants(layer.source.own)}
    e, right = layer.output, values["as it is"]
    wrong = e.values[1] - right
    for name in NARROW if wrong.size >= LEAST_ERRORS else ():
        own = values[f"with its weight in {name}"] - right
        sizes = float(np.linalg.norm(own)), float(np.linalg.norm(wrong))
        if not min(sizes) or abs(sizes[1] / sizes[0] - 1) > 1 - ALIKE:
            continue
        if float(np.vdot(own, wrong)) > ALIKE * sizes[0] * sizes[1]:
            text = f"The error of the port is that of the weight of this layer in {name}."
            return Finding("rounded", text, "Load the weight in the reference's precision.")
    return None


def _linear(e: Evidence, x: Array, weight: Array, bias: Array | None) -> Iterator[Candidate]:
    def result(w: Array, b: Array | None = bias) -> Array:
        return x @ w.T if b is None else x @ w.T + b

    outputs, inputs = weight.shape
    yield Candidate("as it is", result(weight))
    yield from other_bias(lambda b: result(weight, b), bias)
    if outputs == inputs:
        yield Candidate("with its weight transposed", result(weight.T))
    elif outputs > 1 < inputs:
        raw = weight.reshape(inputs, outputs).T
        yield Candidate("with its weight in another order", result(raw))
    for words, other in quantized(weight):
        yield Candidate(f"with its weight {words}", result(other))
    for heads in _head_counts(inputs):
        moved = weight.reshape(outputs, heads, -1).swapaxes(1, 2).reshape(outputs, inputs)
        words = f"its inputs read as {inputs // heads} × {heads}, not {heads} × {inputs // heads}"
        yield Candidate(f"with the inputs of its weight in another order: {words}", result(moved))
    for name, dtype in NARROW.items():
        rounded = narrow(weight, dtype)
        yield Candidate(f"with its weight in {name}", result(rounded))
        given = narrow(x, dtype) @ weight.T + (0.0 if bias is None else bias)
        yield Candidate(f"with its input in {name}", given)
        low = narrow(x, dtype) @ rounded.T + (0.0 if bias is None else bias)
        yield Candidate(f"with its weight and input in {name}", low)
        yield Candidate(f"with its weight, input and result in {name}", narrow(low, dtype))
    for name, other, shift in others(e, weight, bias):
        yield Candidate(f"with the parameters of {name}", result(other, shift))


def _other_heads(x: Array) -> Iterator[tuple[str, Array]]:
    """The input (batch, tokens, width) with its heads in another order, or not moved back."""
    if x.ndim != 3:
        return
    batch, tokens, width = x.shape
    for heads in _head_counts(width):
        split = x.reshape(batch, tokens, heads, -1)
        words = f"with {heads} heads of its input"
        joined = split.swapaxes(1, 2).reshape(x.shape)
        yield f"{words} joined without moving their axis back", joined
        apart = split.swapaxes(1, 2).reshape(batch, tokens, heads, -1)
        yield f"{words} split without moving their axis", apart.swapaxes(1, 2).reshape(x.shape)


def _head_counts(width: int) -> list[int]:
    """Into how many heads a width may be split."""
    return [n for n in range(2, min(width // 2, MOST_HEADS) + 1) if width % n == 0]


def other_bias(result: Callable[[Array | None], Array], bias: Array | None) -> Iterator[Candidate]:
    if bias is not None:
        yield Candidate("without its bias", result(None))
        yield Candidate("with its bias twice", result(2 * bias))
        yield Candidate("with its bias subtracted", result(-bias))


def others(
    e: Evidence, weight: Array, bias: Array | None
) -> Iterator[tuple[str, Array, Array | None]]:
    """Weights of this shape, with the layer's own bias and with their own."""
    biases = dict(e.parameters_like(bias.shape)) if bias is not None else {}
    for name, other in islice(e.parameters_like(weight.shape), MAX_OTHERS):
        if not np.array_equal(other, weight):
            yield name, other, bias
            own = biases.get(name.removesuffix("weight") + "bias")
            if own is not None:
                yield f"{name.removesuffix('.weight')}, weight and bias", other, own


def narrow(weight: Array, dtype: Any) -> Array:
    return weight.astype(np.float32).astype(dtype).astype(np.float64)
