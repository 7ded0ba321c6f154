"""Attention in the MMDiT and the VAE: classes C of docs/bug-classes.md."""

from typing import Any

import mlx.core as mx

from seeded_bugs import reference_forwards as ref
from seeded_bugs.bugs.weights import BLOCK_0, BLOCK_1, BLOCK_2
from seeded_bugs.cases import Apply, Bug, Site, inputs, outputs
from seeded_bugs.patches import forward, forwards, swapped
from seeded_bugs.reference_forwards import attend

JOINT_ATTENTIONS = r".*\.attn2?"


def joint(place: str, **how: Any) -> Apply:
    """A joint attention of the MMDiT computed in another way."""
    return forward(
        place,
        lambda self, original, image, text: ref.joint_attention(self, image, text, **how),
    )


def scaled(factor: Any) -> Any:
    """Attention whose scale is multiplied by factor(head_dim, heads)."""

    def attend_scaled(
        q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | None = None
    ) -> mx.array:
        return attend(q, k, v, scale * factor(q.shape[-1], q.shape[1]), mask)

    return attend_scaled


def over_queries(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    return attend(q, k, v, scale, axis=-2)


def split_dim_first(x: mx.array, heads: int) -> mx.array:
    """(B, L, D) read as (B, L, D/H, H)."""
    B, L, _ = x.shape
    return x.reshape(B, L, -1, heads).transpose(0, 3, 1, 2)


def join_untransposed(x: mx.array) -> mx.array:
    """(B, H, L, D/H) taken for (B, L, D) as it lies in memory."""
    B, _, L, _ = x.shape
    return x.reshape(B, L, -1)


def attended(place: str) -> tuple[Site, ...]:
    """The two slices of one joint attention, where each stream is projected back."""
    return inputs(f"{place}.to_add_out", f"{place}.to_out.0")


def text_alone(self: Any, original: Any, image: mx.array, text: mx.array) -> Any:
    """The text sees only itself; the image sees both."""
    lengths = [image.shape[1], text.shape[1]]
    image_rows = mx.zeros((lengths[0], sum(lengths)))
    text_rows = mx.concatenate(
        [mx.full((lengths[1], lengths[0]), -1e9), mx.zeros((lengths[1],) * 2)], 1
    )
    mask = mx.concatenate([image_rows, text_rows])
    return ref.joint_attention(
        self, image, text, attend=lambda q, k, v, scale: attend(q, k, v, scale, mask)
    )


BUGS = (
    Bug(
        id="softmax-over-queries",
        cause="softmax_axis",
        bug_class="B25",
        site=attended(f"{BLOCK_1}.attn"),
        apply=joint(f"{BLOCK_1}.attn", attend=over_queries),
        severity="fatal",
        fix="The softmax runs over the keys, the last axis of the scores.",
    ),
    Bug(
        id="scale-missing",
        cause="attention_scale",
        bug_class="C26",
        site=attended(f"{BLOCK_1}.attn"),
        apply=joint(f"{BLOCK_1}.attn", attend=scaled(lambda dim, heads: dim**0.5)),
        fix="Multiply the scores by 1/√head_dim.",
    ),
    Bug(
        id="scale-missing-everywhere",
        cause="attention_scale",
        bug_class="C26",
        site=attended(f"{BLOCK_0}.attn"),
        apply=forwards(
            "transformer",
            JOINT_ATTENTIONS,
            lambda self, original, image, text: ref.joint_attention(
                self, image, text, attend=scaled(lambda dim, heads: dim**0.5)
            ),
        ),
        severity="fatal",
        fix="Multiply the scores by 1/√head_dim.",
    ),
    Bug(
        id="scale-of-whole-width",
        cause="attention_scale",
        bug_class="C27",
        site=attended(f"{BLOCK_0}.attn"),
        apply=joint(f"{BLOCK_0}.attn", attend=scaled(lambda dim, heads: heads**-0.5)),
        fix="Scale by √head_dim, not by the root of the whole width.",
    ),
    Bug(
        id="vae-attention-scale-missing",
        cause="attention_scale",
        bug_class="C26",
        site=inputs("vae/decoder.mid_block.attentions.0.to_out.0"),
        apply=forward(
            "vae/decoder.mid_block.attentions.0",
            lambda self, original, x: ref.pixel_attention(
                self, x, attend=scaled(lambda dim, heads: dim**0.5)
            ),
        ),
        fix="Multiply the scores by 1/√channels.",
        held_out=True,
    ),
    Bug(
        id="heads-split-dim-first",
        cause="head_layout",
        bug_class="C28",
        # with qk norms the heads are seen before the attention
        site=inputs(f"{BLOCK_1}.attn.norm_q"),
        apply=joint(f"{BLOCK_1}.attn", split=split_dim_first),
        severity="fatal",
        fix="Reshape to (…, heads, head_dim), not (…, head_dim, heads).",
    ),
    Bug(
        id="heads-joined-untransposed",
        cause="head_layout",
        bug_class="C28",
        site=attended(f"{BLOCK_1}.attn"),
        apply=joint(f"{BLOCK_1}.attn", join=join_untransposed),
        severity="fatal",
        fix="Transpose (B, H, L, d) to (B, L, H, d) before the reshape.",
    ),
    Bug(
        id="qk-norm-skipped",
        cause="qk_norm_missing",
        bug_class="C28",
        # the norm has no output then; the attention is the first value that both sides have
        site=(
            *attended(f"{BLOCK_1}.attn"),
            *outputs(f"{BLOCK_1}.attn.norm_q", f"{BLOCK_1}.attn.norm_k"),
        ),
        apply=joint(f"{BLOCK_1}.attn", norms=(False, False)),
        fix="Apply norm_q and norm_k per head before the attention.",
    ),
    Bug(
        id="qk-norms-exchanged",
        cause="qk_norm_swapped",
        bug_class="C28",
        site=outputs(f"{BLOCK_2}.attn.norm_q"),
        apply=swapped(f"{BLOCK_2}.attn.norm_q", f"{BLOCK_2}.attn.norm_k"),
        fix="norm_q is for q and norm_k for k.",
        held_out=True,
    ),
    Bug(
        id="text-first-cut-wrong",
        cause="concat_order",
        bug_class="C28",
        site=attended(f"{BLOCK_1}.attn"),
        apply=joint(f"{BLOCK_1}.attn", text_first=(True, False)),
        severity="fatal",
        fix="Image tokens come first when joined and when cut apart.",
    ),
    Bug(
        id="text-sees-only-text",
        cause="mask_extra",
        bug_class="C33",
        site=inputs(f"{BLOCK_0}.attn.to_add_out"),
        apply=forward(f"{BLOCK_0}.attn", text_alone),
        fix="Text attends to the image as well: there is no mask.",
        held_out=True,
    ),
)
