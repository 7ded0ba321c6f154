"""Which order of axes a wrong value is given: that of other values, or of what it resembles."""

from pathlib import Path

import numpy as np
import pytest

from lydite.diff.measure.aligned import Layouts, align_values
from lydite.diff.measure.distance import relative_error
from lydite.diff.pairing.paired_events import Pair
from lydite.trace.events import Header, Site
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

DRAW = np.random.default_rng(4)
RIGHT = DRAW.standard_normal((3, 8, 16)).astype(np.float32)
RIGHT_SITE = Site("net/heads")  # whose axes the port has in another order
OTHER = DRAW.standard_normal((3, 8, 16)).astype(np.float32)


def error(folder: Path, value: np.ndarray, layouts: Layouts) -> float:
    """The error of a port that has the tokens of all prompts in one list of rows."""
    traces: list[Trace] = []
    for name, own in (("r", RIGHT), ("p", value.reshape(24, 16))):
        with TraceWriter(folder / name, Header()) as writer:
            writer.add("net/x", own)
        traces.append(Trace.open(folder / name))
    pair = Pair((traces[0].events[0],), (traces[1].events[0],), "name")
    found = align_values(pair, traces[0], traces[1], layouts)
    assert found.reference is not None and found.port is not None
    return relative_error(found.port, found.reference)


@pytest.mark.parametrize("factor", [5.6, 30.0])
def test_a_multiple_keeps_the_order_of_memory(factor: float, tmp_path: Path) -> None:
    layouts = Layouts()
    layouts.orders[(1, 0, 2)] = {RIGHT_SITE}
    assert error(tmp_path, factor * RIGHT, layouts) == pytest.approx(factor - 1)


def test_a_wrong_value_has_the_order_of_right_ones(tmp_path: Path) -> None:
    layouts = Layouts()
    layouts.orders[(1, 0, 2)] = {RIGHT_SITE}
    assert error(tmp_path / "a", RIGHT, layouts) == 0
    assert error(tmp_path / "b", OTHER, layouts) == pytest.approx(relative_error(OTHER, RIGHT))
