"""`scheduler/scheduler_config.json` of a flow model, every key accounted for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from lydite.core.config import Size, read_config

FLOW_MATCH_IGNORED = frozenset(  # read by diffusers only when use_dynamic_shifting is true
    {"base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len", "time_shift_type"}
)
FLOW_MATCH_FIXED = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "use_dynamic_shifting": False,
    "invert_sigmas": False,
    "shift_terminal": None,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "stochastic_sampling": False,
}


@dataclass(frozen=True)
class FlowMatchConfig:
    """The scheduler config of a model with one constant shift."""

    num_train_timesteps: Size
    shift: Annotated[float, Meta(gt=0, le=1000)]


def read_flow_config(raw: Mapping[str, Any], *, where: object) -> FlowMatchConfig:
    """The config of diffusers' FlowMatchEulerDiscreteScheduler, every key accounted for."""
    return read_config(
        FlowMatchConfig, raw, where=where, ignored=FLOW_MATCH_IGNORED, fixed=FLOW_MATCH_FIXED
    )
