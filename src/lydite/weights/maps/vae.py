"""AutoencoderKL: diffusers' names, old and new, and those of the original single file.

Reference for the original names: Stability-AI/sd3.5 @ fbf8f48, sd3_impls.py.
"""

from lydite.weights.layout import CONV1X1_TO_LINEAR, OIHW_TO_OHWI
from lydite.weights.rules import Alias, Convert, Rename, Rule

_CONVS: tuple[Rule, ...] = (
    Convert("{p}.conv_in.weight", OIHW_TO_OHWI),
    Convert("{p}.conv_out.weight", OIHW_TO_OHWI),
    Convert("{p}.conv1.weight", OIHW_TO_OHWI),
    Convert("{p}.conv2.weight", OIHW_TO_OHWI),
    Convert("{p}.conv_shortcut.weight", OIHW_TO_OHWI),
    Convert("{p}.conv.weight", OIHW_TO_OHWI),
    Convert("quant_conv.weight", OIHW_TO_OHWI),
    Convert("post_quant_conv.weight", OIHW_TO_OHWI),
)

DIFFUSERS: tuple[Rule, ...] = (
    *_CONVS,
    # Names of the attention before diffusers 0.17; published files still carry them.
    Alias("{p}.attentions.0.query.{q}", "{p}.attentions.0.to_q.{q}"),
    Alias("{p}.attentions.0.key.{q}", "{p}.attentions.0.to_k.{q}"),
    Alias("{p}.attentions.0.value.{q}", "{p}.attentions.0.to_v.{q}"),
    Alias("{p}.attentions.0.proj_attn.{q}", "{p}.attentions.0.to_out.0.{q}"),
)


def original(levels: int) -> tuple[Rule, ...]:
    """The table for `encoder.down.*` names of a model with this many resolutions."""
    return (
        *_CONVS,
        *_level("encoder.down", "encoder.down_blocks", "downsample", "downsamplers.0", levels),
        *_level(
            "decoder.up", "decoder.up_blocks", "upsample", "upsamplers.0", levels, reverse=True
        ),
        *(
            Rename(f"{{p}}.mid.block_{index + 1}.{{q}}", f"{{p}}.mid_block.resnets.{index}.{{q}}")
            for index in range(2)
        ),
        Rename("{p}.mid.attn_1.norm.{q}", "{p}.mid_block.attentions.0.group_norm.{q}"),
        *(
            Rename(f"{{p}}.mid.attn_1.{theirs}.{{q}}", f"{{p}}.mid_block.attentions.0.{ours}.{{q}}")
            for theirs, ours in _ATTENTION.items()
        ),
        *(
            Convert(f"{{p}}.mid_block.attentions.0.{ours}.weight", CONV1X1_TO_LINEAR)
            for ours in _ATTENTION.values()
        ),
        Rename("{p}coder.norm_out.{q}", "{p}coder.conv_norm_out.{q}"),
    )


_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
_RESNET = {
    "norm1": "norm1",
    "conv1": "conv1",
    "norm2": "norm2",
    "conv2": "conv2",
    "nin_shortcut": "conv_shortcut",
}


def _level(
    theirs: str, ours: str, resample: str, our_resample: str, levels: int, *, reverse: bool = False
) -> list[Rule]:
    """Blocks of each resolution; the original counts the decoder's from the picture inwards."""
    rules: list[Rule] = []
    for level in range(levels):
        block = f"{ours}.{levels - 1 - level if reverse else level}"
        rules.append(
            Rename(f"{theirs}.{level}.{resample}.conv.{{q}}", f"{block}.{our_resample}.conv.{{q}}")
        )
        rules.extend(
            Rename(
                f"{theirs}.{level}.block.{{j}}.{part}.{{q}}", f"{block}.resnets.{{j}}.{our}.{{q}}"
            )
            for part, our in _RESNET.items()
        )
    return rules
