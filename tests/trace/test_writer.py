"""What a writer leaves on disk: levels, budget, twins, and files that appear in the right order."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lydite.core.dtypes import NUMPY_DTYPES
from lydite.core.errors import FileError, InputError, TraceError
from lydite.trace import writer as writing
from lydite.trace.events import MAX_RANK, Header
from lydite.trace.reader import Trace
from lydite.trace.statistics import distance
from lydite.trace.writer import Capture, TraceWriter, remove_trace

RNG = np.random.default_rng(0)


def test_the_budget_takes_values_to_sketches_to_statistics(tmp_path: Path) -> None:
    budget = 2 * 2**20
    with TraceWriter(tmp_path / "run", Header(), Capture(budget=budget)) as writer:
        values = [RNG.standard_normal(20_000).astype(np.float32) for _ in range(60)]
        for index, value in enumerate(values):
            writer.add(f"block.{index}", value)
    trace = Trace.open(tmp_path / "run")
    kept = ["full" if e.shard else "sketch" if e.sketch else "stats" for e in trace.events]
    order = ["full", "sketch", "stats"]
    assert kept == sorted(kept, key=order.index) and set(kept) == set(order)
    assert all(event.stats is not None for event in trace.events)
    assert sum(path.stat().st_size for path in (tmp_path / "run").iterdir()) <= budget


def test_a_value_larger_than_the_rest_of_the_budget_is_a_sketch(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run", Header(), Capture(budget=10**5)) as writer:
        writer.add("large", RNG.standard_normal(10**5))
        writer.add("small", RNG.standard_normal(10))
    large, small = Trace.open(tmp_path / "run").events
    assert large.shard is None and large.sketch and small.shard


def test_sketches_on_disk_estimate_an_error(tmp_path: Path) -> None:
    one = RNG.standard_normal((256, 128)).astype(np.float32)
    other = (one * (1 + 0.01 * RNG.standard_normal(one.shape))).astype(np.float32)
    with TraceWriter(tmp_path / "run", Header(), Capture("sketch")) as writer:
        writer.add("a", one)
        writer.add("b", other)
    first, second = Trace.open(tmp_path / "run").events
    assert first.sketch and second.sketch and first.shard is None
    true = np.linalg.norm(other - one) / np.linalg.norm(one)
    assert distance(second.sketch, first.sketch) == pytest.approx(true, rel=0.1)


def test_equal_values_are_stored_once(tmp_path: Path) -> None:
    value = RNG.standard_normal((100, 100)).astype(np.float32)
    with TraceWriter(tmp_path / "run", Header()) as writer:
        for step in range(50):
            writer.add("text", value, step=step)
        writer.add("flat", value.reshape(-1))  # the same bytes, but another value
    trace = Trace.open(tmp_path / "run")
    assert [event.alias_of for event in trace.events[:50]] == [None] + [0] * 49
    assert trace.events[50].alias_of is None
    np.testing.assert_array_equal(trace.read(trace.events[49]), value)
    assert trace.events[49].stats == trace.events[0].stats
    assert trace.events[49].hash == trace.events[0].hash
    size = sum(path.stat().st_size for path in (tmp_path / "run").iterdir())
    assert size < 2.5 * value.nbytes


def test_values_are_copied_when_they_are_recorded(tmp_path: Path) -> None:
    value = np.arange(6.0)
    with TraceWriter(tmp_path / "run", Header()) as writer:
        writer.add("before", value)
        value += 100
        writer.add("after", value)
    trace = Trace.open(tmp_path / "run")
    np.testing.assert_array_equal(trace.read(trace.events[0]), np.arange(6.0))
    np.testing.assert_array_equal(trace.read(trace.events[1]), np.arange(6.0) + 100)


def test_a_level_nobody_knows_is_refused() -> None:
    level: Any = "everything"
    with pytest.raises(InputError, match="expected full, sketch, stats"):
        Capture(level)


def test_whole_only_at_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    capture = Capture(full_steps=(0, 2))
    with TraceWriter(tmp_path / "run", Header(), capture) as writer:
        for step in range(3):
            writer.add("x", RNG.standard_normal(2000).astype(np.float32), step=step)
    assert [bool(e.shard) for e in Trace.open(tmp_path / "run").events] == [True, False, True]


@pytest.mark.parametrize("kind", ["ids", "schedule", "input", "scalar", "selftest"])
def test_what_decides_the_run_is_whole_at_every_level(tmp_path: Path, kind: str) -> None:
    with TraceWriter(tmp_path / "run", Header(), Capture("stats")) as writer:
        writer.add("table", np.arange(4), kind=kind)
        writer.add("layer", np.arange(4.0))
    trace = Trace.open(tmp_path / "run")
    assert [trace.has_values(event) for event in trace.events] == [True, False]


def test_a_line_appears_only_after_its_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TraceWriter(tmp_path / "run", Header())
    writer.add("a", np.arange(4.0))
    assert (tmp_path / "run/events.jsonl").read_text() == ""
    assert not Trace.open(tmp_path / "run").events
    monkeypatch.setattr(writing, "FLUSH_SECONDS", 0.0)
    time.sleep(0.01)
    writer.add("b", np.arange(5.0))
    assert [event.name for event in Trace.open(tmp_path / "run").events] == ["a", "b"]
    assert not Trace.open(tmp_path / "run").header.complete
    writer.close()
    assert Trace.open(tmp_path / "run").header.complete


def test_shards_are_sealed_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SHARD_BYTES", 3 * 400)
    with TraceWriter(tmp_path / "run", Header()) as writer:
        for index in range(10):
            writer.add(str(index), np.full(50, index, np.float64))
    assert len(list((tmp_path / "run").glob("t-*.safetensors"))) == 4
    trace = Trace.open(tmp_path / "run")
    assert [float(trace.read(event)[0]) for event in trace.events] == list(map(float, range(10)))


def test_an_exception_leaves_an_incomplete_trace_that_opens(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), TraceWriter(tmp_path / "run", Header()) as writer:
        writer.add("a", np.arange(3))
        raise ZeroDivisionError
    trace = Trace.open(tmp_path / "run")
    assert not trace.header.complete and len(trace.events) == 1


def test_calls_are_counted_for_each_name_port_and_step(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run", Header()) as writer:
        for step, port in ((0, "out"), (0, "out"), (0, "in.0"), (1, "out")):
            writer.add("x", np.zeros(1), slot=port, step=step)
        assert writer.count("x", "out", 1) == 1
    assert [event.call for event in Trace.open(tmp_path / "run").events] == [0, 1, 0, 0]


def test_the_header_is_described_and_self_tests_are_listed(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run", Header(side="reference")) as writer:
        writer.describe(conditions={"prompt": "a fox", "seed": 3})
        writer.add("selftest/f32", np.arange(8, dtype=np.float32), kind="selftest")
        assert Trace.open(tmp_path / "run").header.conditions["seed"] == 3
    header = Trace.open(tmp_path / "run").header
    assert (header.side, header.selftest, header.complete) == ("reference", (0,), True)
    assert header.capture["level"] == "full"


def test_weights_are_described_without_their_data(tmp_path: Path) -> None:
    values = {"a.weight": RNG.standard_normal((3, 4)).astype(np.float16), "b": np.zeros(0)}
    with TraceWriter(tmp_path / "run", Header()) as writer:
        writer.add_weights(values)
    trace = Trace.open(tmp_path / "run")
    weights = trace.weights()
    assert weights and weights["a.weight"].shape == (3, 4) and weights["a.weight"].dtype == "f16"
    assert weights["a.weight"].hash and weights["a.weight"].stats
    assert not list((tmp_path / "run").glob("*.safetensors"))


@pytest.mark.parametrize("name", ["", "two\nlines", "x" * 1001, "\x1b[31m"])
def test_a_name_that_no_reader_would_take_is_refused(tmp_path: Path, name: str) -> None:
    writer = TraceWriter(tmp_path / "run", Header())
    with pytest.raises(TraceError, match="not a name"):
        writer.add(name, np.zeros(1))
    with pytest.raises(TraceError, match="not a name"):
        writer.add("x", np.zeros(1), slot=name)
    writer.add("x" * 1000, np.zeros(1), slot="y" * 1000)
    writer.close()
    assert len(Trace.open(tmp_path / "run").events) == 1


@pytest.mark.parametrize("value", [np.array(["text"]), np.array([object()]), np.zeros(2, "M8[s]")])
def test_what_is_no_number_is_refused_by_its_name(tmp_path: Path, value: np.ndarray) -> None:
    with (
        TraceWriter(tmp_path / "run", Header()) as writer,
        pytest.raises(TraceError, match=r"odd:"),
    ):
        writer.add("odd", value)


@pytest.mark.parametrize("dtype", ["f4", "c8"])
def test_as_many_axes_are_stored_as_a_reader_takes(tmp_path: Path, dtype: str) -> None:
    with TraceWriter(tmp_path / "run", Header()) as writer:
        writer.add("most", np.ones((1,) * (MAX_RANK - 1), dtype))
        with pytest.raises(TraceError, match="axes"):
            writer.add("more", np.ones((1,) * MAX_RANK, dtype))
    trace = Trace.open(tmp_path / "run")
    assert [trace.read(event).ndim for event in trace.events] == [MAX_RANK - 1]


def test_big_endian_values_are_turned(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run", Header()) as writer:
        writer.add("x", np.arange(5, dtype=">f4"))
    trace = Trace.open(tmp_path / "run")
    np.testing.assert_array_equal(trace.read(trace.events[0]), np.arange(5, dtype="<f4"))


def test_nothing_is_added_after_the_end_and_closing_twice_is_harmless(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "run", Header())
    writer.close()
    writer.close(complete=False)
    assert json.loads((tmp_path / "run/trace.json").read_text())["complete"]
    for late in (lambda: writer.add("x", np.zeros(1)), writer.flush):
        with pytest.raises(TraceError, match="closed"):
            late()


def test_a_folder_may_be_new_or_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "new" / "deep"):
        with TraceWriter(folder, Header()) as writer:
            writer.add("x", np.zeros(1))
        assert len(Trace.open(folder).events) == 1


def test_a_folder_that_holds_something_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("chapter 1")
    with pytest.raises(FileError, match="not empty"):
        TraceWriter(tmp_path, Header())
    with pytest.raises(FileError, match="not overwritten"):
        remove_trace(tmp_path)


@pytest.mark.parametrize(
    "name", ["events.jsonl", "weights.json", "t-00000.safetensors", ".0123456789abcdef.part"]
)
def test_a_folder_with_a_name_of_a_trace_is_no_trace(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(FileError, match="not overwritten"):
        remove_trace(tmp_path)
    assert (tmp_path / name).read_text() == "mine"


def test_a_trace_is_removed_even_after_a_crash(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run", Header()) as writer:
        writer.add("x", np.zeros(1))
    (tmp_path / "run/.0123456789abcdef.part").write_bytes(b"half a shard")
    remove_trace(tmp_path / "run")
    remove_trace(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_lines_are_json_with_nothing_but_the_format(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run", Header()) as writer:
        writer.add("x", np.array([np.nan, 1.0]))
    line = msgspec.json.decode((tmp_path / "run/events.jsonl").read_bytes())
    assert set(line) == {"i", "name", "shape", "dtype", "shard", "key", "stats", "hash", "t_ms"}


def test_a_line_says_all_of_its_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.0, 10.25, 10.25, *[11.0] * 20])
    monkeypatch.setattr(writing.time, "monotonic", lambda: next(now))
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    with TraceWriter(tmp_path / "run", Header()) as writer:
        said = {"slot": "in.0", "kind": "input", "step": 3, "dims": "b c", "dtype": "bf16"}
        writer.add("x", value, **said)  # pyright: ignore[reportArgumentType]
    (event,) = Trace.open(tmp_path / "run").events
    assert {name: getattr(event, name) for name in said} == said
    assert event.hash == f"sha256:{hashlib.sha256(value.tobytes()).hexdigest()}"
    assert event.t_ms in (0, 250)  # milliseconds since the start


def test_only_floats_have_a_sketch(tmp_path: Path) -> None:
    values = {"f": np.ones(3), "bf": np.ones(3, NUMPY_DTYPES["BF16"]), "i": np.ones(3, int)}
    with TraceWriter(tmp_path / "run", Header(), Capture("sketch")) as writer:
        for name, value in (values | {"nothing": np.ones(0)}).items():
            writer.add(name, value)
    events = Trace.open(tmp_path / "run").events
    assert [event.name for event in events if event.sketch] == ["f", "bf"]


@pytest.mark.parametrize(
    ("used", "kept"), [(0, "full"), (0.89, "full"), (0.91, "sketch"), (0.96, "sketch"), (0.98, "")]
)
def test_the_last_tenth_of_the_budget_is_for_later_events(
    tmp_path: Path, used: float, kept: str
) -> None:
    with TraceWriter(tmp_path / "run", Header()) as writer:
        assert writer.capture.budget == 2 * 2**30
        writer._used = int(used * writer.capture.budget)
        event = writer.add("x", np.ones(3))
    assert ("full" if event.shard else "sketch" if event.sketch else "") == kept


def test_what_is_stored_counts_towards_the_budget(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run", Header()) as writer:
        events = [
            writer.add("x", np.arange(1000.0)),
            writer.add("x", np.arange(1000.0)),  # an alias costs its line alone
            writer.add("y", np.ones(1)),
        ]
        lines = sum(len(msgspec.json.encode(event)) + 1 for event in events)
        assert writer._used == lines + (8000 + 100) + (8 + 100)
    with pytest.raises(InputError, match="budget -1; expected full, sketch, stats, and bytes"):
        Capture(budget=-1)
    Capture(budget=0)


def test_hashes_of_a_long_run_stay_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_HASHES", 2)
    with TraceWriter(tmp_path / "run", Header()) as writer:
        events = [writer.add("x", np.full(3, n)) for n in (0, 1, 2, 2, 1, 0)]
    assert [event.alias_of for event in events] == [None, None, None, None, 1, 0]


def test_weights_of_several_networks_add_up(tmp_path: Path) -> None:
    ones = np.ones(2, np.float32)
    with TraceWriter(tmp_path / "run", Header()) as writer:
        writer.add_weights({"a": ones})
        writer.add_weights({"b": ones})
    found = Trace.open(tmp_path / "run").weights()
    assert found and list(found) == ["a", "b"]
    assert found["a"].hash == f"sha256:{hashlib.sha256(ones.tobytes()).hexdigest()}"


def test_a_folder_that_cannot_be_made_or_removed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileError, match="file"):
        TraceWriter(tmp_path / "file" / "run", Header())
    with TraceWriter(tmp_path / "run", Header()):
        pass
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for name in ("file", "link"):
        with pytest.raises(FileError, match="not a folder; not overwritten"):
            remove_trace(tmp_path / name)
    assert (tmp_path / "run" / "trace.json").exists()


def test_values_are_on_disk_a_while_after_the_last_that_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(writing.time, "monotonic", lambda: now)
    shards: list[int] = []
    with TraceWriter(tmp_path / "run", Header()) as writer:
        for now in (1.0, 2.0, 2.5, 3.5, 4.5, 5.0):  # flushed at 2.5 and at 5
            writer.add("x", np.full(3, now))
            shards.append(len(list((tmp_path / "run").glob("*.safetensors"))))
    assert shards == [0, 0, 1, 1, 1, 2]
