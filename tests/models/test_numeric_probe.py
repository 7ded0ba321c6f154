"""The probe of `lydite doctor` sees TF32 and Winograd, simulated here in NumPy."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from lydite.models.numeric_probe import Floats, Reading, probe

KINDS = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def by_name(readings: list[Reading]) -> dict[tuple[str, str], Reading]:
    return {(reading.operation, reading.dtype): reading for reading in readings}


def tf32(x: Floats) -> Floats:
    """Ten bits of mantissa, rounded to the nearest even number."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000
    return rounded.astype(np.uint32).view(np.float32)


def tf32_matmul(a: Floats, b: Floats, dtype: str) -> Floats:
    return stored(tf32(a) @ tf32(b), dtype) if dtype == "float32" else stored(a @ b, dtype)


def stored(x: NDArray[Any], dtype: str) -> Floats:
    return x.astype(KINDS[dtype]).astype(np.float32)


# F(6×6, 3×3), Lavin and Gray (2016): points 0, ±1, ±2, ±1/2 and infinity.
INPUT = np.array(
    [
        [1, 0, -21 / 4, 0, 21 / 4, 0, -1, 0],
        [0, 1, 1, -17 / 4, -17 / 4, 1, 1, 0],
        [0, -1, 1, 17 / 4, -17 / 4, -1, 1, 0],
        [0, 1 / 2, 1 / 4, -5 / 2, -5 / 4, 2, 1, 0],
        [0, -1 / 2, 1 / 4, 5 / 2, -5 / 4, -2, 1, 0],
        [0, 2, 4, -5 / 2, -5, 1 / 2, 1, 0],
        [0, -2, 4, 5 / 2, -5, -1 / 2, 1, 0],
        [0, -1, 0, 21 / 4, 0, -21 / 4, 0, 1],
    ]
)
WEIGHT = np.array(
    [
        [1, 0, 0],
        [-2 / 9, -2 / 9, -2 / 9],
        [-2 / 9, 2 / 9, -2 / 9],
        [1 / 90, 1 / 45, 2 / 45],
        [1 / 90, -1 / 45, 2 / 45],
        [32 / 45, 16 / 45, 8 / 45],
        [32 / 45, -16 / 45, 8 / 45],
        [0, 0, 1],
    ]
)
OUTPUT = np.array(
    [
        [1, 1, 1, 1, 1, 1, 1, 0],
        [0, 1, -1, 2, -2, 1 / 2, -1 / 2, 0],
        [0, 1, 1, 4, 4, 1 / 4, 1 / 4, 0],
        [0, 1, -1, 8, -8, 1 / 8, -1 / 8, 0],
        [0, 1, 1, 16, 16, 1 / 16, 1 / 16, 0],
        [0, 1, -1, 32, -32, 1 / 32, -1 / 32, 1],
    ]
)


def winograd_conv(x: Floats, weight: Floats, dtype: str) -> Floats:
    """Transformed inputs, weights and products are stored in the dtype, as MLX's kernels do."""
    height, width, channels = x.shape
    rows, columns = -(-height // 6), -(-width // 6)
    padded = np.zeros((rows * 6 + 2, columns * 6 + 2, channels), np.float32)
    padded[1 : height + 1, 1 : width + 1] = x
    tiles = np.stack(
        [
            padded[6 * row : 6 * row + 8, 6 * column : 6 * column + 8]
            for row in range(rows)
            for column in range(columns)
        ]
    )  # (T, 8, 8, C)
    inputs = stored(np.einsum("ai,bj,tijc->abtc", INPUT, INPUT, tiles, optimize=True), dtype)
    weights = stored(np.einsum("ai,bj,oijc->abco", WEIGHT, WEIGHT, weight, optimize=True), dtype)
    products = stored(inputs @ weights, dtype)  # (8, 8, T, O)
    outputs = np.einsum("pa,qb,abto->tpqo", OUTPUT, OUTPUT, products, optimize=True)
    result = np.zeros((rows * 6, columns * 6, weight.shape[0]), np.float32)
    for index, tile in enumerate(outputs):
        row, column = divmod(index, columns)
        result[6 * row : 6 * row + 6, 6 * column : 6 * column + 6] = tile
    return stored(result[:height, :width], dtype)


def test_this_device_is_exact():
    assert [reading for reading in probe() if not reading.is_exact] == []


def test_tf32_is_seen():
    reading = by_name(probe(matmul=tf32_matmul, dtypes=("float32",)))["matmul", "float32"]
    assert not reading.is_exact and "TF32" in reading.advice


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_winograd_is_seen(dtype: str):
    reading = by_name(probe(conv=winograd_conv, dtypes=(dtype,)))["conv", dtype]
    assert not reading.is_exact and "Winograd" in reading.advice


def test_winograd_here_is_a_convolution():
    """In float32 it differs by rounding alone."""
    reading = by_name(probe(conv=winograd_conv, dtypes=("float32",)))["conv", "float32"]
    assert reading.error < 2e-5


@pytest.mark.parametrize(
    ("operation", "dtype", "error", "said"),
    [
        ("conv", "float32", 2e-5, "Winograd"),
        ("conv", "float32", 5e-4, "TF32"),
        ("conv", "bfloat16", 2e-2, "Winograd"),
        ("matmul", "float32", 2e-5, "TF32"),
        ("matmul", "bfloat16", 2e-2, "please report"),
    ],
)
def test_the_advice_follows_from_the_size_of_the_error(
    operation: str, dtype: str, error: float, said: str
) -> None:
    assert said in Reading(operation, dtype, error, 2e-6).advice
