"""Tables of rules: what becomes of each name, and which parameter is made of what."""

import numpy as np
import pytest

from lydite.weights.rules import (
    OIHW_TO_OHWI,
    SWAP_HALVES,
    Alias,
    Convert,
    Drop,
    Fill,
    Join,
    Recipe,
    Rename,
    Rule,
    Split,
    filling,
    layout_of,
    resolve,
    stored_names,
)

RULES: tuple[Rule, ...] = (
    Rename("old.{i}.{p}", "new.{i}.{p}"),
    Alias("nickname.{p}", "name.{p}"),
    Split("{s}.qkv", ("{s}.q", "{s}.k", "{s}.v")),
    Join(("top", "bottom"), "whole"),
    Convert("conv.weight", OIHW_TO_OHWI),
    Convert("new.{i}.swap", SWAP_HALVES),
    Fill("known", np.zeros, because="always zero"),
    Drop("ema.*", because="training state"),
)


def sources(*names: str) -> dict[str, tuple[str, ...]]:
    return {target: recipe.sources for target, recipe in resolve(names, RULES).recipes.items()}


def test_a_name_no_rule_mentions_is_kept() -> None:
    assert sources("plain.weight") == {"plain.weight": ("plain.weight",)}


def test_rename_fills_every_slot() -> None:
    assert sources("old.3.a.b") == {"new.3.a.b": ("old.3.a.b",)}


def test_a_renamed_tensor_is_not_taken_under_its_own_name() -> None:
    """Or a tensor already in our layout would be converted a second time."""
    resolution = resolve(["new.3.swap"], RULES)
    assert not resolution.recipes
    assert "stored as old.3.swap" in resolution.surplus["new.3.swap"]


def test_an_alias_stands_in_for_its_target_or_repeats_it() -> None:
    assert sources("nickname.w") == {"name.w": ("nickname.w",)}
    both = resolve(["nickname.w", "name.w"], RULES)
    assert both.recipes["name.w"].sources == ("name.w",)
    assert both.copies == {"nickname.w": "name.w"}
    assert not both.surplus


def test_split_gives_each_part_its_rows() -> None:
    recipes = resolve(["a.qkv"], RULES).recipes
    rows = np.arange(12).reshape(6, 2)
    parts = [recipes[f"a.{part}"].build([rows]) for part in "qkv"]
    np.testing.assert_array_equal(np.concatenate(parts), rows)
    assert [recipes[f"a.{part}"].shape([(6, 2)]) for part in "qkv"] == [(2, 2)] * 3


def test_join_stacks_in_the_order_of_the_rule() -> None:
    (recipe,) = resolve(["bottom", "top"], RULES).recipes.values()
    assert recipe.sources == ("top", "bottom")
    np.testing.assert_array_equal(
        recipe.build([np.ones((1, 2)), np.zeros((2, 2))])[:, 0], [1, 0, 0]
    )
    assert recipe.shape([(1, 2), (2, 2)]) == (3, 2)


def test_convert_goes_by_the_name_after_renaming() -> None:
    recipe = resolve(["old.0.swap"], RULES).recipes["new.0.swap"]
    np.testing.assert_array_equal(recipe.build([np.arange(4)]), [2, 3, 0, 1])
    assert layout_of("conv.weight", RULES) is OIHW_TO_OHWI
    assert layout_of("conv.bias", RULES) is None


def test_drop_keeps_its_reason() -> None:
    resolution = resolve(["ema.decay"], RULES)
    assert resolution.dropped == {"ema.decay": "training state"} and not resolution.recipes


def test_two_stored_names_for_one_parameter_leave_one_over() -> None:
    resolution = resolve(["a.q", "a.qkv"], (Rename("x", "y"), RULES[2]))
    assert "stored as a.qkv" in resolution.surplus["a.q"]
    twice = (Rename("one", "same"), Rename("two", "same"))
    resolution = resolve(["one", "two"], twice)
    assert resolution.recipes["same"].sources == ("one",)
    assert "already stored as one" in resolution.surplus["two"]


def test_a_name_that_two_rules_match_is_surplus() -> None:
    """A hostile file can hold such a name; it must not stop the program."""
    resolution = resolve(["old.1.x.qkv"], RULES)
    assert resolution.surplus == {"old.1.x.qkv": "two rules of the table match it"}
    assert not resolution.recipes


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("plain", ("plain",)),
        ("new.4.b", ("old.4.b",)),
        ("a.k", ("a.qkv",)),
        ("whole", ("top", "bottom")),
        ("name.w", ("name.w",)),
        ("conv.weight", ("conv.weight",)),
    ],
)
def test_where_a_missing_parameter_was_looked_for(target: str, names: tuple[str, ...]) -> None:
    assert stored_names(target, RULES) == names


def test_a_file_that_goes_by_an_alias_misses_it_under_the_alias() -> None:
    used = resolve(["nickname.bias"], RULES).aliases
    assert stored_names("name.w", RULES, used) == ("nickname.w",)


def test_filling() -> None:
    rule = filling("known", RULES)
    assert rule and rule.because == "always zero" and rule.make((2,)).shape == (2,)
    assert filling("unknown", RULES) is None


@pytest.mark.parametrize(
    ("recipe", "stored"),
    [
        (Recipe("x", ("a", "b")), [(1, 2), (1, 3)]),
        (Recipe("x", ("a", "b")), [(2,), ()]),
        (Recipe("x", ("a", "b")), [(), ()]),
        (Recipe("x", ("a", "b"), axis=1), [(2,), (2,)]),
        (Recipe("x", ("a",), (0, 1, 3)), [(4, 2)]),
        (Recipe("x", ("a",), (0, 1, 3)), [()]),
        (Recipe("x", ("a",), layout=OIHW_TO_OHWI), [(4, 2)]),
    ],
)
def test_shapes_that_do_not_fit_are_a_value_error(recipe: Recipe, stored: list) -> None:
    with pytest.raises(ValueError, match=r"\("):
        recipe.shape(stored)
