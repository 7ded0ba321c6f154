"""FLUX.2's transformer in its authors' names: its geometry, read off the shapes of its tensors."""

from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.inferred_models import Found, Inferred, InferredModel, InferredNetwork, Shapes
from lydite.weights.maps import flux as flux_map

# Of every FLUX.2; no tensor shows them.
FIXED = {"axes_dims_rope": (32, 32, 32, 32), "rope_theta": 2000.0, "eps": 1e-6}


def infer_transformer(shapes: Shapes, found: Found) -> Inferred:
    """Class, config and rules of tensors named `single_stream_modulation.*`; dev has guidance."""
    sizes = {"width": 3072, "head": 128, "input": 128, "output": 128, "text": 7680}
    sizes |= {"time": 256, "hidden": 9216} | shapes.sizes(_AXES)
    config = dict(
        in_channels=sizes["input"],
        out_channels=sizes["output"],
        num_layers=shapes.count("double_blocks.{i}.{p}"),
        num_single_layers=shapes.count("single_blocks.{i}.{p}"),
        attention_head_dim=sizes["head"],
        num_attention_heads=sizes["width"] // sizes["head"],
        joint_attention_dim=sizes["text"],
        timestep_guidance_channels=sizes["time"],
        mlp_ratio=sizes["hidden"] / sizes["width"],
        guidance_embeds=shapes.most("guidance_in.{p}", 2),
        **FIXED,
    )
    return "Flux2Transformer2DModel", config, flux_map.FLUX2_ORIGINAL


_AXES = {
    "img_in.weight": "width input",
    "txt_in.weight": "width text",
    "time_in.in_layer.weight": "width time",
    "time_in.out_layer.weight": "width width",
    "final_layer.linear.weight": "output width",
    "double_blocks.{i}.img_attn.proj.weight": "width width",
    "double_blocks.{i}.img_mlp.2.weight": "width hidden",
    "double_blocks.{i}.txt_mlp.2.weight": "width hidden",
    "double_blocks.{i}.img_attn.norm.query_norm.scale": "head",
    "double_blocks.{i}.img_attn.norm.key_norm.scale": "head",
    "single_blocks.{i}.norm.query_norm.scale": "head",
    "single_blocks.{i}.norm.key_norm.scale": "head",
}

SINGLE_FILE = InferredModel(
    title="FLUX.2",
    networks=(
        InferredNetwork(
            "transformer", "model.diffusion_model.", "single_stream_modulation.", infer_transformer
        ),
    ),
    kinds=KINDS,
    main="transformer",
    alone=("transformer",),
)
