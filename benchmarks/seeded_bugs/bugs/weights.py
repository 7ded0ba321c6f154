"""Weights and loading: classes A of docs/bug-classes.md."""

import mlx.core as mx
import numpy as np

from seeded_bugs.cases import Bug, Site, inputs, outputs
from seeded_bugs.patches import copied, forward, setting, swapped, together, weight

BLOCK_0, BLOCK_1, BLOCK_2 = (f"transformer/transformer_blocks.{index}" for index in range(3))
CLIP, CLIP_2 = "text_encoder/text_model", "text_encoder_2/text_model"
FLOAT32 = ("float32",)


def bfloat16(x: mx.array) -> mx.array:
    """x rounded to bfloat16 once, in its own dtype."""
    return x.astype(mx.bfloat16).astype(x.dtype)


def fresh(x: mx.array) -> mx.array:
    """What an initialiser would have put there: U(−1/√n, 1/√n)."""
    bound = (x.size // x.shape[0]) ** -0.5
    return mx.array(np.random.default_rng(11).uniform(-bound, bound, x.shape).astype(np.float32))


def chunks(x: mx.array, order: tuple[int, ...]) -> mx.array:
    """Rows of a modulation in another order of chunks."""
    parts = mx.split(x, len(order))
    return mx.concatenate([parts[index] for index in order])


BUGS = (
    Bug(
        id="layer-never-loaded",
        cause="random_init",
        bug_class="A1",
        site=outputs(f"{BLOCK_1}.ff_context.net.0.proj"),
        apply=weight(f"{BLOCK_1}.ff_context.net.0.proj.weight", fresh),
        severity="fatal",
        fix="Map the checkpoint's ff_context.net.0.proj.weight to this layer and load strictly.",
    ),
    Bug(
        id="post-quant-conv-missing",
        cause="layer_missing",
        bug_class="A2",
        # what the decoder's first convolution takes is what the missing one should have given
        site=inputs("vae/decoder"),
        apply=setting("vae", "config", lambda c: _without(c, "use_post_quant_conv")),
        fix="Run post_quant_conv before the decoder.",
    ),
    Bug(
        id="block-skipped",
        cause="layer_missing",
        bug_class="A3",
        site=(Site(BLOCK_1), Site(BLOCK_1, "out.1")),  # text and image leave in one call
        apply=forward(BLOCK_1, lambda self, original, text, image, *tables: (text, image)),
        fix="Run transformer_blocks.1: the port has one block too few.",
    ),
    Bug(
        id="resnet-skipped",
        cause="layer_missing",
        bug_class="A3",
        site=outputs("vae/decoder.up_blocks.2.resnets.1"),
        apply=forward("vae/decoder.up_blocks.2.resnets.1", lambda self, original, x: x),
        fix="A decoder level has layers_per_block + 1 residual blocks.",
        held_out=True,
    ),
    Bug(
        id="conv-kernel-transposed",
        cause="conv_layout",
        bug_class="A4",
        site=outputs("vae/decoder.mid_block.resnets.0.conv1"),
        apply=weight(
            "vae/decoder.mid_block.resnets.0.conv1.weight", lambda w: w.transpose(0, 2, 1, 3)
        ),
        fix="The kernel's height and width are exchanged; OIHW becomes OHWI by (0, 2, 3, 1).",
    ),
    Bug(
        id="conv-in-out-swapped",
        cause="conv_layout",
        bug_class="A4",
        site=outputs("vae/decoder.up_blocks.0.resnets.0.conv2"),
        apply=weight(
            "vae/decoder.up_blocks.0.resnets.0.conv2.weight", lambda w: w.transpose(3, 1, 2, 0)
        ),
        severity="fatal",
        fix="Input and output channels are exchanged; OIHW becomes OHWI by (0, 2, 3, 1).",
    ),
    Bug(
        id="conv-raw-reshape",
        cause="conv_layout",
        bug_class="A4",
        site=outputs("transformer/pos_embed.proj"),
        apply=weight(
            "transformer/pos_embed.proj.weight",
            lambda w: w.transpose(0, 3, 1, 2).reshape(w.shape),
        ),
        severity="fatal",
        fix="The kernel was reshaped from OIHW to OHWI; transpose it by (0, 2, 3, 1).",
        held_out=True,
    ),
    Bug(
        id="linear-transposed",
        cause="linear_transposed",
        bug_class="A6",
        site=outputs(f"{BLOCK_1}.attn.to_q"),
        apply=weight(f"{BLOCK_1}.attn.to_q.weight", lambda w: w.T),
        fix="The weight is stored (out, in): do not transpose it.",
    ),
    Bug(
        id="clip-projection-transposed",
        cause="linear_transposed",
        bug_class="A6",
        site=outputs("text_encoder_2/text_projection"),
        apply=weight("text_encoder_2/text_projection.weight", lambda w: w.T),
        fix="text_projection is a linear without bias, stored (out, in).",
        held_out=True,
    ),
    Bug(
        id="bias-dropped",
        cause="bias_dropped",
        bug_class="A7",
        site=outputs(f"{BLOCK_0}.ff.net.2"),
        apply=weight(f"{BLOCK_0}.ff.net.2.bias", mx.zeros_like),
        fix="Load ff.net.2.bias; the port adds zero.",
    ),
    Bug(
        id="conv-bias-dropped",
        cause="bias_dropped",
        bug_class="A7",
        site=outputs("vae/encoder.conv_in"),
        apply=weight("vae/encoder.conv_in.bias", mx.zeros_like),
        fix="Load encoder.conv_in.bias; the port adds zero.",
    ),
    Bug(
        id="norm-left-at-one",
        cause="norm_default_init",
        bug_class="A8",
        site=outputs(f"{CLIP}.encoder.layers.1.layer_norm1"),
        apply=together(
            weight(f"{CLIP}.encoder.layers.1.layer_norm1.weight", mx.ones_like),
            weight(f"{CLIP}.encoder.layers.1.layer_norm1.bias", mx.zeros_like),
        ),
        fix="Map gamma and beta to weight and bias: the norm still has 1 and 0.",
    ),
    Bug(
        id="qk-norm-left-at-one",
        cause="norm_default_init",
        bug_class="A8",
        site=outputs(f"{BLOCK_1}.attn.norm_q"),
        apply=weight(f"{BLOCK_1}.attn.norm_q.weight", mx.ones_like),
        fix="Load attn.norm_q.weight: it still is 1 everywhere.",
    ),
    Bug(
        id="k-and-v-swapped",
        cause="qkv_order",
        bug_class="A9",
        site=outputs(f"{BLOCK_1}.attn.to_k"),
        apply=swapped(f"{BLOCK_1}.attn.to_k", f"{BLOCK_1}.attn.to_v"),
        severity="fatal",
        fix="The fused projection is q, k, v in this order.",
    ),
    Bug(
        id="added-q-and-k-swapped",
        cause="qkv_order",
        bug_class="A9",
        site=outputs(f"{BLOCK_2}.attn.add_q_proj"),
        apply=swapped(f"{BLOCK_2}.attn.add_q_proj", f"{BLOCK_2}.attn.add_k_proj"),
        fix="The fused projection of the text is q, k, v in this order.",
        held_out=True,
    ),
    Bug(
        id="modulation-chunks-permuted",
        cause="modulation_order",
        bug_class="A10",
        site=outputs(f"{BLOCK_1}.norm1.linear"),
        apply=together(
            weight(f"{BLOCK_1}.norm1.linear.weight", lambda w: chunks(w, (1, 0, 2, 3, 4, 5))),
            weight(f"{BLOCK_1}.norm1.linear.bias", lambda b: chunks(b, (1, 0, 2, 3, 4, 5))),
        ),
        severity="fatal",
        fix="norm1.linear gives shift, scale, gate, twice; the port has scale before shift.",
    ),
    Bug(
        id="norm-out-chunks-permuted",
        cause="modulation_order",
        bug_class="A10",
        site=outputs("transformer/norm_out.linear"),
        apply=together(
            weight("transformer/norm_out.linear.weight", lambda w: chunks(w, (1, 0))),
            weight("transformer/norm_out.linear.bias", lambda b: chunks(b, (1, 0))),
        ),
        severity="fatal",
        fix="norm_out.linear gives scale, then shift; the original checkpoint has them reversed.",
    ),
    Bug(
        id="rms-weight-minus-one",
        cause="rms_weight_offset",
        bug_class="A11",
        site=outputs(f"{BLOCK_0}.attn2.norm_k"),
        apply=weight(f"{BLOCK_0}.attn2.norm_k.weight", lambda w: w - 1),
        fix="The weight multiplies as it is stored; do not take 1 from it.",
        held_out=True,
    ),
    Bug(
        id="weights-of-another-block",
        cause="wrong_layer_loaded",
        bug_class="A1",
        site=outputs(f"{BLOCK_1}.ff.net.0.proj"),
        apply=copied(f"{BLOCK_0}.ff", f"{BLOCK_1}.ff"),
        fix="transformer_blocks.1.ff holds the weights of transformer_blocks.0.ff.",
    ),
    Bug(
        id="weight-rounded-to-bf16",
        cause="bf16_rounding",
        bug_class="A16",
        site=outputs(f"{BLOCK_1}.ff.net.0.proj"),
        apply=weight(f"{BLOCK_1}.ff.net.0.proj.weight", bfloat16),
        severity="subtle",
        seen_in=FLOAT32,  # in a bfloat16 run the weight is rounded anyway
        fix="The weight passed through bfloat16 on its way; keep float32.",
    ),
    Bug(
        id="embeddings-rounded-to-f16",
        cause="f16_rounding",
        bug_class="A16",
        site=outputs(f"{CLIP}.embeddings.token_embedding"),
        apply=weight(f"{CLIP}.embeddings.token_embedding.weight", lambda w: w.astype(mx.float16)),
        severity="subtle",
        seen_in=FLOAT32,  # bfloat16 has fewer bits than what float16 loses
        fix="The token table passed through float16; keep float32.",
        held_out=True,
    ),
)


def _without(config, name: str):
    from dataclasses import replace

    return replace(config, **{name: False})
