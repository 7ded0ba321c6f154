"""FLUX.1's transformer without a config: its geometry, read off the shapes of its tensors."""

from functools import partial

from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.inferred_models import Found, Inferred, InferredModel, InferredNetwork, Shapes
from lydite.weights.maps import flux as flux_map
from lydite.weights.rules import Rule

AXES_DIMS = (16, 56, 56)  # of every FLUX.1; no tensor shows them


def infer_transformer(shapes: Shapes, found: Found, rules: tuple[Rule, ...]) -> Inferred:
    """Class, config and rules of a transformer whose names a table knows; dev has guidance."""
    shapes = shapes.renamed(rules)
    sizes = {"width": 3072, "head": 128, "input": 64, "output": 64, "text": 4096, "pooled": 768}
    sizes |= shapes.sizes(_AXES)
    config = dict(
        in_channels=sizes["input"],
        out_channels=sizes["output"],
        num_layers=shapes.count("transformer_blocks.{i}.{p}"),
        num_single_layers=shapes.count("single_transformer_blocks.{i}.{p}"),
        attention_head_dim=sizes["head"],
        num_attention_heads=sizes["width"] // sizes["head"],
        joint_attention_dim=sizes["text"],
        pooled_projection_dim=sizes["pooled"],
        guidance_embeds=shapes.most("time_text_embed.guidance_embedder.{p}", 4),
        axes_dims_rope=AXES_DIMS,
    )
    return "FluxTransformer2DModel", config, rules


_AXES = {
    "x_embedder.weight": "width input",
    "context_embedder.weight": "width text",
    "time_text_embed.text_embedder.linear_1.weight": "width pooled",
    "proj_out.weight": "output width",
    "proj_out.bias": "output",
    "transformer_blocks.{i}.attn.to_out.0.weight": "width width",
    "transformer_blocks.{i}.attn.to_out.0.bias": "width",
    "transformer_blocks.{i}.ff.net.2.bias": "width",
    "transformer_blocks.{i}.attn.norm_q.weight": "head",
    "transformer_blocks.{i}.attn.norm_k.weight": "head",
    "single_transformer_blocks.{i}.attn.norm_q.weight": "head",
    "single_transformer_blocks.{i}.attn.norm_k.weight": "head",
}

SINGLE_FILE = InferredModel(
    title="FLUX.1",
    networks=(
        InferredNetwork(
            "transformer",
            "model.diffusion_model.",
            "double_blocks.",
            partial(infer_transformer, rules=flux_map.ORIGINAL),
        ),
    ),
    kinds=KINDS,
    main="transformer",
    alone=("transformer",),
)
