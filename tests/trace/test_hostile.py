"""Folders that strangers made: one error of ours whatever is in them, never a crash or a hang."""

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lydite.core.errors import LyditeError
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.selftest import check_selftest
from lydite.trace.writer import TraceWriter

fuzz = settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ODD: list[Any] = [None, True, -1, 0, 1, 2, 2.5, 1e400, "", "x", "\0", "\x1b[2J", [], {}, [1], [-1]]
ODD += [2**31, 2**53, 2**63, 10**30, [2**40], [2**20] * 3, [1] * 17, [0, 2**40, 2**40], "é" * 1001]
ODD += ["f32", "F32", "i64", "bool", "c64", "c128", "bf16", "float99", "out.1"]
ODD += [
    "../x.safetensors",
    "/etc/x.safetensors",
    "a/b.safetensors",
    "..safetensors",
    ".safetensors",
]
ODD += [
    "t-00000.safetensors",
    "t-00001.safetensors",
    "t-00009.safetensors",
    "t-00000.safetensors\n",
]
ODD += ["link.safetensors", "folder.safetensors", "pipe.safetensors", "..\\x.safetensors"]
FIELDS = ["i", "name", "port", "kind", "step", "call", "dims", "dtype", "shape", "shard", "key"]
FIELDS += ["alias_of", "stats", "sketch", "hash", "t_ms", "mem", "unknown"]
BYTES = [b"\xff", b"\0", b"{", b"}", b"[" * 2000, b'"', b",", b"\n", b"NaN", b"1e999", b"\\ud800"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a small trace in two shards, with an alias and a sketch."""
    folder = tmp_path_factory.mktemp("good") / "run"
    with TraceWriter(folder, Header(conditions={"seed": 1})) as writer:
        writer.add("selftest/f32", np.arange(8, dtype=np.float32), kind="selftest")
        writer.add("a", np.arange(12.0).reshape(3, 4))
        writer.add("a", np.arange(12.0).reshape(3, 4))
        writer.flush()
        writer.add("b", np.arange(4).astype(np.complex64))
        writer.add_weights({"w": np.ones(3)})
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_everything(folder: Path) -> None:
    """Open the trace and ask for all there is."""
    with Trace.open(folder) as trace:
        check_selftest(trace)
        trace.weights()
        for event in trace.events:
            assert str(event)
            if trace.has_values(event):
                assert trace.read(event).shape == event.shape


def survives(folder: Path) -> None:
    """Everything reads, or one error of ours comes, on one printable line."""
    try:
        read_everything(folder)
    except LyditeError as error:
        assert str(error).isprintable()


def lay(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    os.symlink(folder / "t-00000.safetensors", folder / "link.safetensors")
    (folder / "folder.safetensors").mkdir()
    os.mkfifo(folder / "pipe.safetensors")
    return folder


@fuzz
@given(data=st.data())
def test_any_field_may_be_anything(
    tmp_path_factory: pytest.TempPathFactory, good: dict[str, bytes], data: Any
) -> None:
    lines = [json.loads(line) for line in good["events.jsonl"].splitlines()]
    header = json.loads(good["trace.json"])
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.integers(0, 5)) == 0:
            header[data.draw(st.sampled_from(list(header)))] = data.draw(st.sampled_from(ODD))
            continue
        line = data.draw(st.sampled_from(lines))
        field = data.draw(st.sampled_from(FIELDS))
        if data.draw(st.booleans()) or field not in line:
            line[field] = deepcopy(data.draw(st.sampled_from(ODD)))
        else:
            del line[field]
    if data.draw(st.integers(0, 5)) == 0:
        lines.append(deepcopy(data.draw(st.sampled_from(lines))))
    files = dict(good)
    files["events.jsonl"] = "".join(json.dumps(line) + "\n" for line in lines).encode()
    files["trace.json"] = json.dumps(header).encode()
    survives(lay(tmp_path_factory.mktemp("field"), files))


@fuzz
@given(data=st.data())
def test_any_byte_may_be_anything(
    tmp_path_factory: pytest.TempPathFactory, good: dict[str, bytes], data: Any
) -> None:
    files = dict(good)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(files)))
        content = files[name]
        where = data.draw(st.integers(0, len(content)))
        stop = data.draw(st.sampled_from([where, where + 1, where + 20, len(content)]))
        content = content[:where] + data.draw(st.sampled_from([b"", *BYTES])) + content[stop:]
        files[name] = content
    if data.draw(st.integers(0, 6)) == 0:
        del files[data.draw(st.sampled_from(sorted(files)))]
    survives(lay(tmp_path_factory.mktemp("byte"), files))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("shard", "../x.safetensors", "own folder"),
        ("shard", "/tmp/x.safetensors", "own folder"),
        ("shard", "link.safetensors", "missing or damaged"),
        ("shard", "pipe.safetensors", "missing or damaged"),
        ("shard", "folder.safetensors", "missing or damaged"),
        ("shard", "t-00009.safetensors", "missing or damaged"),
        ("key", "99", "no tensor"),
        ("shape", [2**40], "shape is"),
        ("shape", [2**20, 2**20, 2**20], "more than 2"),
        ("shape", [1] * 17, "length <= 16"),
        ("dtype", "float99", "dtype 'float99'"),
        ("dtype", "i64", "the shard holds F64"),
        ("name", "", "length >= 1"),
        ("name", "x" * 1001, "length <= 1000"),
        ("name", "two\nlines", "cannot be printed"),
        ("port", "\x1b[2J", "cannot be printed"),
        ("kind", "\x1b[2J", "cannot be printed"),
        ("dims", "b\nc", "cannot be printed"),
        ("dtype", "x" * 201, "length <= 200"),
        ("shard", None, "together"),
        ("key", None, "together"),
        ("sketch", [0.5] * 1023, "length >= 1024"),
        ("i", 0, "count up"),
        ("i", 2**53, "<= 9007199254740991"),
        ("shape", [2**40 + 1], "<= 1099511627776"),
        ("shape", [2**40, 2], "more than 2"),
        ("step", -1, ">= 0"),
    ],
)
def test_each_trick_is_refused_with_its_reason(
    tmp_path: Path, good: dict[str, bytes], field: str, value: Any, says: str
) -> None:
    lay(tmp_path, good)
    lines = [json.loads(line) for line in good["events.jsonl"].splitlines()]
    lines[1][field] = value
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(LyditeError, match=says):
        read_everything(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, "\x1b[2J") for field in ("side", "framework", "device", "dtype")]
    + [("version", 2), ("format", "another"), ("side", "x" * 201), ("selftest", [-1])],
)
def test_a_header_that_breaks_the_format_is_refused(
    tmp_path: Path, good: dict[str, bytes], field: str, value: Any
) -> None:
    header = json.loads(good["trace.json"]) | {field: value}
    lay(tmp_path, good | {"trace.json": json.dumps(header).encode()})
    with pytest.raises(LyditeError, match=r"trace\.json"):
        Trace.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"), [({"dtype": "i64"}, "dtype is i64"), ({"shape": [4, 3]}, "shape is")]
)
def test_an_alias_is_of_the_same_kind_as_its_event(
    tmp_path: Path, good: dict[str, bytes], change: dict[str, Any], says: str
) -> None:
    lay(tmp_path, good)
    lines = [json.loads(line) for line in good["events.jsonl"].splitlines()]
    assert lines[2]["alias_of"] == 1
    lines[2] |= change
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(LyditeError, match=says):
        read_everything(tmp_path)


@pytest.mark.parametrize("target", [2, 3, 1, 99])
def test_an_alias_points_to_an_earlier_event_with_values(
    tmp_path: Path, good: dict[str, bytes], target: int
) -> None:
    lay(tmp_path, good)
    lines = [json.loads(line) for line in good["events.jsonl"].splitlines()]
    if target == 1:  # two that point to each other
        lines[1] = lines[2] | {"i": 1, "alias_of": 2}
    lines[2]["alias_of"] = target
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(LyditeError, match="no earlier event"):
        read_everything(tmp_path)


@pytest.mark.parametrize("name", ["trace.json", "events.jsonl", "weights.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b'{"i":' * 50_000 + b"\n",
        b"x" * 2**21,
        b"null\n",
    ],
    ids=["empty", "not UTF-8", "deep list", "deep object", "giant line", "null"],
)
def test_no_file_is_trusted(
    tmp_path: Path, good: dict[str, bytes], name: str, content: bytes
) -> None:
    lay(tmp_path, {**good, name: content})
    if (name, content) == ("events.jsonl", b""):
        assert not Trace.open(tmp_path).events
        return
    with pytest.raises(LyditeError):
        read_everything(tmp_path)


@pytest.mark.parametrize("name", ["trace.json", "events.jsonl", "weights.json"])
def test_a_pipe_or_a_folder_does_not_hang_the_reader(
    tmp_path: Path, good: dict[str, bytes], name: str
) -> None:
    lay(tmp_path, good)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(LyditeError):
        read_everything(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(LyditeError):
        read_everything(tmp_path)


@pytest.mark.parametrize("folder", ["missing", "file", "empty"])
def test_what_is_no_trace_is_said_to_be_none(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LyditeError, match=r"no such folder|not a folder|not a trace"):
        Trace.open(tmp_path / folder)
