"""Taps in hand-written code: nothing when nothing records, and scripts that know no lydite."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import InputError, LyditeError
from lydite.trace.arrays import to_numpy
from lydite.trace.reader import Trace
from lydite.trace.recorder import Recorder
from lydite.trace.taps import active, injection, recording, set_step, tap
from lydite.trace.writer import TraceWriter

SCRIPT = """
import numpy as np
from lydite.trace.taps import set_step, tap

for step in range(3):
    set_step(step)
    x = tap("x", np.full(4, float(step)))
    y = tap("y", x * 2)
print(y.tolist())
"""


def run(script: str, **environment: object) -> subprocess.CompletedProcess[str]:
    given = {name: str(value) for name, value in environment.items()}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **given}
    )


def test_without_a_recorder_a_tap_returns_its_value() -> None:
    value = object()  # not even an array: nothing looks at it
    assert active() is None and tap("x", value) is value
    set_step(3)


def test_taps_are_recorded_in_order_with_their_steps(tmp_path: Path) -> None:
    with recording(tmp_path / "run") as recorder:
        assert active() is recorder
        for step in range(2):
            set_step(step)
            x = tap("x", mx.arange(4).astype(mx.bfloat16), dims="c")
            tap("ids", [1, 2], kind="ids")
            tap("ids", 7, kind="ids")
            assert x.dtype == mx.bfloat16
    assert active() is None
    trace = Trace.open(tmp_path / "run")
    assert trace.header.complete
    assert [str(e) for e in trace.events[3:]] == ["x, step 1", "ids, step 1", "ids, step 1, call 1"]
    assert trace.events[0].dims == "c" and trace.events[0].dtype == "bf16"


def test_recordings_nest_and_an_exception_ends_them(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), recording(tmp_path / "outer") as outer:
        with recording(tmp_path / "inner"):
            tap("x", np.zeros(1))
        assert active() is outer
        raise KeyboardInterrupt
    assert active() is None
    assert len(Trace.open(tmp_path / "inner").events) == 1
    assert not Trace.open(tmp_path / "outer").header.complete


def test_a_recorder_of_one_s_own_stays_open(tmp_path: Path) -> None:
    with Recorder.start(tmp_path / "run") as recorder:
        for _ in range(2):
            with recording(recorder):
                tap("x", np.zeros(1))
    assert len(Trace.open(tmp_path / "run").events) == 2


@pytest.mark.parametrize(
    "value", [np.zeros(4, np.float16), mx.zeros(4), mx.zeros(4, dtype=mx.bfloat16), [0.0] * 4]
)
def test_injection_hands_back_the_reference_s_value_as_the_port_s_type(
    tmp_path: Path, value: Any
) -> None:
    with recording(tmp_path / "reference"):
        tap("x", np.arange(4.0))
    with recording(tmp_path / "run", inject=injection(tmp_path / "reference", "x, y")):
        found = tap("x", value)
    assert type(found) is type(value) and to_numpy(found).tolist() == [0, 1, 2, 3]
    assert getattr(found, "dtype", None) == getattr(value, "dtype", None)


def test_a_recording_replaces_a_trace_only_when_asked_to(tmp_path: Path) -> None:
    with recording(tmp_path):
        tap("first", np.zeros(1))
    with pytest.raises(LyditeError), recording(tmp_path):
        pass
    assert [event.name for event in Trace.open(tmp_path).events] == ["first"]
    with recording(tmp_path, overwrite=True):
        tap("second", np.zeros(1))
    assert [event.name for event in Trace.open(tmp_path).events] == ["second"]


def test_nothing_to_inject_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to inject"):
        injection(tmp_path, " , ")


def test_a_script_is_recorded_by_its_environment(tmp_path: Path) -> None:
    assert run(SCRIPT).stdout == "[4.0, 4.0, 4.0, 4.0]\n"
    done = run(SCRIPT, LYDITE_TRACE=tmp_path / "reference")
    assert done.returncode == 0, done.stderr
    trace = Trace.open(tmp_path / "reference")
    assert trace.header.complete and len(trace.events) == 6
    done = run(
        SCRIPT.replace("float(step)", "100.0"),
        LYDITE_TRACE=tmp_path / "run",
        LYDITE_INJECT=tmp_path / "reference",
        LYDITE_INJECT_AT="x",
    )
    assert done.stdout == "[4.0, 4.0, 4.0, 4.0]\n", done.stderr
    trace = Trace.open(tmp_path / "run")
    assert trace.read(trace.events[-2]).tolist() == [100] * 4  # the run's own, before injection
    assert trace.read(trace.events[-1]).tolist() == [4] * 4


@pytest.mark.parametrize(
    ("ending", "complete"),
    [
        ("", True),
        ("raise SystemExit(0)", True),
        ("raise ValueError", False),
        ("try: raise ValueError\nexcept ValueError: pass", True),
        ("import os; os._exit(0)", False),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", False),
    ],
)
def test_complete_means_that_no_exception_ended_the_script(
    tmp_path: Path, ending: str, complete: bool
) -> None:
    run(SCRIPT + ending, LYDITE_TRACE=tmp_path / "run")
    trace = Trace.open(tmp_path / "run")
    assert trace.header.complete is complete
    assert len(trace.events) == (0 if "_exit" in ending else 6)


def test_a_forked_helper_writes_nothing_into_its_parent_s_trace(tmp_path: Path) -> None:
    fork = """
