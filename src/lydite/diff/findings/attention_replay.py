"""Attention computed again from the recorded q, k and v, in every known variant.

As in `replay`, a cause is named only when one variant gives the reference's value and another the
port's.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay import SHARE, Candidate, apart_of, told_apart
from lydite.diff.result import Finding

MAX_SCORES = 2**25  # numbers in the scores of one variant
HEADS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 64)
PART = re.compile(
    r"(?:^|[._])(?P<norm>norm_)?(?P<added>added?_)?(?:to_)?(?P<part>[qkv])(?:_proj)?$"
)
MASKS: dict[str, Callable[[int, int], Array]] = {  # which keys each query sees
    "no mask": lambda n, m: np.ones((n, m), bool),
    "a causal mask": lambda n, m: np.tri(n, m, dtype=bool),
    "a causal mask that is inverted": lambda n, m: np.tri(m, n, dtype=bool).T,
    "a causal mask that hides each token from itself": lambda n, m: np.tri(n, m, -1, dtype=bool),
}
CAUSES = {
    "scale": ("attention-scale", "Multiply the scores by 1/√(width of a head), once."),
    "softmax": ("softmax-axis", "Take the softmax over the keys, the last axis of the scores."),
    "mask": ("attention-mask", "Check the mask: which keys a query may see."),
    "heads": ("heads-merged-wrongly", "Check the axis order where heads are split and joined."),
    "norm": ("qk-norm-missing", "Apply the norms of q and k before the attention."),
    "parts": ("qkv-exchanged", "Check which of q, k and v is which."),
    "streams": ("streams-cut-wrongly", "Check the order in which the streams are joined and cut."),
}


@dataclass(frozen=True)
class Stream:
    """q, k and v of one stream, each (batch, heads, tokens, width of a head)."""

    q: Array
    k: Array
    v: Array
    raw: "Stream | None" = None  # q and k before their norms


def other_attention(e: Evidence) -> Finding | None:
    """Another scale, mask, softmax axis, head order, or q and k without their norms."""
    if not e.same_shape or e.port.ndim != 3 or e.kind != "activation" or not e.port.size:
        return None
    recorded = _recorded_parts(e)
    for heads in HEADS:
        streams = _streams(recorded, heads, e.port.shape[-1])
        if not streams:
            continue
        tokens = sum(stream.q.shape[2] for stream in streams)
        if len(e.port) * heads * tokens**2 > MAX_SCORES:
            return None
        first = streams[0].q.shape[2]
        for start in {0, first} if len(streams) > 1 else {0}:
            length = e.port.shape[1]
            if start + length > tokens:
                continue
            for mask in ("no mask", "a causal mask"):
                right = _attend(streams, mask=mask)[:, start : start + length]
                if apart_of(e.values[0], right) > SHARE * e.lost:
                    continue
                tried = _variants(streams, start, length, mask, e.port.shape[-1])
                found = told_apart(e, (Candidate("", right), *tried), reference_is="")
                return _finding(found[1], found[2]) if found else None
    return None


def _finding(variant: str, left: str) -> Finding:
    kind, _, words = variant.partition(": ")
    cause, fix = CAUSES[kind]
    text = f"The port's attention is that of the recorded q, k and v {words}; {left}."
    return Finding(cause, text, fix)


def _recorded_parts(e: Evidence) -> dict[tuple[bool, bool, str], Array]:
    """(of a norm, of the added stream, q, k or v) → value, of the attention that e belongs to."""
    parts: dict[tuple[bool, bool, str], Array] = {}
    module = e.name
    names = [(name.partition(" [")[0], name, value) for name, value in e.before()]
    while module and not parts:
        module = module[: max(module.rfind("."), module.rfind("/"), 0)]
        for path, name, value in names:
            inside = path.startswith((f"{module}.", f"{module}/"))
            match = PART.search(path[len(module) :]) if inside and path == name else None
            if match is None:
                continue
            added = bool(match["added"]) or "add_" in path[len(module) :]
            key = (bool(match["norm"]), added, match["part"])
            parts.setdefault(key, value.astype(np.float64))
    return parts


def _streams(
    parts: dict[tuple[bool, bool, str], Array], heads: int, width: int
) -> tuple[Stream, ...]:
    """The streams of an attention with this many heads; empty where the shapes do not permit it."""
    streams: list[Stream] = []
    for added in (False, True):
        raw = [parts.get((False, added, part)) for part in "qkv"]
        if any(value is None for value in raw):
            continue
        split = [_split(value, heads, width) for value in raw if value is not None]
        q, k, v = split
        if q is None or k is None or v is None:
            return ()
        if k.shape != v.shape or (q.shape[:2], q.shape[3]) != (k.shape[:2], k.shape[3]):
            return ()
        stream = Stream(q, k, v)
        normed = [parts.get((True, added, part)) for part in "qk"]
        if normed[0] is not None and normed[1] is not None:
            nq, nk = (_split(value, heads, width) for value in normed if value is not None)
            if nq is None or nk is None or (nq.shape, nk.shape) != (q.shape, k.shape):
                return ()
            stream = Stream(nq, nk, v, stream)
        streams.append(stream)
    return tuple(streams)


def _split(value: Array, heads: int, width: int) -> Array | None:
    """A projection as (batch, heads, tokens, width of a head)."""
    if value.ndim == 3 and value.shape[-1] == width and width % heads == 0:
        return value.reshape(*value.shape[:2], heads, -1).swapaxes(1, 2)
    if value.ndim == 4 and value.shape[-1] * heads == width:
        if value.shape[1] == heads:
            return value
        return value.swapaxes(1, 2) if value.shape[2] == heads else None
    return None


def _attend(streams: tuple[Stream, ...], *, mask: str, scale: float = 1.0, axis: int = -1) -> Array:
    """(batch, tokens, width) of the streams together; `scale` is relative to the right one."""
    heads = _heads(streams, scale=scale, mask=mask, axis=axis)
    return heads.swapaxes(1, 2).reshape(heads.shape[0], heads.shape[2], -1)


def _heads(streams: tuple[Stream, ...], *, mask: str, scale: float = 1.0, axis: int = -1) -> Array:
    q, k, v = (np.concatenate([getattr(s, part) for s in streams], 2) for part in "qkv")
    scores = q @ k.swapaxes(-1, -2) * (scale * q.shape[-1] ** -0.5)
    seen = MASKS[mask](*scores.shape[-2:])
    scores = np.where(seen, scores, -1e30)
    scores = np.exp(scores - scores.max(axis, keepdims=True))
    return scores / scores.sum(axis, keepdims=True) @ v


def _variants(
    streams: tuple[Stream, ...], start: int, length: int, mask: str, width: int
) -> Iterator[Candidate]:
    head = streams[0].q.shape[-1]
    rows = slice(start, start + length)

    def result(changed: tuple[Stream, ...] = streams, **how: Any) -> Array:
        return _attend(changed, **{"mask": mask, **how})[:, rows]

    yield Candidate("scale: without a scale", result(scale=head**0.5))
    yield Candidate("scale: with a second scale", result(scale=head**-0.5))
    if width != head:
        whole_width = result(scale=(head / width) ** 0.5)
        yield Candidate("scale: with the root of the whole width", whole_width)
    yield Candidate("softmax: with the softmax over the queries", result(axis=-2))
    for other in MASKS.keys() - {mask}:
        yield Candidate(f"mask: with {other}", result(mask=other))
    joined = _heads(streams, mask=mask)
    untransposed = joined.reshape(joined.shape[0], joined.shape[2], -1)[:, rows]
    yield Candidate("heads: joined without a transpose", untransposed)
    if all(stream.raw for stream in streams):
        yield Candidate("norm: without the norms of q and k", result(_raw(streams)))
    crossed = any(s.q.shape != s.k.shape for s in streams)  # text as keys: other lengths
    for a, b in ("kv",) if crossed else ("kv", "qk", "qv"):
        swapped = tuple(
            replace(s, **{a: getattr(s, b), b: getattr(s, a)}, raw=None) for s in streams
        )
        yield Candidate(f"parts: with {a} and {b} exchanged", result(swapped))
    if len(streams) > 1:
        alone = streams[1:] if start else streams[:1]
        yield Candidate("mask: in its own stream only", _attend(alone, mask=mask))
        yield Candidate("streams: joined in the other order", result(streams[::-1]))
        whole = _attend(streams, mask=mask)
        from_end = slice(0, length) if start else slice(whole.shape[1] - length, None)
        yield Candidate("streams: cut from the other end", whole[:, from_end])


def _raw(streams: tuple[Stream, ...]) -> tuple[Stream, ...]:
    return tuple(stream.raw or stream for stream in streams)
