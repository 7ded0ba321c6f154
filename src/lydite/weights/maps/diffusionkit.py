"""Networks as DiffusionKit's 4-bit checkpoints have them: its own names, MLX's order of axes.

Reference: argmaxinc/DiffusionKit @ 498e5db, mlx/mmdit.py, mlx/vae.py and mlx/model_io.py. Linears
are rounded in groups of 64.
"""

import numpy as np

from lydite.weights.rules import (
    ADD_BATCH,
    LINEAR_TO_CONV1X1,
    MLX_CONV1X1_TO_LINEAR,
    SWAP_HALVES,
    Convert,
    Drop,
    Fill,
    Join,
    Rename,
    Rule,
)

_BLOCK = "multimodal_transformer_blocks.{i}."
_OURS = "transformer_blocks.{i}."
_STREAMS = {
    "image_transformer_block.": {
        "adaLN_modulation.layers.1.{p}": "norm1.linear.{p}",
        "attn.q_proj.{p}": "attn.to_q.{p}",
        "attn.k_proj.{p}": "attn.to_k.{p}",
        "attn.v_proj.{p}": "attn.to_v.{p}",
        "attn.o_proj.{p}": "attn.to_out.0.{p}",
        "qk_norm.q_norm.{p}": "attn.norm_q.{p}",
        "qk_norm.k_norm.{p}": "attn.norm_k.{p}",
        "mlp.fc1.{p}": "ff.net.0.proj.{p}",
        "mlp.fc2.{p}": "ff.net.2.{p}",
    },
    "text_transformer_block.": {
        "adaLN_modulation.layers.1.{p}": "norm1_context.linear.{p}",
        "attn.q_proj.{p}": "attn.add_q_proj.{p}",
        "attn.k_proj.{p}": "attn.add_k_proj.{p}",
        "attn.v_proj.{p}": "attn.add_v_proj.{p}",
        "attn.o_proj.{p}": "attn.to_add_out.{p}",
        "qk_norm.q_norm.{p}": "attn.norm_added_q.{p}",
        "qk_norm.k_norm.{p}": "attn.norm_added_k.{p}",
        "mlp.fc1.{p}": "ff_context.net.0.proj.{p}",
        "mlp.fc2.{p}": "ff_context.net.2.{p}",
    },
}
_UNIFIED = "unified_transformer_blocks.{i}.transformer_block."
_SINGLE = "single_transformer_blocks.{i}."
_SINGLES = {
    "adaLN_modulation.layers.1.{p}": "norm.linear.{p}",
    "attn.q_proj.{p}": "attn.to_q.{p}",
    "attn.k_proj.{p}": "attn.to_k.{p}",
    "attn.v_proj.{p}": "attn.to_v.{p}",
    "qk_norm.q_norm.{p}": "attn.norm_q.{p}",
    "qk_norm.k_norm.{p}": "attn.norm_k.{p}",
    "mlp.fc1.{p}": "proj_mlp.{p}",
    "attn.o_proj.bias": "proj_out.bias",
}
_UNBIASED = "DiffusionKit leaves out the bias of keys"

_SHARED: tuple[Rule, ...] = (
    *(
        Rename(_BLOCK + stream + theirs, _OURS + name)
        for stream, names in _STREAMS.items()
        for theirs, name in names.items()
    ),
    *(
        Rename(
            f"{theirs}.mlp.layers.{index}.{{p}}", f"time_text_embed.{name}.linear_{number}.{{p}}"
        )
        for theirs, name in (("t_embedder", "timestep_embedder"), ("y_embedder", "text_embedder"))
        for index, number in ((0, 1), (2, 2))
    ),
    Rename("final_layer.adaLN_modulation.layers.1.{p}", "norm_out.linear.{p}"),
    Rename("final_layer.linear.{p}", "proj_out.{p}"),
    # stored shift first; diffusers reads scale first
    Convert("norm_out.linear.{p}", SWAP_HALVES),
    *(
        Fill(_OURS + f"attn.{name}.bias", lambda shape: np.zeros(shape, np.float32), _UNBIASED)
        for name in ("to_k", "add_k_proj")
    ),
)

FLUX: tuple[Rule, ...] = (
    *_SHARED,
    Rename("x_embedder.proj.{p}", "x_embedder.{p}"),
    Convert("x_embedder.weight", MLX_CONV1X1_TO_LINEAR),
    *(Rename(_UNIFIED + theirs, _SINGLE + name) for theirs, name in _SINGLES.items()),
    *(
        Join(
            (f"{_UNIFIED}attn.o_proj.{part}", f"{_UNIFIED}mlp.fc2.{part}"),
            f"{_SINGLE}proj_out.{part}",
            axis=1,
        )
        for part in ("weight", "scales", "biases")
    ),
    Drop(f"{_UNIFIED}mlp.fc2.bias", because="a second copy of attn.o_proj.bias, not used"),
    Fill(f"{_SINGLE}attn.to_k.bias", lambda shape: np.zeros(shape, np.float32), because=_UNBIASED),
)


def sd3(depth: int) -> tuple[Rule, ...]:
    """The table of a model with this many blocks."""
    return (
        *_SHARED,
        Rename("x_embedder.proj.{p}", "pos_embed.proj.{p}"),
        Rename("x_pos_embedder.pos_embed.weight", "pos_embed.pos_embed"),
        Convert("pos_embed.pos_embed", ADD_BATCH),
        Convert(f"transformer_blocks.{depth - 1}.norm1_context.linear.{{p}}", SWAP_HALVES),
    )


_ATTENTION = {
    "query_proj": "to_q",
    "key_proj": "to_k",
    "value_proj": "to_v",
    "out_proj": "to_out.0",
    "group_norm": "group_norm",
}


def sd3_vae(levels: int) -> tuple[Rule, ...]:
    """The table of a model with this many resolutions."""
    return (
        *(
            Rename(f"{{q}}.mid_blocks.{theirs}.{{p}}", f"{{q}}.mid_block.resnets.{index}.{{p}}")
            for index, theirs in enumerate((0, 2))
        ),
        *(
            Rename(f"{{q}}.mid_blocks.1.{old}.{{p}}", f"{{q}}.mid_block.attentions.0.{name}.{{p}}")
            for old, name in _ATTENTION.items()
        ),
        Rename(
            "encoder.down_blocks.{i}.downsample.{p}",
            "encoder.down_blocks.{i}.downsamplers.0.conv.{p}",
        ),
        *(
            rule
            for level in range(levels)  # counted from the picture inwards
            for rule in (
                Rename(
                    f"decoder.up_blocks.{level}.resnets.{{j}}.{{p}}",
                    f"decoder.up_blocks.{levels - 1 - level}.resnets.{{j}}.{{p}}",
                ),
                Rename(
                    f"decoder.up_blocks.{level}.upsample.{{p}}",
                    f"decoder.up_blocks.{levels - 1 - level}.upsamplers.0.conv.{{p}}",
                ),
            )
        ),
        Convert("{q}.conv_shortcut.weight", LINEAR_TO_CONV1X1),
    )
