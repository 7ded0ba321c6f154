"""Configs account for every key, and answer anything else with one short line, at once."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lydite.core.config import Count, Epsilon, Size, TokenId, read_config
from lydite.core.errors import ConfigError


@dataclass(frozen=True)
class Tower:
    floors: Count
    width: Size
    eps: Epsilon
    shape: Literal["round", "square"] = "square"
    balconies: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.floors > self.width:
            raise ValueError(f"floors {self.floors} on a width of {self.width} would fall over")


SOUND: dict[str, Any] = {"floors": 3, "width": 10, "eps": 1e-6}


def read(raw: dict[str, Any]) -> Tower:
    return read_config(
        Tower, raw, where="tower.json", ignored=frozenset({"colour"}), fixed={"gravity": "down"}
    )


def refusal(raw: dict[str, Any]) -> str:
    start = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        read(raw)
    message = str(caught.value)
    assert message.startswith("tower.json: Tower: ") and message.isprintable()
    assert len(message) < 1000 and time.monotonic() - start < 1
    return message


def test_every_kind_of_key_is_understood() -> None:
    raw = {**SOUND, "balconies": [1, 2], "colour": "red", "gravity": "down", "_version": 5}
    assert read(raw) == Tower(3, 10, 1e-6, balconies=(1, 2))


def test_unknown_and_missing_keys_are_named() -> None:
    raw = {"floors": 3, "eps": 1e-6, "depth": 1, "Width": 10}
    assert "missing ['width'], not understood ['depth', 'Width']" in refusal(raw)
    assert "Tower: missing ['width', 'eps']." in refusal({"floors": 3})
    assert "Tower: not understood ['depth']." in refusal({**SOUND, "depth": 1})


def test_a_key_we_run_one_value_of_is_held_to_it() -> None:
    assert "gravity is 'up'; only 'down' is supported" in refusal({**SOUND, "gravity": "up"})
    assert "gravity is {'up': " in refusal({**SOUND, "gravity": {"up": list(range(10**5))}})


@pytest.mark.parametrize(
    "value",
    [0, -1, 1025, 10**9, 10**30, 3.0, 3.5, "3", None, True, [3], {"n": 3}, [[[[]]]], "x" * 10**6],
    ids=lambda value: repr(value)[:20],
)
def test_a_value_of_another_kind_or_size_names_its_key(value: object) -> None:
    assert "$.floors" in refusal({**SOUND, "floors": value})


@pytest.mark.parametrize("value", [0, 1, -1e-6, 1e300, "1e-6", None])
def test_epsilon(value: object) -> None:
    assert "$.eps" in refusal({**SOUND, "eps": value})


def test_a_word_outside_its_list_is_named() -> None:
    assert "'oval'" in refusal({**SOUND, "shape": "oval"})


def test_a_wrong_item_is_named_by_its_place() -> None:
    assert "$.balconies[1]" in refusal({**SOUND, "balconies": [1, "two"]})


def test_sizes_that_do_not_fit_together_are_refused_in_words() -> None:
    assert "floors 20 on a width of 10 would fall over" in refusal({**SOUND, "floors": 20})


def test_a_list_without_end_is_refused() -> None:
    for count in (65, 10**6):
        assert "balconies has more than 64 items" in refusal({**SOUND, "balconies": [1] * count})
    assert len(read({**SOUND, "balconies": [1] * 64}).balconies) == 64


def test_ten_thousand_unknown_keys_make_a_short_message() -> None:
    refusal({**SOUND, **{f"key\n{index}" * 50: index for index in range(10_000)}})


TEXT = st.text("ab1\n€", max_size=5)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*SOUND, "shape", "balconies", "gravity", "x"]), JUNK))
def test_whatever_it_says_it_is_a_tower_or_a_config_error(raw: dict[str, Any]) -> None:
    try:
        tower = read({**SOUND, **raw})
    except ConfigError:
        return
    assert 1 <= tower.floors <= 1024 and tower.shape in ("round", "square")


def test_where_may_be_a_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_config(Tower, {}, where=tmp_path)


def test_vocabularies_of_the_largest_models_fit() -> None:
    known = msgspec.convert(152_064, Size)  # Qwen2.5's
    assert known == 152_064
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(2**20 + 1, Size)


def test_token_ids_are_numbers_that_mlx_compares() -> None:
    assert [msgspec.convert(n, TokenId) for n in (0, 2**31 - 1)] == [0, 2**31 - 1]
    for wrong in (-1, 2**31):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, TokenId)
