"""Factors and offsets, their numbers and their names."""

import re

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lydite.diff.findings import find
from lydite.diff.findings.affine import _RANGES
from support.findings import PRECISIONS, Array, causes, evidence, recorded, values

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = [(256,), (12, 48), (2, 12, 48), (1, 8, 16, 20)]
FACTORS = st.one_of(st.floats(-8, -0.05), st.floats(0.05, 0.9), st.floats(1.1, 2000))


def number_after(text: str, words: str) -> float:
    return float(text.split(words)[1].split()[0].strip(";,()"))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=SEEDS, factor=FACTORS)
def test_scaled(shape: tuple[int, ...], precision: str, seed: int, factor: float) -> None:
    assume(abs(factor + 1) > 0.05)
    draw = np.random.default_rng(seed)
    x = values(shape, draw)
    (finding,) = find(evidence(x, recorded(factor * x, precision, draw), precision))
    assert finding.cause == "scaled"
    found = number_after(finding.evidence, "port = ")
    assert found == pytest.approx(factor, rel=1e-2 if precision == "bf16" else 1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_negated(shape: tuple[int, ...], precision: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    x = values(shape, draw)
    assert causes(evidence(x, recorded(-x, precision, draw), precision)) == ["negated"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=SEEDS, share=st.floats(0.1, 5.0), sign=st.sampled_from([-1, 1]))
def test_shifted(
    shape: tuple[int, ...], precision: str, seed: int, share: float, sign: int
) -> None:
    draw = np.random.default_rng(seed)
    x = values(shape, draw)
    offset = sign * share * float(x.std())
    (finding,) = find(evidence(x, recorded(x + offset, precision, draw), precision))
    assert finding.cause == "shifted"
    found = number_after(finding.evidence, "reference + ")
    assert found == pytest.approx(offset, rel=5e-2 if precision == "bf16" else 1e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=SEEDS, factor=st.floats(0.2, 0.8), share=st.floats(0.3, 2))
def test_scaled_and_shifted(precision: str, seed: int, factor: float, share: float) -> None:
    draw = np.random.default_rng(seed)
    x = values((2, 12, 48), draw)
    x -= x.mean()  # else the offset may be mostly a factor
    offset = share * float(x.std())
    (finding,) = find(evidence(x, recorded(factor * x + offset, precision, draw), precision))
    assert finding.cause == "scaled-and-shifted"
    found = number_after(finding.evidence, "port = ")
    assert found == pytest.approx(factor, rel=2e-2 if precision == "bf16" else 1e-4)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("cause", "shape", "along", "words"),
    [
        ("shifted-per-channel", (2, 12, 48), (48,), "channel (axis 2)"),
        ("shifted-per-channel", (1, 8, 16, 20), (8, 1, 1), "entry of axis 1"),
        ("shifted-per-channel", (3, 12, 48), (3, 1, 48), "batch row and channel (axis 2)"),
        ("scaled-per-channel", (2, 12, 48), (48,), "channel (axis 2)"),
        ("scaled-per-channel", (1, 8, 16, 20), (8, 1, 1), "entry of axis 1"),
        ("scaled-per-channel", (3, 8, 16, 20), (3, 8, 1, 1), "batch row and entry of axis 1"),
        ("affine-per-channel", (2, 12, 48), (48,), "channel (axis 2)"),
        ("scaled-per-row", (2, 12, 48), (2, 12, 1), "row of 48"),
        ("affine-per-row", (2, 12, 48), (2, 12, 1), "row of 48"),
    ],
)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_one_number_per_channel_or_row(
    cause: str,
    shape: tuple[int, ...],
    along: tuple[int, ...],
    words: str,
    precision: str,
    seed: int,
) -> None:
    draw = np.random.default_rng(seed)
    x = values(shape, draw)
    factor = 1 + 0.4 * draw.uniform(-1, 1, along) if cause[:7] != "shifted" else 1.0
    offset = x.std() * draw.standard_normal(along) if cause[:6] != "scaled" else 0.0
    found = find(evidence(x, recorded(factor * x + offset, precision, draw), precision))
    assert [finding.cause for finding in found] == [cause]
    assert words in found[0].evidence


@pytest.mark.parametrize(
    ("factor", "name"),
    [
        (48**0.5, "√48"),
        (8**-0.5, "1/√8"),
        (2.0, "= 2 ×"),
        (0.5, "(1/2)"),
        (1000.0, "(1000, the"),
        (0.18215, "Stable Diffusion 1"),
        (1 / 0.18215, "1/0.18215"),
        (0.13025, "SDXL"),
        (1.5305, "Stable Diffusion 3"),
        (0.3611, "FLUX"),
        ((47 / 48) ** 0.5, "√(47/48)"),
        ((16 / 15) ** 0.5, "√(16/15)"),
        ((1151 / 1152) ** 0.5, "√(1151/1152)"),
    ],
)
def test_known_factors_have_names(factor: float, name: str) -> None:
    draw = np.random.default_rng(0)
    x = values((2, 24, 48), draw)
    (finding,) = find(evidence(x, recorded(factor * x, "f32", draw)))
    assert name in finding.evidence


@pytest.mark.parametrize("factor", [0.77, 3.217, 1.01])
def test_other_factors_have_none(factor: float) -> None:
    draw = np.random.default_rng(0)
    x = values((2, 24, 48), draw)
    (finding,) = find(evidence(x, recorded(factor * x, "f32", draw)))
    assert "(" not in finding.evidence


def range_of(picture: Array) -> str:
    """Its least and its largest value, as a sentence writes them."""
    return f"[{picture.min():.4g}, {picture.max():.4g}]".replace("-", "−")


@pytest.mark.parametrize(("a", "b"), _RANGES)
def test_ranges_of_pictures_are_named(a: float, b: float) -> None:
    """The sentence of each row says which range to draw from; the values say which they have."""
    draw = np.random.default_rng(0)
    named = re.findall(r"\[(\S+), (\S+)\]", _RANGES[a, b].replace("−", "-"))
    low, high = map(float, named[-1])
    x = draw.permutation(np.linspace(low, high, 768, dtype=np.float32)).reshape(1, 3, 16, 16)
    port = recorded(a * x + b, "f32", draw)
    (finding,) = find(evidence(x, port))
    assert finding.cause == "scaled-and-shifted"
    ranges = f"the port has {range_of(port)} where the reference has {range_of(x)}."
    assert finding.fix == f"Change the range: {ranges}"


def test_the_simplest_fit_that_leaves_nothing_is_told() -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((2, 12, 48)).astype(np.float32)
    offsets = 50 + 0.1 * draw.standard_normal(48)  # a constant explains 99.9 % of it, but not all
    assert causes(evidence(x, recorded(x + offsets, "f32", draw))) == ["shifted-per-channel"]


def layer_norm(x: Array, eps: float = 1e-6, ddof: int = 0) -> Array:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True, ddof=ddof) + eps)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_norms_as_they_go_wrong(precision: str) -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((2, 40, 64)) * np.exp(draw.standard_normal((2, 40, 1))) + 0.3
    weight, bias = 1 + 0.3 * draw.standard_normal(64), draw.standard_normal(64)
    rms = x / np.sqrt((x**2).mean(-1, keepdims=True))

    def cause(right: Array, wrong: Array) -> list[str]:
        return causes(evidence(right, recorded(wrong, precision, draw), precision))

    assert cause(layer_norm(x) * weight + bias, layer_norm(x)) == ["affine-per-channel"]
    assert cause(rms * (1 + weight), rms * weight) == ["scaled-per-channel"]
    assert cause(layer_norm(x), rms) == ["affine-per-row"]
    assert cause(layer_norm(x), layer_norm(x, eps=0.3)) == ["scaled-per-row"]
    assert cause(x @ np.eye(64) + bias, x) == ["shifted-per-channel"]


def test_a_factor_of_1000_is_seen_in_a_single_number() -> None:
    assert causes(evidence([0.25], [250.0], kind="scalar")) == ["scaled"]
    assert causes(evidence([0.25], [25.0], kind="scalar")) == []
