"""A request as the conditions of a set and back: what decides the values beside prompt and seed."""

from typing import Any

import msgspec

from lydite.core.errors import CalibrationError, InputError, shown
from lydite.core.request import FIELDS, Request

COMPUTE = ("float32", "bfloat16", "float16")
# The prompt is in the key of each item; a picture to start from is no part of a calibration run.
_ELSEWHERE = ("prompt", "strength", "feather")
# Fields that version 0.1 did not have: left out where they are None.
_LATER = ("true_guidance", "clip_skip", "weighting", "refine_from")


def conditions_of(request: Request, dtype: str) -> dict[str, Any]:
    """Every field of a planned request but the prompt, and the dtype the networks run in."""
    if request.strength is not None:
        raise InputError("calibration starts from noise, not from a picture.")
    values = request.to_dict()
    known = {name: values[name] for name in FIELDS if name not in _ELSEWHERE}
    off = {name for name in _LATER if known[name] is None}
    return {**{name: known[name] for name in known if name not in off}, "compute": dtype}


def request_of(conditions: dict[str, Any]) -> tuple[Request, str]:
    """The request, still without a prompt, and the dtype the networks run in."""
    values = dict(conditions)
    dtype = values.pop("compute", None)
    try:
        if dtype in COMPUTE and {*values, *_LATER} == set(FIELDS) - set(_ELSEWHERE):
            return msgspec.convert(values, Request), dtype
        reason = f"compute is {shown(dtype)}, keys are {shown(sorted(values))}"
    except msgspec.ValidationError as error:
        reason = str(error)
    raise CalibrationError(
        f"the set was made by another tool: its conditions are {shown(conditions)} ({reason}). "
        "It is read-only: lydite cannot resume it."
    )


def read_keep(rule: str, steps: int) -> tuple[int, ...]:
    """`all`, `every:4` or `0,5,10` as numbers of steps, of a run that has `steps` of them."""
    name, _, number = rule.partition(":")
    if rule == "all":
        return tuple(range(steps))
    try:
        if name == "every" and int(number) > 0:
            return tuple(range(0, steps, int(number)))
        kept = sorted({int(part) for part in rule.split(",")})
    except ValueError:
        raise InputError(
            f"--keep-steps is {rule!r:.60}; expected all, every:N, or steps as 0,5,10."
        ) from None
    if kept[0] < 0 or kept[-1] >= steps:
        wrong = kept[0] if kept[0] < 0 else kept[-1]
        raise InputError(f"--keep-steps has step {wrong}; the run has the steps 0 to {steps - 1}.")
    return tuple(kept)
