"""Messages are short and of one line, whatever a file holds."""

from pathlib import Path

import pytest

from lydite.core import errors
from lydite.core.errors import LyditeError, at, first_of, is_unicode, shown


def test_a_wrong_checkpoint_and_wrong_numbers_exit_1_and_all_else_2() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.__name__: kind.exit_code for kind in kinds if issubclass(kind, LyditeError)}
    assert {name for name, code in codes.items() if code == 1} == {"WeightsError", "NotFiniteError"}
    assert set(codes.values()) == {1, 2}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x" * 98, repr("x" * 98)),
        ([*range(8)], "[0, 1, 2, 3, 4, 5, 6, 7]"),
        ([*range(9)], "[0, 1, 2, 3, 4, 5, 6, 7, ...]"),
        ((*range(9),), "(0, 1, 2, 3, 4, 5, 6, 7, ...)"),
        ("a\nb", r"'a\nb'"),
    ],
)
def test_shown(value: object, text: str) -> None:
    assert shown(value) == text
    assert len(shown("x" * 10**6)) == 100


def test_first_of() -> None:
    assert first_of([], 2) == ""
    assert first_of(["a", "b"], 2) == "a, b"
    assert first_of(["a", "b", "c"], 2) == "a, b, and 1 more"
    assert first_of(["a", "b", "c", "d"], 2, "; ") == "a; b; and 2 more"


def test_a_path_is_one_line() -> None:
    assert at(Path("a b")) == "a b" and at(Path("a\nb")) == r"'a\nb'"


def test_lone_surrogates_are_not_unicode() -> None:
    assert is_unicode("a𝕏\ud7ff\ue000")
    for letter in ("\ud800", "\udbff", "\udc00", "\udfff"):
        assert not is_unicode(f"a{letter}")
