"""Attention in the text encoders: classes C of docs/bug-classes.md."""

from typing import Any

import mlx.core as mx
import numpy as np

from lydite.models.text import t5
from seeded_bugs import reference_forwards as ref
from seeded_bugs.bugs.attention import scaled
from seeded_bugs.bugs.norms import T5
from seeded_bugs.bugs.weights import CLIP, CLIP_2
from seeded_bugs.cases import Bug, inputs
from seeded_bugs.patches import attribute, forward, forwards


def clip_masked(mask: Any) -> Any:
    return lambda self, original, x: ref.clip_attention(self, x, mask=mask(x.shape[1]))


def one_sided(length: int, *, num_buckets: int, max_distance: int) -> Any:
    """Buckets of a decoder: keys ahead all in bucket 0, no half for them."""
    behind = np.maximum(np.arange(length)[:, None] - np.arange(length)[None, :], 0)
    exact = num_buckets // 2
    share = np.log(np.maximum(behind, 1) / exact) / np.log(max_distance / exact)
    far = np.minimum(exact + (share * (num_buckets - exact)).astype(np.int64), num_buckets - 1)
    return np.where(behind < exact, behind, far).astype(np.int32)


BUCKETS = inputs(f"{T5}.block.0.layer.0.SelfAttention.relative_attention_bias")

BUGS = (
    Bug(
        id="scaled-twice",
        cause="attention_scale",
        bug_class="C27",
        site=inputs(f"{CLIP}.encoder.layers.1.self_attn.out_proj"),
        apply=forward(
            f"{CLIP}.encoder.layers.1.self_attn",
            lambda self, original, x: ref.clip_attention(
                self, x, attend=scaled(lambda dim, heads: dim**-0.5)
            ),
        ),
        fix="The fused attention scales already: do not scale q before it.",
    ),
    Bug(
        id="t5-scaled",
        cause="attention_scale",
        bug_class="C27",
        site=inputs(f"{T5}.block.0.layer.0.SelfAttention.o"),
        apply=forward(
            f"{T5}.block.0.layer.0.SelfAttention",
            lambda self, original, x, bias: ref.t5_attention(self, x, bias, scale=0.25),
        ),
        fix="T5 does not scale its scores: scale is 1.",
        held_out=True,
    ),
    Bug(
        id="causal-mask-missing",
        cause="mask_missing",
        bug_class="C33",
        site=inputs(f"{CLIP}.encoder.layers.0.self_attn.out_proj"),
        apply=forwards("text_encoder", r".*\.self_attn", clip_masked(lambda n: mx.zeros((n, n)))),
        fix="CLIP's text encoder is causal.",
    ),
    Bug(
        id="mask-inverted",
        cause="mask_inverted",
        bug_class="C33",
        site=inputs(f"{CLIP_2}.encoder.layers.0.self_attn.out_proj"),
        apply=forward(
            f"{CLIP_2}.encoder.layers.0.self_attn",
            clip_masked(lambda n: ref.causal(n).T),
        ),
        severity="fatal",
        fix="A token looks at itself and back, not ahead.",
    ),
    Bug(
        id="mask-hides-itself",
        cause="mask_off_by_one",
        bug_class="C33",
        site=inputs(f"{CLIP_2}.encoder.layers.1.self_attn.out_proj"),
        apply=forward(
            f"{CLIP_2}.encoder.layers.1.self_attn",
            clip_masked(lambda n: mx.where(mx.tri(n, n, -1) > 0, 0.0, -1e9)),
        ),
        fix="The diagonal is allowed: a token sees itself.",
        held_out=True,
    ),
    Bug(
        id="relative-bias-first-layer-only",
        cause="relative_bias_missing",
        bug_class="C35",
        site=inputs(f"{T5}.block.1.layer.0.SelfAttention.o"),
        apply=forward(
            f"{T5}.block.1.layer.0.SelfAttention",
            lambda self, original, x, bias: original(x, mx.zeros_like(bias)),
        ),
        fix="Every block adds the first block's relative bias.",
    ),
    Bug(
        id="bucket-sign",
        cause="bucket_sign",
        bug_class="C35",
        site=BUCKETS,
        apply=attribute(
            t5, "relative_position_buckets", lambda original: lambda n, **how: original(n, **how).T
        ),
        fix="Relative position is key minus query; the upper half is for keys ahead.",
    ),
    Bug(
        id="buckets-one-sided",
        cause="bucket_kind",
        bug_class="C35",
        site=BUCKETS,
        apply=attribute(t5, "relative_position_buckets", lambda original: one_sided),
        fix="An encoder's buckets are bidirectional.",
        held_out=True,
    ),
)
