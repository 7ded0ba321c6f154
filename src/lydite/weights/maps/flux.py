"""FLUX's transformers: diffusers' names, and those of the original single files.

Reference for the original names: black-forest-labs/flux, src/flux/model.py and modules/layers.py;
for FLUX.2's: diffusers 0.42.1, loaders/single_file_utils.py.
"""

from collections.abc import Mapping

from lydite.weights.rules import SWAP_HALVES, Convert, Rename, Rule, Split

DIFFUSERS: tuple[Rule, ...] = ()  # every name and layout is the model's own

_ENDS = {
    "img_in.{p}": "x_embedder.{p}",
    "txt_in.{p}": "context_embedder.{p}",
    "final_layer.adaLN_modulation.1.{p}": "norm_out.linear.{p}",
    "final_layer.linear.{p}": "proj_out.{p}",
}
_NAMES = {
    **_ENDS,
    "time_in.in_layer.{p}": "time_text_embed.timestep_embedder.linear_1.{p}",
    "time_in.out_layer.{p}": "time_text_embed.timestep_embedder.linear_2.{p}",
    "guidance_in.in_layer.{p}": "time_text_embed.guidance_embedder.linear_1.{p}",
    "guidance_in.out_layer.{p}": "time_text_embed.guidance_embedder.linear_2.{p}",
    "vector_in.in_layer.{p}": "time_text_embed.text_embedder.linear_1.{p}",
    "vector_in.out_layer.{p}": "time_text_embed.text_embedder.linear_2.{p}",
}
_ATTENTION = {
    "img_attn.norm.query_norm.scale": "attn.norm_q.weight",
    "img_attn.norm.key_norm.scale": "attn.norm_k.weight",
    "img_attn.proj.{p}": "attn.to_out.0.{p}",
    "txt_attn.norm.query_norm.scale": "attn.norm_added_q.weight",
    "txt_attn.norm.key_norm.scale": "attn.norm_added_k.weight",
    "txt_attn.proj.{p}": "attn.to_add_out.{p}",
}
_DOUBLE = {
    **_ATTENTION,
    "img_mod.lin.{p}": "norm1.linear.{p}",
    "img_mlp.0.{p}": "ff.net.0.proj.{p}",
    "img_mlp.2.{p}": "ff.net.2.{p}",
    "txt_mod.lin.{p}": "norm1_context.linear.{p}",
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

_FLUX2_NAMES = {
    **_ENDS,
    "time_in.in_layer.{p}": "time_guidance_embed.timestep_embedder.linear_1.{p}",
    "time_in.out_layer.{p}": "time_guidance_embed.timestep_embedder.linear_2.{p}",
    "guidance_in.in_layer.{p}": "time_guidance_embed.guidance_embedder.linear_1.{p}",
    "guidance_in.out_layer.{p}": "time_guidance_embed.guidance_embedder.linear_2.{p}",
    "double_stream_modulation_img.lin.{p}": "double_stream_modulation_img.linear.{p}",
    "double_stream_modulation_txt.lin.{p}": "double_stream_modulation_txt.linear.{p}",
    "single_stream_modulation.lin.{p}": "single_stream_modulation.linear.{p}",
}
_FLUX2_DOUBLE = {
    **_ATTENTION,
    "img_mlp.0.{p}": "ff.linear_in.{p}",
    "img_mlp.2.{p}": "ff.linear_out.{p}",
    "txt_mlp.0.{p}": "ff_context.linear_in.{p}",
    "txt_mlp.2.{p}": "ff_context.linear_out.{p}",
}
_FLUX2_SINGLE = {
    "linear1.{p}": "attn.to_qkv_mlp_proj.{p}",
    "linear2.{p}": "attn.to_out.{p}",
    "norm.query_norm.scale": "attn.norm_q.weight",
    "norm.key_norm.scale": "attn.norm_k.weight",
}


def _original(
    names: Mapping[str, str], double: Mapping[str, str], single: Mapping[str, str]
) -> tuple[Rule, ...]:
    return (
        *(Rename(source, target) for source, target in names.items()),
        *(
            Rename(f"double_blocks.{{i}}.{source}", f"transformer_blocks.{{i}}.{target}")
            for source, target in double.items()
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
            for source, target in single.items()
        ),
        # The last norm is stored shift first; diffusers reads scale first.
        Convert("norm_out.linear.{p}", SWAP_HALVES),
    )


ORIGINAL: tuple[Rule, ...] = (
    *_original(_NAMES, _DOUBLE, _SINGLE),
    Split(
        "single_blocks.{i}.linear1.{p}",
        tuple(f"single_transformer_blocks.{{i}}.{target}" for target in _SINGLE_IN),
        shares=(1, 1, 1, 4),
    ),
)
FLUX2_ORIGINAL: tuple[Rule, ...] = _original(_FLUX2_NAMES, _FLUX2_DOUBLE, _FLUX2_SINGLE)
