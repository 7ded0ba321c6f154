"""Two parts of a block that have each other's names in the port, and a bug behind them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.diff.pairing.pair_traces import pair_traces
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

BLOCKS = 2
DRAW = np.random.default_rng(3)
VALUES = DRAW.standard_normal((BLOCKS, 4, 2, 6, 8)).astype(np.float32)
OTHERS = DRAW.standard_normal((BLOCKS, 4, 2, 6, 8)).astype(np.float32)
WEIGHTS = {
    f"blocks.{i}.norm2.weight": DRAW.standard_normal(8).astype(np.float32) for i in range(BLOCKS)
}


def write(folder: Path, first: str, second: str, values: Any, weights: Any = None) -> Trace:
    """Blocks of a norm that `up` takes, and a second one that `down` takes."""
    with TraceWriter(folder, Header()) as writer:
        if weights:
            writer.add_weights(weights)
        for i, (a, up, b, down) in enumerate(values):
            for norm, x, layer, y in ((first, a, "up", up), (second, b, "down", down)):
                writer.add(f"net/blocks.{i}.{norm}", x)
                writer.add(f"net/blocks.{i}.{layer}", x, slot="in.0")
                writer.add(f"net/blocks.{i}.{layer}", y)
    return Trace.open(folder)


def counterparts(reference: Trace, port: Trace) -> set[tuple[str, str]]:
    found = pair_traces(reference, port).pairs
    return {
        (pair.port_event.name, pair.event.name) for pair in found if "norm" in pair.port_event.name
    }


EXCHANGED = {
    (f"net/blocks.{i}.norm{a}", f"net/blocks.{i}.norm{5 - a}")
    for i in range(BLOCKS)
    for a in (2, 3)
}
AS_NAMED = {(name, name) for name, _ in EXCHANGED}


@pytest.mark.parametrize(
    ("right", "order", "found"),
    [
        (2, ("norm3", "norm2"), EXCHANGED),  # the bug is in the first block, behind its first norm
        (1, ("norm3", "norm2"), AS_NAMED),  # what takes it is wrong: perhaps because of it
        (2, ("norm2", "norm3"), AS_NAMED),
    ],
)
def test_the_value_and_what_is_computed_from_it_show_exchanged_names(
    right: int, order: tuple[str, str], found: set[tuple[str, str]], tmp_path: Path
) -> None:
    reference = write(tmp_path / "ref", "norm2", "norm3", VALUES)
    values = OTHERS.copy()
    values[0, :right] = VALUES[0, :right]
    assert counterparts(reference, write(tmp_path / "port", *order, values)) == found


def test_an_equal_value_under_its_own_name_is_no_exchange(tmp_path: Path) -> None:
    """The port computes a norm of the second block in the place of the other one."""
    reference = write(tmp_path / "ref", "norm2", "norm3", VALUES)
    port = write(tmp_path / "port", "norm3", "norm2", [VALUES[0], VALUES[1][[2, 3, 0, 1]]])
    assert counterparts(reference, port) == AS_NAMED


@pytest.mark.parametrize("weighted", [2, 3])
def test_parameters_show_exchanged_names(weighted: int, tmp_path: Path) -> None:
    reference = write(tmp_path / "ref", "norm2", "norm3", VALUES, WEIGHTS)
    own = {name.replace("norm2", f"norm{weighted}"): value for name, value in WEIGHTS.items()}
    port = write(tmp_path / "port", "norm3", "norm2", OTHERS, own)
    assert counterparts(reference, port) == (EXCHANGED if weighted == 3 else AS_NAMED)
