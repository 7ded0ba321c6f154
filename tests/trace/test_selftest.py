"""A dump that is wrong says how, before anybody blames a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lydite.trace import mlx_capture
from lydite.trace.events import STORED_AS
from lydite.trace.reader import Trace
from lydite.trace.recorder import Recorder
from lydite.trace.selftest import (
    VALUES,
    check_selftest,
    expected,
    write_selftest,
)
from lydite.trace.writer import Capture

Array = np.ndarray[Any, Any]


def dump(folder: Path, spoil: Callable[[str, Array], Array], dtypes: tuple[str, ...] = ()) -> Trace:
    """A trace by a writer with a fault."""
    with Recorder.start(folder) as recorder:
        for name in (*VALUES, *dtypes):
            value = spoil(name, expected(name))
            recorder.record(f"selftest/{name}", value, kind="selftest")
    return Trace.open(folder)


def test_numpy_s_and_mlx_s_own_dumps_are_right(tmp_path: Path) -> None:
    with Recorder.start(tmp_path / "numpy", capture=Capture("stats")) as recorder:
        write_selftest(recorder, tuple(STORED_AS))
    with Recorder.start(tmp_path / "mlx") as recorder:
        dtypes = tuple(name for name in mlx_capture._DTYPES if name != "f64")  # no f64 on a GPU
        mlx_capture.write_selftest(recorder, dtypes)
    for name in ("numpy", "mlx"):
        trace = Trace.open(tmp_path / name)
        assert trace.header.selftest and len(trace.header.selftest) == len(trace.events)
        assert {f"selftest/{value}" for value in VALUES} < {event.name for event in trace.events}
        assert check_selftest(trace) == ()


def test_a_trace_without_a_self_test_is_not_blamed(tmp_path: Path) -> None:
    with Recorder.start(tmp_path / "run") as recorder:
        recorder.record("selftest", np.zeros(1))
        recorder.record("selftest/mine", np.zeros(1))
    assert check_selftest(Trace.open(tmp_path / "run")) == ()


def memory(view: Array, offset: int) -> Array:
    """What lies behind a view of arange(24), read on without its strides."""
    return np.arange(24, dtype=np.float32)[offset : offset + view.size].reshape(view.shape)


@pytest.mark.parametrize(
    ("name", "offset"), [("transposed", 0), ("sliced", 1), ("sliced", 0), ("broadcast", 0)]
)
def test_ignored_strides_are_recognized(tmp_path: Path, name: str, offset: int) -> None:
    trace = dump(tmp_path / "run", lambda n, v: memory(v, offset) if n == name else v)
    (problem,) = check_selftest(trace)
    assert problem.startswith(f"selftest/{name} was written as raw memory")
    assert problem.endswith("strides were ignored.")


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16", "i64", "i16", "u32", "c64", "c128"])
def test_big_endian_bytes_are_recognized(tmp_path: Path, dtype: str) -> None:
    def swap(name: str, value: Array) -> Array:
        width = value.dtype.itemsize // (2 if value.dtype.kind == "c" else 1)
        data = np.frombuffer(value.tobytes(), np.uint8).reshape(-1, width)[:, ::-1]
        return np.frombuffer(data.tobytes(), value.dtype).reshape(value.shape)

    trace = dump(
        tmp_path / "run", lambda n, v: swap(n, v) if n in (dtype, "sliced") else v, (dtype,)
    )
    problems = check_selftest(trace)
    assert len(problems) == 2 and all("big-endian" in problem for problem in problems)


@pytest.mark.parametrize("name", ["transposed", "sliced", "broadcast"])
def test_both_faults_at_once_are_recognized(tmp_path: Path, name: str) -> None:
    trace = dump(
        tmp_path / "run",
        lambda n, v: memory(v, int(n == "sliced")).astype(">f4").view("<f4") if n == name else v,
    )
    (problem,) = check_selftest(trace)
    assert problem.endswith("has the bytes of each value in reverse, and strides were ignored.")


def test_bytes_have_no_order(tmp_path: Path) -> None:
    trace = dump(tmp_path / "run", lambda n, v: v + 1 if n == "u8" else v, ("u8",))
    (problem,) = check_selftest(trace)
    assert problem == "selftest/u8 has 1 at [0], expected 0."


def test_column_order_is_recognized(tmp_path: Path) -> None:
    trace = dump(
        tmp_path / "run",
        lambda n, v: v.ravel(order="F").reshape(v.shape) if n == "contiguous" else v,
    )
    (problem,) = check_selftest(trace)
    assert "first axis varying fastest" in problem


@pytest.mark.parametrize(
    ("index", "value", "says"),
    [
        (0, 0.0, "NaN became 0"),
        (1, 3.4028235e38, "+Inf became 3.40282e+38"),
        (3, 0.0, "−0.0 became 0"),
        (4, 0.0, "1e-40 became 0 (subnormal numbers are flushed to zero)"),
        (7, np.inf, "65504 became inf"),
        (5, -5.0, "1 became -5"),
        (5, -0.0, "1 became −0.0"),
    ],
)
def test_changed_values_are_named(tmp_path: Path, index: int, value: float, says: str) -> None:
    def change(name: str, array: Array) -> Array:
        if name == "special":
            array = array.copy()
            array[index] = value
        return array

    (problem,) = check_selftest(dump(tmp_path / "run", change))
    assert problem == f"selftest/special has changed values: {says}."


def test_another_nan_is_a_nan(tmp_path: Path) -> None:
    def payload(name: str, array: Array) -> Array:
        if name == "special":
            array = array.copy()
            array.view(np.uint32)[0] = 0xFFC12345
        return array

    assert check_selftest(dump(tmp_path / "run", payload)) == ()


def test_a_changed_dtype_or_size_is_named(tmp_path: Path) -> None:
    trace = dump(
        tmp_path / "run",
        lambda n, v: {
            "bf16": v.astype(np.float32),
            "transposed": v.T,
            "i64": v + 1,
        }.get(n, v),
        ("bf16", "i64"),
    )
    assert check_selftest(trace) == (
        "selftest/transposed has shape [3, 2, 4], expected [4, 2, 3].",
        "selftest/bf16 was recorded as f32, expected bf16.",
        "selftest/i64 has 1 at [0], expected 0.",
    )


def test_a_value_without_its_data_is_a_wrong_dump(tmp_path: Path) -> None:
    with Recorder.start(tmp_path / "run", capture=Capture("stats")) as recorder:
        recorder.record("selftest/f32", np.arange(8, dtype=np.float32))  # the kind was forgotten
    (problem,) = check_selftest(Trace.open(tmp_path / "run"))
    assert "cannot be read" in problem and problem.endswith("level full.")


def test_stored_wider_is_no_fault(tmp_path: Path) -> None:
    value = np.arange(8).astype(ml_dtypes.bfloat16)
    with Recorder.start(tmp_path / "run") as recorder:
        recorder.writer.add(
            "selftest/bf16", value.astype(np.float32), kind="selftest", dtype="bf16"
        )
    assert check_selftest(Trace.open(tmp_path / "run")) == ()
