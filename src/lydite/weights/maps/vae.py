"""Autoencoders: diffusers' names, old and new, and those of SD3's original single file.

Reference for the original names: Stability-AI/sd3.5 @ fbf8f48, sd3_impls.py.
"""

from lydite.weights.rules import (
    CONV1X1_TO_LINEAR,
    OIHW_TO_OHWI,
    PER_CHANNEL_2D,
    PER_CHANNEL_3D,
    PRESENT_FRAME,
    Alias,
    Convert,
    Drop,
    Rename,
    Rule,
)

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

FLUX2: tuple[Rule, ...] = (
    *DIFFUSERS,
    Drop("bn.num_batches_tracked", because="counts the batches of training"),
)

_CAUSAL = ("conv_in", "conv_out", "conv1", "conv2", "conv_shortcut")
QWEN_IMAGE: tuple[Rule, ...] = (
    Drop("{p}.time_conv.{q}", because="changes the number of frames; a picture is one frame"),
    *(Convert(f"{{p}}.{name}.weight", PRESENT_FRAME) for name in _CAUSAL),
    Convert("quant_conv.weight", PRESENT_FRAME),
    Convert("post_quant_conv.weight", PRESENT_FRAME),
    Convert("{p}.resample.1.weight", OIHW_TO_OHWI),
    Convert("{p}.attentions.0.to_qkv.weight", CONV1X1_TO_LINEAR),
    Convert("{p}.attentions.0.proj.weight", CONV1X1_TO_LINEAR),
    Convert("{p}.attentions.0.norm.gamma", PER_CHANNEL_2D),
    Convert("{p}.gamma", PER_CHANNEL_3D),
)


def original(levels: int) -> tuple[Rule, ...]:
    """The table for `encoder.down.*` names of a model with this many resolutions."""
    return (
        *_CONVS,
        *_level("encoder.down.{i}", "encoder.down_blocks.{i}"),
        # The original counts the decoder's resolutions from the picture inwards.
        *(
            rule
            for level in range(levels)
            for rule in _level(f"decoder.up.{level}", f"decoder.up_blocks.{levels - 1 - level}")
        ),
        *(
            Rename(f"{{p}}.mid.block_{index + 1}.{{q}}", f"{{p}}.mid_block.resnets.{index}.{{q}}")
            for index in range(2)
        ),
        Rename("{p}.mid.attn_1.norm.{q}", "{p}.mid_block.attentions.0.group_norm.{q}"),
        *(
            Rename(f"{{p}}.mid.attn_1.{old}.{{q}}", f"{{p}}.mid_block.attentions.0.{name}.{{q}}")
            for old, name in _ATTENTION.items()
        ),
        *(
            Convert(f"{{p}}.mid_block.attentions.0.{name}.weight", CONV1X1_TO_LINEAR)
            for name in _ATTENTION.values()
        ),
        Rename("{p}coder.norm_out.{q}", "{p}coder.conv_norm_out.{q}"),
    )


_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
_LEVEL = {
    "downsample.conv.{q}": "downsamplers.0.conv.{q}",
    "upsample.conv.{q}": "upsamplers.0.conv.{q}",
    "block.{j}.norm1.{q}": "resnets.{j}.norm1.{q}",
    "block.{j}.conv1.{q}": "resnets.{j}.conv1.{q}",
    "block.{j}.norm2.{q}": "resnets.{j}.norm2.{q}",
    "block.{j}.conv2.{q}": "resnets.{j}.conv2.{q}",
    "block.{j}.nin_shortcut.{q}": "resnets.{j}.conv_shortcut.{q}",
}


def _level(original: str, level: str) -> list[Rule]:
    """The blocks of one resolution."""
    return [Rename(f"{original}.{old}", f"{level}.{new}") for old, new in _LEVEL.items()]
