"""The U-Net of Stable Diffusion: diffusers' names, and those of the original single files.

Reference for the original names: CompVis/stable-diffusion, ldm/modules/diffusionmodules/
openaimodel.py; Stability-AI/generative-models has the same for SDXL.
"""

from collections.abc import Sequence

from lydite.weights.rules import CONV_OR_LINEAR, OIHW_TO_OHWI, Convert, Rename, Rule

DIFFUSERS: tuple[Rule, ...] = (
    Convert("conv_in.weight", OIHW_TO_OHWI),
    Convert("conv_out.weight", OIHW_TO_OHWI),
    Convert("{p}.conv1.weight", OIHW_TO_OHWI),
    Convert("{p}.conv2.weight", OIHW_TO_OHWI),
    Convert("{p}.conv_shortcut.weight", OIHW_TO_OHWI),
    Convert("{p}.conv.weight", OIHW_TO_OHWI),
    Convert("{p}.proj_in.weight", CONV_OR_LINEAR),
    Convert("{p}.proj_out.weight", CONV_OR_LINEAR),
)


def original(
    layers: int, down_attention: Sequence[bool], up_attention: Sequence[bool]
) -> tuple[Rule, ...]:
    """The table for `input_blocks.*` names; `layers` resnets in each level's down block.

    The original counts all blocks in one row: a downsampler is a block of its own, an upsampler is
    the last part of a block.
    """
    rules: list[Rule] = [*DIFFUSERS, *(Rename(*pair) for pair in _OUTSIDE_BLOCKS.items())]
    levels, last = len(down_attention), len(down_attention) - 1
    for level in range(levels):
        first = 1 + level * (layers + 1)
        for layer in range(layers):
            block, target = f"input_blocks.{first + layer}", f"down_blocks.{level}"
            rules += _resnet(f"{block}.0", f"{target}.resnets.{layer}")
            if down_attention[level]:
                rules.append(Rename(f"{block}.1.{{p}}", f"{target}.attentions.{layer}.{{p}}"))
        if level < last:
            downsampler = f"down_blocks.{level}.downsamplers.0.conv.{{p}}"
            rules.append(Rename(f"input_blocks.{first + layers}.0.op.{{p}}", downsampler))
    rules += _resnet("middle_block.0", "mid_block.resnets.0")
    rules.append(Rename("middle_block.1.{p}", "mid_block.attentions.0.{p}"))
    rules += _resnet("middle_block.2", "mid_block.resnets.1")
    for level in range(levels):
        target = f"up_blocks.{level}"
        for layer in range(layers + 1):
            block = f"output_blocks.{level * (layers + 1) + layer}"
            rules += _resnet(f"{block}.0", f"{target}.resnets.{layer}")
            if up_attention[level]:
                rules.append(Rename(f"{block}.1.{{p}}", f"{target}.attentions.{layer}.{{p}}"))
            if level < last and layer == layers:
                part = 2 if up_attention[level] else 1
                upsampler = f"{target}.upsamplers.0.conv.{{p}}"
                rules.append(Rename(f"{block}.{part}.conv.{{p}}", upsampler))
    return tuple(rules)


_OUTSIDE_BLOCKS = {
    "time_embed.0.{p}": "time_embedding.linear_1.{p}",
    "time_embed.2.{p}": "time_embedding.linear_2.{p}",
    "label_emb.0.0.{p}": "add_embedding.linear_1.{p}",
    "label_emb.0.2.{p}": "add_embedding.linear_2.{p}",
    "input_blocks.0.0.{p}": "conv_in.{p}",
    "out.0.{p}": "conv_norm_out.{p}",
    "out.2.{p}": "conv_out.{p}",
}
_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}


def _resnet(source: str, target: str) -> list[Rule]:
    return [
        Rename(f"{source}.{theirs}.{{p}}", f"{target}.{ours}.{{p}}")
        for theirs, ours in _RESNET.items()
    ]
