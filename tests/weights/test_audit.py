"""Every tensor in exactly one bin, whatever was done to the checkpoint."""

from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lydite.core.errors import WeightsError
from lydite.weights.audit import Ledger, TensorView, audit, parameter, rearrangements
from lydite.weights.rules import (
    OIHW_TO_OHWI,
    SWAP_HALVES,
    Alias,
    Convert,
    Drop,
    Fill,
    Join,
    Rename,
    Rule,
    Shape,
    Split,
    resolve,
)
from support.memory_checkpoint import in_memory

RULES: tuple[Rule, ...] = (
    Rename("old.{i}.{p}", "new.{i}.{p}"),
    Alias("twin", "table"),
    Split("qkv.{p}", ("q.{p}", "k.{p}", "v.{p}")),
    Join(("upper", "lower"), "both"),
    Convert("conv", OIHW_TO_OHWI),
    Convert("new.1.swap", SWAP_HALVES),
    Fill("eye", lambda shape: np.eye(*shape, dtype=np.float32), because="always the identity"),
    Drop("ids", because="counted anew"),
)
EXPECTED: dict[str, Shape] = {
    "plain": (2, 3),
    "square": (3, 3),
    "new.0.w": (4, 2),
    "new.1.swap": (4,),
    "table": (5, 2),
    "q.weight": (2, 3),
    "k.weight": (2, 3),
    "v.weight": (2, 3),
    "both": (3, 2),
    "conv": (2, 3, 3, 1),
    "eye": (3, 3),
}
STORED: dict[str, Shape] = {
    "plain": (2, 3),
    "square": (3, 3),
    "old.0.w": (4, 2),
    "old.1.swap": (4,),
    "table": (5, 2),
    "twin": (5, 2),
    "qkv.weight": (6, 3),
    "upper": (1, 2),
    "lower": (2, 2),
    "conv": (2, 1, 3, 3),
    "ids": (7,),
}
BINS = ("dropped", "unexpected", "wrong_shape", "wrong_dtype")


def sound() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    arrays = {n: draw.standard_normal(s).astype(np.float32) for n, s in STORED.items()}
    return {**arrays, "twin": arrays["table"].copy(), "ids": np.arange(7)}


def judge(arrays: dict[str, Any], prefix: str = "") -> Ledger:
    return audit(in_memory(arrays, prefix), EXPECTED, RULES, where="here")


def bins(ledger: Ledger) -> dict[str, list[str]]:
    found = {name: [each.tensor for each in getattr(ledger, name)] for name in BINS}
    return {"loaded": list(ledger.loaded), **found}


NAMES = st.sampled_from([*STORED, *EXPECTED, "old.7.w", "old.0.qkv.w", "zebra", "qkv.bias", "k.x"])
DTYPES = st.sampled_from(
    [
        np.float32,
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        np.float64,
        np.int32,
        bool,
    ]
)
SHAPES = st.lists(st.integers(0, 4), max_size=5).map(tuple)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """The sound checkpoint after a few changes: drop, rename, add, reshape, cast."""
    arrays = sound()
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.sampled_from(sorted(arrays)) if arrays else st.just(""))
        match draw(st.sampled_from(["drop", "rename", "add", "reshape", "cast"])):
            case "drop":
                arrays.pop(name, None)
            case "rename" if arrays:
                arrays[draw(NAMES)] = arrays.pop(name)
            case "add":
                arrays[draw(NAMES)] = np.zeros(draw(SHAPES), np.float32)
            case "reshape" if arrays:
                arrays[name] = np.zeros(draw(SHAPES), np.float32)
            case "cast" if arrays:
                arrays[name] = arrays[name].astype(draw(DTYPES))
    return arrays


@given(mutated(), st.sampled_from(["", "model.part."]))
def test_every_tensor_is_in_exactly_one_bin(arrays: dict[str, Any], prefix: str) -> None:
    stored = {prefix + name: x for name, x in arrays.items()}
    ledger = judge(stored, prefix)
    times = Counter(name for names in bins(ledger).values() for name in names)
    assert times == Counter(stored.keys())
    assert not {each.tensor for each in ledger.filled} & set(ledger.loaded)


