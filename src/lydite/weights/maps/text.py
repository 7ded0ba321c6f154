"""Text encoders: transformers' names, and what a single file adds or leaves out."""

import numpy as np

from lydite.weights.rules import (
    TRANSPOSE,
    Alias,
    Array,
    Convert,
    Drop,
    Fill,
    Rename,
    Rule,
    Shape,
    Split,
)

_COUNTED = "0, 1, 2, …: known without being stored"
CLIP: tuple[Rule, ...] = (
    Drop("text_model.embeddings.position_ids", because=_COUNTED),
    Drop("embeddings.position_ids", because=_COUNTED),
    # transformers 5 saves CLIPTextModel, the one without projection, without this prefix. So do
    # single files that were written with an early version of transformers.
    Alias("embeddings.token_embedding.{p}", "text_model.embeddings.token_embedding.{p}"),
    Alias("embeddings.position_embedding.{p}", "text_model.embeddings.position_embedding.{p}"),
    Alias("encoder.{p}", "text_model.encoder.{p}"),
    Alias("final_layer_norm.{p}", "text_model.final_layer_norm.{p}"),
)

T5: tuple[Rule, ...] = (Alias("encoder.embed_tokens.weight", "shared.weight"),)

_HEAD = Drop("lm_head.weight", because="predicts the next token; pipelines take hidden states")
_UNSEEN = "the vision tower; a prompt is text only"
QWEN2_5_VL: tuple[Rule, ...] = (
    _HEAD,
    Drop("visual.{p}", because=_UNSEEN),
    Drop("model.visual.{p}", because=_UNSEEN),
    # As published and as transformers saves them; its modules have another name.
    Alias("model.embed_tokens.{p}", "model.language_model.embed_tokens.{p}"),
    Alias("model.layers.{p}", "model.language_model.layers.{p}"),
    Alias("model.norm.{p}", "model.language_model.norm.{p}"),
)
QWEN3_WITH_HEAD: tuple[Rule, ...] = (_HEAD,)
# Saved as a whole language model, of which the pipeline loads what is inside.
QWEN3: tuple[Rule, ...] = (_HEAD, Alias("model.{p}", "{p}"))


def _identity(shape: Shape) -> Array:
    return np.eye(shape[0], shape[1], dtype=np.float32)


# Inside SD3's single file; the encoders sit under text_encoders.<name>.transformer.
_UNPROJECTED = "SD3 takes CLIP-L's pooled output unprojected"
CLIP_L_ORIGINAL: tuple[Rule, ...] = (
    *CLIP,
    Drop("text_projection.weight", because=_UNPROJECTED),
    Fill("text_projection.weight", _identity, because=f"identity: {_UNPROJECTED}"),
)


# OpenCLIP's names, inside the single files of SD 2.x and SDXL.
_OPENCLIP = {
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "ln_final.{p}": "text_model.final_layer_norm.{p}",
}
_OPENCLIP_LAYER = {
    "ln_1.{p}": "layer_norm1.{p}",
    "ln_2.{p}": "layer_norm2.{p}",
    "mlp.c_fc.{p}": "mlp.fc1.{p}",
    "mlp.c_proj.{p}": "mlp.fc2.{p}",
    "attn.out_proj.{p}": "self_attn.out_proj.{p}",
}


def openclip(layers: int, *, projected: bool) -> tuple[Rule, ...]:
    """The table for `transformer.resblocks.*` names.

    SDXL's encoder is whole and `projected`. SD 2.x takes the output of the layer before the last,
    so that its file has one layer more than `layers`.
    """
    rules: list[Rule] = [
        *(Rename(*pair) for pair in _OPENCLIP.items()),
        Drop("logit_scale", because="used by contrastive training only"),
        Drop("attn_mask", because="the causal mask: known without being stored"),
    ]
    for layer in range(layers):
        source = f"transformer.resblocks.{layer}."
        target = f"text_model.encoder.layers.{layer}."
        rules += [Rename(source + name, target + ours) for name, ours in _OPENCLIP_LAYER.items()]
        rules += [
            Split(
                f"{source}attn.in_proj_{part}",
                tuple(f"{target}self_attn.{name}_proj.{part}" for name in "qkv"),
            )
            for part in ("weight", "bias")
        ]
    if projected:
        rules.append(Rename("text_projection", "text_projection.weight"))
        rules.append(Convert("text_projection.weight", TRANSPOSE))
    else:
        last = f"transformer.resblocks.{layers}.{{p}}"
        rules.append(Drop(last, because="SD 2 takes the output of the layer before the last"))
        rules.append(Drop("text_projection", because="SD 2 does not use the pooled output"))
    return tuple(rules)
