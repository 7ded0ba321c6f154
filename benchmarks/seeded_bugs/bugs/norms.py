"""Normalisation and activations: classes B of docs/bug-classes.md, and two of G."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from seeded_bugs import reference_forwards as ref
from seeded_bugs.bugs.weights import BLOCK_0, BLOCK_1, BLOCK_2, CLIP, CLIP_2, FLOAT32
from seeded_bugs.cases import Apply, Bug, inputs, outputs
from seeded_bugs.patches import forward, forwards

T5 = "text_encoder_3/encoder"
GELUS = r".*\.ff(_context)?\.net\.0"
GROUP_NORMS = r".*(\.norm[12]|_norm|_norm_out)"


def norm(place: str, **how: Any) -> Apply:
    """A layer norm or RMS norm computed in another way."""
    return forward(place, lambda self, original, x: ref.layer_norm(self, x, **how))


def groups(place: str, **how: Any) -> Apply:
    """A group norm computed in another way."""
    return forward(place, lambda self, original, x: ref.group_norm(self, x, **how))


def quick_gelu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(1.702 * x)


def mlp(place: str, activation: Any) -> Apply:
    """A CLIP layer's MLP with another activation."""
    return forward(place, lambda self, original, x: self.fc2(activation(self.fc1(x))))


def gated(activation: Any) -> Any:
    """T5's feed-forward as `activation(wi_0, wi_1)` has it."""
    return lambda self, original, x: self.wo(activation(self["wi_0"](x), self["wi_1"](x)))


def embedder(activation: Any) -> Any:
    return lambda self, original, x: self.linear_2(activation(self.linear_1(x)))


