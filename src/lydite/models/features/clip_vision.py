"""CLIP with both towers: pictures and prompts to vectors of one space.

Reference: huggingface/transformers 5.22.2, models/clip/modeling_clip.py (CLIPModel) and
configuration_clip.py. The text tower and the layers are those of `models.text.clip`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from lydite.core.config import Size, read_config
from lydite.core.errors import ConfigError
from lydite.models.layers import Linear
from lydite.models.text import clip, ignored_config_keys
from lydite.models.text.clip import CLIPEncoder, CLIPEncoderConfig, CLIPTextConfig


@dataclass(frozen=True, kw_only=True)
class CLIPVisionConfig(CLIPEncoderConfig):
    """The keys of `vision_config` that shape the model."""

    image_size: Size
    patch_size: Size

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patch_size > self.image_size:
            raise ValueError(f"patch_size {self.patch_size} exceeds image_size {self.image_size}")


@dataclass(frozen=True, kw_only=True)
class CLIPConfig:
    """The keys of config.json. Old files repeat some keys of a tower in a dict that goes first."""

    projection_dim: Size = 512
    text_config: dict[str, Any] | None = field(default_factory=dict)
    vision_config: dict[str, Any] | None = field(default_factory=dict)
    text_config_dict: dict[str, Any] | None = None
    vision_config_dict: dict[str, Any] | None = None


# transformers' values for keys that a file leaves out.
_LAYERS = {"num_hidden_layers": 12, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_TEXT = {
    **_LAYERS,
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "eos_token_id": 49407,
}
_VISION = {
    **_LAYERS,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
}
_VISION_FIXED = {**ignored_config_keys.FIXED, "model_type": "clip_vision_model", "num_channels": 3}


def read_clip_config(
    raw: Mapping[str, Any], *, where: object
) -> tuple[CLIPTextConfig, CLIPVisionConfig]:
    """The towers of a config.json; both have the projection of the whole."""
    if raw.get("model_type") != "clip":
        raise ConfigError(
            f"{where}: model_type is {raw.get('model_type')!r}; expected clip, with both towers, "
            "as in openai/clip-vit-large-patch14."
        )
    both = read_config(
        CLIPConfig,
        raw,
        where=where,
        ignored=ignored_config_keys.IGNORED | {"logit_scale_init_value"},
        fixed={"model_type": "clip"},
    )
    text = read_config(
        CLIPTextConfig,
        {
            **_tower(_TEXT, both.text_config, both.text_config_dict),
            "projection_dim": both.projection_dim,
        },
        where=f"{where}: text_config",
        ignored=clip.IGNORED,
        fixed=clip.FIXED,
    )
    vision = read_config(
        CLIPVisionConfig,
        _tower(_VISION, both.vision_config, both.vision_config_dict),
        where=f"{where}: vision_config",
        ignored=ignored_config_keys.IGNORED | {"projection_dim"},
        fixed=_VISION_FIXED,
    )
    return text, vision


def _tower(
    defaults: Mapping[str, Any], config: Mapping[str, Any] | None, first: Mapping[str, Any] | None
) -> dict[str, Any]:
    """As transformers has it: with an old dict, even its defaults win over the newer config."""
    if first is None:
        return {**defaults, **(config or {})}
    return {**(config or {}), **defaults, **first}


class CLIPVisionEmbeddings(nn.Module):
    def __init__(self, config: CLIPVisionConfig) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.class_embedding = mx.zeros((width,))
        self.patch_embedding = nn.Conv2d(3, width, patch, stride=patch, bias=False)
        self.position_embedding = nn.Embedding((config.image_size // patch) ** 2 + 1, width)

    def __call__(self, x: mx.array) -> mx.array:
        patches = self.patch_embedding(x).flatten(1, 2)  # (B, L, D)
        first = mx.broadcast_to(self.class_embedding, (x.shape[0], 1, patches.shape[-1]))
        return mx.concatenate([first, patches], axis=1) + self.position_embedding.weight


class CLIPVisionTransformer(nn.Module):
    """Pictures (B, H, W, 3), normalised, to the state of the class token (B, D)."""

    def __init__(self, config: CLIPVisionConfig) -> None:
        super().__init__()
        self.embeddings = CLIPVisionEmbeddings(config)
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.encoder = CLIPEncoder(config, causal=False)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.encoder(self.pre_layrnorm(self.embeddings(x)))[-1]  # (B, L + 1, D)
        return self.post_layernorm(x[:, 0])


class CLIPModel(clip.CLIPTextModel):
    """Both towers, each with its projection."""

    def __init__(self, text: CLIPTextConfig, vision: CLIPVisionConfig) -> None:
        super().__init__(text, projection=True)
        assert text.projection_dim is not None
        self.vision_model = CLIPVisionTransformer(vision)
        self.visual_projection = Linear(vision.hidden_size, text.projection_dim, bias=False)

    def encode_image(self, x: mx.array) -> mx.array:
        """(B, H, W, 3) to (B, P), not normalised."""
        return self.visual_projection(self.vision_model(x))

    def encode_text(self, input_ids: mx.array) -> mx.array:
        """(B, S) to (B, P), not normalised."""
        return self(input_ids).pooled
