"""When a replayed variant is told: how much it may leave, and which of several near ones it is."""

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from lydite.diff.findings.evidence import Recorded
from lydite.diff.findings.replay.layer_input import _rearrangements
from lydite.diff.findings.replay.sampler_steps import _contributes
from lydite.diff.findings.replay.variants import (
    Candidate,
    Source,
    allowed,
    apart_of,
    fit_tolerance,
    inputs_of,
    is_replayable,
    nearest,
    simplest,
    sources,
    told_apart,
)
from support.findings import Array, evidence

DRAW = np.random.default_rng(2)
RIGHT, WRONG, OTHER = DRAW.standard_normal((3, 20, 30))


def off(value: Array, norm: float) -> Array:
    """A value that is so far from another."""
    return value + norm / float(np.linalg.norm(OTHER)) * OTHER


def test_how_much_of_an_error_a_variant_may_leave() -> None:
    lost, size = (float(np.linalg.norm(x)) for x in (WRONG - RIGHT, WRONG))
    largest = max(size, float(np.linalg.norm(RIGHT)))
    e = evidence(RIGHT, WRONG, floor=1e-9)  # far apart: a thousandth of the value
    assert allowed(e) == pytest.approx(1e-3 * largest) and 1e-3 * largest < 0.02 * lost
    near = evidence(RIGHT, off(RIGHT, 0.01 * size), floor=1e-9)  # close: 2 % of the error
    assert allowed(near) == pytest.approx(0.02 * 0.01 * size, rel=1e-3)
    coarse = evidence(RIGHT, WRONG, floor=0.02)  # four roundings
    assert allowed(coarse) == pytest.approx(0.08 * size)
    hidden = evidence(RIGHT, off(RIGHT, 0.02 * size), floor=0.02)  # a quarter of the error
    assert allowed(hidden) == pytest.approx(0.02 * size / 4, rel=1e-3)
    assert fit_tolerance(e) == 1e-4 and fit_tolerance(coarse) == 0.08


@pytest.mark.parametrize(("share", "told"), [(0.9, True), (1.1, False)])
def test_both_sides_have_to_be_explained(share: float, told: bool) -> None:
    e = evidence(RIGHT, WRONG, floor=1e-9)
    right, wrong = Candidate("right", RIGHT), Candidate("wrong", WRONG)
    reference = Candidate("right", off(RIGHT, share * allowed(e)))
    port = Candidate("wrong", off(WRONG, share * allowed(e)))
    assert (told_apart(e, [reference, wrong]) is not None) == told
    found = told_apart(e, [right, port], what="forms")
    assert (found is not None) == told and e.ruled_out == ([] if told else ["2 forms"])
    assert found is None or (found.right, found.wrong) == ("right", "wrong")


def test_which_variant_is_told() -> None:
    e = evidence(RIGHT, WRONG, floor=1e-9)
    right, wrong = Candidate("right", RIGHT), Candidate("wrong", WRONG)
    assert told_apart(e, []) is None
    assert told_apart(e, [right], what="forms") is None and e.ruled_out == ["1 forms"]
    same = evidence(RIGHT, RIGHT, floor=1e-9)
    assert told_apart(same, [right, wrong]) is None  # the port is the right one
    assert told_apart(e, [right, wrong], reference_is="wrong") is None
    own = [Candidate("right", OTHER), Candidate("wrong", WRONG)]
    found = told_apart(e, [right, Candidate("wrong", OTHER)], lambda: own)
    assert found and found.wrong == "wrong"  # from the port's own inputs
    found = told_apart(e, [right, wrong], lambda: [replace(c, value=OTHER) for c in own])
    assert found and found.wrong == "wrong"  # or from the reference's


@pytest.mark.parametrize(
    ("lefts", "like", "name"),
    [
        ({"a": 1.0, "b": 2.9}, "b", "b"), ({"a": 1.0, "b": 3.1}, "b", "a"),
        ({"a": 1.0, "b": 2.0}, "", "a"), ({"a": 2.0, "b": 1.0}, "", "a"),
        ({"x with p": 1.0, "y with q": 2.0}, "z with q", "y with q"),
        ({"a": 0.0, "b": 1e-30}, "b", "a"),
    ],
)  # fmt: skip
def test_of_variants_that_leave_as_much_the_likest_is_meant(
    lefts: dict[str, float], like: str, name: str
) -> None:
    assert simplest(list(lefts.items()), like) == name


