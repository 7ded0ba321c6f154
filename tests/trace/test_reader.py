"""Every dtype and shape there and back, and the places where a trace may be cut."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lydite.core import tensorfile
from lydite.core.dtypes import NUMPY_DTYPES
from lydite.core.errors import FileError, TraceError
from lydite.trace.events import STORED_AS, Event, Header, dtype_name
from lydite.trace.pipeline_sites import prediction, token_ids
from lydite.trace.reader import Trace, is_trace
from lydite.trace.writer import Capture, TraceWriter

COMPLEX = {"c64": np.dtype(np.complex64), "c128": np.dtype(np.complex128)}
DTYPES = {name: COMPLEX.get(name) or NUMPY_DTYPES[stored] for name, stored in STORED_AS.items()}


def write(folder: Path, **values: np.ndarray[Any, Any]) -> Trace:
    with TraceWriter(folder, Header()) as writer:
        for name, value in values.items():
            writer.add(name, value)
    return Trace.open(folder)


def test_the_precision_of_a_run_is_stated_or_that_of_most_values(tmp_path: Path) -> None:
    half = np.zeros(3, ml_dtypes.bfloat16)
    found = write(tmp_path / "run", a=half, b=half, c=np.zeros(3, np.float32), d=np.arange(3))
    assert found.dtype == "bf16" and write(tmp_path / "ids", a=np.arange(3)).dtype == ""
    with TraceWriter(tmp_path / "stated", Header(dtype="torch.float16")) as writer:
        writer.add("a", half)
    assert Trace.open(tmp_path / "stated").dtype == "f16"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4)])
def test_every_dtype_and_shape_comes_back_bit_by_bit(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    bits = np.random.default_rng(0).integers(0, 256, (*shape, DTYPES[dtype].itemsize), np.uint8)
    value = np.ascontiguousarray(bits & (1 if dtype == "bool" else 255)).view(DTYPES[dtype])[..., 0]
    trace = write(tmp_path / "run", x=value, y=value.T)
    event, turned = trace.events
    assert (event.shape, event.dtype) == (shape, dtype)
    for one, want in ((event, value), (turned, value.T)):
        found = trace.read(one)
        assert found.dtype == want.dtype and found.shape == want.shape
        assert found.tobytes() == want.tobytes()
    if event.stats:
        assert event.stats.count == value.size * (2 if dtype in COMPLEX else 1)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_arbitrary_views_come_back(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4)))
    dtype = DTYPES[data.draw(st.sampled_from(list(DTYPES)))]
    value = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    value = value.transpose(data.draw(st.permutations(range(len(shape)))))
    for axis in range(len(shape)):
        step = data.draw(st.sampled_from([1, 2, -1]))
        value = value[(slice(None),) * axis + (slice(None, None, step),)]
    trace = write(tmp_path_factory.mktemp("views") / "run", x=value)
    assert trace.read(trace.events[0]).tobytes() == value.tobytes()
    trace.close()


@pytest.mark.parametrize(
    ("stored", "dtype", "fits"),
    [
        ("F32", "bf16", True),
        ("F64", "f32", True),
        ("F32", "f8_e4m3", True),
        ("I64", "i32", True),
        ("I16", "u8", True),
        ("BF16", "f32", False),
        ("F16", "bf16", False),
        ("I64", "f32", False),
        ("F32", "i32", False),
        ("U8", "bool", False),
        ("I8", "u8", False),
        ("C64", "c64", False),
        ("C64", "i16", False),
    ],
)
def test_values_may_be_stored_wider_and_not_otherwise(
    tmp_path: Path, stored: str, dtype: str, fits: bool
) -> None:
    trace = write(tmp_path / "run", x=np.zeros(3, DTYPES[dtype] if fits else np.float32))
    tensorfile.save(tmp_path / "run/t-00000.safetensors", {"0": np.ones(3, NUMPY_DTYPES[stored])})
    rewrite(tmp_path / "run", dtype=dtype)
    trace = Trace.open(tmp_path / "run")
    if fits:
        assert trace.read(trace.events[0]).tolist() == [1, 1, 1]
    else:
        with pytest.raises(TraceError, match=f"dtype is {dtype}|but the shard holds"):
            trace.read(trace.events[0])


def test_calls_of_a_hand_written_dump_are_counted_by_order(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"format":"lydite-trace","version":1}')
    calls = [2, None, None, None, 0, 7, None]
    lines = [
        {"i": i, "name": "x", "shape": [1], "dtype": "f32"} | ({"call": c} if c is not None else {})
        for i, c in enumerate(calls)
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [event.call for event in Trace.open(tmp_path).events]
    assert found == [2, 0, 3, 4, 5, 7, 8] and len(set(found)) == len(found)


def test_a_cut_last_line_is_ignored(tmp_path: Path) -> None:
    write(tmp_path / "run", a=np.zeros(1), b=np.ones(1))
    path = tmp_path / "run/events.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    assert [event.name for event in Trace.open(tmp_path / "run").events] == ["a"]


def test_empty_lines_are_ignored(tmp_path: Path) -> None:
    write(tmp_path / "run", a=np.zeros(2), b=np.ones(2))
    path = tmp_path / "run/events.jsonl"
    path.write_text(path.read_text().replace("\n", "\n\n  \n"))
    assert [event.name for event in Trace.open(tmp_path / "run").events] == ["a", "b"]


def test_trailing_events_without_their_shard_are_lost_and_counted(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "run", Header())
    for name in "abc":
        writer.add(name, np.full(3, ord(name)))
        writer.flush()
    writer.close(complete=False)
    (tmp_path / "run/t-00002.safetensors").unlink()
    trace = Trace.open(tmp_path / "run")
    assert [event.name for event in trace.events] == ["a", "b"] and trace.lost == 1
    shard = tmp_path / "run/t-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])  # cut off
    assert Trace.open(tmp_path / "run").lost == 2
    (tmp_path / "run/t-00000.safetensors").rename(shard)  # no crash leaves a later one alone
    with pytest.raises(FileError, match=r"t-00000\.safetensors is missing"):
        Trace.open(tmp_path / "run")


def test_a_shard_missing_from_a_complete_trace_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "run", a=np.zeros(1))
    (tmp_path / "run/t-00000.safetensors").unlink()
    with pytest.raises(FileError, match=r"t-00000\.safetensors is missing"):
        Trace.open(tmp_path / "run")


def test_a_value_that_was_only_measured_says_so(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run", Header(), Capture("stats")) as writer:
        writer.add("x", np.zeros(3))
    trace = Trace.open(tmp_path / "run")
    with pytest.raises(TraceError, match=r"only statistics\. Record it with level full"):
        trace.read(trace.events[0])


def test_events_are_found_by_their_place(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run", Header()) as writer:
        writer.add("x", np.zeros(1))
        writer.add("x", np.ones(1), slot="in.0", step=3)
    trace = Trace.open(str(tmp_path / "run"))
    assert trace.find("x") == trace.events[0]
    assert trace.find("x", "in.0", 3) == trace.events[1]
    assert trace.find("x", "in.0") is None


def test_arrays_stay_valid_after_the_trace_is_closed(tmp_path: Path) -> None:
    with write(tmp_path / "run", x=np.arange(5.0)) as trace:
        values = trace.read(trace.events[0])
    assert values.tolist() == [0, 1, 2, 3, 4] and not values.flags.writeable


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("torch.bfloat16", "bf16"),
        ("F32", "f32"),
        ("mlx.core.float16", "f16"),
        ("half", "f16"),
        ("torch.float8_e4m3fn", "f8_e4m3"),
        ("F8_E5M2", "f8_e5m2"),
        ("int64", "i64"),
        ("bool_", "bool"),
        ("complex64", "c64"),
        ("BOOL", "bool"),
        ("float", "f32"),
        ("double", "f64"),
        ("int", "i32"),
        ("long", "i64"),
        ("complex128", "c128"),
        *(
            (f"{kind}{bits}", f"{kind[0]}{bits}")
            for kind in ("int", "uint")
            for bits in (8, 16, 32)
        ),
        *((f"torch.float{bits}", f"f{bits}") for bits in (16, 32, 64)),
    ],
)
def test_dtypes_are_read_as_frameworks_spell_them(spelled: str, name: str) -> None:
    assert dtype_name(spelled) == name


def test_a_bf16_value_keeps_its_type(tmp_path: Path) -> None:
    value = np.array([1.5, -2.25], ml_dtypes.bfloat16)
    trace = write(tmp_path / "run", x=value)
    assert trace.read(trace.events[0]).dtype == ml_dtypes.bfloat16


def rewrite(folder: Path, **changes: Any) -> None:
    """Change the first line of a trace."""
    path = folder / "events.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps(line | changes) + "\n")


def test_no_more_than_a_few_shards_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lydite.trace.reader.MAX_OPEN", 2)
    with TraceWriter(tmp_path / "run", Header()) as writer:
        for number in range(5):
            writer.add(f"x{number}", np.full(100, number))
            writer.flush()
    with Trace.open(tmp_path / "run") as trace:
        shards = {event.shard for event in trace.events}
        assert len(shards) == 5
        for number, event in enumerate(trace.events):
            assert trace.read(event)[0] == number and len(trace._files) <= 2


def test_a_line_is_as_long_as_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "run", a=np.zeros(2))
    path = tmp_path / "run/events.jsonl"
    longest = len(path.read_bytes()) - 1
    for limit in (longest, longest - 1):
        monkeypatch.setattr("lydite.trace.json_files.MAX_LINE", limit)
        if limit == longest:
            assert len(Trace.open(tmp_path / "run").events) == 1
    with pytest.raises(TraceError, match=rf"events\.jsonl:1: longer than {longest - 1} bytes"):
        Trace.open(tmp_path / "run")


def test_the_number_of_events_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "run", a=np.zeros(2), b=np.ones(2))
    monkeypatch.setattr("lydite.trace.json_files.MAX_EVENTS", 2)
    assert len(Trace.open(tmp_path / "run").events) == 2
    monkeypatch.setattr("lydite.trace.json_files.MAX_EVENTS", 1)
    with pytest.raises(TraceError, match="more than 1 events"):
        Trace.open(tmp_path / "run")


def test_shards_are_closed_with_their_trace(tmp_path: Path) -> None:
    trace = write(tmp_path / "run", a=np.zeros(2))
    trace.read(trace.events[0])
    (shard,) = trace._files.values()
    del trace
    with pytest.raises(FileError, match="already closed"):
        shard.read("0")
    assert is_trace(tmp_path / "run") and not is_trace(tmp_path)


def test_an_event_for_people() -> None:
    plain = Event(0, "vae/x", (), "f32")
    assert str(plain) == "vae/x"
    other = msgspec.structs.replace(plain, slot="in.0", step=2, call=1)
    assert str(other) == "vae/x [in.0], step 2, call 1"
    assert other.id == ("vae/x", "in.0", 2, 1)


def test_names_of_what_passes_between_networks() -> None:
    assert [token_ids(f"text_encoder{n}") for n in ("", "_2")] == [
        "pipeline/token_ids",
        "pipeline/token_ids_2",
    ]
    assert [prediction(kind) for kind in ("flow", "eps", "v", "x0", "edm")] == [
        f"pipeline/{word}" for word in ("velocity", "epsilon", "v", "sample", "edm")
    ]
