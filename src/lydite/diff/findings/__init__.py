"""Causes that can be recognized in the first wrong value.

Each hypothesis is a function of the evidence; a new cause is a new function in one of the lists.
"""

import warnings
from dataclasses import replace
from itertools import permutations

import numpy as np

from lydite.diff.findings.affine import negated, scaled, scaled_and_shifted, shifted
from lydite.diff.findings.attention import causal_mask, mask, softmax_axis
from lydite.diff.findings.degenerate_values import (
    constant,
    mask_differs,
    not_finite,
    padding_mask,
    repeated,
)
from lydite.diff.findings.displaced import cropped, displaced
from lydite.diff.findings.evidence import Evidence, Hypothesis
from lydite.diff.findings.other_values import another_value, passed_through, residual_wrong
from lydite.diff.findings.parts import entries_reordered, parts_reordered
from lydite.diff.findings.per_channel import (
    affine_per_channel,
    affine_per_row,
    scaled_per_channel,
    scaled_per_row,
    shifted_per_channel,
)
from lydite.diff.findings.precision import (
    clipped,
    low_precision,
    not_clipped,
    rounded,
    truncated,
)
from lydite.diff.findings.rearranged import (
    flipped,
    memory_order,
    merged_wrongly,
    patch_order,
    split_swapped,
    transposed,
)
from lydite.diff.findings.regions import border, slice_of_axis
from lydite.diff.findings.replay.attention import other_attention
from lydite.diff.findings.replay.batch_norm import other_batch_norm
from lydite.diff.findings.replay.buckets import other_buckets
from lydite.diff.findings.replay.convolutions import other_convolution, part_of_bias
from lydite.diff.findings.replay.embeddings import added_positions, other_embedding
from lydite.diff.findings.replay.fused_heads import other_split
from lydite.diff.findings.replay.gated_feed_forward import other_gate
from lydite.diff.findings.replay.guidance import other_combination, other_guidance
from lydite.diff.findings.replay.layer_input import wrong_input
from lydite.diff.findings.replay.linear import other_linear, other_weight
from lydite.diff.findings.replay.linear_attention import other_linear_attention
from lydite.diff.findings.replay.modulation import other_modulation
from lydite.diff.findings.replay.normalization import other_normalization
from lydite.diff.findings.replay.norms_and_activations import (
    extra_norm,
    other_activation,
    other_norm,
)
from lydite.diff.findings.replay.pictures import other_range
from lydite.diff.findings.replay.positions import (
    other_joined_sinusoid,
    other_position_table,
    other_sinusoid,
)
from lydite.diff.findings.replay.residuals import other_residual, rearranged_branch
from lydite.diff.findings.replay.rotations import (
    norm_after_rotation,
    other_rotation,
    other_rotation_table,
)
from lydite.diff.findings.replay.sampler_steps import other_step
from lydite.diff.findings.replay.selections import (
    dropout,
    other_assembly,
    other_chunk,
    other_patches,
    other_resize,
    other_token,
)
from lydite.diff.findings.replay.solver_steps import other_solver_step
from lydite.diff.findings.replay.token_sources import other_tokens
from lydite.diff.findings.replay.token_sums import other_terms
from lydite.diff.findings.schedules import SCHEDULES
from lydite.diff.findings.token_ids import IDS, ids_differ
from lydite.diff.findings.whole_numbers import other_mask, other_places
from lydite.diff.result import Finding

__all__ = [
    "Evidence",
    "Hypothesis",
    "HypothesisFailed",
    "find",
    "in_another_order",
    "is_another_form",
    "replayed",
]

MAX_FINDINGS = 5
FAR_OFF = 0.5  # relative error from which a layout may be taken for another

# Reported alone: nothing else can be recognized in such a value.
CONCLUSIVE: tuple[Hypothesis, ...] = (not_finite, constant)

# The right numbers in other positions; nothing is fitted. One of each line.
MOVED: tuple[tuple[Hypothesis, ...], ...] = (
    (other_places,),
    (padding_mask,),
    (another_value, residual_wrong),
    (negated,),
    (
        repeated,
        split_swapped,
        transposed,
        flipped,
        parts_reordered,
        displaced,
        cropped,
        memory_order,
        merged_wrongly,
        entries_reordered,
    ),
    (patch_order,),
    (softmax_axis, mask, mask_differs, causal_mask),
)

# The right numbers with fewer digits, or cut off.
COARSER: tuple[tuple[Hypothesis, ...], ...] = (
    (rounded, low_precision),
    (not_clipped, clipped, truncated),
)

# The operation computed again from recorded values, in other variants; the most certain of all.
REPLAYED: tuple[Hypothesis, ...] = (
    passed_through,
    other_range,
    other_linear,
    other_convolution,
    other_embedding,
    wrong_input,
    part_of_bias,
    other_weight,
    other_activation,
    other_norm,
    other_batch_norm,
    norm_after_rotation,
    other_modulation,
    other_residual,
    other_attention,
    other_linear_attention,
    other_gate,
    other_rotation,
    other_rotation_table,
    other_solver_step,
    other_combination,
    other_step,
    other_guidance,
    other_sinusoid,
    other_joined_sinusoid,
    other_resize,
    other_patches,
    other_position_table,
    other_token,
    other_chunk,
    other_split,
    other_assembly,
    other_tokens,
    other_terms,
    added_positions,
    rearranged_branch,
    extra_norm,
    other_normalization,
    dropout,
)

