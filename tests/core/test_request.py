"""A request in the forms that files hold."""

from typing import Any

import msgspec
import pytest

from lydite.core.request import FIELDS, Request

SET: dict[str, Any] = {
    "prompt": "a cat",
    "negative": "a dog",
    "steps": 7,
    "guidance": 0.0,
    "guidance_steps": (1.0, 2.0),
    "guidance_rescale": 0.7,
    "guidance_interval": (0.25, 1.0),
    "width": 64,
    "height": 32,
    "sampler": "euler",
    "options": {"eta": 0.0},
    "schedule": "karras",
    "convention": "comfyui",
    "text_length": 77,
    "noise": "mlx",
    "strength": 0.0,
    "clip_skip": 0,
    "feather": 3,
    "true_guidance": 0.0,
    "weighting": "a1111",
    "refine_from": 0.0,
}
PLAIN = {"model": "m", "prompt": "", "negative": "", "noise": "torch", "seed": 0}


def test_conditions_name_what_is_set_and_nothing_that_is_off() -> None:
    assert Request().conditions(seed=0, model="m") == PLAIN
    assert list(SET) == list(FIELDS)
    for name, value in SET.items():
        conditions = Request(**{name: value}).conditions(seed=0, model="m")
        assert conditions == PLAIN | {name: value}
        assert [*conditions][:: len(conditions) - 1] == ["model", "seed"]


def test_what_is_not_said_is_the_checkpoints_own_or_off() -> None:
    off: dict[str, Any] = {"prompt": "", "negative": "", "convention": "lydite", "noise": "torch"}
    off |= {"guidance_steps": [], "guidance_rescale": 0.0, "guidance_interval": [0.0, 1.0]}
    off |= {"options": {}, "feather": 0}
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in Request().to_dict().items()}
    assert plain == dict.fromkeys(FIELDS) | off


def test_a_request_is_whole_after_its_plain_form() -> None:
    request = Request(**SET)
    assert list(request.to_dict()) == list(FIELDS)
    assert msgspec.convert(request.to_dict(), Request) == request
    assert request.replace(steps=8).to_dict() == request.to_dict() | {"steps": 8}
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"stepss": 8}, Request)
    with pytest.raises(AttributeError):
        request.steps = 8  # pyright: ignore[reportAttributeAccessIssue]
