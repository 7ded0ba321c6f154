"""Which findings of `lydite diff` name the cause of a seeded bug.

The first finding counts. One that is not in the list is wrong, even where it only describes the
difference (a scale per channel): whoever follows it looks at the wrong place.
"""

from collections.abc import Iterable
from typing import Literal

WEIGHTS = {"weights-differ", "weight-reordered"}
ACTIVATION = {"other-activation"}
NORM = {"other-norm"}
NAMED_BY: dict[str, set[str]] = {
    "random_init": WEIGHTS,
    "layer_missing": {"another-value", "passed-through"},
    "conv_layout": WEIGHTS | {"weight-transposed"},
    "linear_transposed": WEIGHTS | {"weight-transposed"},
    "bias_dropped": WEIGHTS | {"shifted-per-channel", "bias-missing"},
    "norm_default_init": WEIGHTS,
    "qkv_order": WEIGHTS | {"another-value", "qkv-exchanged"},
    "modulation_order": WEIGHTS
    | {"parts-reordered", "halves-swapped", "other-gate", "other-chunks"},
    "rms_weight_offset": WEIGHTS,
    "wrong_layer_loaded": WEIGHTS | {"another-parameter"},
    "bf16_rounding": WEIGHTS | {"rounded", "lower-precision"},
    "f16_rounding": WEIGHTS | {"rounded", "lower-precision"},
    "unbiased_variance": NORM,
    "eps_value": NORM,
    "eps_outside_sqrt": NORM,
    "rms_for_layer_norm": NORM | {"affine-per-row"},
    "layer_norm_for_rms": NORM | {"affine-per-row"},
    "group_norm_grouping": NORM,
    "norm_low_precision": {"lower-precision", "rounded"},
    "gelu_variant": ACTIVATION,
    "activation_kind": ACTIVATION,
    "activation_missing": ACTIVATION | {"another-value"},
    "gate_up_swapped": {"gate-exchanged"},
    "mlp_not_gated": {"another-value"},
    "softmax_axis": {"softmax-axis"},
    "attention_scale": {"attention-scale"},
    "head_layout": {"heads-merged-wrongly", "heads-swapped"},
    "qk_norm_missing": {"qk-norm-missing"},
    "qk_norm_swapped": WEIGHTS,
    "concat_order": {"streams-cut-wrongly", "parts-reordered", "halves-swapped"},
    "mask_extra": {"attention-mask"},
    "mask_missing": {"attention-mask", "mask-missing"},
    "mask_inverted": {"attention-mask", "mask-inverted"},
    "mask_off_by_one": {"attention-mask"},
    "bucket_sign": {"transposed", "other-buckets"},
    "bucket_kind": {"other-buckets"},
    "relative_bias_missing": {"attention-bias"},
    "train_mode": {"dropout"},
    "gate_missing": {"gate-missing"},
    "one_plus_missing": {"one-plus-missing"},
    "scale_shift_swapped": {"scale-shift-exchanged"},
    "residual_missing": {"residual-missing"},
    "broadcast_axis": {"one-batch-row"},
    "branch_missing": {"branch-missing", "another-value", "positions-missing", "residual-missing"},
    "raw_buffer": {"memory-order"},
    "unpatchify_order": {"patch-order"},
    "token_order": {"patch-order", "transposed", "token-order"},
    "channel_order": {"flipped"},
    "pixel_range": {"scaled-and-shifted"},
    "skip_order": {"another-value"},
    "output_order": {"parts-reordered", "halves-swapped", "another-value", "another-chunk"},
    "position_offset": {"shifted-positions"},
    "position_crop": {"positions-shifted"},
    "position_transposed": {"positions-transposed"},
    "padding_side": {"other-padding", "shifted-pixels"},
    "resize_kind": {"other-resize"},
    "schedule_shift": {"schedule-differ", "schedule-shift"},
    "schedule_timesteps": {"schedule-differ"},
    "schedule_length": {"schedule-differ"},
    "final_sigma": {"schedule-differ"},
    "schedule_order": {"parts-reordered", "flipped", "schedule-differ"},
    "timestep_unit": {"sigma-for-timestep", "schedule-differ", "other-sinusoid"},
    "timestep_integer": {"schedule-differ", "truncated"},
    "sin_cos_order": {"halves-swapped", "other-sinusoid"},
    "freq_shift": {"other-sinusoid"},
    "max_period": {"other-sinusoid"},
    "prediction_sign": {"term-negated", "negated", "other-step"},
    "input_scale": {"scaled"},
    "sampler_step": {"other-factors", "other-step"},
    "noise_generator": {"inputs-differ"},
    "cfg_swapped": {"terms-exchanged", "batch-swapped", "guidance-exchanged"},
    "cfg_scale": {"other-factors", "guidance-weight"},
    "cfg_channels": {"guided-in-part"},
    "stale_state": {"one-batch-row", "another-value"},
    "vae_scaling": {"scaled-and-shifted", "shifted", "scaled"},
    "pad_token": {"pad-id"},
    "special_tokens": {"bos-missing", "eos-missing", "ids-differ"},
    "vocabulary_order": {"ids-differ"},
    "negative_prompt": {"ids-differ"},
    "hidden_layer": {"another-value"},
    "final_norm": {"another-value", "norm-extra"},
    "pooled_token": {"another-token"},
}


def judged(cause: str, found: Iterable[str]) -> Literal["named", "wrong", "none"]:
    """Whether the first finding names the cause of a bug."""
    first = next(iter(found), None)
    if first is None:
        return "none"
    return "named" if first in NAMED_BY.get(cause, ()) else "wrong"