def test_the_array_that_a_fit_is() -> None:
    x, y = RIGHT[0], WRONG[0]
    size = float(np.linalg.norm(x))
    step = y / np.linalg.norm(y) * size
    assert nearest(x + 2.9e-3 * step, {"y": y, "x": x}) == "x"
    assert nearest(x + 3.1e-3 * step, {"y": y, "x": x}) is None and nearest(x, {}) is None
    two = {"x": x, "also": x + 0.02 * step}
    assert nearest(x + 4e-3 * step, two, 0.1) == "x"
    assert nearest(x + 6e-3 * step, two, 0.1) is None  # two could be it


def test_values_that_can_be_computed_again() -> None:
    fine = evidence(RIGHT, WRONG)
    assert is_replayable(fine) and is_replayable(evidence(RIGHT[0, :8], WRONG[0, :8]), least=8)
    assert not is_replayable(evidence(RIGHT[0], WRONG[0])) and not is_replayable(
        evidence(RIGHT, WRONG, kind="schedule")
    )
    assert not is_replayable(evidence(RIGHT, WRONG[:, :9]))
    assert not is_replayable(evidence(RIGHT, np.sign(WRONG)))  # a mask has no variety
    assert apart_of(RIGHT, RIGHT.T) == inf == apart_of(RIGHT, RIGHT * np.nan)
    assert apart_of(RIGHT, WRONG) == pytest.approx(float(np.linalg.norm(RIGHT - WRONG)))


def test_what_an_operation_may_have_taken() -> None:
    given = {"in.0": (RIGHT, WRONG)}
    e = evidence(RIGHT, WRONG, inputs=given)
    batch, tokens = DRAW.standard_normal((40, 30)), DRAW.standard_normal((1, 6, 4))
    before = [
        Recorded("m [in.0]", OTHER), Recorded("m [in.1]", OTHER[:9]), Recorded("n [in.2]", WRONG),
        Recorded("pair", batch, lambda: batch + 1), Recorded("again", RIGHT.copy()),
        Recorded("none", np.zeros((0, 30))),
    ]  # fmt: skip
    e = replace(e, before=lambda: before)
    assert [source.name for source in inputs_of(e)] == ["m [in.0]", "m [in.1]"]
    first, *rest = inputs_of(e)
    assert np.array_equal(first.own, WRONG) and np.array_equal(rest[0].own, rest[0].x)
    found = {source.name: source for source in sources(e)}
    names = ["m [in.0]", "m [in.1]", "n [in.2]", *(f"pair (part {n} of the batch)" for n in (0, 1))]
    assert set(found) == set(names)
    second = found["pair (part 1 of the batch)"]
    assert np.array_equal(second.x, batch[20:]) and np.array_equal(second.own, batch[20:] + 1)
    picture: Any = DRAW.standard_normal((1, 4, 2, 3))
    e = replace(evidence(picture, picture + 1), before=lambda: [Recorded("t", tokens)])
    (source,) = sources(e)
    assert source.name == "t as a picture"
    assert np.array_equal(source.x, tokens.swapaxes(1, 2).reshape(1, 4, 2, 3))


def test_positions_in_which_a_layer_may_take_its_input() -> None:
    x = DRAW.standard_normal((1, 12, 5))
    tried = {each.name: each.value for each in _rearrangements(x)}
    assert np.array_equal(tried.pop(next(iter(tried))), x)  # as it is, first
    moves = {name for name in tried if name.startswith("moved by") and "axis 1" in name}
    assert moves == {f"moved by {sign}{by} along axis 1" for by in (1, 2, 3) for sign in ("", "−")}
    assert not any(name.endswith("axis 0") for name in tried)  # of one row there is one order
    assert np.array_equal(tried["moved by 2 along axis 1"], np.roll(x, 2, 1))
    assert np.array_equal(tried["moved by −3 along axis 2"], np.roll(x, -3, 2))
    assert np.array_equal(tried["backwards along axis 2"], x[..., ::-1])
    halves = tried["with the parts [1, 0] of axis 1"]
    assert np.array_equal(halves, np.concatenate([x[:, 6:], x[:, :6]], 1))
    turned = tried["with axis 1 read as 3 × 4 and transposed"]
    assert np.array_equal(turned, x.reshape(1, 3, 4, 5).swapaxes(1, 2).reshape(x.shape))
    assert len([name for name in tried if "parts [" in name]) == 1 + 5 + 23  # in 2, 3 and 4


@pytest.mark.parametrize(("share", "counts"), [(1.1e-3, True), (0.9e-3, False)])
def test_a_term_of_a_step_contributes_something(share: float, counts: bool) -> None:
    terms = [
        Source(name, x, lambda: None) for name, x in zip("abc", (RIGHT, WRONG, OTHER), strict=True)
    ]
    value = RIGHT + WRONG
    factor = share * float(np.linalg.norm(value)) / float(np.linalg.norm(OTHER))
    assert _contributes(tuple(terms), np.array([1.0, 1.0, factor]), value) == counts