# Where the error is, when its cause is unknown.
LOCATED: tuple[Hypothesis, ...] = (border, slice_of_axis)

# Numbers are fitted, few before many; only the best is reported.
FITTED: tuple[Hypothesis, ...] = (
    scaled,
    shifted,
    scaled_and_shifted,
    shifted_per_channel,
    scaled_per_channel,
    affine_per_channel,
    scaled_per_row,
    affine_per_row,
)


class HypothesisFailed(RuntimeWarning):
    """One possible cause could not be looked for."""


def replayed(evidence: Evidence, *, of_input: bool = True) -> tuple[Finding, ...]:
    """What follows from computing the operation again; this also shows that a pair is right.

    Without `of_input`, the operation takes the right input.
    """
    if not evidence.same_shape or not evidence.port.size or not evidence.wrong:
        return ()
    tried = tuple(each for each in REPLAYED if of_input or each is not wrong_input)
    with np.errstate(all="ignore"):
        return _tried(tried, evidence, one=True)


def is_another_form(evidence: Evidence) -> bool:
    """Whether the port's value is the reference's in another known form, up to rounding.

    Rounding itself may look like a fit, a place or another precision; it never looks like this. A
    time that is rounded to the precision of the run is rounding.
    """
    forms = (f for f in replayed(evidence) if f.cause != "sinusoid-rounded")
    moved = (f for line in MOVED for f in _tried(line, evidence, one=True))
    same = evidence.same_shape and evidence.port.size > 0 and evidence.wrong
    return any(forms) or (same and any(_is_sure(f) for f in moved))


def find(evidence: Evidence) -> tuple[Finding, ...]:
    """What can be recognized in a wrong value, the most certain first; often nothing."""
    if not evidence.port.size or not evidence.reference.size:
        return ()
    if evidence.kind == "ids":
        return (*_tried(IDS, evidence, one=True), *_tried((ids_differ,), evidence))
    if masks := _tried((other_mask,), evidence):
        return masks
    if conclusive := _tried(CONCLUSIVE, evidence, one=True):
        return conclusive
    if not evidence.wrong:
        return ()
    if buckets := _tried((other_buckets,), evidence):
        return buckets
    exact = _tried(SCHEDULES, evidence) if evidence.kind == "schedule" else ()
    with np.errstate(all="ignore"):  # a variant of the wrong operation may overflow
        exact = exact or _tried(REPLAYED, evidence, one=True)
        exact = exact or _in_another_layout(evidence)
    lines = (*MOVED, *COARSER)
    exact = exact or tuple(f for line in lines for f in _tried(line, evidence, one=True))
    located = () if exact else _tried(LOCATED, evidence, one=True)
    # The operation is known, and in none of its variants the port's: many numbers fit anything.
    few = FITTED[:3] if evidence.ruled_out else FITTED
    fitted = () if exact else _tried(few, evidence, one=True)
    return (*exact, *located, *fitted)[:MAX_FINDINGS]


def _in_another_layout(e: Evidence) -> tuple[Finding, ...]:
    """What a replay tells of a port with channels last, where all axes have one size.

    Where such a value is wrong everywhere, its layout does not show.
    """
    if e.port.ndim != 4 or len(set(e.port.shape[1:])) > 1 or e.error < FAR_OFF:
        return ()
    turned = replace(e, port=np.moveaxis(e.port, -1, 1), ruled_out=[])
    return _tried(REPLAYED, turned, one=True)


def in_another_order(e: Evidence) -> tuple[Finding, ...]:
    """What a replay tells of a layer whose outputs the port has in two or three other parts."""
    for count in (2, 3):
        if not e.same_shape or e.port.shape[-1] % count:
            continue
        parts = np.split(e.port, count, -1)
        for order in permutations(range(count)):
            moved = replace(e, port=np.concatenate([parts[n] for n in order], -1), ruled_out=[])
            found = replayed(moved) if order != tuple(range(count)) else ()
            if found:
                return found
    return ()


def _tried(
    hypotheses: tuple[Hypothesis, ...], evidence: Evidence, *, one: bool = False
) -> tuple[Finding, ...]:
    """What holds, in order; explanations that leave only rounding come first."""
    findings: list[Finding] = []
    for hypothesis in hypotheses:
        finding = _ask(hypothesis, evidence)
        if finding is None:
            continue
        if one and _is_sure(finding):
            return (finding,)
        findings.append(finding)
    findings.sort(key=_is_sure, reverse=True)
    return tuple(findings[:1] if one else findings)


def _is_sure(finding: Finding) -> bool:
    return finding.confidence == "certain"


def _ask(hypothesis: Hypothesis, evidence: Evidence) -> Finding | None:
    """What it finds. A mistake in it loses one possible cause, not the verdict."""
    try:
        return hypothesis(evidence)
    except Exception as error:  # noqa: BLE001 - any
        text = f"lydite cannot look for the cause {hypothesis.__name__}: {error!r}"
        warnings.warn(text, HypothesisFailed, stacklevel=2)
        return None
