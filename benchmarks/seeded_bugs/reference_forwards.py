"""Forward passes of our modules written a second time, with typical bugs as arguments.

With default arguments they are controls: the same arithmetic in another order. They rely on the
names of a module's children and on its inputs and outputs, which checkpoints and traces fix, and
not on how the model computes in between.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

Split = Callable[[mx.array, int], mx.array]
Join = Callable[[mx.array], mx.array]


def split_heads(x: mx.array, heads: int) -> mx.array:
    """(B, L, D) to (B, H, L, D/H)."""
    B, L, _ = x.shape
    return x.reshape(B, L, heads, -1).transpose(0, 2, 1, 3)


def join_heads(x: mx.array) -> mx.array:
    """(B, H, L, D/H) to (B, L, D)."""
    B, _, L, _ = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, L, -1)


def attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    mask: mx.array | None = None,  # added to the scores
    axis: int = -1,
) -> mx.array:
    """softmax(q·kᵀ·scale + mask)·v, in float32 inside."""
    scores = (q.astype(mx.float32) * scale) @ k.astype(mx.float32).swapaxes(-1, -2)
    if mask is not None:
        scores = scores + mask.astype(mx.float32)
    return (mx.softmax(scores, axis=axis) @ v.astype(mx.float32)).astype(v.dtype)


Attend = Callable[..., mx.array]


def projected(self: Any, x: mx.array, names: tuple[str, ...]) -> list[mx.array]:
    """q, k and v of one stream, each from its own linear."""
    return [self[name](x) for name in names]


def joint_attention(
    self: Any,
    image: mx.array,
    text: mx.array | None,
    *,
    attend: Attend = attend,
    project: Callable[[Any, mx.array, tuple[str, ...]], list[mx.array]] = projected,
    split: Split = split_heads,
    join: Join = join_heads,
    norms: tuple[bool, bool] = (True, True),  # of q, of k
    text_first: tuple[bool, bool] = (False, False),  # when joined, when cut apart
) -> tuple[mx.array, mx.array | None]:
    """JointAttention of the MMDiT."""

    def heads(x: mx.array, names: tuple[str, ...]) -> list[mx.array]:
        q, k, v = (split(y, self.heads) for y in project(self, x, names[:3]))
        if names[3] in self:
            q = self[names[3]](q) if norms[0] else q
            k = self[names[4]](k) if norms[1] else k
        return [q, k, v]

    scale = (image.shape[-1] // self.heads) ** -0.5
    image_heads = heads(image, ("to_q", "to_k", "to_v", "norm_q", "norm_k"))
    if text is None:
        return self.to_out[0](join(attend(*image_heads, scale))), None
    added = ("add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k")
    text_heads = heads(text, added)
    streams = (text_heads, image_heads) if text_first[0] else (image_heads, text_heads)
    q, k, v = (mx.concatenate(list(pair), axis=2) for pair in zip(*streams, strict=True))
    x = join(attend(q, k, v, scale))
    L, S = image.shape[1], text.shape[1]
    image, text = (x[:, S:], x[:, :S]) if text_first[1] else (x[:, :L], x[:, L:])
    return self.to_out[0](image), self.to_add_out(text) if "to_add_out" in self else None


def clip_attention(
    self: Any, x: mx.array, *, attend: Attend = attend, mask: mx.array | None = None
) -> mx.array:
    """CLIPAttention; causal unless a mask is given."""
    q, k, v = (
        split_heads(self[name](x), self.num_heads) for name in ("q_proj", "k_proj", "v_proj")
    )
    mask = causal(x.shape[1]) if mask is None else mask
    return self.out_proj(join_heads(attend(q, k, v, q.shape[-1] ** -0.5, mask)))


def t5_attention(
    self: Any, x: mx.array, bias: mx.array, *, attend: Attend = attend, scale: float = 1.0
) -> mx.array:
    """T5Attention, which does not scale."""
    q, k, v = (split_heads(self[name](x), self.num_heads) for name in ("q", "k", "v"))
    return self.o(join_heads(attend(q, k, v, scale, bias)))


def pixel_attention(
    self: Any, x: mx.array, *, attend: Attend = attend, residual: bool = True
) -> mx.array:
    """PixelAttention of the VAE."""
    B, H, W, C = x.shape
    tokens = self.group_norm(x).reshape(B, 1, H * W, C)
    q, k, v = (self[name](tokens) for name in ("to_q", "to_k", "to_v"))
    attended = self.to_out[0](attend(q, k, v, C**-0.5)).reshape(B, H, W, C)
    return x + attended if residual else attended


def joint_block(
    self: Any,
    text: mx.array,
    image: mx.array,
    table: mx.array,
    text_table: mx.array,
    *,
    one: float = 1.0,  # of 1 + scale, before the feed-forward of the image
    shift: int = 3,
    scale: int = 4,
    gates: tuple[int | None, int | None] = (2, 5),  # attention's, feed-forward's; None: no gate
    text_gates: tuple[int | None, int | None] = (2, 5),
    second: tuple[int, int, int] | None = (6, 7, 8),  # shift, scale, gate; None: left out
    residual: bool = True,
) -> tuple[mx.array, mx.array]:
    """JointBlock of the MMDiT; numbers are chunks of the modulation tables."""
    attended, text_attended = self.attn(
        self.norm1(image, table), self.norm1_context(text, text_table)
    )
    after = image + gated(attended, table, gates[0])
    if "attn2" in self and second is not None:
        normed = modulated(self.norm1.norm(image), table[:, second[0]], table[:, second[1]])
        after = after + gated(self.attn2(normed, None)[0], table, second[2])
    hidden = modulated(self.norm2(after), table[:, shift], table[:, scale], one)
    forward = gated(self.ff(hidden), table, gates[1])
    image = after + forward if residual else forward
    if text_attended is not None:
        text = text + gated(text_attended, text_table, text_gates[0])
        hidden = modulated(self.norm2_context(text), text_table[:, 3], text_table[:, 4])
        text = text + gated(self.ff_context(hidden), text_table, text_gates[1])
    return text, image


def modulated(x: mx.array, shift: mx.array, scale: mx.array, one: float = 1.0) -> mx.array:
    """x (B, L, D) times one + scale, plus shift."""
    return x * (one + scale[:, None]) + shift[:, None]


def gated(x: mx.array, table: mx.array, chunk: int | None) -> mx.array:
    """x (B, L, D) times a chunk of the table."""
    return x if chunk is None else x * table[:, chunk, None]


def normed(
    x: mx.array,
    eps: float,
    *,
    centre: bool = True,
    unbiased: bool = False,
    outside: bool = False,  # eps added to the root instead of under it
    dtype: mx.Dtype = mx.float32,
) -> mx.array:
    """x over its last axis with mean 0 and variance 1, before any weight."""
    wide = x.astype(dtype)
    n = x.shape[-1]
    if centre:
        wide = wide - wide.mean(axis=-1, keepdims=True)
    variance = (wide * wide).sum(axis=-1, keepdims=True) / (n - 1 if unbiased else n)
    root = mx.sqrt(variance) + eps if outside else mx.sqrt(variance + eps)
    return (wide / root).astype(x.dtype)


def layer_norm(self: Any, x: mx.array, **how: Any) -> mx.array:
    """nn.LayerNorm, nn.RMSNorm or T5's, written out; rounded once, at the end."""
    y = normed(x.astype(mx.float32), how.pop("eps", self.eps), **how)
    y = y * self.weight if "weight" in self else y
    return (y + self.bias if "bias" in self else y).astype(x.dtype)


def rms_norm(self: Any, x: mx.array) -> mx.array:
    """nn.RMSNorm written out."""
    return layer_norm(self, x, centre=False)


def group_norm(
    self: Any, x: mx.array, *, groups: int | None = None, strided: bool = False, **how: Any
) -> mx.array:
    """nn.GroupNorm over (B, H, W, C) as torch groups channels, or every G-th together."""
    B, H, W, C = x.shape
    G = groups or self.num_groups
    y = x.reshape(B, H * W, C // G, G) if strided else x.reshape(B, H * W, G, C // G)
    y = y.transpose(0, 3, 1, 2) if strided else y.transpose(0, 2, 1, 3)  # (B, G, L, C/G)
    y = normed(y.reshape(B, G, -1), how.pop("eps", self.eps), **how).reshape(B, G, H * W, C // G)
    y = y.transpose(0, 2, 3, 1) if strided else y.transpose(0, 2, 1, 3)
    return y.reshape(B, H, W, C) * self.weight + self.bias


def causal(length: int) -> mx.array:
    """Zero where a token may look, and a very low score where not: (S, S)."""
    ahead = mx.arange(length)[None, :] > mx.arange(length)[:, None]
    return mx.where(ahead, -1e9, 0.0)
