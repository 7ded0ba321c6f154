"""Mutated headers against the safetensors library, and arbitrary tensors there and back."""

import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lydite.core.dtypes import NUMPY_DTYPES
from lydite.core.errors import LyditeError
from lydite.core.tensorfile import TensorFile, save

fuzz = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# Values that are wrong in an interesting way wherever a header wants a name, a number or a list.
ODD: list[Any] = [None, True, False, -1, 0, 1, 4, 2.0, 1e400, [], {}, [0, 0], [0, 8], [8, 0]]
ODD += [
    "",
    "F32",
    "BF16",
    "F4",
    "a",
    "\0",
    "\ud800",
    [-0.0, 8],
    [True, 8],
    [2**32, 2**32],
    [0] * 40,
]
ODD += [2**31, 2**32 + 4, 2**53, 2**63 - 1, 2**63, 2**64 - 8, 2**64, 10**30, [2**62, 4]]
PRINTABLE = st.characters(codec="utf-8", exclude_categories=["C", "Z"])
NAMES = st.text(PRINTABLE, min_size=1, max_size=20)
SHAPES = st.lists(st.integers(0, 4), max_size=5).map(tuple)
TOKENS = [b"-0", b"NaN", b"1e2", b"0.0", b"\\u0000", b"\\ud800", b"\xff", b"\0", b"  ", b"{", b"]]"]
TOKENS += [b'"shape":[],', b'"dtype":"F64",', b'"__metadata__":{},', b"18446744073709551616", b","]


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, np.ndarray[Any, Any]]:
    """A few arrays of any dtype, shape and bits."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name in draw(st.lists(NAMES, max_size=5, unique=True)):
        dtype, shape = draw(st.sampled_from(list(NUMPY_DTYPES.values()))), draw(SHAPES)
        count = math.prod(shape) * dtype.itemsize
        bits = draw(st.binary(min_size=count, max_size=count))
        if dtype == np.bool_:
            bits = bytes(bit & 1 for bit in bits)
        arrays[name] = np.frombuffer(bits, dtype).reshape(shape)
    return arrays


@st.composite
def mutated_headers(draw: st.DrawFn) -> bytes:
    """A valid file with one to three parts of its JSON replaced, removed or added."""
    header, data = valid()
    for _ in range(draw(st.integers(1, 3))):
        if not header:
            break
        place, key = draw(st.sampled_from(places(header)))
        action = draw(st.sampled_from(["replace", "remove", "nudge", "add"]))
        if action == "remove":
            del place[key]
        elif action == "nudge" and type(place[key]) is int:
            place[key] += draw(st.sampled_from([-8, -1, 1, 8, 2**32, 2**63, 2**64]))
        elif action == "add" and isinstance(place, dict):
            place[draw(NAMES)] = deepcopy(draw(st.sampled_from(ODD)))
        else:
            place[key] = deepcopy(draw(st.sampled_from(ODD)))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@st.composite
def mutated_bytes(draw: st.DrawFn) -> bytes:
    """A valid file with one to four stretches of bytes overwritten, inserted or cut out."""
    header, data = valid()
    text = json.dumps(header, separators=(",", ":")).encode()
    file = bytearray(len(text).to_bytes(8, "little") + text + data)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(file)))
        stop = start + draw(st.integers(0, 6))
        file[start:stop] = draw(st.one_of(st.sampled_from(TOKENS), st.binary(max_size=6)))
    if draw(st.booleans()):  # or nearly every file fails at the length already
        length = len(file) - 8 - draw(st.sampled_from([len(data)] * 4 + [0, 1, 8]))
        file[:8] = max(length, 0).to_bytes(8, "little")
    return bytes(file)


@fuzz
@given(file=mutated_headers())
def test_mutated_header_is_never_read_where_the_library_refuses(
    file: bytes, tmp_path: Path
) -> None:
    agree(file, tmp_path)


@fuzz
@given(file=mutated_bytes())
def test_mutated_bytes_are_never_read_where_the_library_refuses(
    file: bytes, tmp_path: Path
) -> None:
    agree(file, tmp_path)


@settings(fuzz, max_examples=100)
@given(file=st.binary(max_size=200))
def test_noise_is_never_read_where_the_library_refuses(file: bytes, tmp_path: Path) -> None:
    agree(file, tmp_path)


@settings(fuzz, max_examples=60)
@given(arrays=tensors(), metadata=st.dictionaries(NAMES, st.text(st.characters(codec="utf-8"))))
def test_anything_saved_comes_back_and_the_library_reads_the_same(
    arrays: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    save(path, arrays, metadata)
    with TensorFile.open(path) as file:
        assert file.header.metadata == metadata
        assert file.header.tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            back = file.read(name)
            assert (back.dtype, back.shape) == (array.dtype, array.shape)
            assert back.tobytes() == array.tobytes()
    agree(path.read_bytes(), tmp_path)


def agree(data: bytes, folder: Path) -> bool:
    """Whether both read `data`, and alike; our refusals are one line, theirs are ours too."""
    path = folder / "fuzz.safetensors"
    path.write_bytes(data)
    try:
        with TensorFile.open(path) as file:
            ours = {name: (info, file.read(name)) for name, info in file.header.tensors.items()}
    except LyditeError as error:
        assert str(error).startswith(str(path)) and str(error).isprintable()
        assert len(str(error)) < len(str(path)) + 500
        return False
    theirs = dict(safetensors.deserialize(data))  # raises where the library refuses
    assert ours.keys() == theirs.keys()
    for name, (info, array) in ours.items():
        assert (info.dtype, list(info.shape)) == (theirs[name]["dtype"], theirs[name]["shape"])
        assert array.tobytes() == bytes(theirs[name]["data"])
    return True


def valid() -> tuple[dict[str, Any], bytes]:
    """The header and data of a small file with all kinds of tensors in it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape in [
        ("weight", "F32", [2, 2]),
        ("scale", "BF16", []),
        ("empty", "F16", [0, 3]),
        ("mask", "U8", [2]),
    ]:
        stop = position + math.prod(shape) * NUMPY_DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, stop]}
        position = stop
    return header, bytes(range(position))


def places(node: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below `node`."""
    pairs = list(node.items() if isinstance(node, dict) else enumerate(node))
    found = [(node, key) for key, _ in pairs]
    for _, child in pairs:
        if isinstance(child, dict | list):
            found += places(child)
    return found


def test_the_fuzzed_file_is_valid_before_it_is_mutated(tmp_path: Path) -> None:
    header, data = valid()
    text = json.dumps(header).encode()
    assert agree(len(text).to_bytes(8, "little") + text + data, tmp_path)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(text)
