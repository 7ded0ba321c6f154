"""The text tower of Qwen2.5-VL (Qwen-Image) and Qwen3 (Z-Image, FLUX.2-klein) as encoders.

Reference: huggingface/transformers 5.22.2, models/qwen2_5_vl/modeling_qwen2_5_vl.py and
models/qwen3/modeling_qwen3.py. Names follow its modules. Qwen2.5-VL's rotary positions have three
axes; for text all three are the token's number, which makes them ordinary ones. There is no vision
tower and no head for the next token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lydite.core.config import Count, Epsilon, Size
from lydite.models.layers import Linear, join_heads, silu, split_heads
from lydite.models.rotary_attention import Rotation, rotation
from lydite.models.text import ignored_config_keys

IGNORED = ignored_config_keys.IGNORED | {
    "image_token_id",
    "max_position_embeddings",  # nothing has its length
    "max_window_layers",
    "mrope_section",  # which channels turn by which axis: alike for text
    "sliding_window",
    "text_config",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
    "vision_token_id",
}
_FIXED: Mapping[str, Any] = {
    **ignored_config_keys.FIXED,
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_type": "default",
    "use_sliding_window": False,
}
QWEN2_5_VL_FIXED: Mapping[str, Any] = {**_FIXED, "model_type": "qwen2_5_vl"}
QWEN3_FIXED: Mapping[str, Any] = {**_FIXED, "model_type": "qwen3"}


@dataclass(frozen=True)
class QwenConfig:
    """The keys of config.json that shape the text tower, as `flat` gives them."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    rms_norm_eps: Epsilon
    rope_theta: float
    head_dim: Size | None = None  # Qwen3 has it; otherwise the heads fill the width
    layer_types: tuple[Literal["full_attention"], ...] = ()

    def __post_init__(self) -> None:
        heads = self.num_attention_heads
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {heads}"
            )
        if self.width % 2:
            raise ValueError(f"heads of {self.width} channels cannot be rotated in pairs")
        if heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )

    @property
    def width(self) -> int:
        """Channels of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of any generation with the text tower's keys and its rotary ones at the top.

    Published files have them beside those of the whole model, newer ones in `text_config`; where
    both have a key the latter counts, as in transformers.
    """
    text = raw.get("text_config")
    settings = {**raw, **(text if isinstance(text, Mapping) else {})}
    scaling = settings.pop("rope_scaling", None)
    rope = settings.pop("rope_parameters", None) or scaling or {}
    rope = dict(rope) if isinstance(rope, Mapping) else {"rope_parameters": rope}
    kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", kind)
    return {
        "rope_theta": 1_000_000.0,
        **settings,
        **rope,
        "rope_type": "default" if kind == "mrope" else kind,
        "model_type": raw.get("model_type"),
    }


class QwenTextOutput(NamedTuple):
    """What a pipeline may ask of the encoder. B batch, S tokens, D width."""

    last: mx.array  # (B, S, D) after the final norm; transformers' hidden_states[-1]
    hidden_states: tuple[mx.array, ...]  # each (B, S, D): embeddings, then every layer; no norm

    @property
    def penultimate(self) -> mx.array:
        """The last layer's input: (B, S, D); transformers' hidden_states[-2]."""
        return self.hidden_states[-2]


class Attention(nn.Module):
    """Several query heads share each key and value head."""

    def __init__(self, config: QwenConfig, *, qk_norm: bool) -> None:
        super().__init__()
        self.heads, self.shared_heads = config.num_attention_heads, config.num_key_value_heads
        dim, inner, shared = (
            config.hidden_size,
            config.num_attention_heads * config.width,
            config.num_key_value_heads * config.width,
        )
        self.q_proj = Linear(dim, inner, bias=not qk_norm)
        self.k_proj = Linear(dim, shared, bias=not qk_norm)
        self.v_proj = Linear(dim, shared, bias=not qk_norm)
        self.o_proj = Linear(inner, dim, bias=False)
        if qk_norm:
            self.q_norm = nn.RMSNorm(config.width, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.width, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, table: Rotation, mask: mx.array | None) -> mx.array:
        q = split_heads(self.q_proj(x), self.heads)  # (B, H, S, D/H)
        k = split_heads(self.k_proj(x), self.shared_heads)
        v = split_heads(self.v_proj(x), self.shared_heads)
        if "q_norm" in self:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate_halves(q, table), rotate_halves(k, table)
        scale = q.shape[-1] ** -0.5
        seen = "causal" if mask is None else mask
        x = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=seen)
        return self.o_proj(join_heads(x))  # (B, S, D)


class MLP(nn.Module):
    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: QwenConfig, *, qk_norm: bool) -> None:
        super().__init__()
        self.self_attn = Attention(config, qk_norm=qk_norm)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, table: Rotation, mask: mx.array | None) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), table, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class QwenTextModel(nn.Module):
    """transformers' Qwen3Model, or with biases in place of norms Qwen2_5_VLTextModel."""

    def __init__(self, config: QwenConfig, *, qk_norm: bool) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [
            DecoderLayer(config, qk_norm=qk_norm) for _ in range(config.num_hidden_layers)
        ]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, input_ids: mx.array, mask: mx.array | None = None) -> QwenTextOutput:
        """Encode ids (B, S).

        No token sees a later one, so that padding on the right changes nothing before it. With a
        `mask` (B, S), False where there is padding, padding does not see padding either.
        """
        config, ids = self.config, np.arange(input_ids.shape[1])[:, None]
        table = rotation(ids, (config.width,), theta=config.rope_theta, dtype=np.float32)
        if mask is not None:
            mask = mx.tril(mx.ones((len(ids), len(ids)), mx.bool_)) & mask[:, None, None]
        states = [self.embed_tokens(input_ids)]
        for layer in self.layers:
            states.append(layer(states[-1], table, mask))
        return QwenTextOutput(self.norm(states[-1]), tuple(states))


class _LanguageModel(nn.Module):
    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.language_model = QwenTextModel(config, qk_norm=False)

    def __call__(self, input_ids: mx.array) -> QwenTextOutput:
        return self.language_model(input_ids)


class Qwen3TextEncoder(nn.Module):
    """transformers' Qwen3ForCausalLM without its head."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.model = QwenTextModel(config, qk_norm=True)

    def __call__(self, input_ids: mx.array, mask: mx.array | None = None) -> QwenTextOutput:
        return self.model(input_ids, mask)


class Qwen2_5_VLTextEncoder(nn.Module):
    """transformers' Qwen2_5_VLForConditionalGeneration as far as text goes through it."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.model = _LanguageModel(config)

    def __call__(self, input_ids: mx.array) -> QwenTextOutput:
        return self.model(input_ids)


def rotate_halves(x: mx.array, table: Rotation) -> mx.array:
    """Turn each channel of the first half of x (B, H, S, D) with its fellow of the second."""
    cos, sin = table
    first, second = mx.split(x.astype(mx.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return mx.concatenate(turned, axis=-1).astype(x.dtype)
