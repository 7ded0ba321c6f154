"""Patterns of dotted names: what fits, what the placeholders stand for, and back again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lydite.weights.rules import fill, match

PART = st.text("abcxyz_0189", min_size=1)
NAME = st.lists(PART, min_size=1, max_size=4).map(".".join)


@pytest.mark.parametrize(
    ("pattern", "name", "slots"),
    [
        ("a.b", "a.b", {}),
        ("a.b", "axb", None),
        ("a.b", "a.b.c", None),
        ("a.b", "z.a.b", None),
        ("blocks.{i}.w", "blocks.12.w", {"i": "12"}),
        ("blocks.{i}.w", "blocks.x.w", None),
        ("blocks.{i}.w", "blocks..w", None),
        ("blocks.{i}.w", "blocks.١.w", None),  # a digit elsewhere, never in a checkpoint
        ("{i}.{j}", "3.4", {"i": "3", "j": "4"}),
        ("{p}.w", "a.b.w", {"p": "a.b"}),
        ("{p}.w", ".w", None),
        ("head.*", "head.", {}),
        ("head.*", "head.a.b", {}),
        ("head.*", "heads", None),
        ("a[0].{p}", "a[0].w", {"p": "w"}),
        ("a\n{p}", "a\nb\nc", {"p": "b\nc"}),
    ],
)
def test_match(pattern: str, name: str, slots: dict[str, str] | None) -> None:
    assert match(pattern, name) == slots


@given(NAME, st.integers(0, 999))
def test_what_was_filled_in_is_found_again(p: str, i: int) -> None:
    pattern = "blocks.{i}.{p}.weight"
    slots = {"i": str(i), "p": p}
    assert match(pattern, fill(pattern, slots)) == slots


@given(NAME)
def test_a_name_is_its_own_pattern(name: str) -> None:
    assert match(name, name) == {}
    assert fill(name, {}) == name
