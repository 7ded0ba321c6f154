"""What has nothing to do with each other is not explained."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from lydite.diff.findings import find
from support.findings import Array, evidence

SHAPES = [
    *[(1,), (2,), (3,), (7,), (16,), (64,), (1, 1), (2, 2), (4, 4), (1, 8), (3, 5), (16, 16)],
    *[(64, 48), (2, 3, 4), (1, 16, 16), (2, 16, 16), (2, 77, 32), (1, 64, 64), (8, 1, 6)],
    *[(1, 4, 8, 8), (2, 4, 16, 16), (1, 3, 32, 32), (1, 8, 8, 3), (1, 2, 8, 8, 4), (2,) * 5],
]
FLOORS = [("f32", 6e-8), ("f32", 1e-5), ("bf16", 2e-3), ("bf16", 1e-2), ("bf16", 5e-2)]
TRUE_OF_ITSELF = {"all-zero", "constant", "repeated"}  # a fact about the port, related or not

Maker = Callable[[np.random.Generator, tuple[int, ...]], Array]


def smooth(draw: np.random.Generator, shape: tuple[int, ...]) -> Array:
    x = draw.standard_normal(shape)
    for axis, size in enumerate(shape):
        x = sum(np.roll(x, by, axis) for by in range(min(5, size)))
    return np.asarray(x)


def softmax(draw: np.random.Generator, shape: tuple[int, ...]) -> Array:
    e = np.exp(3 * draw.standard_normal(shape))
    return e / e.sum(-1, keepdims=True)


MAKERS: dict[str, Maker] = {
    "normal": lambda draw, shape: draw.standard_normal(shape),
    "uniform": lambda draw, shape: draw.random(shape),
    "heavy tails": lambda draw, shape: draw.standard_t(1.5, shape),
    "sparse": lambda draw, shape: draw.standard_normal(shape) * (draw.random(shape) < 0.1),
    "whole numbers": lambda draw, shape: np.rint(2 * draw.standard_normal(shape)),
    "zeros and ones": lambda draw, shape: (draw.random(shape) < 0.5) * 1.0,
    "far from zero": lambda draw, shape: draw.integers(5, 50) + draw.standard_normal(shape),
    "large channels": lambda draw, shape: (
        draw.standard_normal(shape) * np.exp(4 * draw.standard_normal(shape[-1]))
    ),
    "equal channels": lambda draw, shape: (
        draw.standard_normal(shape) + 20 * np.random.default_rng(5).standard_normal(shape[-1])
    ),
    "softmax": softmax,
    "smooth": smooth,
    "rectified": lambda draw, shape: np.maximum(draw.standard_normal(shape), 0),
    "sorted": lambda draw, shape: np.sort(draw.standard_normal(shape), -1)[..., ::-1],
}


@pytest.mark.parametrize("name", MAKERS)
def test_unrelated_values_give_no_finding(name: str) -> None:
    draw = np.random.default_rng(list(MAKERS).index(name))
    make = MAKERS[name]
    for number in range(50):
        shape = SHAPES[number % len(SHAPES)]
        dtype, floor = FLOORS[draw.integers(len(FLOORS))]
        kind = ("activation", "activation", "schedule", "scalar")[draw.integers(4)]
        other = MAKERS[draw.choice(list(MAKERS))] if draw.random() < 0.2 else make
        reference = make(draw, shape).astype(np.float32)
        port = other(draw, shape[::-1] if draw.random() < 0.2 else shape).astype(np.float32)
        if dtype == "bf16" and draw.random() < 0.7:
            port = port.astype(ml_dtypes.bfloat16)
        near = make(draw, shape).astype(np.float32)
        e = evidence(
            reference,
            port,
            dtype,
            floor=floor,
            kind=kind,
            inputs={"in.0": (near, make(draw, shape).astype(np.float32))},
            others=[("near", near)],
        )
        found = [f for f in find(e) if f.cause not in TRUE_OF_ITSELF]
        assert not found, (shape, dtype, floor, kind, found)


@pytest.mark.parametrize("times", [0.5, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("name", MAKERS)
def test_noise_gives_no_finding(name: str, times: float) -> None:
    """Rounding alone, or an error that has no pattern."""
    draw = np.random.default_rng(list(MAKERS).index(name))
    for number in range(25):
        shape = SHAPES[number % len(SHAPES)]
        dtype, floor = FLOORS[draw.integers(len(FLOORS))]
        reference = MAKERS[name](draw, shape).astype(np.float32)
        rms = float(np.sqrt(np.mean(reference.astype(np.float64) ** 2)))
        noise = times * floor * rms * draw.standard_normal(shape)
        port = (reference + noise).astype(np.float32)
        found = [f for f in find(evidence(reference, port, dtype, floor=floor))]
        assert not found, (shape, dtype, floor, found)


def test_related_values_of_another_kind_give_no_finding() -> None:
    """Errors that need the operation to be understood are left to those who replay it."""
    draw = np.random.default_rng(0)
    x = 2 * draw.standard_normal((2, 77, 64))
    silu, quick = x / (1 + np.exp(-x)), x / (1 + np.exp(-1.702 * x))
    w = draw.standard_normal((64, 64)) / 8
    for reference, port in ((silu, quick), (x @ w, x @ w.T), (silu, np.maximum(x, 0))):
        assert find(evidence(reference.astype(np.float32), port.astype(np.float32))) == ()