import os
from lydite.trace import writer
if (child := os.fork()) == 0:
    writer.FLUSH_SECONDS = -1.0  # what it records would be on disk at once
    tap("child", np.zeros(1))
    raise SystemExit(0)
os.waitpid(child, 0)
tap("parent", np.zeros(1))
"""
    done = run(SCRIPT + fork, LYDITE_TRACE=tmp_path / "run")
    assert done.returncode == 0, done.stderr
    names = [event.name for event in Trace.open(tmp_path / "run").events]
    assert names == ["x", "y"] * 3 + ["parent"]


def test_threads_may_tap(tmp_path: Path) -> None:
    def work(number: int) -> None:
        for index in range(50):
            tap(f"thread.{number}", np.full(20, index))

    with recording(tmp_path / "run"):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    trace = Trace.open(tmp_path / "run")
    assert len(trace.events) == 200
    assert all((trace.read(event) == event.call).all() for event in trace.events)


def test_one_thread_at_a_time_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[int] = []
    most: list[int] = []
    add = TraceWriter.add

    def slow(*given: Any, **more: Any) -> Any:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.005)
        inside.pop()
        return add(*given, **more)

    monkeypatch.setattr(TraceWriter, "add", slow)
    with recording(tmp_path / "run"):
        threads = [threading.Thread(target=tap, args=("x", np.ones(2))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(most) >= 8 and max(most) == 1


@pytest.mark.parametrize("given", ["LYDITE_INJECT", "LYDITE_INJECT_AT"])
def test_half_of_an_injection_is_an_error(tmp_path: Path, given: str) -> None:
    for folder in ({}, {"LYDITE_TRACE": tmp_path / "run"}):
        done = run(SCRIPT, **{given: "x"}, **folder)
        assert done.returncode == 1 and "given together" in done.stderr


def test_importing_taps_brings_neither_mlx_nor_torch() -> None:
    done = run(
        "import sys, lydite.trace.taps; print([m for m in ('mlx', 'torch') if m in sys.modules])"
    )
    assert done.stdout == "[]\n", done.stderr


def test_after_an_inner_recording_taps_write_to_the_outer_one_again(tmp_path: Path) -> None:
    outer, inner = (Recorder.start(tmp_path / name) for name in ("outer", "inner"))
    with recording(outer):
        with recording(inner):
            assert active() is inner
        tap("x", np.zeros(1))
    assert active() is None
    for recorder in (outer, inner):
        recorder.close()
    assert [len(Trace.open(tmp_path / name).events) for name in ("outer", "inner")] == [1, 0]
