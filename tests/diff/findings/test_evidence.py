"""The evidence that hypotheses work on."""

import numpy as np
import pytest

from lydite.diff.findings import Evidence, find
from lydite.diff.findings.evidence import axis_names, comparable
from support.findings import Array, causes, evidence, values


def test_axes_have_the_names_that_dims_gives() -> None:
    assert axis_names("b s (h d)", 3) == ["b", "s", "(h d)"]
    assert axis_names("b s (h d)", 4) is None
    assert axis_names(None, 3) is None
    e = evidence(np.zeros((1, 2, 3)), np.zeros((1, 2, 3)), dims="b s (h d)")
    assert e.axis(2) == "axis 2 ((h d))"
    assert [e.role(axis) for axis in range(3)] == ["batch", "position", "channel"]


@pytest.mark.parametrize(
    ("dims", "roles"),
    [
        ("b c h w", ["batch", "channel", "space", "space"]),
        ("b h s d", ["batch", "head", "position", "channel"]),
        ("b (h w) c", ["batch", "position", "channel"]),
        (None, ["batch", "", "", ""]),
    ],
)
def test_roles_of_axes(dims: str | None, roles: list[str]) -> None:
    shape = np.zeros((2,) * len(roles))
    assert [evidence(shape, shape, dims=dims).role(axis) for axis in range(len(roles))] == roles


def test_what_is_not_finite_becomes_large_and_equal_on_both_sides() -> None:
    a, b = comparable(np.array([1.0, -np.inf, np.nan]), np.array([-np.inf, 3.0, 1.0]))
    assert a.tolist() == [1.0, -6.0, 0.0]
    assert b.tolist() == [-6.0, 3.0, 1.0]


def test_the_lowest_number_of_a_mask_does_not_overflow() -> None:
    low = np.finfo(np.float32).min
    mask = np.where(np.tri(16, dtype=bool), 0, low).astype(np.float32)
    assert causes(evidence(mask, mask.T.copy()))[0] == "transposed"


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (1, 1, 1)])
def test_tiny_and_empty_values_are_no_trouble(shape: tuple[int, ...]) -> None:
    right = np.full(shape, 0.5, np.float32)
    for kind in ("activation", "ids", "schedule", "scalar"):
        assert find(evidence(right, right, kind=kind)) == ()
        find(evidence(right, right + 1, kind=kind))
        find(evidence(right, np.zeros((3, 2), np.float32), kind=kind))


def test_zeros_and_nothing_else() -> None:
    zeros, ones = np.zeros((4, 8), np.float32), np.ones((4, 8), np.float32)
    assert find(evidence(zeros, zeros)) == ()
    assert find(evidence(zeros, ones)) == ()  # both constant: nothing to recognise
    assert causes(evidence(np.arange(32.0).reshape(4, 8), zeros)) == ["all-zero"]


def test_findings_are_plain_and_at_most_five() -> None:
    draw = np.random.default_rng(0)
    x = values((2, 8, 8), draw)
    found = find(evidence(x, x.swapaxes(1, 2).copy(), others=[("k", x.swapaxes(1, 2))]))
    assert [type(finding).__name__ for finding in found] == ["Finding"] * len(found)
    assert {finding.cause for finding in found} == {"another-value", "transposed"}
    assert len(found) <= 5


def test_integers_and_sixteen_bits_are_read() -> None:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 255, (16, 16, 3)).astype(np.uint8)
    assert causes(evidence(x, x[..., ::-1], "u8")) == ["flipped"]
    y = draw.standard_normal((16, 48)).astype(np.float16)
    assert causes(evidence(y, -y, "f16")) == ["negated"]


DRAW = np.random.default_rng(5)
RIGHT, OTHER = DRAW.standard_normal((2, 40, 30))


def judged(floor: float = 1e-9) -> Evidence:
    """Two unrelated values: a hypothesis has all of the error to explain."""
    return evidence(RIGHT, OTHER, floor=floor)


