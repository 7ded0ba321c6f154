"""Keys: the same for the same run however it is spelled, another for each thing that decides it."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lydite.calibrate.settings import (
    Image,
    Plan,
    Settings,
    canonical,
    conditioning_key,
    differences,
    digest,
    picture_key,
    plan_of,
    sample_key,
)
from lydite.core.errors import CalibrationError

SETTINGS = Settings("f00d", {"sampler": "euler", "guidance": 7.0, "sigmas": [1.0, 0.5]})
IMAGE = Image(0, "a cat", 0)


def test_the_spelling_of_settings_does_not_matter() -> None:
    other = Settings("f00d", {"sigmas": (1, 0.5), "guidance": 7, "sampler": "euler"}, model="x")
    assert other.hash == SETTINGS.hash
    assert sample_key(other, IMAGE, 3) == sample_key(SETTINGS, IMAGE, 3)


def test_all_that_decides_a_value_is_in_its_key() -> None:
    replace = msgspec.structs.replace
    keys = [
        sample_key(SETTINGS, IMAGE, 0),
        sample_key(SETTINGS, IMAGE, 1),
        sample_key(SETTINGS, replace(IMAGE, prompt="a cat "), 0),
        sample_key(SETTINGS, replace(IMAGE, seed=1), 0),
        sample_key(replace(SETTINGS, model_hash="beef"), IMAGE, 0),
        sample_key(replace(SETTINGS, conditions=SETTINGS.conditions | {"guidance": 7.5}), IMAGE, 0),
        sample_key(replace(SETTINGS, conditions=SETTINGS.conditions | {"shift": 3}), IMAGE, 0),
        picture_key(SETTINGS, IMAGE),
        conditioning_key(SETTINGS, IMAGE.prompt),
    ]
    assert len(set(keys)) == len(keys)


def test_joined_plans_keep_all_that_either_keeps() -> None:
    images, flags = [("a cat", 0), ("a dog", 1)], (False, True)
    plans = [
        plan_of(images[:count], steps, pictures=pictures, conditioning=conditioning)
        for count, steps, pictures, conditioning in product((0, 1, 2), ((), (0, 2)), flags, flags)
    ]

    def kept(plan: Plan) -> set[str]:
        return {key for key, _, _ in plan.keys(SETTINGS)}

    for one, other in product(plans, repeat=2):
        joined = one.joined(other, Path("set"))
        assert joined == other.joined(one, Path("set"))
        assert kept(joined) >= kept(one) | kept(other)
        assert one.joined(one, Path("set")) == one


def test_labels_and_storage_are_not_in_a_key() -> None:
    replace = msgspec.structs.replace
    assert sample_key(SETTINGS, replace(IMAGE, number=9), 0) == sample_key(SETTINGS, IMAGE, 0)
    narrow = replace(SETTINGS, dtype="BF16")
    assert sample_key(narrow, IMAGE, 0) == sample_key(SETTINGS, IMAGE, 0)
    assert narrow.hash != SETTINGS.hash  # but such sets are not mixed


def test_canonical_json_is_written_out() -> None:
    value = {"b": [1.0, -0.0, 0.1, 1e300], "a": {"é": None, "t": True}}
    assert canonical(value) == '{"a":{"t":true,"é":null},"b":[1,0,0.1,1e+300]}'.encode()


@dataclass
class _Strange:
    value: int = 0


@pytest.mark.parametrize("value", [float("nan"), {"x": float("inf")}, "\ud800", {1: 2}, _Strange()])
def test_what_has_no_one_spelling_is_refused(value: Any) -> None:
    with pytest.raises(CalibrationError, match="cannot be written as JSON"):
        canonical(value)


def test_differences_name_what_differs() -> None:
    other = Settings("f00d", {"sampler": "heun", "guidance": 7, "eta": 1}, "BF16")
    assert differences(SETTINGS, other) == (
        "dtype: 'F32', 'BF16'; eta: None, 1; sampler: 'euler', 'heun'; sigmas: [1.0, 0.5], None"
    )


def test_a_key_is_the_digest_of_all_that_decides_a_value() -> None:
    decides = {
        "model": "f00d",
        "conditions": SETTINGS.conditions,
        "kind": "sample",
        "prompt": 'é "quoted"',
        "seed": 2**70,
        "step": 3,
    }
    image = Image(0, 'é "quoted"', 2**70)
    assert sample_key(SETTINGS, image, 3) == digest(decides)
    decides |= {"kind": "conditioning", "seed": None, "step": None}
    assert conditioning_key(SETTINGS, image.prompt) == digest(decides)
    with pytest.raises(CalibrationError, match="cannot be written as JSON"):
        sample_key(SETTINGS, Image(0, "\ud800", 0), 0)


def test_whole_numbers_are_equal_up_to_what_a_float_holds_exactly() -> None:
    for number in (0, 1, -7, 2**53, -(2**53)):
        assert canonical(float(number)) == canonical(number)
    assert canonical(-0.0) == canonical(0) and canonical(0.5) != canonical(0)
    assert canonical(float(2**53 + 2)) != canonical(2**53 + 2)
