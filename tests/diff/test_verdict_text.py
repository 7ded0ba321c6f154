"""The sentences of verdicts: which value, how wrong, beside what; errors of quantized layers."""

from dataclasses import replace
from typing import Any

import pytest

from lydite.diff.divergence.first import Coverage
from lydite.diff.pairing.paired_events import Pairing
from lydite.diff.quantized import layer_errors
from lydite.diff.result import Finding, Row, Verdict, to_json
from lydite.diff.verdict_text import (
    agreement_text,
    divergence_text,
    error_text,
    narrowing_text,
    uncovered_text,
    undecided_text,
)
from lydite.trace.events import Event


def row(site: str = "a", error: float | None = 1e-7, **more: Any) -> Row:
    known = Row(site, site, "out", 0, 0, "activation", (2,), "f32", error, 1e-7, 1e-6, False)
    return replace(known, **more)


def event(i: int, name: str | None = None, **more: Any) -> Event:
    return Event(i=i, name=name or f"v{i}", shape=(2,), dtype="f32", **more)


@pytest.mark.parametrize(
    ("error", "text"),
    [(0.0, "0"), (9.99e-3, "1.0e-02"), (0.01, "0.01"), (1.5, "1.5"), (1234.5, "1.23e+03")],
)
def test_errors_have_two_or_three_digits(error: float, text: str) -> None:
    assert error_text(error) == text


def test_the_first_wrong_value() -> None:
    wrong = row("b", 0.5, wrong=True)
    rows = [row("a", 2e-7), wrong]
    text = divergence_text(rows, wrong, rows[0], ())
    assert text == (
        "b is the first wrong value: error 0.5; rounding alone would give about 1e-07; the last "
        "value before it that agrees is a (error 2.0e-07)."
    )
    assert "at step 3" in divergence_text(
        [*rows, row("c", step=1)], replace(wrong, step=3), None, ()
    )
    assert "have to be equal" in divergence_text(rows, replace(wrong, floor=0.0), None, ())
    assert "shapes differ" in divergence_text(rows, replace(wrong, error=None), None, ())
    finding = Finding("x", "It is doubled.", "fix")
    assert divergence_text(rows, wrong, None, (finding,)).endswith(". It is doubled.")
    for names, said in (
        (["x"], "1 value of the port has no"),
        (["x", "y"], "2 values of the port have no"),
    ):
        assert said in divergence_text(rows, wrong, rows[0], (), names)


def test_inputs_that_agree_stand_for_the_last_agreement() -> None:
    wrong = row("b", 0.5, wrong=True, step=1, call=2)
    inputs = [
        row("b", error, slot=f"in.{n}", step=1, call=2) for n, error in enumerate((2e-7, 3e-7))
    ]
    others = [
        row("b", 9e-7, slot="in.2", step=0, call=2), row("b", 9e-7, slot="in.2", step=1, call=1),
        row("c", 9e-7, slot="in.0", step=1, call=2), row("b", 9e-7, slot="out.1", step=1, call=2),
        row("b", 9e-7, slot="in.3", step=1, call=2, wrong=True),
    ]  # fmt: skip
    text = divergence_text([*inputs, *others, wrong], wrong, others[0], ())
    assert "its inputs agree (error 3.0e-07)" in text and "last value" not in text
    own = replace(wrong, slot="in.9")
    assert "last value" in divergence_text([*inputs, own], own, inputs[0], ())
    text = divergence_text(others, others[2], None, (), follows_inputs=True)
    assert "no compared value lies between the inputs of the run and it" in text


@pytest.mark.parametrize(
    ("dtype", "second"), [("f32", "float64"), ("bf16", "bfloat16"), ("f16", "float16")]
)
def test_what_may_be_rounding_says_how_to_find_out(dtype: str, second: str) -> None:
    one = row("a", 3e-6, dtype=dtype)
    text = undecided_text([one], one, estimated=True)
    assert ", 3 × its limit" in text and f"once more in {second} " in text and "step" not in text
    measured = undecided_text([one, row(step=1)], one, estimated=False)
    assert "--floor" not in measured and "at step 0" in measured and "Record more" in measured


def test_values_that_narrow_it_down() -> None:
    passed = [event(n) for n in range(9)]
    assert "v0 or v3 or v6:" in str(narrowing_text(passed, ()))
    assert "v1 or v3 or v5:" in str(narrowing_text(passed, {0}))
    inputs = [event(20, slot="in.0", alias_of=0), event(21, slot="in.0")]
    assert "v21 [in.0]:" in str(narrowing_text(inputs, ()))
    assert narrowing_text(inputs[:1], ()) is None and narrowing_text(passed[:1], {0}) is None


