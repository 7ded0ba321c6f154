"""A request in the forms that files hold."""

import re
from typing import Any

import msgspec
import numpy as np
import pytest

from lydite.core.errors import InputError
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


TAKEN: list[tuple[dict[str, Any], Any]] = [
    ({"width": np.int64(128)}, 128),
    ({"guidance": np.float32(3)}, 3.0),
    ({"guidance": 3}, 3.0),
    ({"guidance_steps": [5, 3]}, (5.0, 3.0)),
    ({"guidance_interval": [0, np.float64(0.5)]}, (0.0, 0.5)),
    ({"options": {"eta": np.float64(1)}}, {"eta": 1.0}),
]


@pytest.mark.parametrize(("fields", "value"), TAKEN)
def test_numbers_of_numpy_and_lists_become_plain_values(fields: dict[str, Any], value: Any) -> None:
    (name,) = fields
    found = getattr(Request(**fields), name)
    assert found == value and type(found) is type(value)
    msgspec.json.encode(Request(**fields))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ["a", "b"]}, "prompt is ['a', 'b']; expected text, found list."),
    ({"negative": None}, "negative is None; expected text, found NoneType."),
    ({"guidance": "3"}, "guidance is '3'; expected a number or None, found str."),
    ({"width": 128.0}, "width is 128.0; expected a whole number or None, found float."),
    ({"steps": True}, "steps is True; expected a whole number or None, found bool."),
    ({"steps": np.ones(2)}, "steps is array([1., 1.]); expected a whole number or None, found"),
    ({"feather": None}, "feather is None; expected a whole number, found NoneType."),
    ({"sampler": 1}, "sampler is 1; expected text or None, found int."),
    ({"guidance_steps": ["a"]}, "guidance_steps is ['a']; expected a list of numbers, found list."),
    ({"guidance_interval": (1, 2, 3)}, "guidance_interval is (1, 2, 3); expected two numbers, "),
    ({"options": {"eta": "x"}}, "options is {'eta': 'x'}; expected numbers by name, found dict."),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_a_value_of_another_type_is_refused_by_its_field(
    fields: dict[str, Any], message: str
) -> None:
    for make in (Request, Request().replace):
        with pytest.raises(InputError) as caught:
            make(**fields)
        assert str(caught.value).startswith(message)


def test_every_field_is_explained_in_the_docstring() -> None:
    text = Request.__doc__ or ""
    assert [name for name in FIELDS if not re.search(rf"\b{name}\b[\w, ]*: ", text)] == []
