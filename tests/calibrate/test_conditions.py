"""Requests as conditions and back, and the rule of kept steps."""

import json

import pytest

from lydite.calibrate.request_record import conditions_of, read_keep, request_of
from lydite.calibrate.settings import canonical
from lydite.core.errors import CalibrationError, InputError
from lydite.core.request import Request

REQUEST = Request(
    "a star",
    negative="snow",
    steps=5,
    guidance=5.0,
    guidance_steps=(5.0, 5.0, 3.0, 1.0, 1.0),
    guidance_interval=(0.2, 0.8),
    width=64,
    height=32,
    sampler="ddim",
    options={"eta": 0.5},
)


def test_a_request_comes_back_from_the_conditions_of_a_set() -> None:
    told = json.loads(canonical(conditions_of(REQUEST, "bfloat16")))
    assert "prompt" not in told
    assert request_of(told) == (REQUEST.replace(prompt=""), "bfloat16")


def test_conditions_of_another_tool_cannot_be_drawn_from() -> None:
    told = conditions_of(REQUEST, "float32")
    for strange in ({"sampler": "euler"}, {**told, "more": 1}, {**told, "compute": "int8"},
                    {**told, "steps": "many"}):  # fmt: skip
        with pytest.raises(CalibrationError, match="made by another tool"):
            request_of(strange)


def test_calibration_starts_from_noise() -> None:
    with pytest.raises(InputError, match="not from a picture"):
        conditions_of(REQUEST.replace(strength=0.5), "float32")


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ("all", (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)),
        ("every:4", (0, 4, 8)),
        ("every:20", (0,)),
        ("5,0, 9,5", (0, 5, 9)),
    ],
)
def test_keep_rules(rule: str, kept: tuple[int, ...]) -> None:
    assert read_keep(rule, 10) == kept


@pytest.mark.parametrize("rule", ["", "every", "every:0", "every:-1", "every:x", "0,,1", "1-4"])
def test_a_rule_that_is_none(rule: str) -> None:
    with pytest.raises(InputError, match="expected all, every:N"):
        read_keep(rule, 10)


@pytest.mark.parametrize(("rule", "step"), [("0,10", 10), ("-1,3", -1)])
def test_a_step_the_run_does_not_have(rule: str, step: int) -> None:
    with pytest.raises(InputError, match=f"has step {step}; the run has the steps 0 to 9"):
        read_keep(rule, 10)
