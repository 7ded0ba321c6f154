"""A request: everything but the seed that decides a picture.

The command line, PNG metadata, traces, calibration sets and the reference all hold this one form.
"""

from typing import Any

import msgspec

LONGEST_PROMPT = 10_000  # characters; text encoders read a few hundred tokens


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`None` means the checkpoint's own value; `Pipeline.plan` fills it in."""

    prompt: str = ""
    negative: str = ""
    steps: int | None = None
    guidance: float | None = None  # 1 or less: the negative prompt is not used, except by CFG++
    guidance_steps: tuple[float, ...] = ()  # one for each step that runs, in place of `guidance`
    guidance_rescale: float = 0.0  # 0: off; 1: the standard deviation of the prompt alone
    guidance_interval: tuple[float, float] = (0.0, 1.0)  # shares of the steps that are guided
    width: int | None = None  # pixels
    height: int | None = None
    sampler: str | None = None
    options: dict[str, float] = {}  # of the sampler: eta, s_noise, …
    schedule: str | None = None
    convention: str = "lydite"  # whose choices where programs differ under one name
    text_length: int | None = None  # tokens, for text encoders that take any number
    noise: str = "torch"  # whose generator a seed means
    strength: float | None = None  # img2img: the share of the steps that run
    clip_skip: int | None = None  # layers of CLIP left out for the prompt, from the last one
    feather: int = 0  # inpainting: pixels of the mask's soft edge, outside of which nothing changes
    true_guidance: float | None = None  # of models whose `guidance` is an input of the network
    weighting: str | None = None  # syntax of weights in the prompts: a1111 or compel
    refine_from: float | None = None  # with a refiner: the share of the timesteps before it

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


FIELDS = Request.__struct_fields__
_NOTHING_SET = Request()
_OFTEN_OFF = (
    "guidance_steps",
    "guidance_rescale",
    "guidance_interval",
    "options",
    "convention",
    "strength",
    "feather",
    "clip_skip",
    "true_guidance",
    "weighting",
    "refine_from",
)
