"""SD3's transformer: diffusers' names, and those of the original single file.

Reference for the original names: Stability-AI/sd3.5 @ fbf8f48, mmditx.py.
"""

from lydite.weights.rules import OIHW_TO_OHWI, SWAP_HALVES, Convert, Rename, Rule, Split

DIFFUSERS: tuple[Rule, ...] = (Convert("pos_embed.proj.weight", OIHW_TO_OHWI),)


def original(depth: int) -> tuple[Rule, ...]:
    """The table for `joint_blocks.*` names of a model with this many blocks."""
    text_norm = f"transformer_blocks.{depth - 1}.norm1_context.linear"
    return (
        *DIFFUSERS,
        Rename("pos_embed", "pos_embed.pos_embed"),
        Rename("x_embedder.proj.{p}", "pos_embed.proj.{p}"),
        Rename("t_embedder.mlp.0.{p}", "time_text_embed.timestep_embedder.linear_1.{p}"),
        Rename("t_embedder.mlp.2.{p}", "time_text_embed.timestep_embedder.linear_2.{p}"),
        Rename("y_embedder.mlp.0.{p}", "time_text_embed.text_embedder.linear_1.{p}"),
        Rename("y_embedder.mlp.2.{p}", "time_text_embed.text_embedder.linear_2.{p}"),
        *(Rename(_ORIGINAL + original, _OURS + name) for original, name in _BLOCK.items()),
        *(
            Split(f"{_ORIGINAL}{fused}.qkv.{{p}}", tuple(f"{_OURS}{name}.{{p}}" for name in names))
            for fused, names in _QKV.items()
        ),
        Rename("final_layer.adaLN_modulation.1.{p}", "norm_out.linear.{p}"),
        Rename("final_layer.linear.{p}", "proj_out.{p}"),
        # The two continuous norms are stored shift first; diffusers reads scale first.
        Convert(f"{text_norm}.{{p}}", SWAP_HALVES),
        Convert("norm_out.linear.{p}", SWAP_HALVES),
    )


_ORIGINAL = "joint_blocks.{i}."
_OURS = "transformer_blocks.{i}."

_BLOCK = {
    "x_block.adaLN_modulation.1.{p}": "norm1.linear.{p}",
    "x_block.attn.proj.{p}": "attn.to_out.0.{p}",
    "x_block.attn.ln_q.{p}": "attn.norm_q.{p}",
    "x_block.attn.ln_k.{p}": "attn.norm_k.{p}",
    "x_block.attn2.proj.{p}": "attn2.to_out.0.{p}",
    "x_block.attn2.ln_q.{p}": "attn2.norm_q.{p}",
    "x_block.attn2.ln_k.{p}": "attn2.norm_k.{p}",
    "x_block.mlp.fc1.{p}": "ff.net.0.proj.{p}",
    "x_block.mlp.fc2.{p}": "ff.net.2.{p}",
    "context_block.adaLN_modulation.1.{p}": "norm1_context.linear.{p}",
    "context_block.attn.proj.{p}": "attn.to_add_out.{p}",
    "context_block.attn.ln_q.{p}": "attn.norm_added_q.{p}",
    "context_block.attn.ln_k.{p}": "attn.norm_added_k.{p}",
    "context_block.mlp.fc1.{p}": "ff_context.net.0.proj.{p}",
    "context_block.mlp.fc2.{p}": "ff_context.net.2.{p}",
}

_QKV = {
    "x_block.attn": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "x_block.attn2": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "context_block.attn": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}