def test_how_much_of_an_error_an_explanation_may_leave() -> None:
    e, size = judged(), float(np.linalg.norm(OTHER))
    lost, part = float(np.linalg.norm(OTHER - RIGHT)), 1e-3**0.5
    assert (e.lost, e.norms[1]) == pytest.approx((lost, size))
    lost = min(lost, e.spread)
    assert e.explains(0.999 * part * lost) and not e.explains(1.001 * part * lost)
    assert e.explains(0.999 * part * 10, 10.0) and not e.explains(1.001 * part * 10, 10.0)
    assert not e.explains(0.0, 0.0)  # there is no error
    noisy = judged(floor=0.05)  # four roundings are practically equal
    assert noisy.noise() == pytest.approx(0.2 * size)
    assert noisy.noise(3.0) == pytest.approx(0.6 * float(np.linalg.norm(RIGHT))) == noisy.noise(-3)
    assert noisy.explains(0.199 * size) and not noisy.explains(0.201 * size)
    assert noisy.explains(0.25 * size, scale=1.5)
    coarse = judged(floor=0.3)
    assert coarse.explains(0.399 * lost) and not coarse.explains(0.401 * lost)


def test_an_explanation_does_not_fit_by_chance() -> None:
    e = judged()
    own = OTHER - OTHER.mean()
    effective = min(np.sum(v**2) ** 2 / np.sum(v**4) for v in (own, OTHER - RIGHT))
    bits = effective * 24 - 40
    assert e.explains(0.0, choices=bits - 1) and not e.explains(0.0, choices=bits + 1)
    left = 2.0**-8 * min(e.lost, e.spread)
    bits = effective * 8 - 40
    assert e.explains(left, choices=bits - 1) and not e.explains(left, choices=bits + 1)
    half = effective * 12 - 40
    assert e.explains(0.0, free=600, choices=half - 1)
    assert not e.explains(0.0, free=600, choices=half + 1)
    mask = evidence(np.zeros((40, 30)), (OTHER > 0).astype(float))  # one bit in each value
    bits = mask.effective - 40
    assert mask.variety == 1 and mask.explains(0.0, choices=bits - 1)
    assert not mask.explains(0.0, choices=bits + 1)


def test_a_single_outlier_is_one_value() -> None:
    spike = np.zeros((40, 30))
    spike[3, 4] = 1e6
    assert evidence(RIGHT, RIGHT + spike).effective == pytest.approx(1, rel=0.01)
    assert evidence(RIGHT, RIGHT.T + 0.0).effective > 300  # of another shape: its own values


@pytest.mark.parametrize(
    ("values", "bits"),
    [
        (np.arange(64.0), 6.0),  # whole numbers
        (np.arange(64) % 16 + 0.25, 4.0),
        (np.arange(64) / 64 + 1e-3, 24.0),
        (np.r_[np.arange(48), np.zeros(16)] + 0.25, 24.0),  # three quarters are distinct
        (np.r_[np.arange(46), np.zeros(18)] + 0.25, np.log2(46)),
    ],
)
def test_bits_of_information_in_a_value(values: Array, bits: float) -> None:
    assert evidence(values, values).variety == pytest.approx(bits)


def test_what_is_wrong_and_what_a_few_values_promise() -> None:
    size = float(np.linalg.norm(RIGHT))
    for share, wrong in ((1.99, False), (2.01, True)):
        port = RIGHT * (1 + share * 1e-3)
        assert evidence(RIGHT, port, floor=1e-3).wrong == wrong
    assert evidence(RIGHT, RIGHT.T).wrong and size > 1
    port, right = OTHER.reshape(-1), RIGHT.reshape(-1)
    gap = port - right
    for floor, share in ((1e-9, 0.009**0.5), (1.0, 0.4**0.5)):
        e = judged(floor)
        for factor, promised in ((0.999, True), (1.001, False)):
            assert e.promises(port, port - factor * share * gap, right) == promised
    e = judged(floor=0.02)  # twice four roundings
    for factor, promised in ((0.999, True), (1.001, False)):
        other = port * (1 - factor * 8 * 0.02)
        assert e.promises(port, other, right) == promised
        assert e.promises(port, other, None) == promised  # against its own mean


def test_equal_rows_do_not_make_numbers_coarse() -> None:
    row = np.random.default_rng(4).standard_normal((1, 20)).astype(np.float32)
    assert evidence(np.repeat(row, 4, 0), np.repeat(row, 4, 0)).variety == 24.0
    few = np.round(row)  # whole numbers are coarse in one row as well
    assert evidence(np.repeat(few, 4, 0), np.repeat(few, 4, 0)).variety < 5
