"""Traces that lydite did not write: the NumPy block of the documentation, and the Rust example."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lydite.core.errors import LyditeError
from lydite.trace.reader import Trace
from lydite.trace.recorder import Recorder
from lydite.trace.selftest import VALUES, check_selftest, expected

ROOT = Path(__file__).parents[2]
RUST = ROOT / "examples/rust"
needs_rust = pytest.mark.skipif(not shutil.which("rustc"), reason="no rustc")


@pytest.fixture(scope="module")
def numpy_writer() -> dict[str, Any]:
    text = (ROOT / "docs/trace-format.md").read_text()
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block is not None
    assert len(block[1].splitlines()) <= 25 and "lydite" not in block[1].replace("lydite-trace", "")
    names: dict[str, Any] = {}
    exec(block[1], names)
    return names


def test_the_writer_of_the_documentation(tmp_path: Path, numpy_writer: dict[str, Any]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    numpy_writer["header"](folder, False, side="reference")
    dtypes = (
        "f64",
        "f32",
        "f16",
        "bf16",
        "i64",
        "i32",
        "i16",
        "i8",
        "u64",
        "u32",
        "u16",
        "u8",
        "bool",
    )
    for i, name in enumerate((*VALUES, *dtypes)):
        numpy_writer["add"](folder, i, f"selftest/{name}", expected(name), kind="selftest")
    numpy_writer["add"](folder, 90, "latent", np.zeros((0, 2)), step=3, dims="b c")
    numpy_writer["add"](folder, 91, "scalar", np.float64(0.5), port="in.0")
    assert not Trace.open(folder).header.complete
    numpy_writer["header"](folder, True, side="reference", conditions={"seed": 0})
    trace = Trace.open(folder)
    assert check_selftest(trace) == () and len(trace.events) == len(VALUES) + len(dtypes) + 2
    assert trace.header.complete and trace.header.conditions == {"seed": 0}
    event = trace.find("scalar", "in.0")
    assert event is not None and trace.read(event) == 0.5


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("rust"), RUST)


def compiled(folder: Path, source: Path) -> Path:
    command = ["rustc", "--edition", "2021", "-D", "warnings", "-o", folder / "demo"]
    subprocess.run([*command, source / "demo.rs"], check=True, timeout=300)
    return folder / "demo"


def run(program: Path, **environment: object) -> subprocess.CompletedProcess[str]:
    given = {name: str(value) for name, value in environment.items()}
    return subprocess.run(
        [program], env={**os.environ, **given}, capture_output=True, text=True, timeout=60
    )


def reference(recorder: Recorder, dtype: type = np.float32) -> None:
    """What demo.rs computes, in NumPy."""
    weight = ((np.arange(12) - 5.5) / 8).astype(dtype).reshape(4, 3)
    for step in range(2):
        recorder.step = step
        x = recorder.record("model/input", ((np.arange(6) + step) / 4).astype(dtype).reshape(2, 3))
        recorder.record("model/weight_t", weight.T)
        product = recorder.record("model/linear", x @ weight.T)
        gated = recorder.record("model/silu", product / (1 + np.exp(-product)))
        recorder.record("model/sum", gated.sum())


def test_the_rust_writer_is_small() -> None:
    lines = (RUST / "trace.rs").read_text().splitlines()
    assert len(lines) <= 80 and max(map(len, lines)) <= 100


@needs_rust
def test_rust_writes_what_numpy_computes(tmp_path: Path, demo: Path) -> None:
    done = run(demo, LYDITE_TRACE=tmp_path / "port")
    assert done.returncode == 0, done.stderr
    with Recorder.start(tmp_path / "reference") as recorder:
        reference(recorder)
    port, theirs = Trace.open(tmp_path / "port"), Trace.open(tmp_path / "reference")
    assert port.header.complete and check_selftest(port) == ()
    assert {e.dtype for e in port.events} == {
        "f64",
        "f32",
        "bf16",
        "f16",
        "i64",
        "i32",
        "u8",
        "bool",
    }
    for event in theirs.events:
        twin = port.find(*event.id)
        assert twin is not None and twin.shape == event.shape
        np.testing.assert_allclose(port.read(twin), theirs.read(event), rtol=1e-6)
    bits = port.find("selftest/bf16")
    assert bits is not None and port.read(bits).dtype == ml_dtypes.bfloat16


@needs_rust
def test_rust_without_the_variable_writes_nothing(tmp_path: Path, demo: Path) -> None:
    assert run(demo).returncode == 0
    assert not list(tmp_path.iterdir())


@needs_rust
@pytest.mark.parametrize("writer", ["lydite", "documentation", "rust"])
@pytest.mark.parametrize("at", ["model/linear", "selftest/nothing,model/lin*"])
def test_rust_takes_values_from_a_reference(
    tmp_path: Path, demo: Path, numpy_writer: dict[str, Any], writer: str, at: str
) -> None:
    folder = tmp_path / "reference"
    if writer == "rust":
        run(demo, LYDITE_TRACE=folder)
    elif writer == "lydite":
        with Recorder.start(folder) as recorder:
            recorder.record("model/linear", np.zeros((2, 4)), slot="in.0")
            recorder.record("other", np.full((2, 4), 0.5, np.float32))
            for step in range(2):  # the first is an alias
                recorder.step = step
                recorder.record("model/linear", np.full((2, 4), 0.5 + step, np.float32))
    else:
        folder.mkdir()
        numpy_writer["header"](folder, True)
        for step in range(2):
            value = np.full((2, 4), 0.5 + step, np.float32)
            numpy_writer["add"](folder, step, "model/linear", value, step=step)
    done = run(demo, LYDITE_TRACE=tmp_path / "port", LYDITE_INJECT=folder, LYDITE_INJECT_AT=at)
    assert done.returncode == 0, done.stderr
    theirs, port = Trace.open(folder), Trace.open(tmp_path / "port")
    for step in range(2):
        given, gated = theirs.find("model/linear", step=step), port.find("model/silu", step=step)
        assert given is not None and gated is not None
        value = theirs.read(given)
        np.testing.assert_allclose(port.read(gated), value / (1 + np.exp(-value)), rtol=1e-6)
        own = port.find("model/linear", step=step)
        assert own is not None
        if writer != "rust":
            assert not np.array_equal(port.read(own), value)  # recorded before it was replaced


@needs_rust
@pytest.mark.parametrize(
    ("value", "says"),
    [(np.zeros((4, 2), np.float32), "the reference's shape"), (np.zeros((2, 4)), "is not f32")],
)
def test_rust_refuses_another_shape_or_dtype(
    tmp_path: Path, demo: Path, value: np.ndarray[Any, Any], says: str
) -> None:
    with Recorder.start(tmp_path / "reference") as recorder:
        recorder.record("model/linear", value)
    done = run(
        demo,
        LYDITE_TRACE=tmp_path / "port",
        LYDITE_INJECT=tmp_path / "reference",
        LYDITE_INJECT_AT="model/linear",
    )
    assert done.returncode == 101 and says in done.stderr
    port = Trace.open(tmp_path / "port")
    assert not port.header.complete and port.events[-1].name == "model/linear"


@needs_rust
def test_a_writer_that_ignores_strides_fails_the_self_test(tmp_path: Path) -> None:
    shutil.copytree(RUST, tmp_path / "source")
    path = tmp_path / "source/trace.rs"
    text = path.read_text()
    right = "    let strides = if strides.is_empty() { &dense } else { strides };\n"
    assert right in text
    path.write_text(text.replace(right, "    let (_, strides) = (strides, &dense);\n"))
    run(compiled(tmp_path, tmp_path / "source"), LYDITE_TRACE=tmp_path / "run")
    trace = Trace.open(tmp_path / "run")
    problems = check_selftest(trace)
    assert [problem.split()[0] for problem in problems] == [
        "selftest/transposed",
        "selftest/sliced",
        "selftest/broadcast",
    ]
    assert all("strides were ignored" in problem for problem in problems)


@needs_rust
def test_a_rust_run_that_is_cut_off_opens(tmp_path: Path, demo: Path) -> None:
    run(demo, LYDITE_TRACE=tmp_path / "run")
    lines = (tmp_path / "run/events.jsonl").read_bytes()
    header = (tmp_path / "run/trace.json").read_text().replace("true", "false")
    (tmp_path / "run/trace.json").write_text(header)
    (tmp_path / "run/part").write_bytes(b"half a shard")
    for size in range(0, len(lines), 97):
        (tmp_path / "run/events.jsonl").write_bytes(lines[:size])
        try:
            trace = Trace.open(tmp_path / "run")
        except LyditeError as error:
            pytest.fail(f"cut at {size}: {error}")
        assert len(trace.events) == lines[:size].count(b"\n")