def test_an_agreement_names_its_largest_error() -> None:
    covered = Coverage(None, (), 0, True)
    rows = [
        row("a", 1e-7),
        row("b", 3e-6, floor=1e-6, limit=8e-6),
        row("c", 9.0, wrong=True),
        row("d", None),
    ]
    text = agreement_text(rows, covered, Pairing((), (), ()))
    assert (
        text == "All 2 values agree: the largest error is 3.0 × rounding, limit 8 × (3.0e-06 at b)."
    )
    close = agreement_text([row("a", 5e-7), *rows[1:]], covered, Pairing((), (), ()))
    assert "the largest error is 5.0 × rounding, limit 10 × (5.0e-07 at a)" in close
    assert "no activation" in agreement_text(rows[2:], covered, Pairing((), (), ()))
    coarse = [row("a", 1e-3, dtype="bf16", limit=0.03), row("b", 1e-3, dtype="f16", limit=0.05)]
    text = agreement_text(coarse, covered, Pairing((), (), ()))
    assert "In bf16 and f16 smaller errors" in text
    assert "0.04 of a value in the median, 0.05 at most" in text
    assert "2 names of the reference and 1 of the port have no counterpart" in agreement_text(
        rows, covered, Pairing((), ("x", "y"), ("z",))
    )
    late = Coverage(rows[0], tuple(event(n) for n in range(5)), 0, False)
    text = agreement_text(rows, late, Pairing((), (), ()))
    assert "5 values of the port after a were not compared (v0, v1, v2 and 2 more)" in text
    one = replace(late, uncovered=late.uncovered[:1])
    assert "1 value of the port after a was not" in agreement_text(rows, one, Pairing((), (), ()))


def test_an_end_that_was_not_compared() -> None:
    rows = [row("a"), row("b", 9.0, wrong=True)]
    covered = Coverage(rows[0], tuple(event(n) for n in range(4)), 0, False)
    text = uncovered_text(rows, covered)
    assert "All 1 compared values agree, but after a 4 values of the port have no" in text
    assert ": v0, v1, v2, v3. Give their names" in text and "that can be compared" not in text
    assert "after a, step 0 " in uncovered_text([*rows, row(step=1)], covered)
    some = uncovered_text(rows, replace(covered, not_comparable=3))
    assert "(3 of another shape, or no values)" in some and "--map" in some
    every = uncovered_text(rows, replace(covered, not_comparable=4))
    assert "--map" not in every and "same shape" in every
    assert uncovered_text(rows, replace(covered, last=None)).startswith("No value was compared: 4 ")


def test_errors_of_layers_from_the_largest_local_one() -> None:
    free = [
        row("a", 0.1), row("a", 0.3, slot="out.1"), row("a", 0.2, slot="out.2"),
        row("a", 0.2, step=1), row("b", 0.9),
        row("b", 5.0, slot="in.0"), row("c", None),
    ]  # fmt: skip
    a, b = layer_errors(free, [row("a", 0.08), row("a", 0.05, step=1), row("b", 0.01)])
    assert (a.site, a.local, a.accumulated, a.by_step) == ("a", 0.08, 0.3, (0.3, 0.2))
    assert (b.local, b.accumulated) == (0.01, 0.9)
    assert [(layer.site, layer.local) for layer in layer_errors(free)] == [("b", None), ("a", None)]
    a, b = layer_errors(free, [row("a", 0.08), row("b", 0.0)])  # b is not quantized
    assert (a.site, b.site, b.local, b.accumulated) == ("a", "b", 0.0, 0.9)


def test_numbers_that_json_does_not_have_are_null() -> None:
    plain = Verdict("diverge", "x", error=float("inf"), slot="out", rows=(row(error=float("nan")),))
    found = plain.to_json()
    assert found["error"] is None and found["rows"][0]["error"] is None and found["place"] == "out"
    assert to_json({"a": (1, 2.5, "x", True, None)}) == {"a": [1, 2.5, "x", True, None]}
    assert [Verdict(word, "").exit_code for word in ("agree", "diverge", "cannot-compare")] == [
        0,
        1,
        2,
    ]


def test_a_value_has_the_ports_name_first_where_it_is_another() -> None:
    one = row("net/a", slot="in.0", call=2)
    assert one.name == "net/a [in.0], call 2" == one.full_name and one.scope == "net"
    other = replace(one, port_site="b")
    assert other.full_name == "b (in the reference: net/a [in.0], call 2)"
    assert row().agrees and not row(error=None).agrees and not row(wrong=True).agrees
