"""Networks as mflux saves them: in its own names, convolutions in MLX's order of axes.

Reference: mflux 0.24.0, models/*/model and models/*/weights. Layers that are not here have
diffusers' names. `mflux-save -q` rounds every linear and embedding in groups of 64; a table's {p}
stands for `weight`, `scales`, `biases` and `bias` alike.
"""

from lydite.weights.rules import (
    MLX_CONV1X1_TO_LINEAR,
    MLX_PRESENT_FRAME,
    Alias,
    Convert,
    Drop,
    Rename,
    Rule,
)

FLUX: tuple[Rule, ...] = tuple(
    Rename(f"{{b}}.{part}.{theirs}.{{p}}", f"{{b}}.{part}.{name}.{{p}}")
    for part in ("ff", "ff_context")
    for theirs, name in (("linear1", "net.0.proj"), ("linear2", "net.2"))
)

T5: tuple[Rule, ...] = (
    *(
        Rename(
            f"t5_blocks.{{i}}.attention.SelfAttention.{name}.{{p}}",
            f"encoder.block.{{i}}.layer.0.SelfAttention.{name}.{{p}}",
        )
        for name in "qkvo"
    ),
    Rename("t5_blocks.{i}.attention.layer_norm.{p}", "encoder.block.{i}.layer.0.layer_norm.{p}"),
    Rename("t5_blocks.{i}.ff.{p}", "encoder.block.{i}.layer.1.{p}"),
    Rename("final_layer_norm.{p}", "encoder.final_layer_norm.{p}"),
    # The table of the first block is stored in every block.
    Alias(
        "t5_blocks.{i}.attention.SelfAttention.relative_attention_bias.{p}",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.{p}",
    ),
)

# FLUX.1's and Z-Image's; their modules around these layers have different names.
KL_VAE: tuple[Rule, ...] = (
    *(
        Rename(f"{{q}}.{name}.{inner}.{{p}}", f"{{q}}.{name}.{{p}}")
        for name in ("conv_in", "conv_out")
        for inner in ("conv2d", "conv")
    ),
    Rename("{q}.conv_norm_out.norm.{p}", "{q}.conv_norm_out.{p}"),
)

QWEN_IMAGE: tuple[Rule, ...] = (
    Rename("{b}.img_mod_linear.{p}", "{b}.img_mod.1.{p}"),
    Rename("{b}.txt_mod_linear.{p}", "{b}.txt_mod.1.{p}"),
    Rename("{b}.attn.attn_to_out.0.{p}", "{b}.attn.to_out.0.{p}"),
    *(
        Rename(f"{{b}}.{stream}_ff.{theirs}.{{p}}", f"{{b}}.{stream}_mlp.{name}.{{p}}")
        for stream in ("img", "txt")
        for theirs, name in (("mlp_in", "net.0.proj"), ("mlp_out", "net.2"))
    ),
)

_COMPUTED = "computed from the config"
QWEN2_5_VL: tuple[Rule, ...] = (
    *(
        Rename(f"encoder.{name}.{{p}}", f"model.language_model.{name}.{{p}}")
        for name in (
            "embed_tokens",
            "norm",
            *(f"layers.{{i}}.self_attn.{part}_proj" for part in "qkvo"),
            *(f"layers.{{i}}.mlp.{part}_proj" for part in ("gate", "up", "down")),
            "layers.{i}.input_layernorm",
            "layers.{i}.post_attention_layernorm",
        )
    ),
    Drop("encoder.visual.{p}", because="the vision tower; a prompt is text only"),
    Drop("encoder.rotary_emb.inv_freq", because=_COMPUTED),
    Drop("encoder.layers.{i}.self_attn.rotary_emb.inv_freq", because=_COMPUTED),
)

Z_IMAGE: tuple[Rule, ...] = (
    Rename("t_embedder.linear1.{p}", "t_embedder.mlp.0.{p}"),
    Rename("t_embedder.linear2.{p}", "t_embedder.mlp.2.{p}"),
    Rename(
        "all_final_layer.2-1.adaLN_modulation.0.{p}", "all_final_layer.2-1.adaLN_modulation.1.{p}"
    ),
)

QWEN3: tuple[Rule, ...] = (Drop("rotary_emb.inv_freq", because=_COMPUTED),)


def qwen_image_vae(levels: int, resnets: int) -> tuple[Rule, ...]:
    """The table of a model with this many resolutions, and resnets in each of the encoder's."""
    rules: list[Rule] = [
        Drop("{q}.time_conv.{p}", because="changes the number of frames; a picture is one frame"),
        *_resnet("{q}.mid_block.resnets.{i}"),
        _norm("{q}.norm_out"),
        _norm(f"{_ATTENTION}.norm"),
        Convert(f"{_ATTENTION}.to_qkv.weight", MLX_CONV1X1_TO_LINEAR),
        Convert(f"{_ATTENTION}.proj.weight", MLX_CONV1X1_TO_LINEAR),
    ]
    for name in ("{q}.conv_in", "{q}.conv_out", "quant_conv", "post_quant_conv"):
        rules += _convolution(f"{name}.conv3d", name)
    for level in range(levels):
        theirs, ours = f"decoder.up_block{level}", f"decoder.up_blocks.{level}"
        rules += _resnet(f"{theirs}.resnets.{{i}}", f"{ours}.resnets.{{i}}")
        rules.append(_resample(f"{theirs}.upsamplers.0", f"{ours}.upsamplers.0"))
        # diffusers counts the encoder's resnets and the layers between resolutions in one list
        first = level * (resnets + 1)
        for index in range(resnets):
            theirs = f"encoder.down_blocks.{level}.resnets.{index}"
            rules += _resnet(theirs, f"encoder.down_blocks.{first + index}")
        theirs = f"encoder.down_blocks.{level}.downsamplers.0"
        rules.append(_resample(theirs, f"encoder.down_blocks.{first + resnets}"))
    return tuple(rules)


_ATTENTION = "{q}.mid_block.attentions.0"


def _resnet(theirs: str, ours: str = "") -> list[Rule]:
    ours = ours or theirs
    return [
        rule
        for index in "12"
        for rule in (
            *_convolution(f"{theirs}.conv{index}.conv3d", f"{ours}.conv{index}"),
            _norm(f"{theirs}.norm{index}", f"{ours}.norm{index}"),
        )
    ] + _convolution(f"{theirs}.skip_conv.conv3d", f"{ours}.conv_shortcut")


def _convolution(theirs: str, ours: str) -> list[Rule]:
    return [
        Rename(f"{theirs}.{{p}}", f"{ours}.{{p}}"),
        Convert(f"{ours}.weight", MLX_PRESENT_FRAME),
    ]


def _norm(theirs: str, ours: str = "") -> Rule:
    return Rename(f"{theirs}.weight", f"{ours or theirs}.gamma")


def _resample(theirs: str, ours: str) -> Rule:
    return Rename(f"{theirs}.resample_conv.{{p}}", f"{ours}.resample.1.{{p}}")
