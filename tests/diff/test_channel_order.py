"""A port that has the channels of a value in an order of its own, and takes that into account."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.diff.measure.channels import in_order_of, moves
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

ROWS, COLUMNS, PATCH, CHANNELS, STEPS = 4, 6, 2, 4, 2
SIZE = PATCH * PATCH * CHANNELS
LAST = np.arange(SIZE).reshape(CHANNELS, PATCH, PATCH).transpose(1, 2, 0).reshape(-1)


def picture(patches: np.ndarray, *, port: bool, wrong: str) -> np.ndarray:
    """Patches (channel, row, column) as a picture; those of the port are (row, column, channel)."""
    if port and wrong != "order":
        patches = patches[..., np.argsort(LAST)]
    split = patches.reshape(2, ROWS, COLUMNS, CHANNELS, PATCH, PATCH)
    axes = (0, 3, 1, 5, 2, 4) if wrong == "picture" else (0, 3, 1, 4, 2, 5)
    return split.transpose(axes).reshape(2, CHANNELS, ROWS * PATCH, COLUMNS * PATCH)


def run(folder: Path, dtype: str, *, port: bool = False, wrong: str = "") -> Trace:
    """A layer that takes patches, one that returns them, and the picture of these."""
    draw = np.random.default_rng(0)
    first, last = draw.standard_normal((2, SIZE, SIZE)) / 4
    given = draw.standard_normal((STEPS, 2, ROWS * COLUMNS, SIZE))
    order = LAST if port else np.arange(SIZE)
    narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    with TraceWriter(folder, Header(dtype=dtype)) as writer:
        for step in range(STEPS):

            def add(name: str, value: np.ndarray, slot: str = "out", step: int = step) -> None:
                writer.add(name, value.astype(narrow), slot=slot, step=step)

            add("net", given[step], "in.0")
            add("net/patch", given[step][..., order], "in.0")
            add("net/patch", hidden := (given[step] @ first).astype(narrow).astype(float))
            add("net/act", hidden := np.tanh(hidden).astype(narrow).astype(float))
            add("net/head", hidden, "in.0")
            add("net/head", head := (hidden @ last)[..., order].astype(narrow))
            add("net", picture(head.astype(float), port=port, wrong=wrong))
    return Trace.open(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("wrong", "site"), [("", None), ("picture", "net"), ("order", "net/head")])
def test_channels_in_an_order_of_the_ports_own(
    dtype: str, wrong: str, site: str | None, tmp_path: Path
) -> None:
    """Right, or put together wrongly; or the port forgets that they are in that order."""
    reference = run(tmp_path / "r", "float32")
    floor = run(tmp_path / "f", dtype)
    port = run(tmp_path / "p", dtype, port=True, wrong=wrong)
    verdict = compare(reference, port, floor=floor if dtype == "bfloat16" else None)
    assert verdict.verdict == ("diverge" if wrong else "agree"), verdict.sentence
    assert verdict.port_site == site


def test_channels_are_put_back() -> None:
    value = np.random.default_rng(0).standard_normal((3, 8, 6))
    order = np.array([4, 0, 1, 5, 2, 3])
    ordered = in_order_of(value, value[..., order])
    assert ordered is not None and np.array_equal(ordered, value)
    assert in_order_of(value, value) is None
    assert in_order_of(value, value[..., [0, 0, 1, 2, 3, 4]]) is None
    assert in_order_of(value[0, :4], value[0, :4, order]) is None  # too few numbers of each


def test_moves() -> None:
    value = np.random.default_rng(0).standard_normal((4, 6))
    at = moves(value, value.T)
    assert at is not None and np.array_equal(value.reshape(-1)[at], value.T.reshape(-1))
    assert moves(value, value + 1) is None and moves(np.ones(4), np.ones(4)) is None
