"""FLUX.1's transformer in its authors' names: its geometry, read off the shapes of its tensors."""

from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.single_file import Found, Inferred, InferredNetwork, Shapes, SingleFile
from lydite.weights.maps import flux as flux_map

AXES_DIMS = (16, 56, 56)  # of every FLUX.1; no tensor shows them


def infer_transformer(shapes: Shapes, found: Found) -> Inferred:
    """Class, config and rules of tensors named `double_blocks.*`; dev has `guidance_in.*`."""
    sizes = {"width": 3072, "head": 128, "input": 64, "output": 64, "text": 4096, "pooled": 768}
    sizes |= shapes.sizes(_AXES)
    config = dict(
        in_channels=sizes["input"],
        out_channels=sizes["output"],
        num_layers=shapes.count("double_blocks.{i}.{p}"),
        num_single_layers=shapes.count("single_blocks.{i}.{p}"),
        attention_head_dim=sizes["head"],
        num_attention_heads=sizes["width"] // sizes["head"],
        joint_attention_dim=sizes["text"],
        pooled_projection_dim=sizes["pooled"],
        guidance_embeds=shapes.most("guidance_in.{p}", 4),
        axes_dims_rope=AXES_DIMS,
    )
    return "FluxTransformer2DModel", config, flux_map.ORIGINAL


_AXES = {
    "img_in.weight": "width input",
    "txt_in.weight": "width text",
    "vector_in.in_layer.weight": "width pooled",
    "final_layer.linear.weight": "output width",
    "final_layer.linear.bias": "output",
    "double_blocks.{i}.img_attn.proj.weight": "width width",
    "double_blocks.{i}.img_attn.proj.bias": "width",
    "double_blocks.{i}.img_mlp.2.bias": "width",
    "double_blocks.{i}.img_attn.norm.query_norm.scale": "head",
    "double_blocks.{i}.img_attn.norm.key_norm.scale": "head",
    "single_blocks.{i}.norm.query_norm.scale": "head",
    "single_blocks.{i}.norm.key_norm.scale": "head",
}

SINGLE_FILE = SingleFile(
    title="FLUX.1",
    networks=(
        InferredNetwork(
            "transformer", "model.diffusion_model.", "double_blocks.", infer_transformer
        ),
    ),
    kinds=KINDS,
    main="transformer",
    alone=("transformer",),
)
