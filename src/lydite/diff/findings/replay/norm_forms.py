"""The known norms and activations of a value, without weights."""

from collections.abc import Callable, Iterator
from itertools import product
from math import prod

import numpy as np

from lydite.diff.findings.evidence import Array
from lydite.diff.findings.replay.gated_feed_forward import ACTIVATIONS, OTHER_NUMBERS
from lydite.diff.findings.replay.variants import Candidate

NORM_EPS = (1e-6, 1e-5, 1e-12, 1e-8, 1e-4, 1e-3, 1e-2, 1e-1)
GROUPS = (1, 2, 4, 8, 16, 32, 64, 3, 6, 12, 24, 48)
NONE = "no activation"
VARIANTS: dict[str, Callable[[Array], Array]] = {
    **ACTIVATIONS,
    "tanh": np.tanh,
    "3 · tanh(x / 3)": lambda x: 3 * np.tanh(x / 3),
    "quick gelu with 1.7 (x · sigmoid(1.7 x))": lambda x: x / (1 + np.exp(-1.7 * x)),
    "squared relu": lambda x: np.maximum(x, 0) ** 2,
    "leaky relu of 0.01": lambda x: np.where(x > 0, x, 0.01 * x),
    "leaky relu of 0.2": lambda x: np.where(x > 0, x, 0.2 * x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "softplus": lambda x: np.logaddexp(x, 0),
    "mish": lambda x: x * np.tanh(np.logaddexp(x, 0)),
    NONE: lambda x: x,
    **OTHER_NUMBERS,
}


def norms(x: Array, channels: int) -> Iterator[Candidate]:
    """Norms of the last axis; of groups of channels where these are on axis 1."""
    if channels == -1:
        yield from _standardized(x, (-1,), "layer norm")
        for eps in NORM_EPS:
            root = np.sqrt((x * x).mean(-1, keepdims=True) + eps)
            yield Candidate(f"RMS norm with eps {eps:g}", x / root)
        if x.ndim == 4:
            yield from _over_all_heads(x)
        return
    count, size = x.shape[:2]
    for groups in (n for n in GROUPS if size % n == 0 and n < size):
        for words in ("", " of every nth channel"):
            split = x.reshape(count, groups, size // groups, -1)
            if words:
                split = x.reshape(count, size // groups, groups, -1).swapaxes(1, 2)
            flat = split.reshape(count, groups, -1)
            for norm in _standardized(flat, (-1,), f"group norm of {groups} groups{words}"):
                value = norm.value.reshape(split.shape)
                value = value.swapaxes(1, 2) if words else value
                yield Candidate(norm.name, value.reshape(x.shape))
            name = f"group norm of {groups} groups{words}, of each pixel alone"
            for norm in _standardized(split, (2,), name, few=True) if groups > 1 else ():
                value = norm.value.swapaxes(1, 2) if words else norm.value
                yield Candidate(norm.name, value.reshape(x.shape))
            name = f"group norm of {groups} groups{words}, over the batch too"
            for norm in _standardized(split, (0, 2, 3), name, few=True) if count > 1 else ():
                value = norm.value.swapaxes(1, 2) if words else norm.value
                yield Candidate(norm.name, value.reshape(x.shape))
    if x.ndim > 2:
        yield from _standardized(x, (1,), "layer norm of the channels at each pixel")
    if x.ndim > 3:
        yield from _standardized(
            x, tuple(range(2, x.ndim)), "norm of each channel apart (instance norm)"
        )


def _over_all_heads(x: Array) -> Iterator[Candidate]:
    """Norms of q or k over all heads together, where these are an axis."""
    for axis, eps in product((1, 2), NORM_EPS):
        words = f"with eps {eps:g} with axes {axis} and 3 together (over all heads, not each head)"
        root = np.sqrt((x * x).mean((axis, 3), keepdims=True) + eps)
        yield Candidate(f"RMS norm {words}", x / root)
        centred = x - x.mean((axis, 3), keepdims=True)
        root = np.sqrt((centred * centred).mean((axis, 3), keepdims=True) + eps)
        yield Candidate(f"layer norm {words}", centred / root)


def _standardized(
    x: Array, axes: tuple[int, ...], name: str, *, few: bool = False
) -> Iterator[Candidate]:
    centred = x - x.mean(axes, keepdims=True)
    variance = (centred * centred).mean(axes, keepdims=True)
    count = prod(x.shape[axis] for axis in axes)
    for eps in NORM_EPS[:2] if few else NORM_EPS:
        yield Candidate(f"{name} with eps {eps:g}", centred / np.sqrt(variance + eps))
        if few:
            continue
        outside = centred / (np.sqrt(variance) + eps)
        yield Candidate(f"{name} with eps {eps:g} with the root before eps", outside)
    unbiased = centred / np.sqrt(variance * count / (count - 1) + 1e-6) if count > 1 else centred
    if not few:
        yield Candidate(f"{name} with n − 1 as divisor of the (unbiased) variance", unbiased)


def affine_left(
    x: Array, value: Array, channels: int, *, by_row: bool = False
) -> tuple[float, Array, Array]:
    """The error of the best weight and bias per channel, or per row of the batch and channel."""
    axes = tuple(axis for axis in range(by_row, x.ndim) if axis != channels % x.ndim)
    mean, expected = x.mean(axes, keepdims=True), value.mean(axes, keepdims=True, dtype=np.float64)
    power = ((x - mean) ** 2).sum(axes, keepdims=True)
    scale = ((x - mean) * (value - expected)).sum(axes, keepdims=True) / np.maximum(power, 1e-300)
    shift = expected - scale * mean
    return float(np.linalg.norm(value - x * scale - shift)), scale, shift
