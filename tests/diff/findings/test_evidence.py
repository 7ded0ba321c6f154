"""The evidence that hypotheses work on."""

import numpy as np
import pytest

from lydite.diff.findings import find
from lydite.diff.findings.evidence import axis_names, comparable
from support.findings import causes, evidence, values


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