@given(mutated())
def test_a_clean_ledger_means_that_every_parameter_can_be_made(arrays: dict[str, Any]) -> None:
    source = in_memory(arrays)
    ledger = audit(source, EXPECTED, RULES, where="here")
    if not ledger.clean:
        with pytest.raises(WeightsError) as caught:
            ledger.require_clean()
        assert str(caught.value).isprintable()
        return
    ledger.require_clean()
    resolution = resolve(source.tensors, RULES)
    for target, shape in EXPECTED.items():
        value = parameter(target, shape, source, resolution, RULES)
        assert value is not None and value.shape == shape


@given(mutated())
def test_what_is_missing_is_not_in_the_file(arrays: dict[str, Any]) -> None:
    source = in_memory(arrays)
    ledger = audit(source, EXPECTED, RULES, where="here")
    recipes = resolve(source.tensors, RULES)
    for finding in ledger.missing:
        assert finding.tensor not in arrays or finding.tensor in recipes.surplus


def test_the_sound_one_is_clean() -> None:
    ledger = judge(sound())
    assert ledger.clean and ledger.missing == ()
    assert set(ledger.loaded) == STORED.keys() - {"ids", "twin"}
    assert {each.tensor: each.detail for each in ledger.dropped} == {
        "ids": "counted anew",
        "twin": "a second copy of table",
    }
    assert [each.tensor for each in ledger.filled] == ["eye"]
    assert {each.tensor for each in ledger.undecidable} == {"square", "conv"}


def only(ledger: Ledger, name: str) -> tuple[str, str]:
    """The one finding of the one bin that is not as it should be."""
    wrong = {each: getattr(ledger, each) for each in ledger.WRONG if getattr(ledger, each)}
    assert list(wrong) == [name] and len(wrong[name]) == 1, wrong
    return wrong[name][0].tensor, wrong[name][0].detail


@pytest.mark.parametrize("name", sorted(STORED.keys() - {"ids", "twin", "table"}))
def test_a_dropped_tensor_is_missing_under_its_stored_name(name: str) -> None:
    arrays = sound()
    del arrays[name]
    ledger = judge(arrays)
    assert [each.tensor for each in ledger.missing] == [name]


def test_a_table_may_come_under_either_name() -> None:
    arrays = sound()
    del arrays["table"]
    assert judge(arrays).clean
    del arrays["twin"]
    assert only(judge(arrays), "missing")[0] == "table"


def test_half_of_a_joined_pair_is_not_loaded() -> None:
    arrays = sound()
    del arrays["upper"]
    ledger = judge(arrays)
    assert [each.tensor for each in ledger.missing] == ["upper"]
    assert [each.tensor for each in ledger.unexpected] == ["lower"]


def test_wrong_shapes_say_what_is_in_the_file() -> None:
    arrays = sound()
    arrays["conv"] = np.zeros((2, 3, 1, 3), np.float32)
    assert only(judge(arrays), "wrong_shape") == (
        "conv",
        "model expects (2, 3, 3, 1), file has (2, 3, 1, 3), read as (2, 1, 3, 3)"
        " (the same sizes in another order: stored transposed?)",
    )
    arrays["conv"] = np.zeros((2, 9), np.float32)
    assert "found (2, 9)" in only(judge(arrays), "wrong_shape")[1]


def test_a_joined_pair_of_the_wrong_size_names_both() -> None:
    arrays = sound()
    arrays["lower"] = np.zeros((3, 2), np.float32)
    assert [each.tensor for each in judge(arrays).wrong_shape] == ["upper", "lower"]


def test_integers_are_no_weights() -> None:
    arrays = sound()
    arrays["qkv.weight"] = np.zeros((5, 5), np.int8)  # the wrong shape too, but one bin is enough
    assert only(judge(arrays), "wrong_dtype") == (
        "qkv.weight",
        "stored as I8, expected a float type",
    )


def test_a_copy_has_to_have_the_shape_of_the_other() -> None:
    arrays = sound()
    arrays["twin"] = arrays["twin"].T.copy()
    assert only(judge(arrays), "wrong_shape") == ("twin", "file has (2, 5), but (5, 2) for table")
    arrays["twin"] = np.zeros((5, 2), np.int32)
    assert only(judge(arrays), "wrong_dtype")[0] == "twin"


