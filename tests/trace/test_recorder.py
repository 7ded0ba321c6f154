"""Names, patterns, steps, and what is handed back instead."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import FileError, InputError, TraceError
from lydite.trace.reader import Trace
from lydite.trace.recorder import Injection, Recorder, full_name, matches
from lydite.trace.writer import Capture


@pytest.fixture
def reference(tmp_path: Path) -> Trace:
    with Recorder.start(tmp_path / "reference") as recorder:
        for step in range(2):
            recorder.step = step
            recorder.record("model/a", np.full((2, 3), 10.0 + step))
            recorder.record("model/a", np.full((2, 3), 20.0 + step))
            recorder.record("model/a", np.full((2, 3), 30.0 + step), slot="in.0")
    return Trace.open(tmp_path / "reference")


def test_a_name_is_the_scope_and_the_path() -> None:
    assert full_name("vae", "decoder.conv_in") == "vae/decoder.conv_in"
    assert full_name("vae", "") == "vae"
    assert full_name("", "layer") == "layer"


@pytest.mark.parametrize(
    ("pattern", "name", "slot", "expected"),
    [
        ("*", "vae/x", "in.0", True),
        ("vae/*", "vae/x", "out", True),
        ("vae/*", "unet/x", "out", False),
        ("*:out", "vae/x", "in.0", False),
        ("*:out*", "vae/x", "out.1", True),
        ("*.attn", "t/blocks.0.attn", "out", True),
        ("*.attn", "t/blocks.0.attn.to_q", "out", False),
        ("blocks[0]", "blocks[0]", "out", True),
        ("blocks[0]:in.0", "blocks[0]", "in.0", True),
        ("blocks.[01]", "blocks.1", "out", True),
        ("Blocks", "blocks", "out", False),
        ("step:0", "step:0", "out", True),
    ],
)
def test_patterns(pattern: str, name: str, slot: str, expected: bool) -> None:
    assert matches(pattern, name, slot, default_slots="*") is expected


def test_only_the_points_asked_for_are_recorded(tmp_path: Path) -> None:
    capture = Capture(points=("vae/*:out*", "unet"))
    with Recorder.start(tmp_path / "run", capture=capture) as recorder:
        for name in ("vae/a", "unet", "unet/b"):
            for slot in ("in.0", "out"):
                value = np.zeros(1)
                assert recorder.record(name, value, slot=slot) is value
        assert recorder.wants("vae/a") and not recorder.wants("vae/a", "in.0")
    places = [(event.name, event.slot) for event in Trace.open(tmp_path / "run").events]
    assert places == [("vae/a", "out"), ("unet", "in.0"), ("unet", "out")]


def test_the_reference_is_handed_back_at_the_same_step_and_call(
    tmp_path: Path, reference: Trace
) -> None:
    inject = Injection(reference, ("model/a",))
    with Recorder.start(tmp_path / "run", inject=inject) as recorder:
        for step in range(2):
            recorder.step = step
            first = recorder.record("model/a", np.zeros((2, 3), np.float32))
            second = recorder.record("model/a", np.zeros((2, 3), np.float32))
            own = recorder.record("model/a", np.zeros((2, 3), np.float32), slot="in.0")
            assert (first[0, 0], second[0, 0], own[0, 0]) == (10 + step, 20 + step, 0)
            assert first.dtype == np.float32
        assert len(recorder.injected) == 4 and recorder.injected[0] == ("model/a", "out", 0, 0)
    trace = Trace.open(tmp_path / "run")
    assert all(not trace.read(event).any() for event in trace.events)  # the run's own is recorded


def test_inputs_are_injected_when_the_port_is_named(tmp_path: Path, reference: Trace) -> None:
    inject = Injection(reference, ("model/*:in.*",))
    with Recorder.start(tmp_path / "run", inject=inject) as recorder:
        assert recorder.record("model/a", np.zeros((2, 3)), slot="in.0")[0, 0] == 30
        assert recorder.record("model/a", np.zeros((2, 3)))[0, 0] == 0


def test_a_place_that_is_not_recorded_can_be_injected(tmp_path: Path, reference: Trace) -> None:
    capture, inject = Capture(points=("nothing",)), Injection(reference, ("model/a",))
    with Recorder.start(tmp_path / "run", capture=capture, inject=inject) as recorder:
        recorder.record("model/a", np.zeros((2, 3)))
        assert recorder.record("model/a", np.zeros((2, 3)))[0, 0] == 20  # the second call
    assert not Trace.open(tmp_path / "run").events


def test_another_shape_is_an_error_with_both(tmp_path: Path, reference: Trace) -> None:
    inject = Injection(reference, ("model/a",))
    with (
        Recorder.start(tmp_path / "run", inject=inject) as recorder,
        pytest.raises(TraceError, match=r"model/a \[out\].*\[2, 3\].*\[3, 2\].*dims"),
    ):
        recorder.record("model/a", np.zeros((3, 2)))


def test_a_name_the_reference_lacks_is_an_error_and_a_pattern_is_not(
    tmp_path: Path, reference: Trace
) -> None:
    value = np.zeros(1)
    with Recorder.start(tmp_path / "1", inject=Injection(reference, ("model/*",))) as recorder:
        assert recorder.record("model/b", value) is value
    for pattern in ("model/b", "model/b:out"):
        with (
            Recorder.start(tmp_path / pattern, inject=Injection(reference, (pattern,))) as recorder,
            pytest.raises(TraceError, match="no model/b"),
        ):
            recorder.record("model/b", value)


def test_a_value_that_was_only_measured_cannot_be_injected(tmp_path: Path) -> None:
    with Recorder.start(tmp_path / "reference", capture=Capture("stats")) as recorder:
        recorder.record("x", np.zeros(2))
    inject = Injection(Trace.open(tmp_path / "reference"), ("x",))
    with (
        Recorder.start(tmp_path / "run", inject=inject) as recorder,
        pytest.raises(TraceError, match="level full"),
    ):
        recorder.record("x", np.zeros(2))


def test_any_source_of_values_will_do(tmp_path: Path) -> None:
    class Ones:
        def wants(self, name: str, slot: str) -> bool:
            return name == "x"

        def value(self, event_id: tuple[str, str, int, int]) -> Any:
            return np.ones(2) if event_id[2] == 1 else None

    with Recorder.start(tmp_path / "run", inject=Ones()) as recorder:
        assert recorder.record("x", np.zeros(2)).tolist() == [0, 0]
        recorder.step = 1
        assert recorder.record("x", np.zeros(2)).tolist() == [1, 1]


@pytest.mark.parametrize("step", [-1, 1.5, "2", None])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    with Recorder.start(tmp_path / "run") as recorder:
        recorder.step = step
        with pytest.raises(InputError, match="step is"):
            recorder.record("x", np.zeros(1))


def test_the_framework_of_the_first_value_is_noted(tmp_path: Path) -> None:
    with Recorder.start(tmp_path / "run") as recorder:
        recorder.record("x", np.zeros(1))
    assert Trace.open(tmp_path / "run").header.framework == f"numpy {np.__version__}"


def test_what_is_no_array_is_refused_by_its_place(tmp_path: Path) -> None:
    with (
        Recorder.start(tmp_path / "run") as recorder,
        pytest.raises(TraceError, match=r"x \[out\]: a str is not an array"),
    ):
        recorder.record("x", "text")


def test_overwrite_replaces_a_trace_and_nothing_else(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        with Recorder.start(tmp_path / "run", overwrite=True) as recorder:
            recorder.record("x", np.full(3, value))
    (event,) = (trace := Trace.open(tmp_path / "run")).events
    assert trace.read(event).tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(FileError, match="overwrite=True"):
        Recorder.start(tmp_path / "run")
    (tmp_path / "run/thesis.txt").write_text("mine")
    with pytest.raises(FileError, match="not overwritten"):
        Recorder.start(tmp_path / "run", overwrite=True)
    assert (tmp_path / "run/thesis.txt").exists() and (tmp_path / "run/events.jsonl").exists()


def test_a_framework_that_the_run_names_is_not_replaced_by_that_of_a_value(tmp_path: Path) -> None:
    for name, given, expected in (("own", "mine 1", "mine 1"), ("found", "", "numpy ")):
        with Recorder.start(tmp_path / name) as recorder:
            recorder.describe(framework=given, device="cpu")
            recorder.record("x", np.zeros(1))
        assert Trace.open(tmp_path / name).header.framework.startswith(expected)
