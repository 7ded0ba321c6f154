"""CLIP and T5 text encoders: transformers' names, and what a single file adds or leaves out."""

import numpy as np

from lydite.weights.layout import Array, Shape
from lydite.weights.rules import Drop, Fill, Rule

CLIP: tuple[Rule, ...] = (
    Drop("text_model.embeddings.position_ids", because="0, 1, 2, …: known without being stored"),
)

T5: tuple[Rule, ...] = (
    Drop("encoder.embed_tokens.weight", because="the same matrix as shared.weight"),
)


def _identity(shape: Shape) -> Array:
    return np.eye(shape[0], shape[1], dtype=np.float32)


# Inside SD3's single file; the encoders sit under text_encoders.<name>.transformer.
CLIP_L_ORIGINAL: tuple[Rule, ...] = (
    *CLIP,
    Fill(
        "text_projection.weight", _identity, because="SD3 uses CLIP-L's pooled output unprojected"
    ),
)
