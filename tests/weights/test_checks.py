"""What reading the values adds: NaN, odd statistics, two copies that differ, a reference."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lydite.weights.audit import Ledger, audit, check_values, compare, digests
from lydite.weights.digest import Digest
from lydite.weights.rules import SWAP_HALVES, Alias, Convert, Drop, Fill, Rename, Rule, Shape
from support.memory_checkpoint import in_memory

RULES: tuple[Rule, ...] = (
    Rename("stored.{p}", "square.{p}"),
    Alias("twin", "table"),
    Convert("square.bias", SWAP_HALVES),
    Fill("eye", lambda shape: np.eye(*shape, dtype=np.float32), because="always the identity"),
    Drop("state", because="training only"),
)
EXPECTED: dict[str, Shape] = {
    "square.weight": (4, 4),
    "square.bias": (4,),
    "table": (5, 4),
    "eye": (2, 2),
}
HALF = {"F16": np.float16, "BF16": ml_dtypes.bfloat16}


def sound() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    shapes = {"stored.weight": (4, 4), "stored.bias": (4,), "table": (5, 4)}
    return {name: draw.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def cast(arrays: dict[str, Any], dtype: Any) -> dict[str, Any]:
    return {name: x.astype(dtype) for name, x in arrays.items()}


def checked(arrays: dict[str, Any]) -> Ledger:
    source = in_memory(arrays)
    return check_values(audit(source, EXPECTED, RULES, where="here"), source, RULES)


def against(arrays: dict[str, Any], reference: dict[str, Digest]) -> Ledger:
    source = in_memory(arrays)
    ledger = audit(source, EXPECTED, RULES, where="here")
    return compare(ledger, source, EXPECTED, RULES, reference)


def digested(arrays: dict[str, Any]) -> dict[str, Digest]:
    return digests(in_memory(arrays), EXPECTED, RULES)


def plain(findings: Any) -> dict[str, str]:
    return {each.tensor: each.detail for each in findings}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", sound())
def test_one_value_that_is_no_number_is_found(name: str, value: float) -> None:
    arrays = sound()
    arrays[name].flat[-1] = value
    ledger = checked(arrays)
    assert list(plain(ledger.not_finite)) == [name] and not ledger.clean


def test_in_a_tensor_that_is_dropped_it_is_only_noted() -> None:
    ledger = checked({**sound(), "state": np.array([np.nan, 1.0])})
    assert ledger.clean and plain(ledger.suspicious) == {"state": "1 NaN and 0 Inf of 2 values"}


def test_odd_values_are_noted_and_do_not_stop_a_load() -> None:
    arrays = {**sound(), "stored.weight": np.zeros((4, 4), np.float32)}
    ledger = checked(arrays)
    assert ledger.clean and plain(ledger.suspicious) == {"stored.weight": "all zero"}


def test_two_copies_have_to_be_equal() -> None:
    arrays = sound()
    assert checked({**arrays, "twin": arrays["table"].copy()}).clean
    assert checked({**arrays, "twin": arrays["table"].astype(np.float16)}).clean
    other = arrays["table"].copy()
    other[2, 2] += 1
    ledger = checked({**arrays, "twin": other})
    assert plain(ledger.different) == {"twin": "should repeat table, but its values differ"}
    assert not checked({**arrays, "twin": other.astype(np.float16)}).clean


def test_what_one_check_finds_stays_after_the_next() -> None:
    arrays = sound()
    reference = digested(arrays)
    arrays |= {"stored.bias": arrays["stored.bias"] + 1, "twin": arrays["table"] + 1}
    source = in_memory(arrays)
    values_first = compare(checked(arrays), source, EXPECTED, RULES, reference)
    values_last = check_values(against(arrays, reference), source, RULES)
    assert {*plain(values_first.different)} == {*plain(values_last.different)}
    assert {*plain(values_first.different)} == {"stored.bias", "twin"}


def test_the_same_checkpoint_in_any_precision_is_the_same() -> None:
    arrays = sound()
    for dtype in (np.float64, np.float32, *HALF.values()):
        for ours, theirs in ((arrays, cast(arrays, dtype)), (cast(arrays, dtype), arrays)):
            ledger = against(ours, digested(theirs))
            assert ledger.clean and not ledger.undecidable
    mixed = {**cast(arrays, np.float16), "table": arrays["table"]}
    assert against(mixed, digested(arrays)).clean


def test_the_two_half_precisions_cannot_be_compared() -> None:
    ours, theirs = (cast(sound(), HALF[name]) for name in ("F16", "BF16"))
    ledger = against(ours, digested(theirs))
    assert ledger.clean
    assert plain(ledger.undecidable) == dict.fromkeys(
        ours, "F16, not comparable with the reference's BF16"
    )


@pytest.mark.parametrize("dtype", [np.float32, *HALF.values()])
def test_a_square_stored_transposed_is_seen_with_a_reference(dtype: Any) -> None:
    arrays = sound()
    wrong = {**arrays, "stored.weight": np.ascontiguousarray(arrays["stored.weight"].T)}
    unaided = checked(wrong)
    assert unaided.clean and list(plain(unaided.undecidable)) == ["stored.weight"]
    ledger = against(cast(wrong, dtype), digested(arrays))
    assert list(plain(ledger.different)) == ["stored.weight"]
    assert "transposed" in plain(ledger.different)["stored.weight"]


def test_other_values_and_shapes_are_different() -> None:
    arrays = sound()
    changed = {**arrays, "stored.bias": arrays["stored.bias"] + 1}
    assert plain(against(changed, digested(arrays)).different) == {
        "stored.bias": "values differ from the reference"
    }
    reference = digested(arrays)
    reference["table"] = Digest((9, 9), "F32", "", "", "")
    found = plain(against(arrays, reference).different)
    assert found == {"table": "shape (5, 4), in the reference (9, 9)"}


def test_a_parameter_that_only_one_side_has_is_different() -> None:
    reference = digested(sound())
    reference["ghost"] = reference.pop("table")
    assert plain(against(sound(), reference).different) == {
        "table": "the reference has no table",
        "ghost": "only the reference has this parameter",
    }


def test_what_is_filled_in_is_compared_too() -> None:
    eye = {**sound(), "eye": np.eye(2, dtype=np.float16)}
    assert against(sound(), digested(eye)).clean
    assert against(eye, digested(sound())).clean
    other = {**sound(), "eye": np.ones((2, 2), np.float32)}
    assert list(plain(against(sound(), digested(other)).different)) == ["eye"]


def test_what_is_in_another_bin_is_left_to_it() -> None:
    arrays = sound()
    reference = digested(arrays)
    arrays["stored.weight"] = np.zeros((4, 4, 4), np.float32)
    arrays["stored.bias"] = np.zeros((), np.float32)
    arrays["table"] = np.zeros((5, 4), np.int32)
    ledger = against(arrays, reference)
    assert not ledger.different
    assert list(plain(ledger.wrong_shape)) == ["stored.weight", "stored.bias"]
    assert list(plain(ledger.wrong_dtype)) == ["table"]
