"""Linear attention (Sana, EfficientViT): a kernel of q and k, and a sum over the keys.

As in diffusers 0.42.1, SanaLinearAttnProcessor2_0: relu(q) · Σ relu(k) v, over relu(q) · Σ relu(k).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.attention import recorded_parts, streams_of
from lydite.diff.findings.replay.attention_form import Form, Stream, divisors, merged
from lydite.diff.findings.replay.attention_variants import MOST_HEADS
from lydite.diff.findings.replay.variants import (
    MAX_VALUES,
    Candidate,
    allowed,
    apart_of,
    told_apart,
)
from lydite.diff.result import Finding

KERNELS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "elu + 1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0.0))),
    "softmax over a head": lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
    "exp": np.exp,
    "no kernel": lambda x: x,
}
EPS = (1e-15, 1e-6, 1e-5, 1e-3, 1e-2, 1e-1, 1.0)


@dataclass(frozen=True, eq=False)
class Linear:
    """How linear attention is computed from one stream."""

    stream: Stream
    of_q: str = "relu"
    of_k: str = "relu"
    eps: float = 1e-15
    divisor: str = "sum"

    def result(self) -> Array:
        """(batch, tokens, width)."""
        q, k = KERNELS[self.of_q](self.stream.q), KERNELS[self.of_k](self.stream.k)
        value = q @ (k.swapaxes(-1, -2) @ self.stream.v)
        if self.divisor == "sum":
            value = value / (q @ k.sum(2)[..., None] + self.eps)
        elif self.divisor == "length":
            value = value / k.shape[2]
        return merged(value)


def other_linear_attention(e: Evidence) -> Finding | None:
    """Another kernel, divisor, number of heads, or q and k without their norms."""
    if not e.same_shape or e.kind != "activation" or e.port.ndim != 3 or e.port.size > MAX_VALUES:
        return None
    parts, own = recorded_parts(e)
    if not parts:
        return None
    width = e.port.shape[-1]
    for heads in (n for n in divisors(width) if n <= MOST_HEADS):
        streams = streams_of(parts, heads, width)
        mine = streams_of(own, heads, width) if len(streams) == 1 else ()
        if len(mine) != 1 or e.port.shape[1] != streams[0].q.shape[2]:
            continue
        for kernel in ("relu", "elu + 1"):
            form = Linear(streams[0], kernel, kernel)
            if apart_of(e.values[0], form.result()) <= allowed(e):
                return _told(e, form, replace(form, stream=mine[0]))
    return None


def _told(e: Evidence, form: Linear, mine: Linear) -> Finding | None:
    told = told_apart(
        e,
        (Candidate("", form.result()), *_variants(form)),
        lambda: (Candidate("", mine.result()), *_variants(mine)),
        reference_is="",
        what="forms of linear attention from the recorded q, k and v",
    )
    if told is None:
        return None
    return Finding(
        "other-linear-attention",
        f"The reference is linear attention of the recorded q, k and v with {form.of_q} of q and "
        f"k, divided by its sum over the keys; the port is {told.wrong}; {told.leaves}.",
        "Compute the linear attention as the reference.",
    )


def _variants(form: Linear) -> Iterator[Candidate]:
    changes: dict[str, dict[str, object]] = {}
    for kernel in KERNELS:
        if kernel != form.of_q:
            changes[f"that with {kernel} of q and k"] = {"of_q": kernel, "of_k": kernel}
            changes[f"that with {kernel} of q"] = {"of_q": kernel}
            changes[f"that with {kernel} of k"] = {"of_k": kernel}
    changes["that without the denominator"] = {"divisor": "none"}
    changes["that divided by the number of keys, not by the denominator"] = {"divisor": "length"}
    changes |= {f"that with eps {n:g} in the denominator": {"eps": n} for n in EPS[1:]}
    raw = form.stream.raw
    if raw is not None:
        changes["that without the norms of q and k"] = {"stream": raw}
        for part in "qk":
            stream = replace(form.stream, **{part: getattr(raw, part)})
            changes[f"that without the norm of {part}"] = {"stream": stream}
    swapped = replace(form.stream, k=form.stream.v, v=form.stream.k)
    changes["that with k and v exchanged"] = {"stream": swapped}
    for words, changed in changes.items():
        yield Candidate(words, replace(form, **changed).result())
    kernel = KERNELS[form.of_q]
    inside = replace(form.stream, q=kernel(form.stream.q), k=kernel(form.stream.k))
    for words, stream in ((f" of {form.of_q}(q) and {form.of_k}(k)", inside), ("", form.stream)):
        yield Candidate(f"softmax attention{words}", Form((stream,)).result())
        unscaled = Form((stream,), stream.q.shape[-1] ** 0.5).result()
        yield Candidate(f"softmax attention{words} without a scale", unscaled)
    heads, width = form.stream.q.shape[1], merged(form.stream.q).shape[-1]
    for other in divisors(width):
        if other != heads and other <= MOST_HEADS:
            q, k, v = (
                merged(x).reshape(len(x), x.shape[2], other, -1).swapaxes(1, 2)
                for x in (form.stream.q, form.stream.k, form.stream.v)
            )
            value = replace(form, stream=Stream(q, k, v)).result()
            yield Candidate(f"that with {other} heads, not {heads}", value)
