"""Which wrong row is the bug: rows written by hand, on both sides of every limit."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from lydite.diff.divergence.first import (
    Divergence,
    RowTests,
    doubled_rows,
    first_divergence,
    first_isolated,
    open_margin,
    over_limit,
)
from lydite.diff.result import Row

LIMIT = 1e-6


def row(over: float | None, site: str = "", **changes: Any) -> Row:
    """A value whose error is so many times its limit; None: of another shape."""
    error = None if over is None else over * LIMIT
    wrong = over is None or over > 1
    known = Row(site, site, "out", 0, 0, "activation", (2, 8), "f32", error, LIMIT, LIMIT, wrong)
    return replace(known, **changes)


def rows(*overs: float | Row | None) -> list[Row]:
    made = (over if isinstance(over, Row) else row(over) for over in overs)
    return [replace(one, site=one.site or f"v{at}") for at, one in enumerate(made)]


def judge(found: Sequence[Row], *, misplaced: bool = False, **tests: Any) -> Divergence:
    known: dict[str, Any] = {
        key: (lambda _, value=value: value) for key, value in tests.items() if key != "estimated"
    }
    estimated = tests.get("estimated", False)
    return first_divergence(found, RowTests(lambda _: misplaced, **known), estimated=estimated)


def test_the_first_wrong_row_is_the_bug() -> None:
    assert judge(rows(0, 0.5, 1.0)).first is None
    assert judge(rows(0, 2e5, 0, 3e5)).first == 1 == judge(rows(0, 2e5), estimated=True).first
    assert (
        first_isolated(rows(0, 0, 2, 3)) == Divergence(2) and first_isolated(rows(0)).first is None
    )


@pytest.mark.parametrize(
    ("overs", "first"),
    [
        ((2.9, 0, 0), None),  # a little above an estimated limit, and nothing later is
        ((3.1, 0, 0), 0),
        ((2.9,), 0),  # nothing after it was compared
        ((2.9, replace(row(0), error=None, wrong=False)), 0),
        ((2.9, 0, 2.9), 2),  # the last one itself has nothing after it
        ((2.9, 0, 3.1), 0),
    ],
)
def test_a_value_a_little_above_an_estimated_limit(overs: Any, first: int | None) -> None:
    assert judge(rows(*overs), estimated=True).first == first
    assert judge(rows(*overs)).first == 0  # above a measured one


@pytest.mark.parametrize(("over", "first"), [(1.9, None), (2.1, 0)])
def test_a_value_a_little_above_a_measured_limit(over: float, first: int | None) -> None:
    """In 16 bits a second run does not show how a port rounds inside of an operation."""
    assert judge(rows(over, 0, 0)).first == 0
    assert judge([replace(one, dtype="bf16") for one in rows(over, 0, 0)]).first == first


@pytest.mark.parametrize(("name", "first"), [("b.1.gate", None), ("b.1.other", 5)])
def test_another_shape_in_each_block_is_a_form_of_the_ports_own(
    name: str, first: int | None
) -> None:
    """The one of the first block is ignored: what follows agrees."""
    found = rows(row(None, "b.0.gate"), 0, 0, 0, 0, row(None, name), 9e5)
    assert judge(found).first == (6 if first is None else first)


@pytest.mark.parametrize(
    ("overs", "leads", "first"),
    [((9e5, 0, 0), True, None), ((9e5, 0, 0), False, 0), ((9e5, 0, 9e5), True, 0)],
)
def test_a_value_that_leads_to_right_ones_is_no_bug(
    overs: Any, leads: bool, first: int | None
) -> None:
    assert judge(rows(*overs), leads_to_right=leads).first == first


@pytest.mark.parametrize(("site", "first"), [("attention", 1), ("other", 0)])
def test_what_one_call_returns_is_in_the_ports_order(site: str, first: int) -> None:
    """Also where its pairs are guesses: the reference lists the output before the probabilities."""
    found = rows(row(9e5, "attention"), row(9e5, site, slot="out.1"), row(9e5, "after"))
    judged = first_divergence(found, RowTests(is_guessed=lambda at: at < 2), port_order=[1, 0, 2])
    assert judged.first == first


@pytest.mark.parametrize(
    ("overs", "estimated", "first"),
    [
        ((2, 601), False, 1),  # not the same error, grown
        ((2, 599), False, 0),
        ((99, 99 * 301), False, 1),
        ((101, 101 * 301), False, 0),  # too large for rounding
        ((2, 20, 20 * 301), False, 2),
        ((2, 20, 200, 2000, 20000), False, 0),  # little by little
        ((2, 41), True, 1),  # the limit before it may be too low
        ((2, 39), True, 0),
        ((3.1, 3.1 * 21), True, 0),
    ],
)
def test_a_jump_after_a_small_error(overs: Any, estimated: bool, first: int) -> None:
    assert judge(rows(*overs), estimated=estimated).first == first


@pytest.mark.parametrize(
    ("after", "ignored"),
    [
        ((0, 0, 0, 0), True),
        ((0, 0, 0, 0, 500), True),  # four that agree are enough
        ((0, 0, 0, 500), False),
        ((0, 0), True),  # all there are
        ((), False),
        ((row(0, site="v0", slot="out.1"),), False),  # of itself, not after it
    ],
)
@pytest.mark.parametrize("over", [500, None])
def test_a_value_recorded_at_another_point(after: Any, ignored: bool, over: float | None) -> None:
    found = judge(rows(over, *after), misplaced=True)
    assert (0 in found.ignored) == ignored
    assert judge(rows(over, *after), misplaced=True, spoils=True).first == 0
    if over is not None:
        assert judge(rows(over, *after)).first == 0


def test_only_values_of_its_component_and_pass_show_that_it_is_not_used() -> None:
    wrong = row(500, "net/a")

    def is_ignored(*after: Row, first: Row = wrong) -> bool:
        return 0 in judge([first, *after], misplaced=True).ignored

    assert is_ignored(row(0, "net/b"))
    assert not is_ignored(row(0, "vae/b"))
    assert is_ignored(row(500, "vae/b"), row(0, "net/b"))
    seen = row(0, "net/f")
    frame = [seen, row(500, "net/a"), row(0, "net/f"), row(0, "net/b")]
    assert judge(frame, misplaced=True).first == 1  # the next frame does not depend on it
    other_step = [seen, row(500, "net/a"), row(0, "net/f", step=1)]
    assert judge(other_step, misplaced=True).first is None
    stream = (2, 3, 8)
    first = row(500, "net/a", shape=stream)
    streams = [row(0, f"net/{n}") for n in range(4)]
    assert is_ignored(*streams, first=first)
    own = row(500, "net/own", shape=(2, 3, 5))  # its own stream runs after the other one
    assert not is_ignored(*streams, own, first=first)
    assert is_ignored(*streams, row(500, "net/own", shape=(2, 4, 5)), first=first)


@pytest.mark.parametrize(
    ("outer", "later", "ignored"),
    [
        ([("net/a", 0.5)], 0, True),  # the module around it returns what it should
        ([("net/a", 2)], 0, False),
        ([("net", 0.5)], 0, True),
        ([("net/ab", 0.5)], 0, False),  # not around it
        ([("net/a", 0.5), ("net/a", 2)], 0, False),  # all that it returns has to agree
        ([("net/a", 0.5), ("net", 2)], 0, True),
        ([("net/a", 0.6)], 500, False),  # what is left of the error may be their cause
        ([("net/a", 0.4)], 500, True),
    ],
)
def test_a_module_that_returns_what_it_should(
    outer: list[tuple[str, float]], later: float, ignored: bool
) -> None:
    found = [row(500, "net/a.b"), *(row(over, site) for site, over in outer), row(later, "end")]
    assert (0 in judge(found).ignored) == ignored
    for change in ({"step": 1}, {"call": 1}, {"slot": "in.0"}):
        assert judge([found[0], *(replace(one, **change) for one in found[1:])]).first == 0


@pytest.mark.parametrize(
    ("slots", "dtype", "over", "ignored"),
    [
        (("in.0", "in.0"), "f32", 0.4, True),  # its weights have the order of its input
        (("in.0", "in.0"), "f32", 0.6, False),  # something is left, and later values are wrong
        (("in.0", "in.0"), "bf16", 0.6, True),  # which rounding gives in 16 bits
        (("in.0", "out"), "f32", 0.4, False),  # in the port the result of an operation of its own
        (("in.1", "in.1"), "f32", 0.4, False),  # positions may not show in this module
    ],
)
def test_a_module_that_returns_what_it_should_from_an_input_in_a_form_of_its_own(
    slots: tuple[str, str], dtype: str, over: float, ignored: bool
) -> None:
    first = row(500, "net/a", slot=slots[0], port_slot=slots[1])
    found = [replace(one, dtype=dtype) for one in (first, row(over, "net/a"), row(9e5, "end"))]
    assert (0 in judge(found).ignored) == ignored


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({}, 6),  # it was as wrong at the step before, where the values after it agree
        ({"error": 5e3 * 1.9 * LIMIT}, 6),
        ({"error": 5e3 * 2.1 * LIMIT}, 5),
        ({"slot": "in.0"}, 5),
        ({"step": 0}, 5),
        ({"error": None}, 5),
    ],
)
def test_a_value_in_a_form_of_its_own_is_so_at_every_step(
    changes: dict[str, Any], first: int
) -> None:
    own = row(5e3, "own")
    later = replace(own, step=1, **changes) if "step" not in changes else replace(own, **changes)
    found = [own, *(row(0, name) for name in "bcde"), later, row(9e5, "bug", step=1)]
    judged = first_divergence(found, RowTests(lambda at: at == 0))
    assert (0 in judged.ignored, judged.first) == (True, first)


def test_a_value_in_a_form_of_its_own_is_no_jump() -> None:
    own, small = row(5e4, "own"), row(20, "latents")
    agreeing = [row(0, name) for name in "bcde"]
    found = [own, *agreeing, small, replace(own, step=1), row(30, "patch", step=1)]
    assert first_divergence(found, RowTests(lambda at: at == 0)).first == 5
    found[6] = replace(own, site="other", step=1)
    assert (
        first_divergence(found, RowTests(lambda at: at == 0)).first == 5
    )  # nor is one that does not last
    found[7] = row(5e4, "patch", step=1)
    assert first_divergence(found, RowTests(lambda at: at == 0)).first == 6


def test_what_is_left_of_an_error_in_the_module_around_it() -> None:
    for over, ignored in ((0.9, True), (1.1, False)):
        outer = row(over, "net", limit=LIMIT * 2, wrong=False)
        assert (0 in judge([row(10.0, "net/a"), outer]).ignored) == ignored


@pytest.mark.parametrize(
    ("over", "changes", "unsure"),
    [
        (99, {}, True), (101, {}, False),  # over a limit in float32
        (99, {"peak": 11.9 * 99 * LIMIT}, True), (99, {"peak": 12.1 * 99 * LIMIT}, False),
        (9, {"error": 0.99e-4, "limit": 1e-5}, True), (9, {"error": 1.1e-4, "limit": 1e-5}, False),
        (99, {"dtype": "i32"}, False),
        (None, {}, False),
    ],
)  # fmt: skip
def test_a_small_error_of_which_nobody_knows_whence_it_came(
    over: float | None, changes: dict[str, Any], unsure: bool
) -> None:
    found = [row(over, "a", **changes), row(50, "b")]
    assert judge(found, is_anchored=False).undecided == unsure
    assert not judge(found).undecided  # what it is computed from agrees
    assert not judge([*found, row(101, "c")], is_anchored=False).undecided


@pytest.mark.parametrize(("over", "unsure"), [(19, True), (21, False)])
def test_coarse_numbers_are_unsure_where_limits_are_estimated(over: float, unsure: bool) -> None:
    found = [row(over, "a", dtype="bf16")]
    assert judge(found, is_anchored=False, estimated=True).undecided == unsure
    assert not judge(found, is_anchored=False).undecided
    assert (open_margin("bf16"), open_margin("f32"), open_margin("f64")) == (20, 100, 100)


def test_a_guessed_pair_that_agrees_later_is_no_pair() -> None:
    assert judge(rows(500, 0, 0), is_guessed=True).first is None
    assert judge(rows(500, 500), is_guessed=True, is_mispaired=False).first == 0
    assert judge(rows(500, 500), is_guessed=True, is_mispaired=True).first is None
    for error, unsure in ((0.99, False), (1.01, True)):  # nothing in common: perhaps no pair
        far = row(2, "a", error=error, limit=error / 150)
        tests = {"estimated": True, "is_guessed": True, "is_mispaired": False, "is_anchored": False}
        assert judge([far], **tests).undecided is unsure


def test_a_guess_is_no_pair_where_all_later_values_agree() -> None:
    """The first values after it may be wrong for the same reason: the port has them elsewhere."""
    found = rows(500, 500, 0, 0)
    tests = {"is_guessed": True, "is_mispaired": False, "spoils": True}
    assert judge(found, **tests).first == 0
    at_second = {"is_doubled": lambda at: at == 1, "is_guessed": lambda _: True}
    never = {"is_mispaired": lambda _: False, "spoils": lambda _: True}
    assert first_divergence(found, RowTests(**at_second, **never)).first is None
    assert judge(found[1:], **tests).first is None and judge(found[:1], **tests).first == 0


def test_another_shape_of_a_guess_does_not_explain_a_small_error() -> None:
    found = rows(20, 500_000, None)
    assert judge(found[:1] + found[2:]).first == 1
    guessed = {"is_guessed": lambda at: at == 1, "is_mispaired": lambda _: False}
    assert first_divergence(found[:1] + found[2:], RowTests(**guessed)).first == 0
    assert first_divergence(found[:2], RowTests(**guessed)).first == 1


def test_wrong_rows_whose_value_the_port_has_under_another_name() -> None:
    def pair(name: str, hash: str, how: str) -> Any:
        event = SimpleNamespace(hash=hash)
        own = SimpleNamespace(name=name)
        return SimpleNamespace(event=event, reference=(event,), port_event=own, how=how)

    found = rows(0, 500, 500, 500, 500)
    pairs = [pair("a", "1", "equal"), pair("b", "1", "siblings"), pair("c", "2", "siblings")]
    pairs += [pair("d", "1", "end"), pair("e", "1", "name")]
    assert doubled_rows(found, pairs) == {1}
    assert doubled_rows(found, [pair("b", "1", "equal"), *pairs[1:]]) == set()  # the same name


def test_a_guess_inside_of_a_module_that_returns_the_right_value_is_not_the_bug() -> None:
    """Its other outputs may not be compared: a port may have a value in a form of its own."""
    found = rows(row(500, "net/a.b"), row(0, "net/a"), row(500, "net/z"))
    for guessed, whole, first in ((True, False, 2), (False, False, 0), (False, True, 2)):
        assert judge(found, is_guessed=guessed, is_whole=whole, is_mispaired=False).first == first
    found[1] = replace(found[1], slot="out.image")  # one of several: of another stream
    assert judge(found, is_guessed=True, is_whole=False, is_mispaired=False).first == 0


def test_values_that_are_not_computed_from_a_guess_show_nothing_about_it() -> None:
    found = rows(500, 0, 0, 0, 0, 500)
    assert judge(found, is_guessed=True, is_mispaired=False).first == 5
    assert judge(found, is_guessed=True, is_mispaired=False, is_used=False).first == 0


def test_a_counterpart_that_comes_before_the_inputs_is_none() -> None:
    found = rows(500, 500)
    at_first = first_divergence(found, RowTests(is_impossible=lambda at: at == 0))
    assert (at_first.first, at_first.ignored) == (1, (0,))


def test_errors_in_limits() -> None:
    assert over_limit(row(3)) == pytest.approx(3) and over_limit(row(None)) == inf
    assert over_limit(replace(row(None), wrong=False)) == 0
    assert over_limit(replace(row(3), limit=0.0)) == inf == over_limit(replace(row(3), limit=None))
    assert over_limit(replace(row(0), limit=0.0)) == 0


def test_where_rounding_may_change_a_value_wholly_it_shows_nothing() -> None:
    """As behind a sinusoid of a time in bfloat16."""
    unrelated = row(1, site="v0", error=1.4, limit=1.1, wrong=True)
    larger = row(1, site="v0", error=2.1, limit=1.1, wrong=True)
    known = row(1, site="v0", error=1.4, limit=0.9, wrong=True)
    assert judge([unrelated, *rows(0)]).first is None
    assert judge([larger, *rows(2)]).first == judge([known, *rows(2)]).first == 0


def test_the_call_that_the_port_runs_first_is_named() -> None:
    """Also of a guess: it is the same value as the first wrong one in the reference's order."""
    found = rows(row(9e5, "a"), row(9e5, "b"), row(9e5, "a", call=1), row(9e5, "b", call=1))
    judged = first_divergence(
        found, RowTests(is_guessed=lambda at: at % 2 == 0), port_order=[2, 3, 0, 1]
    )
    assert judged.first == 2


@pytest.mark.parametrize(
    ("error", "guessed", "first"), [(1.9, True, 2), (2.1, True, 1), (2.1, False, 2)]
)
def test_a_guess_that_is_far_larger_does_not_show_where_an_error_was_made(
    error: float, guessed: bool, first: int
) -> None:
    found = rows(0, 90.0, error / LIMIT, error / LIMIT)
    assert judge(found, is_guessed=guessed, is_anchored=True).first == first
