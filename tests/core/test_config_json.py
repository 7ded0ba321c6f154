"""JSON from strangers: read strictly, refused in one line, never a hang."""

import json
import math
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lydite.core.config import MAX_BYTES, JsonError, parse_object, read_json
from lydite.core.errors import FileError

TEXT = st.text('a0-"\\\n\0é€𝕏')
SCALARS = st.none() | st.booleans() | st.integers() | TEXT
SCALARS |= st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=8
)


@given(st.dictionaries(TEXT, VALUES, max_size=5))
def test_what_json_writes_is_read(value: dict[str, object]) -> None:
    assert parse_object(json.dumps(value).encode()) == value


REFUSED = {
    b"": "not JSON",
    b"{": "not JSON",
    b"[1]": "expected a JSON object, found list",
    b"null": "found NoneType",
    b"\xff{}": "not UTF-8",
    b"\xef\xbb\xbf{}": "not JSON",
    b'{"a": NaN}': "NaN is not JSON",
    b'{"a": -Infinity}': "-Infinity is not JSON",
    b'{"a": 1e999}': "'1e999' is beyond",
    b'{"a": 1, "b": 2, "a": 3}': "duplicate key 'a'",
    b'{"x": {"b": 2, "b": 3}}': "duplicate key 'b'",
    b'{"a": -0}': "-0 is not an integer",
    b'{"a": 01}': "not JSON",
    b'{"a": ' + b"9" * 5000 + b"}": "digits",
    b'{"a": ' + b"[" * 10**6 + b"}": "nested too deep",
    b"{} {}": "not JSON",
    rb'{"a": "\ud800"}': "not valid Unicode",
    rb'{"a": "\uDFFF"}': "not valid Unicode",
}


@pytest.mark.parametrize("data", REFUSED, ids=lambda data: repr(data[:20]))
def test_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    for infinity in (False, b"Infinity" not in data):  # which allows nothing else
        with pytest.raises(JsonError) as caught:
            parse_object(data, infinity=infinity)
        assert REFUSED[data] in str(caught.value)
    with pytest.raises(FileError) as caught:
        read_json(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and message.isprintable() and len(message) < 300


def test_infinity_is_read_where_it_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": Infinity, "b": -Infinity}')
    assert read_json(path, infinity=True) == {"a": math.inf, "b": -math.inf}
    with pytest.raises(FileError, match="Infinity is not JSON"):
        read_json(path)


def test_too_much_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a": "' + b"x" * MAX_BYTES + b'"}')
    with pytest.raises(FileError, match="more than"):
        read_json(path)


def test_a_missing_file_a_folder_and_a_pipe_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        read_json(tmp_path / "nothing.json")
    with pytest.raises(FileError, match="not a file"):
        read_json(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")
    start = time.monotonic()
    with pytest.raises(FileError, match="not a file"):
        read_json(tmp_path / "pipe.json")
    assert time.monotonic() - start < 1
