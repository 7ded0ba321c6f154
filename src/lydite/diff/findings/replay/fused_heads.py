"""Heads of a fused product of queries, keys and values, read with the axes in another order."""

from collections.abc import Iterator

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.attention import recorded_parts
from lydite.diff.findings.replay.variants import (
    Candidate,
    allowed,
    apart_of,
    apart_of_port,
    is_replayable,
)
from lydite.diff.result import Finding

FUSED = ("qkv", "kv")
COUNTS = (2, 4, 8, 12, 16, 20, 24, 32, 64)  # of heads that a merged value may have


def other_split(e: Evidence) -> Finding | None:
    """One of queries, keys and values, cut from their fused product in another order of axes."""
    if not is_replayable(e) or e.port.ndim not in (3, 4):
        return None
    right, own = recorded_parts(e)
    for added, fused in ((a, f) for a in (False, True) for f in FUSED):
        keys = [(False, added, part) for part in fused]
        if any(key not in right for key in keys):
            continue
        parts = [right[key] for key in keys]
        if len({x.shape for x in parts}) > 1 or parts[0].ndim != 3 or len(parts[0]) != len(e.port):
            continue
        mine = np.concatenate([own[key] for key in keys], -1)
        if (found := _told(e, parts, mine)) is not None:
            return found
    return None


def _told(e: Evidence, parts: list[Array], fused: Array) -> Finding | None:
    """The order in which the port reads the product, where the reference takes a part of it."""
    width, count = parts[0].shape[-1], len(parts)
    for heads in _heads(e.port.shape, width):
        shown = (_in_shape(x.reshape(*x.shape[:2], heads, -1), e.port.shape) for x in parts)
        if all(x is None or apart_of(e.values[0], x) > allowed(e) for x in shown):
            continue
        for tried in _readings(fused, heads, count):
            value = _in_shape(tried.value, e.port.shape)
            if value is not None and apart_of_port(e, value) <= allowed(e):
                return _finding(tried.name, heads, width, count)
    return None


def _finding(wrong: str, heads: int, width: int, count: int) -> Finding:
    usual, read, what = f"{heads} heads, {width // heads} channels", f"{width} channels", "channels"
    if "parts" in wrong:  # else each part by itself is read so, fused or not
        usual, read, what = f"{count} parts, {usual}", "the fused product", "parts"
    return Finding(
        "heads-swapped",
        f"The port splits {read} as {wrong}, the reference as ({usual}): the order of heads and "
        f"{what} is exchanged in the reshape.",
        f"Reshape it to ({usual}).",
    )


def _heads(shape: tuple[int, ...], width: int) -> list[int]:
    """How many heads a value may have."""
    if len(shape) == 3:
        return [n for n in COUNTS if width % n == 0]
    return [n for n in dict.fromkeys(shape[1:3]) if n > 1 and n * shape[3] == width]


def _readings(fused: Array, heads: int, count: int) -> Iterator[Candidate]:
    """Each part of the product by mistake, as (batch, tokens, heads, channels)."""
    batch, tokens, width = fused.shape
    size = width // (heads * count)
    by_head = fused.reshape(batch, tokens, heads, count, size)
    inner = fused.reshape(batch, tokens, heads, size, count)
    by_channel = fused.reshape(batch, tokens, count, size, heads)
    for n in range(count):
        yield Candidate(f"({heads} heads, {count} parts, {size} channels)", by_head[..., n, :])
        yield Candidate(f"({heads} heads, {size} channels, {count} parts)", inner[..., n])
        words = f"({size} channels, {heads} heads)"
        yield Candidate(words, by_channel[:, :, n].swapaxes(2, 3))


def _in_shape(value: Array, shape: tuple[int, ...]) -> Array | None:
    """(batch, tokens, heads, channels) with the heads merged, or before the tokens."""
    merged = value.reshape(*value.shape[:2], -1)
    turned = (value, value.swapaxes(1, 2), merged)
    return next((x for x in turned if x.shape == shape), None)
