"""Positions and frequencies of rotations: which of the two differ, and where."""

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from lydite.diff.findings.replay.rotation_angles import compare_angles

Array = NDArray[np.float64]
TEXT, GRID = np.zeros((5, 3)), np.stack(np.meshgrid([33], range(4), range(6), indexing="ij"), -1)
IDS = np.concatenate((TEXT, GRID.reshape(-1, 3))).astype(float)
LLAMA = 500.0 ** (-np.arange(8) / 8)


def table(ids: Array = IDS, widths: tuple[int, ...] = (2, 3, 3), base: float = 1e4) -> Array:
    angles = [
        np.outer(ids[:, axis], base ** (-np.arange(width) / width))
        for axis, width in enumerate(widths)
    ]
    return np.exp(1j * np.concatenate(angles, -1)).astype(np.complex64).astype(complex)


def of_rates(rates: Array) -> Array:
    return np.exp(1j * np.outer(np.arange(13), rates))


def moved(axis: int, by: float, first: int = 5) -> Array:
    ids = IDS.copy()
    ids[first:, axis] += by
    return table(ids)


@pytest.mark.parametrize(
    ("wrong", "cause", "says"),
    [
        (
            moved(0, -1),
            "rotation-positions",
            "token 5 has 32, in the reference 33: displaced by -1",
        ),
        (
            moved(2, 5),
            "rotation-positions",
            "axis of pairs 5 to 7: token 5 has 5, in the reference 0",
        ),
        (table(IDS * (1, 1, 2)), "rotation-positions", "times 2"),
        (table(base=500.0), "rotation-base", "its base is 500, the reference's 1e+04"),
        (table(widths=(3, 3, 2)), "rotation-axes", "pair 2 of q with the positions of the axis of"),
    ],
)
def test_axes_of_positions(wrong: Array, cause: str, says: str) -> None:
    found = compare_angles("q", table(), wrong)
    assert found is not None and found.cause == cause and says in found.evidence, found


def test_another_base_where_positions_are_far_from_each_other() -> None:
    ids = np.concatenate((np.full((8, 1), 65.0), np.full((8, 1), 33.0), np.zeros((4, 1))))
    found = compare_angles("q", table(ids, (2,), 256.0), table(ids, (2,)))
    assert found is not None and "its base is 1e+04, the reference's 256" in found.evidence, found


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        (
            np.where(np.arange(8) > 4, LLAMA / 8, LLAMA),
            "frequencies at the same positions: 0.125 ×",
        ),
        (np.where(np.arange(8) > 4, 0, LLAMA), "pairs 5 to 7 not rotated"),
        (LLAMA.astype(ml_dtypes.bfloat16).astype(float), "frequencies rounded to bfloat16"),
    ],
)
def test_frequencies_of_single_pairs(rates: Array, says: str) -> None:
    found = compare_angles("q", of_rates(LLAMA), of_rates(rates))
    assert found is not None and says in found.evidence, found


def test_angles_that_are_no_rotation_of_the_same_tokens() -> None:
    draw = np.random.default_rng(0)
    other = np.exp(1j * draw.uniform(-3, 3, table().shape))
    assert compare_angles("q", table(), other) is None
    assert compare_angles("q", other, table()) is None
    assert compare_angles("q", table(), table()) is None
