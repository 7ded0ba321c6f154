"""CLIP text encoder, with or without projection (SD 1.x, SDXL, SD3, FLUX).

Reference: huggingface/transformers 5.22.2, models/clip/modeling_clip.py. Names follow 4.x and every
published checkpoint: `text_model.` in front, which 5.x no longer writes without a projection.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from lydite.core.config import Count, Epsilon, Size, TokenId
from lydite.core.errors import InputError
from lydite.models.layers import (
    ACTIVATIONS,
    Activation,
    Linear,
    attention,
    join_heads,
    split_heads,
)
from lydite.models.text import ignored_config_keys

IGNORED = ignored_config_keys.IGNORED
FIXED: Mapping[str, Any] = {**ignored_config_keys.FIXED, "model_type": "clip_text_model"}

LEGACY_EOS = 2  # configs before transformers #24773 say 2 although the tokenizer's EOS is 49407


@dataclass(frozen=True, kw_only=True)
class CLIPEncoderConfig:
    """The keys of config.json that shape the layers, of the text and of the vision encoder."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Count
    num_attention_heads: Count
    hidden_act: Activation
    layer_norm_eps: Epsilon

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of "
                f"num_attention_heads {self.num_attention_heads}"
            )


@dataclass(frozen=True, kw_only=True)
class CLIPTextConfig(CLIPEncoderConfig):
    """The keys of config.json that shape the model."""

    vocab_size: Size
    max_position_embeddings: Size
    eos_token_id: TokenId
    projection_dim: Size | None = None  # early Stable Diffusion configs leave it out


class CLIPTextOutput(NamedTuple):
    """What a pipeline may ask of the encoder. B batch, S tokens, D width, P projection."""

    last: mx.array  # (B, S, D) after final_layer_norm
    pooled: mx.array  # (B, D) at the EOS token, or (B, P) with projection
    hidden_states: tuple[mx.array, ...]  # each (B, S, D): embeddings, then every layer; no norm

    @property
    def penultimate(self) -> mx.array:
        """The last layer's input, without final_layer_norm: (B, S, D)."""
        return self.hidden_states[-2]


class CLIPTextEmbeddings(nn.Module):
    def __init__(self, config: CLIPTextConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def __call__(self, input_ids: mx.array) -> mx.array:
        positions = mx.arange(input_ids.shape[1])
        return self.token_embedding(input_ids) + self.position_embedding(positions)  # (B, S, D)


class CLIPAttention(nn.Module):
    def __init__(self, config: CLIPEncoderConfig, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.num_heads = config.num_attention_heads
        self.q_proj = Linear(config.hidden_size, config.hidden_size, bias=True)
        self.k_proj = Linear(config.hidden_size, config.hidden_size, bias=True)
        self.v_proj = Linear(config.hidden_size, config.hidden_size, bias=True)
        self.out_proj = Linear(config.hidden_size, config.hidden_size, bias=True)

    def __call__(self, x: mx.array, mask: mx.array | None = None) -> mx.array:
        q = split_heads(self.q_proj(x), self.num_heads)  # (B, H, S, D/H)
        k = split_heads(self.k_proj(x), self.num_heads)
        v = split_heads(self.v_proj(x), self.num_heads)
        scale = q.shape[-1] ** -0.5
        if mask is not None:
            x = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
        elif self.causal:
            x = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")
        else:
            x = attention(q, k, v, scale=scale)
        return self.out_proj(join_heads(x))  # (B, S, D)


class CLIPMLP(nn.Module):
    def __init__(self, config: CLIPEncoderConfig) -> None:
        super().__init__()
        self.activation_fn = ACTIVATIONS[config.hidden_act]
        self.fc1 = Linear(config.hidden_size, config.intermediate_size, bias=True)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size, bias=True)

    def __call__(self, x: mx.array) -> mx.array:
        return self.fc2(self.activation_fn(self.fc1(x)))


class CLIPEncoderLayer(nn.Module):
    def __init__(self, config: CLIPEncoderConfig, *, causal: bool) -> None:
        super().__init__()
        self.self_attn = CLIPAttention(config, causal=causal)
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = CLIPMLP(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def __call__(self, x: mx.array, *mask: mx.array) -> mx.array:
        x = x + self.self_attn(self.layer_norm1(x), *mask)
        return x + self.mlp(self.layer_norm2(x))


class CLIPEncoder(nn.Module):
    """The layers; in a causal one a token attends to those before it, in another one to all."""

    def __init__(self, config: CLIPEncoderConfig, *, causal: bool) -> None:
        super().__init__()
        layers = range(config.num_hidden_layers)
        self.layers = [CLIPEncoderLayer(config, causal=causal) for _ in layers]

    def __call__(self, x: mx.array, *mask: mx.array) -> tuple[mx.array, ...]:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1], *mask))
        return tuple(states)


class CLIPTextTransformer(nn.Module):
    def __init__(self, config: CLIPTextConfig) -> None:
        super().__init__()
        self.eos_token_id = config.eos_token_id
        self.embeddings = CLIPTextEmbeddings(config)
        self.encoder = CLIPEncoder(config, causal=True)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def __call__(self, input_ids: mx.array, *mask: mx.array) -> CLIPTextOutput:
        states = self.encoder(self.embeddings(input_ids), *mask)  # each (B, S, D)
        last = self.final_layer_norm(states[-1])
        return CLIPTextOutput(last, last[mx.arange(last.shape[0]), self.eos(input_ids)], states)

    def eos(self, input_ids: mx.array) -> mx.array:
        """Position of the first EOS in each row, 0 in a row without one: (B,)."""
        if self.eos_token_id == LEGACY_EOS:
            return mx.argmax(input_ids, axis=-1)  # the highest id, wherever it is
        return mx.argmax((input_ids == self.eos_token_id).astype(mx.int32), axis=-1)


class CLIPTextModel(nn.Module):
    """transformers' CLIPTextModelWithProjection, or CLIPTextModel when `projection` is false."""

    def __init__(self, config: CLIPTextConfig, *, projection: bool) -> None:
        super().__init__()
        self.max_length = config.max_position_embeddings
        self.text_model = CLIPTextTransformer(config)
        if projection:
            if config.projection_dim is None:
                raise InputError(
                    "CLIPTextModel: projection asked for, config has no projection_dim."
                )
            self.text_projection = Linear(config.hidden_size, config.projection_dim, bias=False)

    def __call__(self, input_ids: mx.array, hidden: mx.array | None = None) -> CLIPTextOutput:
        """Encode ids (B, S); every row attends causally, padding included, as diffusers has it.

        `hidden` (B, S): tokens that are seen by none.
        """
        length = input_ids.shape[1]
        if length > self.max_length:  # MLX would read past the table
            raise InputError(f"CLIPTextModel: {length} tokens for {self.max_length} positions.")
        if hidden is None:
            output = self.text_model(input_ids)
        else:
            earlier = mx.tril(mx.ones((length, length), dtype=mx.bool_))
            output = self.text_model(input_ids, earlier & ~hidden[:, None, None, :])  # (B, 1, S, S)
        if "text_projection" in self:
            output = output._replace(pooled=self.text_projection(output.pooled))  # (B, P)
        return output