BUGS = (
    Bug(
        id="layer-norm-unbiased",
        cause="unbiased_variance",
        bug_class="B17",
        site=outputs(f"{CLIP}.encoder.layers.0.layer_norm2"),
        apply=norm(f"{CLIP}.encoder.layers.0.layer_norm2", unbiased=True),
        severity="subtle",
        fix="The variance divides by n, not by n − 1.",
    ),
    Bug(
        id="group-norm-unbiased",
        cause="unbiased_variance",
        bug_class="B17",
        site=outputs("vae/decoder.mid_block.resnets.0.norm1"),
        apply=groups("vae/decoder.mid_block.resnets.0.norm1", unbiased=True),
        severity="subtle",
        seen_in=FLOAT32,  # √(383/384): less than a bfloat16 step
        fix="The variance divides by n, not by n − 1.",
    ),
    Bug(
        id="clip-eps",
        cause="eps_value",
        bug_class="B18",
        site=outputs(f"{CLIP}.encoder.layers.0.layer_norm1"),
        apply=norm(f"{CLIP}.encoder.layers.0.layer_norm1", eps=1e-6),
        severity="subtle",
        seen_in=FLOAT32,  # 7e-3; rounding is 3.6e-3
        fix="CLIP's layer norms have eps 1e-5.",
    ),
    Bug(
        id="group-norm-eps",
        cause="eps_value",
        bug_class="B18",
        site=outputs("vae/decoder.up_blocks.0.resnets.0.norm1"),
        apply=groups("vae/decoder.up_blocks.0.resnets.0.norm1", eps=1e-5),
        severity="subtle",
        seen_in=(),  # the variance is about 1: 4.5e-6 of it is what rounding does
        fix="The VAE's group norms have eps 1e-6, not MLX's default of 1e-5.",
    ),
    Bug(
        id="eps-outside-root",
        cause="eps_outside_sqrt",
        bug_class="B19",
        site=outputs(f"{CLIP_2}.encoder.layers.0.layer_norm1"),
        apply=norm(f"{CLIP_2}.encoder.layers.0.layer_norm1", outside=True),
        severity="subtle",
        seen_in=FLOAT32,  # 7e-3; rounding is 4e-3
        fix="eps is added to the variance, under the root.",
    ),
    Bug(
        id="rms-for-layer-norm",
        cause="rms_for_layer_norm",
        bug_class="B20",
        site=outputs(f"{BLOCK_1}.norm2"),
        apply=norm(f"{BLOCK_1}.norm2", centre=False),
        fix="norm2 is a layer norm: take the mean off first.",
    ),
    Bug(
        id="layer-norm-for-rms",
        cause="layer_norm_for_rms",
        bug_class="B20",
        site=outputs(f"{T5}.block.1.layer.0.layer_norm"),
        apply=norm(f"{T5}.block.1.layer.0.layer_norm", centre=True),
        fix="T5's norm is a root mean square: the mean stays.",
        held_out=True,
    ),
    Bug(
        id="group-norm-strided",
        cause="group_norm_grouping",
        bug_class="B21",
        site=outputs("vae/decoder.up_blocks.1.resnets.0.norm1"),
        apply=groups("vae/decoder.up_blocks.1.resnets.0.norm1", strided=True),
        fix="Use nn.GroupNorm(…, pytorch_compatible=True): groups are runs of channels.",
    ),
    Bug(
        id="group-norm-strided-everywhere",
        cause="group_norm_grouping",
        bug_class="B21",
        site=outputs("vae/decoder.mid_block.resnets.0.norm1"),
        apply=forwards(
            "vae",
            GROUP_NORMS,
            lambda self, original, x: ref.group_norm(self, x, strided=True),
        ),
        severity="fatal",
        fix="Use nn.GroupNorm(…, pytorch_compatible=True): groups are runs of channels.",
    ),
    Bug(
        id="group-count",
        cause="group_norm_grouping",
        bug_class="B21",
        site=outputs("vae/encoder.mid_block.attentions.0.group_norm"),
        apply=groups("vae/encoder.mid_block.attentions.0.group_norm", groups=4),
        fix="norm_num_groups is 8 here.",
        held_out=True,
    ),
    Bug(
        id="norm-in-bf16",
        cause="norm_low_precision",
        bug_class="B22",
        site=outputs(f"{BLOCK_1}.norm1.norm"),
        apply=forward(
            f"{BLOCK_1}.norm1.norm",
            lambda self, original, x: original(x.astype(mx.bfloat16)).astype(x.dtype),
        ),
        severity="subtle",
        seen_in=FLOAT32,
        fix="Compute the norm in float32.",
    ),
    Bug(
        id="gelu-erf-for-tanh",
        cause="gelu_variant",
        bug_class="B23",
        site=outputs(f"{BLOCK_0}.ff.net.0"),
        apply=forwards("transformer", GELUS, lambda self, original, x: nn.gelu(self.proj(x))),
        severity="subtle",
        seen_in=FLOAT32,  # 4.7e-4 at most
        fix="The feed-forward has GELU's tanh approximation.",
    ),
    Bug(
        id="gelu-erf-for-quick",
        cause="gelu_variant",
        bug_class="B23",
        # the activation is a module of the reference, and a function here
        site=inputs(f"{CLIP}.encoder.layers.1.mlp.fc2"),
        apply=mlp(f"{CLIP}.encoder.layers.1.mlp", nn.gelu),
        severity="subtle",
        seen_in=FLOAT32,  # 1.2e-2; rounding is 8e-3
        fix="hidden_act is quick_gelu: x·σ(1.702·x).",
    ),
    Bug(
        id="gelu-quick-for-erf",
        cause="gelu_variant",
        bug_class="B23",
        site=inputs(f"{CLIP_2}.encoder.layers.0.mlp.fc2"),
        apply=mlp(f"{CLIP_2}.encoder.layers.0.mlp", quick_gelu),
        severity="subtle",
        seen_in=FLOAT32,  # 1.0e-2; rounding is 8e-3
        fix="hidden_act is gelu, the exact one.",
    ),
    Bug(
        id="silu-for-gelu",
        cause="activation_kind",
        bug_class="B23",
        site=outputs(f"{BLOCK_2}.ff.net.0"),
        apply=forward(f"{BLOCK_2}.ff.net.0", lambda self, original, x: nn.silu(self.proj(x))),
        fix="The feed-forward has GELU, not SiLU.",
        held_out=True,
    ),
    Bug(
        id="embedder-without-silu",
        cause="activation_missing",
        bug_class="B23",
        site=inputs("transformer/time_text_embed.timestep_embedder.linear_2"),
        apply=forward("transformer/time_text_embed.timestep_embedder", embedder(lambda x: x)),
        fix="SiLU stands between the two linears.",
    ),
    Bug(
        id="feed-forward-without-activation",
        cause="activation_missing",
        bug_class="B23",
        site=outputs(f"{BLOCK_1}.ff_context.net.0"),
        apply=forward(f"{BLOCK_1}.ff_context.net.0", lambda self, original, x: self.proj(x)),
        fix="GELU follows the first projection.",
        held_out=True,
    ),
    Bug(
        id="gate-and-up-swapped",
        cause="gate_up_swapped",
        bug_class="B24",
        site=inputs(f"{T5}.block.0.layer.1.DenseReluDense.wo"),
        apply=forward(
            f"{T5}.block.0.layer.1.DenseReluDense", gated(lambda a, b: a * nn.gelu_approx(b))
        ),
        fix="The activation is on wi_0; wi_1 multiplies.",
    ),
    Bug(
        id="mlp-not-gated",
        cause="mlp_not_gated",
        bug_class="B24",
        site=inputs(f"{T5}.block.1.layer.1.DenseReluDense.wo"),
        apply=forward(
            f"{T5}.block.1.layer.1.DenseReluDense", gated(lambda a, b: nn.gelu_approx(a) + 0 * b)
        ),
        fix="Multiply the activation of wi_0 by wi_1.",
        held_out=True,
    ),
    Bug(
        id="intermediate-rounded-to-bf16",
        cause="bf16_rounding",
        bug_class="G65",
        site=outputs(f"{BLOCK_2}.ff.net.0.proj"),
        apply=forward(
            f"{BLOCK_2}.ff.net.0.proj",
            lambda self, original, x: original(x).astype(mx.bfloat16).astype(x.dtype),
        ),
        severity="subtle",
        seen_in=FLOAT32,
        fix="One result is rounded to bfloat16 in a float32 run.",
    ),
    Bug(
        id="dropout-left-on",
        cause="train_mode",
        bug_class="G66",
        site=outputs(f"{BLOCK_1}.ff.net.1"),  # a dropout in the reference, nothing here
        apply=forward(f"{BLOCK_1}.ff.net.1", lambda self, original, x: nn.Dropout(0.1)(x)),
        fix="Call model.eval(): dropout is still on.",
    ),
)
