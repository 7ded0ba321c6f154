"""T5 encoder, versions 1.0 and 1.1 (SD3, FLUX).

Reference: huggingface/transformers 5.22.2, models/t5/modeling_t5.py. Names follow it. The token
table is `shared`; `encoder.embed_tokens` of a checkpoint is the same array and no parameter here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from lydite.core.config import Count, Epsilon, Size
from lydite.models.layers import ACTIVATIONS, Activation, join_heads, split_heads
from lydite.models.text import ignored_config_keys

IGNORED = ignored_config_keys.IGNORED
FIXED: Mapping[str, Any] = {**ignored_config_keys.FIXED, "model_type": "t5"}

# Feed-forward outputs exceed float16. When transformers loads float16 (not bfloat16) these weights
# stay float32, and with them the residual stream from the first block on.
KEEP_FLOAT32 = ("*.wo.weight",)

# feed_forward_proj -> activation, gated
FEED_FORWARD: Mapping[str, tuple[Activation, bool]] = {
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gated-gelu": ("gelu_new", True),
}


@dataclass(frozen=True)
class T5Config:
    """The keys of config.json that shape the encoder."""

    vocab_size: Size
    d_model: Size
    d_kv: Size
    d_ff: Size
    num_layers: Count
    num_heads: Count
    relative_attention_num_buckets: Count
    relative_attention_max_distance: Size
    layer_norm_epsilon: Epsilon
    feed_forward_proj: Literal["relu", "gelu", "gated-gelu"]
    dense_act_fn: str | None = None  # newer configs spell out what feed_forward_proj says
    is_gated_act: bool | None = None

    def __post_init__(self) -> None:
        activation, gated = FEED_FORWARD[self.feed_forward_proj]
        if self.dense_act_fn not in (None, activation) or self.is_gated_act not in (None, gated):
            raise ValueError("dense_act_fn or is_gated_act contradicts feed_forward_proj")
        buckets = self.relative_attention_num_buckets
        if buckets % 4 or self.relative_attention_max_distance <= buckets // 4:
            raise ValueError("relative_attention_num_buckets or _max_distance makes no buckets")


class T5LayerNorm(nn.Module):
    """Root mean square in float32, no mean, no bias; the result takes the weight's dtype."""

    def __init__(self, dims: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = mx.ones((dims,))

    def __call__(self, x: mx.array) -> mx.array:
        return self.weight * mx.fast.rms_norm(x, None, self.eps).astype(self.weight.dtype)


class T5Attention(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        inner = config.num_heads * config.d_kv
        self.q = nn.Linear(config.d_model, inner, bias=False)
        self.k = nn.Linear(config.d_model, inner, bias=False)
        self.v = nn.Linear(config.d_model, inner, bias=False)
        self.o = nn.Linear(inner, config.d_model, bias=False)

    def __call__(self, x: mx.array, bias: mx.array) -> mx.array:
        q = split_heads(self.q(x), self.num_heads)  # (B, H, S, d_kv)
        k = split_heads(self.k(x), self.num_heads)
        v = split_heads(self.v(x), self.num_heads)
        x = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=bias)
        return self.o(join_heads(x))  # (B, S, D)


class T5Dense(nn.Module):
    """`wi`, or `wi_1` gated by `wi_0`; then `wo`, in float32 where its weight is: MLX promotes."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        activation, gated = FEED_FORWARD[config.feed_forward_proj]
        self.act = ACTIVATIONS[activation]
        for name in ("wi_0", "wi_1") if gated else ("wi",):
            self[name] = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        if "wi" in self:
            return self.wo(self.act(self["wi"](x)))
        return self.wo(self.act(self["wi_0"](x)) * self["wi_1"](x))


class T5Layer(nn.Module):
    """A residual around `branch`, a child called `name`, which sees normalized input."""

    def __init__(self, config: T5Config, name: str, branch: nn.Module) -> None:
        super().__init__()
        self.name = name
        self[name] = branch
        self.layer_norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)

    def __call__(self, x: mx.array, *bias: mx.array) -> mx.array:
        return clamp_float16(x + self[self.name](self.layer_norm(x), *bias))


class T5Block(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.layer = [
            T5Layer(config, "SelfAttention", T5Attention(config)),
            T5Layer(config, "DenseReluDense", T5Dense(config)),
        ]

    def __call__(self, x: mx.array, bias: mx.array) -> mx.array:
        return self.layer[1](self.layer[0](x, bias))


class T5Stack(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.block = [T5Block(config) for _ in range(config.num_layers)]
        self.final_layer_norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        table = nn.Embedding(config.relative_attention_num_buckets, config.num_heads)
        self.block[0].layer[0]["SelfAttention"].relative_attention_bias = table  # for all blocks

    def __call__(self, x: mx.array, buckets: mx.array) -> mx.array:
        bias = self.block[0].layer[0]["SelfAttention"].relative_attention_bias(buckets)
        bias = bias.transpose(2, 0, 1)[None]  # (S, S, H) to (1, H, S, S)
        for block in self.block:
            x = block(x, bias)
        return self.final_layer_norm(x)  # (B, S, D)


class T5EncoderModel(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = T5Stack(config)

    def __call__(self, input_ids: mx.array) -> mx.array:
        """Encode ids (B, S) to (B, S, D); padding is attended to, as diffusers has it."""
        buckets = relative_position_buckets(
            input_ids.shape[1],
            num_buckets=self.config.relative_attention_num_buckets,
            max_distance=self.config.relative_attention_max_distance,
        )
        return self.encoder(self.shared(input_ids), mx.array(buckets))


def relative_position_buckets(
    length: int, *, num_buckets: int, max_distance: int
) -> NDArray[np.int32]:
    """Bucket of each key position relative to each query position: (S, S).

    Reference: T5Attention._relative_position_bucket, bidirectional. Half of the buckets are for
    keys ahead of the query. In either half near distances have a bucket each and far ones share. A
    distance on a border (16, 32, 64 of 128) goes to the farther bucket; the 1e-9 keeps rounding out
    of that.
    """
    half = num_buckets // 2
    exact = half // 2
    relative = np.arange(1 - length, length)  # key minus query
    distance = np.abs(relative)
    share = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact)
    far = exact + (share * (half - exact) + 1e-9).astype(np.int64)
    bucket = np.where(distance < exact, distance, np.minimum(far, half - 1))
    bucket = (bucket + half * (relative > 0)).astype(np.int32)
    rows = np.lib.stride_tricks.sliding_window_view(bucket, length)  # of the last query first
    return rows[::-1].copy()


def clamp_float16(x: mx.array) -> mx.array:
    """The reference's guard: once anything overflowed, no value is past 65504 - 1000."""
    if x.dtype != mx.float16:
        return x
    limit = mx.where(mx.isinf(x).any(), 64504.0, 65504.0).astype(mx.float16)
    return mx.clip(x, -limit, limit)
