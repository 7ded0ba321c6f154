"""A weight after rounding to a few bits: the usual forms, with one scale for a group of inputs.

Sources: llama.cpp's q8_0 and q4_0 (ggml-quants.c), mlx.core.quantize of MLX 0.32.4.
"""

from collections.abc import Iterator

import numpy as np

from lydite.diff.findings.evidence import Array

GROUPS = (32, 64, 128)
BITS = (8, 4, 6, 5, 3, 2)
MAX_WEIGHT = 2**22


def quantized(weight: Array) -> Iterator[tuple[str, Array]]:
    """Words, and the weight (outputs, inputs) as it is after quantization."""
    outputs, inputs = weight.shape
    if weight.size > MAX_WEIGHT:
        return
    for size in GROUPS:
        if weight.size % size:
            continue  # groups may run on into the next row
        groups = weight.reshape(-1, size).astype(np.float32)
        for bits in BITS:
            words = f"quantized to {bits} bits in groups of {size} inputs"
            yield f"{words} (symmetric)", _symmetric(groups, bits).reshape(weight.shape)
            half = _symmetric(groups, bits, np.float16).reshape(weight.shape)
            yield f"{words} (symmetric, scales in float16)", half
            if inputs % size == 0:
                yield (
                    f"{words} (with a shift, as MLX)",
                    _shifted(groups, bits).reshape(weight.shape),
                )
    for bits in (8, 4):
        rows = _symmetric(weight.astype(np.float32), bits)
        yield f"quantized to {bits} bits with one scale for each output", rows
        whole = _symmetric(weight.reshape(1, -1).astype(np.float32), bits)
        yield f"quantized to {bits} bits with one scale", whole.reshape(outputs, inputs)


def _symmetric(groups: Array, bits: int, scales: type = np.float32) -> Array:
    """The largest number of a group is the largest step, on either side of zero."""
    scale = np.abs(groups).max(1, keepdims=True) / (2 ** (bits - 1) - 1)
    scale = np.maximum(scale, 1e-12).astype(scales).astype(np.float32)
    return (np.round(groups / np.maximum(scale, 1e-12)) * scale).astype(np.float64)


def _shifted(groups: Array, bits: int) -> Array:
    """From the smallest to the largest number of a group, with zero among the steps."""
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    from_low = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / (2**bits - 1), 1e-7)
    scale = np.where(from_low, scale, -scale)
    edge = np.where(from_low, low, high)
    steps = np.round(edge / scale)
    scale = np.where(steps != 0, edge / np.where(steps, steps, 1), scale)
    shift = np.where(steps != 0, edge, 0)
    whole = np.clip(np.round((groups - shift) / scale), 0, 2**bits - 1)
    return (whole * scale + shift).astype(np.float64)
