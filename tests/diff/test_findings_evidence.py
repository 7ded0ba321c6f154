"""The evidence itself, and how the other tests of findings make it."""

from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from lydite.diff.findings import Evidence, find
from lydite.diff.findings.evidence import axis_names, comparable

Array = NDArray[Any]
FLOORS = {"f32": 6e-8, "bf16": 2e-3}
PRECISIONS = tuple(FLOORS)


def evidence(
    reference: ArrayLike,
    port: ArrayLike,
    dtype: str = "f32",
    *,
    floor: float | None = None,
    kind: str = "activation",
    dims: str | None = None,
    place: str = "out",
    inputs: Mapping[str, tuple[Array, Array]] | None = None,
    others: Iterable[tuple[str, Array]] = (),
) -> Evidence:
    """Evidence with everything that a test does not care about filled in."""
    floor = FLOORS.get(dtype, 0.0) if floor is None else floor
    pair = (np.asarray(reference), np.asarray(port))
    return Evidence(*pair, floor, "m", place, dtype, kind, dims, inputs or {}, lambda: others)


def seen(value: ArrayLike, precision: str, draw: np.random.Generator) -> Array:
    """The value as a port in this precision would record it: rounded, by other kernels."""
    value = np.asarray(value, np.float64)
    if precision == "bf16":
        return value.astype(ml_dtypes.bfloat16)
    return (value * (1 + 4e-8 * draw.standard_normal(value.shape))).astype(np.float32)


def values(shape: tuple[int, ...], draw: np.random.Generator) -> Array:
    """Values as they occur: normal, with heavy tails, with large channels, or mostly positive."""
    normal = draw.standard_normal(shape)
    kind = draw.integers(4)
    if kind == 1:
        normal = draw.standard_t(6, shape)
    elif kind == 2 and len(shape) > 1:
        normal = normal * np.exp(0.7 * draw.standard_normal(shape[-1]))
    elif kind == 3:
        normal = np.maximum(normal, -0.3) + 0.1 * normal
    return (normal * 10 ** draw.uniform(-2, 2)).astype(np.float32)


def causes(e: Evidence) -> list[str]:
    """The causes found, in order."""
    return [finding.cause for finding in find(e)]


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