def test_unknown_tensors_are_named_with_what_they_are() -> None:
    arrays = {**sound(), "old.5.extra": np.zeros((1, 2), np.float16)}
    assert only(judge(arrays), "unexpected") == (
        "old.5.extra",
        "the model has no new.5.extra (F16 (1, 2))",
    )


def test_a_tensor_of_which_only_a_part_has_a_place_is_unexpected() -> None:
    expected = {name: shape for name, shape in EXPECTED.items() if name != "v.weight"}
    ledger = audit(in_memory(sound()), expected, RULES, where="here")
    assert only(ledger, "unexpected")[0] == "qkv.weight"


def test_a_tensor_of_which_a_part_comes_from_elsewhere_is_unexpected() -> None:
    rules = (*RULES, Rename("apart", "q.weight"))
    arrays = {**sound(), "apart": np.zeros((2, 3), np.float32)}
    assert only(audit(in_memory(arrays), EXPECTED, rules, where="here"), "unexpected") == (
        "qkv.weight",
        "q.weight is already stored as apart (F32 (6, 3))",
    )


def test_dropping_what_is_needed_and_not_filled_is_missing() -> None:
    rules = (*RULES, Drop("plain", because="a mistake in the table"))
    ledger = audit(in_memory(sound()), EXPECTED, rules, where="here")
    assert only(ledger, "missing")[0] == "plain"


def test_dropping_what_is_filled_in_is_fine() -> None:
    rules = (*RULES, Drop("eye", because="the identity is filled in"))
    ledger = audit(in_memory({**sound(), "eye": np.zeros(1)}), EXPECTED, rules, where="here")
    assert ledger.clean and [each.tensor for each in ledger.filled] == ["eye"]


def test_the_error_names_five_of_each_bin_on_one_line() -> None:
    arrays = {f"extra.{index}": np.zeros(1, np.float32) for index in range(7)}
    with pytest.raises(WeightsError) as caught:
        judge(arrays).require_clean()
    message = str(caught.value)
    assert message.startswith("here: ") and message.isprintable()
    assert "7 unexpected (extra.0: " in message and "and 2 more" in message
    assert message.count("extra.") == 10
    assert "9 missing (plain: needed for plain (2, 3)" in message
    assert "wrong" not in message and "not finite" not in message  # bins without a tensor


def test_a_name_without_end_does_not_fill_the_screen() -> None:
    with pytest.raises(WeightsError) as caught:
        judge({"x" * 10**6: np.zeros(1, np.float32)}).require_clean()
    assert len(str(caught.value)) < 5000


def test_names_are_those_of_the_file() -> None:
    ledger = judge({"net.plain": np.zeros((3, 2), np.float32), "net.odd": np.zeros(1)}, "net.")
    assert [each.tensor for each in ledger.wrong_shape] == ["net.plain"]
    assert [each.tensor for each in ledger.unexpected] == ["net.odd"]
    assert "net.old.0.w" in {each.tensor for each in ledger.missing}


def test_to_json_is_plain_and_whole() -> None:
    import json

    ledger = judge({**sound(), "odd": np.zeros(1)})
    rows = json.loads(json.dumps(ledger.to_json()))
    assert rows["clean"] is False and rows["where"] == "here"
    assert rows["unexpected"] == [{"tensor": "odd", "detail": "the model has no odd (F64 (1,))"}]
    assert set(rows["loaded"]) == set(ledger.loaded)
    assert rows.keys() == {each for each in Ledger.__dataclass_fields__} | {"clean"}


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((3, 3), [(1, 0)]),
        ((3, 4), []),
        ((1, 1), []),
        ((5,), []),
        ((), []),
        ((3, 4, 3), [(2, 1, 0)]),
        ((4, 1, 1), []),
    ],
)
def test_rearrangements(shape: Shape, found: list[tuple[int, ...]]) -> None:
    assert list(rearrangements(shape)) == found


def test_a_view_is_the_part_under_its_prefix() -> None:
    arrays = {"a.x": np.zeros(1), "ab.x": np.ones(1), "b.x": np.ones(1)}
    view: TensorView = in_memory(arrays, "a.")
    assert list(view.tensors) == ["x"] and view.full_name("x") == "a.x"
    assert view.read("x")[0] == 0
    assert list(in_memory(arrays, exclude=("a.", "b.")).tensors) == ["ab.x"]
