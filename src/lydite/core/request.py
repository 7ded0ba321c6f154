"""A request: everything but the seed that decides a picture.

The command line, PNG metadata, traces, calibration sets and the reference all hold this one form.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from numbers import Integral, Real
from typing import Any, cast

import msgspec

from lydite.core.errors import InputError, shown

LONGEST_PROMPT = 10_000  # characters; text encoders read a few hundred tokens


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything but the seed that decides a picture. A value of another type is an InputError.

    None means the checkpoint's own value; `Pipeline.plan` fills it in.

    prompt: what the picture shows.
    negative: what it should not show; needs guidance.
    steps: number of denoising steps.
    guidance: weight of the prompt. At 1 or less the negative prompt is not used, except by CFG++.
    guidance_steps: a guidance for each step that runs, in place of `guidance`.
    guidance_rescale: undoes the contrast that guidance adds; 0 is off, 1 is full.
    guidance_interval: from and to, the shares of the steps that are guided; (0, 1) is all.
    width, height: of the picture, in pixels.
    sampler: its name, as `lydite sampler list` prints it.
    options: numbers of the sampler by name: {"eta": 0.5}.
    schedule: its name, as `lydite sampler list` prints it.
    convention: whose choice where programs differ under one name: lydite, k-diffusion, comfyui,
        a1111 or diffusers.
    text_length: number of tokens of a text encoder that takes any number, as T5.
    noise: whose random generator a seed means: torch, as in diffusers, or mlx.
    strength: with an image, the share of the steps that run; 1 ignores the image.
    clip_skip: last layers of CLIP that are left out for the prompt.
    feather: with a mask, pixels of its soft edge; every pixel outside of it stays.
    true_guidance: FLUX.1 with a negative prompt: weight of the prompt against it.
    weighting: syntax of weights in the prompts: a1111 or compel.
    refine_from: with a refiner, the share of the denoising before it.
    """

    prompt: str = ""
    negative: str = ""
    steps: int | None = None
    guidance: float | None = None
    guidance_steps: tuple[float, ...] = ()
    guidance_rescale: float = 0.0
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    width: int | None = None
    height: int | None = None
    sampler: str | None = None
    options: dict[str, float] = {}
    schedule: str | None = None
    convention: str = "lydite"
    text_length: int | None = None
    noise: str = "torch"
    strength: float | None = None
    clip_skip: int | None = None
    feather: int = 0
    true_guidance: float | None = None
    weighting: str | None = None
    refine_from: float | None = None

    def __post_init__(self) -> None:
        for name, (kind, expected) in _types().items():
            value = getattr(self, name)
            try:
                converted = msgspec.convert(_plain(value), kind)
            except (msgspec.ValidationError, TypeError):
                raise InputError(
                    f"{name} is {shown(value)}; expected {expected}, found {type(value).__name__}."
                ) from None
            msgspec.structs.force_setattr(self, name, converted)

    def replace(self, **changes: Any) -> "Request":
        """The same request with some values changed."""
        return msgspec.structs.replace(self, **changes)

    def conditions(self, *, seed: int, model: str) -> dict[str, Any]:
        """What a trace says of its run; settings that are off are left out."""
        values = self.to_dict()
        off = {name for name in _OFTEN_OFF if getattr(self, name) == getattr(_NOTHING_SET, name)}
        chosen = {name: value for name, value in values.items() if name not in off}
        known = {name: value for name, value in chosen.items() if value is not None}
        return {"model": model, **known, "seed": seed}

    def to_dict(self) -> dict[str, Any]:
        """Plain values by name, as they are written to files."""
        return msgspec.to_builtins(self)


def _plain(value: Any) -> Any:
    """Numbers of NumPy as Python's, in sequences and mappings too."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return {key: _plain(each) for key, each in items}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(each) for each in cast(Sequence[Any], value)]
    return value


@cache
def _types() -> dict[str, tuple[Any, str]]:
    """The type of each field, and the same in words."""
    return {each.name: (each.type, _WORDS[each.type]) for each in msgspec.structs.fields(Request)}


_WORDS = {
    str: "text",
    str | None: "text or None",
    int: "a whole number",
    int | None: "a whole number or None",
    float: "a number",
    float | None: "a number or None",
    tuple[float, ...]: "a list of numbers",
    tuple[float, float]: "two numbers",
    dict[str, float]: "numbers by name",
}
FIELDS = Request.__struct_fields__
_NOTHING_SET = Request()
_OFTEN_OFF = (
    "guidance_steps",
    "guidance_rescale",
    "guidance_interval",
    "options",
    "convention",
    "feather",
)
