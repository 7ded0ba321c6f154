"""CLIP and T5 text encoders: transformers' names, and what a single file adds or leaves out."""

import numpy as np

from lydite.weights.layout import Array, Shape
from lydite.weights.rules import Alias, Drop, Fill, Rule

CLIP: tuple[Rule, ...] = (
    Drop("text_model.embeddings.position_ids", because="0, 1, 2, …: known without being stored"),
    # transformers 5 saves CLIPTextModel, the one without projection, without this prefix.
    Alias("embeddings.{p}", "text_model.embeddings.{p}"),
    Alias("encoder.{p}", "text_model.encoder.{p}"),
    Alias("final_layer_norm.{p}", "text_model.final_layer_norm.{p}"),
)

T5: tuple[Rule, ...] = (Alias("encoder.embed_tokens.weight", "shared.weight"),)


def _identity(shape: Shape) -> Array:
    return np.eye(shape[0], shape[1], dtype=np.float32)


# Inside SD3's single file; the encoders sit under text_encoders.<name>.transformer.
_UNPROJECTED = "SD3 takes CLIP-L's pooled output unprojected"
CLIP_L_ORIGINAL: tuple[Rule, ...] = (
    *CLIP,
    Drop("text_projection.weight", because=_UNPROJECTED),
    Fill("text_projection.weight", _identity, because=f"identity: {_UNPROJECTED}"),
)
