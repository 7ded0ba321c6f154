"""Values of a port with names of its own keep their partner when they are wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.diff.divergence.first import RowTests, first_divergence
from lydite.diff.measure.distance import correlation, relative_error, wide
from lydite.diff.preconditions import check_weights
from lydite.diff.result import Row
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

BLOCKS, TOKENS, TEXT, WIDTH = 3, 12, 7, 16


def norm(x: np.ndarray) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def run(folder: Path, *, port: bool, wrong: str = "") -> Trace:
    """Two streams; the port runs them in turn and has names of its own for what goes into a layer.

    The reference records the inputs and outputs of modules.
    """
    draw = np.random.default_rng(3)
    weights = draw.standard_normal((BLOCKS, 2, WIDTH, WIDTH)) / 4
    gates = 1 + draw.standard_normal((BLOCKS, 2, WIDTH)) / 2
    streams = [draw.standard_normal((2, n, WIDTH)) for n in (TOKENS, TEXT)]
    with TraceWriter(folder, Header(dtype="float32")) as writer:

        def add(name: str, value: np.ndarray, **more: Any) -> None:
            writer.add(name, value.astype(np.float32), **more)

        for s in (0, 1):
            add("ab"[s] if port else f"net/start{s}", streams[s])
        for block in range(BLOCKS):
            given = []
            for s in (0, 1):
                normed = norm(streams[s])
                shift = 0.5 if wrong == f"in{s}" else 0.0
                given.append(normed * gates[block, s] * (1 - shift) - shift * normed[:, ::-1])
            for s in (0, 1):
                if port:
                    add(f"L{block}.{'xc'[s]}.in", given[s])
            for s in (0, 1):
                out = given[s] @ weights[block, s]
                if port:
                    add(f"L{block}.{'xc'[s]}.out", out)
                else:
                    path = f"net/blocks.{block}.{('image', 'text')[s]}"
                    add(f"{path}.norm", streams[s], slot="in.0")
                    add(f"{path}.norm", norm(streams[s]))
                    add(f"{path}.layer", given[s], slot="in.0")
                    add(f"{path}.layer", out)
                streams[s] = streams[s] + out
    return Trace.open(folder)


@pytest.mark.parametrize(("wrong", "name"), [("in0", "L0.x.in"), ("in1", "L0.c.in")])
def test_a_wrong_input_of_a_layer_is_named(tmp_path: Path, wrong: str, name: str) -> None:
    reference = run(tmp_path / "r", port=False)
    assert compare(reference, run(tmp_path / "clean", port=True)).verdict == "agree"
    verdict = compare(reference, run(tmp_path / "p", port=True, wrong=wrong))
    assert (verdict.verdict, verdict.port_site) == ("diverge", name)


def test_complex_against_real_values() -> None:
    table = np.exp(1j * np.arange(24.0)).reshape(4, 6).astype(np.complex64)
    assert correlation(table.real.copy(), wide(table)) == 0.0
    assert 0.1 < relative_error(table.real.copy(), table) < 1.0


def test_the_rounding_of_a_sinusoid_that_a_16_bit_run_stores_in_float32(tmp_path: Path) -> None:
    times = np.linspace(100, 900, 4)
    rates = 1e4 ** (-np.arange(32) / 32)

    def write(name: str, dtype: str, shift: float) -> Trace:
        angles = np.outer(times + shift, rates)
        value = np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
        with TraceWriter(tmp_path / name, Header(dtype=dtype)) as writer:
            writer.add("time", value)
        return Trace.open(tmp_path / name)

    reference, floor = write("r", "float32", 0.0), write("f", "bfloat16", 0.25)
    port = write("p", "bfloat16", 0.3)
    assert compare(reference, port, floor=floor).verdict == "agree"
    assert compare(reference, write("w", "bfloat16", 9.0), floor=floor).verdict == "diverge"


def test_matrices_and_kernels_have_customs_of_their_own(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    kernels = {f"conv{n}.weight": draw.standard_normal((8, 8, 3, 3)) for n in range(9)}
    matrices = {f"to_{n}.weight": draw.standard_normal((8, 8)) for n in range(3)}
    traces: list[Trace] = []
    for name, moved in (("r", False), ("p", True), ("q", True)):
        with TraceWriter(tmp_path / name, Header()) as writer:
            writer.add("x", np.ones(4, np.float32))
            turned = {k: v.transpose(0, 2, 3, 1) for k, v in kernels.items()} if moved else kernels
            others = {
                k: v.T if name == "q" and k == "to_0.weight" else v for k, v in matrices.items()
            }
            both = {**turned, **others}
            writer.add_weights({k: v.astype(np.float32).copy() for k, v in both.items()})
        traces.append(Trace.open(tmp_path / name))
    assert check_weights(traces[0], traces[1], {})[0].turned == ()
    assert [b for _, b in check_weights(traces[0], traces[2], {})[0].turned] == ["to_0.weight"]


def test_the_output_of_a_module_comes_after_the_values_inside_it() -> None:
    """Its input was seen before; that does not end the pass."""
    order = [("net.a", "in.0"), ("net.a.mod", "in.0"), ("net.b", "out"), ("net.a", "out")]
    wrong = [False, True, False, True]
    rows = [
        Row(site, site, slot, 0, 0, "activation", (2, 8), "f32", float(bad), 1e-7, 1e-6, bad)
        for (site, slot), bad in zip(order, wrong, strict=True)
    ]
    assert first_divergence(rows, RowTests(lambda _: True)).first == 1


@pytest.mark.parametrize(("inside", "first"), [(0.5, 3), (5e-4, 0)])
def test_what_a_module_does_not_return_is_not_the_cause_of_what_follows(
    inside: float, first: int
) -> None:
    """Tokens in another order inside of a module; an error that is only smaller behind it."""
    errors = {"net.a.in": inside, "net.a.out": inside, "net.a": 9e-7, "net.b": 0.4}
    rows = [
        Row(site, site, "out", 0, 0, "activation", (2, 8), "f32", error, 1e-7, 1e-6, error > 1e-6)
        for site, error in errors.items()
    ]
    assert first_divergence(rows, RowTests()).first == first


def test_of_transposed_matrices_only_a_square_one_can_be_forgotten(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    layers = {f"to_{n}.weight": draw.standard_normal((8, 8)) for n in range(9)}
    table = {"positions.weight": draw.standard_normal((6, 4))}
    traces: list[Trace] = []
    for name, kept in (("r", {*layers}), ("p", set[str]()), ("q", {"to_2.weight"})):
        with TraceWriter(tmp_path / name, Header()) as writer:
            writer.add("x", np.ones(4, np.float32))
            turned = {k: v if k in kept else v.T for k, v in layers.items()} | table
            writer.add_weights({k: v.astype(np.float32).copy() for k, v in turned.items()})
        traces.append(Trace.open(tmp_path / name))
    assert check_weights(traces[0], traces[1], {})[0].turned == ()
    assert [b for _, b in check_weights(traces[0], traces[2], {})[0].turned] == ["to_2.weight"]
