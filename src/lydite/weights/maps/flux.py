"""FLUX.1's transformer: diffusers' names, and those of the original single file.

Reference for the original names: black-forest-labs/flux, src/flux/model.py and modules/layers.py.
"""

from lydite.weights.rules import SWAP_HALVES, Convert, Rename, Rule, Split

DIFFUSERS: tuple[Rule, ...] = ()  # every name and layout is the model's own

_NAMES = {
    "img_in.{p}": "x_embedder.{p}",
    "txt_in.{p}": "context_embedder.{p}",
    "time_in.in_layer.{p}": "time_text_embed.timestep_embedder.linear_1.{p}",
    "time_in.out_layer.{p}": "time_text_embed.timestep_embedder.linear_2.{p}",
    "guidance_in.in_layer.{p}": "time_text_embed.guidance_embedder.linear_1.{p}",
    "guidance_in.out_layer.{p}": "time_text_embed.guidance_embedder.linear_2.{p}",
    "vector_in.in_layer.{p}": "time_text_embed.text_embedder.linear_1.{p}",
    "vector_in.out_layer.{p}": "time_text_embed.text_embedder.linear_2.{p}",
    "final_layer.adaLN_modulation.1.{p}": "norm_out.linear.{p}",
    "final_layer.linear.{p}": "proj_out.{p}",
}
_DOUBLE = {
    "img_mod.lin.{p}": "norm1.linear.{p}",
    "img_attn.norm.query_norm.scale": "attn.norm_q.weight",
    "img_attn.norm.key_norm.scale": "attn.norm_k.weight",
    "img_attn.proj.{p}": "attn.to_out.0.{p}",
    "img_mlp.0.{p}": "ff.net.0.proj.{p}",
    "img_mlp.2.{p}": "ff.net.2.{p}",
    "txt_mod.lin.{p}": "norm1_context.linear.{p}",
    "txt_attn.norm.query_norm.scale": "attn.norm_added_q.weight",
    "txt_attn.norm.key_norm.scale": "attn.norm_added_k.weight",
    "txt_attn.proj.{p}": "attn.to_add_out.{p}",
    "txt_mlp.0.{p}": "ff_context.net.0.proj.{p}",
    "txt_mlp.2.{p}": "ff_context.net.2.{p}",
}
_DOUBLE_QKV = {
    "img_attn.qkv.{p}": ("attn.to_q.{p}", "attn.to_k.{p}", "attn.to_v.{p}"),
    "txt_attn.qkv.{p}": ("attn.add_q_proj.{p}", "attn.add_k_proj.{p}", "attn.add_v_proj.{p}"),
}
_SINGLE = {
    "modulation.lin.{p}": "norm.linear.{p}",
    "norm.query_norm.scale": "attn.norm_q.weight",
    "norm.key_norm.scale": "attn.norm_k.weight",
    "linear2.{p}": "proj_out.{p}",
}
_SINGLE_IN = ("attn.to_q.{p}", "attn.to_k.{p}", "attn.to_v.{p}", "proj_mlp.{p}")

ORIGINAL: tuple[Rule, ...] = (
    *(Rename(source, target) for source, target in _NAMES.items()),
    *(
        Rename(f"double_blocks.{{i}}.{source}", f"transformer_blocks.{{i}}.{target}")
        for source, target in _DOUBLE.items()
    ),
    *(
        Split(
            f"double_blocks.{{i}}.{source}",
            tuple(f"transformer_blocks.{{i}}.{target}" for target in targets),
        )
        for source, targets in _DOUBLE_QKV.items()
    ),
    *(
        Rename(f"single_blocks.{{i}}.{source}", f"single_transformer_blocks.{{i}}.{target}")
        for source, target in _SINGLE.items()
    ),
    Split(
        "single_blocks.{i}.linear1.{p}",
        tuple(f"single_transformer_blocks.{{i}}.{target}" for target in _SINGLE_IN),
        shares=(1, 1, 1, 4),
    ),
    # The last norm is stored shift first; diffusers reads scale first.
    Convert("norm_out.linear.{p}", SWAP_HALVES),
)
