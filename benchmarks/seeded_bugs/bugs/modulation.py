"""Gates, scales and shifts in the MMDiT: A10 and D44 of docs/bug-classes.md."""

from typing import Any

import mlx.core as mx

from lydite.models import modulation
from seeded_bugs import reference_forwards as ref
from seeded_bugs.bugs.weights import BLOCK_0, BLOCK_1, BLOCK_2
from seeded_bugs.cases import Apply, Bug, Site, inputs, outputs
from seeded_bugs.patches import forward, method


def block(place: str, **how: Any) -> Apply:
    """A block whose parts are joined in another way."""
    return forward(place, lambda self, original, *args: ref.joint_block(self, *args, **how))


def adaptive(place: str, shift: int, scale: int, one: float = 1.0) -> Apply:
    """An adaptive norm that takes other chunks of its table."""

    def new(self: Any, original: Any, x: mx.array, table: mx.array) -> mx.array:
        return ref.modulated(self.norm(x), table[:, shift], table[:, scale], one)

    return forward(place, new)


def bare_table(self: Any, embedding: mx.array) -> mx.array:
    """A modulation table without the activation before its linear."""
    return mx.unflatten(self.linear(embedding), -1, (self.chunks, -1))


def time_alone(self: Any, original: Any, timesteps: mx.array, pooled: mx.array) -> mx.array:
    """The embedding of the timestep for every row, without the pooled text."""
    angles = modulation.sinusoids(timesteps, 256, exact=self.exact)
    time = self.timestep_embedder(angles.astype(pooled.dtype))
    return mx.repeat(time[:, None], pooled.shape[0], axis=1)


BUGS = (
    Bug(
        id="gate-missing",
        cause="gate_missing",
        bug_class="A10",
        site=inputs(f"{BLOCK_1}.norm2"),
        apply=block(BLOCK_1, gates=(None, 5)),
        severity="fatal",
        fix="Multiply the attention by its gate, chunk 2, before adding it.",
    ),
    Bug(
        id="text-gate-missing",
        cause="gate_missing",
        bug_class="A10",
        site=outputs(BLOCK_0),
        apply=block(BLOCK_0, text_gates=(2, None)),
        fix="Multiply the text's feed-forward by its gate, chunk 5, before adding it.",
    ),
    Bug(
        id="gates-exchanged",
        cause="modulation_order",
        bug_class="A10",
        site=inputs(f"{BLOCK_2}.norm2"),
        apply=block(BLOCK_2, gates=(5, 2)),
        fix="Chunk 2 gates the attention, chunk 5 the feed-forward.",
        held_out=True,
    ),
    Bug(
        id="one-plus-missing",
        cause="one_plus_missing",
        bug_class="A10",
        site=outputs(f"{BLOCK_1}.norm1"),
        apply=adaptive(f"{BLOCK_1}.norm1", 0, 1, one=0.0),
        severity="fatal",
        fix="Modulate by 1 + scale, not by scale.",
    ),
    Bug(
        id="one-plus-missing-in-feed-forward",
        cause="one_plus_missing",
        bug_class="A10",
        site=inputs(f"{BLOCK_0}.ff"),
        apply=block(BLOCK_0, one=0.0),
        severity="fatal",
        fix="Modulate by 1 + scale, not by scale.",
        held_out=True,
    ),
    Bug(
        id="scale-and-shift-exchanged",
        cause="scale_shift_swapped",
        bug_class="A10",
        site=outputs(f"{BLOCK_1}.norm1_context"),
        apply=adaptive(f"{BLOCK_1}.norm1_context", 1, 0),
        severity="fatal",
        fix="Chunk 0 is the shift, chunk 1 the scale.",
    ),
    Bug(
        id="norm-out-scale-and-shift-exchanged",
        cause="scale_shift_swapped",
        bug_class="A10",
        site=outputs("transformer/norm_out"),
        apply=adaptive("transformer/norm_out", 0, 1),
        severity="fatal",
        fix="In the last norm chunk 0 is the scale, chunk 1 the shift.",
    ),
    Bug(
        id="feed-forward-scale-and-shift-exchanged",
        cause="scale_shift_swapped",
        bug_class="A10",
        site=inputs(f"{BLOCK_1}.ff"),
        apply=block(BLOCK_1, shift=4, scale=3),
        severity="fatal",
        fix="Chunk 3 is the shift of the feed-forward, chunk 4 its scale.",
    ),
    Bug(
        id="feed-forward-residual-missing",
        cause="residual_missing",
        bug_class="A2",
        site=(Site(BLOCK_1, "out.1"),),
        apply=block(BLOCK_1, residual=False),
        severity="fatal",
        fix="Add the feed-forward to what went into it.",
    ),
    Bug(
        id="modulation-without-silu",
        cause="activation_missing",
        bug_class="B23",
        site=inputs(f"{BLOCK_1}.norm1.linear"),
        apply=method(f"{BLOCK_1}.norm1", "table", bare_table),
        fix="SiLU comes before the linear of an adaptive norm.",
    ),
    Bug(
        id="modulation-of-first-row",
        cause="broadcast_axis",
        bug_class="D44",
        site=outputs(f"{BLOCK_1}.norm1"),
        apply=forward(f"{BLOCK_1}.norm1", lambda self, original, x, t: original(x, t[:1])),
        fix="Each row of the batch has its own shift and scale.",
    ),
    Bug(
        id="pooled-text-not-added",
        cause="branch_missing",
        bug_class="A2",
        site=outputs("transformer/time_text_embed", "transformer/time_text_embed.text_embedder"),
        apply=forward("transformer/time_text_embed", time_alone),
        fix="The modulation is driven by timestep plus pooled text.",
        held_out=True,
    ),
    Bug(
        id="second-attention-dropped",
        cause="branch_missing",
        bug_class="A2",
        # the reference has attn2 before it, with no counterpart
        site=(*inputs(f"{BLOCK_0}.norm2"), *outputs(f"{BLOCK_0}.attn2")),
        apply=forward(
            BLOCK_0,
            lambda self, original, *args: ref.joint_block(self, *args, second=None),
        ),
        fix="Blocks in dual_attention_layers add a second attention over the image.",
    ),
    Bug(
        id="second-attention-wrong-chunks",
        cause="modulation_order",
        bug_class="A10",
        site=inputs(f"{BLOCK_0}.attn2.to_q"),
        apply=forward(
            BLOCK_0,
            lambda self, original, *args: ref.joint_block(self, *args, second=(0, 1, 8)),
        ),
        fix="The second attention is modulated by chunks 6 and 7.",
    ),
)
