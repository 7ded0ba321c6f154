"""Parts of a block that have each other's names in the port, or other values' names."""

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


def write_modulated(folder: Path, names: str, values: Any, *, taken: bool = False) -> Trace:
    """Blocks of a normed value, the same modulated, and what a layer returns for that.

    `names` are those of the three; "" where one is not recorded. The reference's modules take them.
    """
    with TraceWriter(folder, Header()) as writer:
        for i, (normed, modulated, result) in enumerate(values):
            before = None
            for name, x in zip(names.split(","), (normed, modulated, result), strict=True):
                if taken and before is not None:
                    writer.add(f"net/blocks.{i}.{name}", before, slot="in.0")
                if name:
                    writer.add(f"net/blocks.{i}.{name}", x)
                before = x
    return Trace.open(folder)


RIGHT, WRONG = VALUES[:, :3], OTHERS[:, :3]
OWN = {("norm", "norm")}
OF_OTHER_NAME = {("norm", "scaled"), ("plain", "norm")}
LATE = np.stack((RIGHT[0], WRONG[1]))  # the first block is right
ALONE = np.stack((RIGHT[:, 0], RIGHT[:, 1], WRONG[:, 2]), axis=1)


@pytest.mark.parametrize(
    ("names", "values", "found"),
    [
        ("plain,norm,out", RIGHT, OF_OTHER_NAME),
        ("plain,norm,out", LATE, OF_OTHER_NAME),
        (",norm,out", LATE, {("norm", "scaled")}),  # the result is right
        ("plain,norm,", LATE, OF_OTHER_NAME),  # the other name has the value
        (",norm,out", ALONE, OWN),  # nothing shows that the normed value was right
        (",norm,out", WRONG, OWN),
    ],
)
def test_a_name_is_paired_with_the_value_that_it_has(
    names: str, values: Any, found: set[tuple[str, str]], tmp_path: Path
) -> None:
    reference = write_modulated(tmp_path / "ref", "norm,scaled,out", RIGHT, taken=True)
    port = write_modulated(tmp_path / "port", names, values)
    pairs = pair_traces(reference, port).pairs
    assert {
        (pair.port_event.name, pair.event.name)
        for pair in pairs
        if pair.port_event.name.endswith((".norm", ".plain"))
    } == {(f"net/blocks.{i}.{a}", f"net/blocks.{i}.{b}") for i in range(BLOCKS) for a, b in found}


def test_two_names_with_each_others_values_are_no_names_of_others(tmp_path: Path) -> None:
    """What is computed from both is wrong: the values may be exchanged."""
    reference = write(tmp_path / "ref", "norm2", "norm3", VALUES)
    values = VALUES.copy()
    values[:, 1::2] = OTHERS[:, 1::2]
    assert counterparts(reference, write(tmp_path / "port", "norm3", "norm2", values)) == AS_NAMED


def test_a_port_that_leaves_the_operation_out_has_no_name_of_another(tmp_path: Path) -> None:
    """Its norm has the value that comes in, and what is computed from that is wrong."""
    sides: list[Trace] = []
    for side, normed, out in (("ref", RIGHT, RIGHT), ("port", RIGHT[:, [2, 1, 0]], WRONG)):
        with TraceWriter(tmp_path / side, Header()) as writer:
            for i in range(BLOCKS):
                writer.add(f"net/blocks.{i}.given", RIGHT[i, 2])
                writer.add(f"net/blocks.{i}.norm", normed[i, 0])
                if side == "ref":
                    writer.add(f"net/blocks.{i}.out", normed[i, 0], slot="in.0")
                writer.add(f"net/blocks.{i}.out", out[i, 1])
        sides.append(Trace.open(tmp_path / side))
    assert counterparts(*sides) == {(f"net/blocks.{i}.norm",) * 2 for i in range(BLOCKS)}


@pytest.mark.parametrize("kept", [True, False])
def test_a_layer_that_joins_the_results_shows_what_was_recorded(kept: bool, tmp_path: Path) -> None:
    """The reference's q, k and v of the normed value are one layer of the port."""
    qkv = DRAW.standard_normal((3, 2, 6, 8)).astype(np.float32)
    with TraceWriter(tmp_path / "ref", Header()) as writer:
        writer.add("net/blocks.0.norm.plain", RIGHT[0, 0])
        writer.add("net/blocks.0.norm", RIGHT[0, 1])
        for name, value in zip("qkv", qkv, strict=True):
            writer.add(f"net/blocks.0.to_{name}", RIGHT[0, 1], slot="in.0")
            writer.add(f"net/blocks.0.to_{name}", value)
    with TraceWriter(tmp_path / "port", Header()) as writer:
        writer.add("net/blocks.0.norm", RIGHT[0, 0])
        writer.add("net/blocks.0.qkv", np.concatenate(qkv if kept else qkv[::-1] + 1, -1))
    found = counterparts(*(Trace.open(tmp_path / side) for side in ("ref", "port")))
    assert found == {("net/blocks.0.norm", "net/blocks.0.norm" + ".plain" * kept)}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("key", "value"), {("key", "to_key"), ("value", "to_value")}),  # as in the encoder
        (("a", "b"), {("a", "to_value"), ("b", "to_key")}),  # the spelling says nothing
    ],
)
def test_a_word_means_the_same_in_a_later_part(
    words: tuple[str, str], found: set[tuple[str, str]], tmp_path: Path
) -> None:
    """The port's decoder has keys and values exchanged, and the attention of these."""
    sides: list[Trace] = []
    for side, names in (("ref", ("to_key", "to_value")), ("port", words)):
        with TraceWriter(tmp_path / side, Header()) as writer:
            for n, part in enumerate(("down", "up")):
                part += "_blocks" if side == "ref" else ""
                swaps = side == "port" and n == 1
                key, value = VALUES[n, 1::-1] if swaps else VALUES[n, :2]
                writer.add(f"net/{part}.0.{names[0]}", key)
                writer.add(f"net/{part}.0.{names[1]}", value)
                writer.add(f"net/{part}.0.out", (OTHERS if swaps else VALUES)[n, 2])
        sides.append(Trace.open(tmp_path / side))
    pairs = pair_traces(sides[0], sides[1]).pairs
    ends = {(p.port_event.name.split(".")[-1], p.event.name.split(".")[-1]) for p in pairs[3:]}
    assert {pair for pair in ends if pair[0] in words} == found
