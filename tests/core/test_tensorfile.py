"""Every rule of the format broken once, every dtype through the file and back."""

import json
import os
import pickle
import re
import shlex
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from lydite.core import tensorfile
from lydite.core.dtypes import NUMPY_DTYPES
from lydite.core.errors import FileError, LyditeError, TensorFileError
from lydite.core.tensorfile import TensorFile, read_header, save


def pack(header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    """A file with this header and data; `length` lies about the header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(
    shape: object = (2, 3), offsets: object = (0, 24), dtype: object = "F32"
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def one(name: str = "a.weight", data: bytes = bytes(24), **fields: object) -> bytes:
    """A file of one tensor, valid but for what `fields` say."""
    return pack({name: entry() | fields}, data)


def raw(fields: str, data: bytes = bytes(24)) -> bytes:
    """A file of one tensor whose entry is written out as text."""
    return pack(b'{"a.weight":{' + fields.encode() + b"}}", data)


def two(first: tuple[int, int], second: tuple[int, int], data: int) -> bytes:
    """A file of two byte tensors with these offsets."""
    spans = {"a.weight": first, "b.weight": second}
    entries = {
        name: entry([stop - start], [start, stop], "U8") for name, (start, stop) in spans.items()
    }
    return pack(entries, bytes(data))


def zipped() -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
    return buffer.getvalue()


@dataclass(frozen=True)
class Bad:
    """How to build a malformed file, and what the message must say of it."""

    build: Callable[[], bytes]
    says: str
    tensor: str = ""
    stricter: bool = False  # the safetensors library lets it through
    kind: type[LyditeError] = TensorFileError


GOOD = '"dtype":"F32","shape":[2,3],"data_offsets":[0,24]'
A = "a.weight"

BAD = {
    # the outside
    "empty file": Bad(lambda: b"", "empty"),
    "seven bytes": Bad(lambda: b"\x02\0\0\0\0\0\0", "7 bytes"),
    "length only, past the end": Bad(
        lambda: pack(b"", length=2), "header length 2 bytes, but only 0"
    ),
    "header length zero": Bad(lambda: pack(b"", bytes(8)), "must begin with '{'"),
    "header length one short": Bad(lambda: pack(b'{"a":1}', length=6), "not JSON"),
    "header length one long": Bad(lambda: pack({A: entry()}, bytes(24), 70), "not JSON|not UTF-8"),
    "header length past the file": Bad(lambda: pack(b"{}", length=1000), "1000 bytes, but only 2"),
    "header length over the limit": Bad(lambda: pack(b"{}", length=50_000_001), "limit 50000000"),
    "header length 2^64-1": Bad(lambda: pack(b"{}", length=2**64 - 1), "limit 50000000"),
    "header length 2^63": Bad(lambda: pack(b"{}", length=2**63), "limit 50000000"),
    "header length big-endian": Bad(lambda: (2).to_bytes(8, "big") + b"{}", "limit 50000000"),
    # the text of the header
    "not UTF-8": Bad(lambda: pack(b'{"\xff":1}'), "not UTF-8"),
    "UTF-16": Bad(lambda: pack('{"a":1}'.encode("utf-16-le")), "not JSON"),
    "byte order mark": Bad(lambda: pack(b"\xef\xbb\xbf{}"), "must begin with '{'"),
    "leading space": Bad(lambda: pack(b" {}"), "must begin with '{'", stricter=True),
    "array at the top": Bad(lambda: pack(b"[]"), "must begin with '{'"),
    "text at the top": Bad(lambda: pack(b'"{}"'), "must begin with '{'"),
    "two objects": Bad(lambda: pack(b"{}{}"), "not JSON"),
    "NUL padding": Bad(lambda: pack(b"{}\0\0\0\0\0\0"), "not JSON"),
    "cut in the middle": Bad(lambda: pack(b'{"a.weight":{"dtype"'), "not JSON"),
    "comment": Bad(lambda: pack(b"{/*a*/}"), "not JSON"),
    "trailing comma": Bad(lambda: raw(GOOD + ","), "not JSON"),
    "single quotes": Bad(lambda: pack(b"{'a':1}"), "not JSON"),
    "raw newline in a name": Bad(
        lambda: pack(b'{"a\nb":{' + GOOD.encode() + b"}}", bytes(24)), "not JSON"
    ),
    "NaN": Bad(lambda: raw('"dtype":"F32","shape":[NaN],"data_offsets":[0,24]'), "NaN is not JSON"),
    "Infinity": Bad(
        lambda: raw('"dtype":"F32","shape":[Infinity],"data_offsets":[0,24]'), "Infinity is not"
    ),
    "nested 100000 deep": Bad(lambda: pack(b'{"a":' + b"[" * 100_000), "nested too deep|not JSON"),
    "nested 100 deep": Bad(
        lambda: one(shape=json.loads("[" * 100 + "]" * 100)), "shape must be", A
    ),
    "integer of 5000 digits": Bad(
        lambda: raw(f'"dtype":"F32","shape":[{"9" * 5000}],"data_offsets":[0,24]'), "5000 digits"
    ),
    "duplicate tensor": Bad(
        lambda: pack(f'{{"a":{{{GOOD}}},"a":{{{GOOD}}}}}'.encode(), bytes(24)),
        "duplicate key 'a'",
        stricter=True,
    ),
    "duplicate tensor, escaped": Bad(
        lambda: pack(f'{{"a":{{{GOOD}}},"\\u0061":{{{GOOD}}}}}'.encode(), bytes(24)),
        "duplicate key 'a'",
        stricter=True,
    ),
    "duplicate field": Bad(lambda: raw(GOOD + ',"shape":[3,2]'), "duplicate key 'shape'"),
    "duplicate metadata": Bad(
        lambda: pack(b'{"__metadata__":{},"__metadata__":{}}'), "duplicate key '__metadata__'"
    ),
    # metadata
    "metadata is a list": Bad(lambda: pack({"__metadata__": []}), "__metadata__ must map"),
    "metadata holds a number": Bad(
        lambda: pack({"__metadata__": {"a": 1}}), "__metadata__ must map"
    ),
    "metadata holds an object": Bad(
        lambda: pack({"__metadata__": {"a": {}}}), "__metadata__ must map"
    ),
    "metadata with half a surrogate": Bad(
        lambda: pack({"__metadata__": {"a": "\ud800"}}), "not valid Unicode"
    ),
    # names
    "empty name": Bad(lambda: one(""), "printable", "", stricter=True),
    "NUL in a name": Bad(lambda: one("a\0b"), "printable", "a\0b", stricter=True),
    "newline in a name": Bad(lambda: one("a\nb"), "printable", "a\nb", stricter=True),
    "line separator in a name": Bad(
        lambda: one("a\u2028b"), "printable", "a\u2028b", stricter=True
    ),
    "terminal escape in a name": Bad(lambda: one("\x1b[2J"), "printable", "\x1b[2J", stricter=True),
    "right-to-left override in a name": Bad(
        lambda: one("a\u202eb"), "printable", "a\u202eb", stricter=True
    ),
    "half a surrogate in a name": Bad(lambda: one("a\ud800"), "not valid Unicode"),
    # entries
    "entry is null": Bad(lambda: pack({A: None}), "expected just dtype", A),
    "entry is a list": Bad(
        lambda: pack({A: ["F32", [2, 3], [0, 24]]}, bytes(24)), "expected just", A, stricter=True
    ),
    "entry is a number": Bad(lambda: pack({A: 1}), "expected just", A),
    "entry is empty": Bad(lambda: pack({A: {}}), "expected just", A),
    "no dtype": Bad(lambda: raw('"shape":[2,3],"data_offsets":[0,24]'), "expected just", A),
    "no shape": Bad(lambda: raw('"dtype":"F32","data_offsets":[0,24]'), "expected just", A),
    "no offsets": Bad(lambda: raw('"dtype":"F32","shape":[2,3]'), "expected just", A),
    "unknown field": Bad(lambda: one(stride=[3, 1]), "expected just .* 'stride'", A, stricter=True),
    # dtypes
    "dtype of another library": Bad(
        lambda: one(dtype="float32"), "'float32' is not a safetensors dtype", A
    ),
    "dtype in lower case": Bad(lambda: one(dtype="f32"), "'f32' is not", A),
    "dtype empty": Bad(lambda: one(dtype=""), "'' is not", A),
    "dtype is a number": Bad(lambda: one(dtype=4), "4 is not", A),
    "dtype is null": Bad(lambda: one(dtype=None), "None is not", A),
    "dtype is a list": Bad(lambda: one(dtype=["F32"]), "is not a safetensors dtype", A),
    "dtype F4": Bad(lambda: one(dtype="F4", shape=[48]), "F4 is not read here", A, stricter=True),
    "dtype F6": Bad(
        lambda: one(dtype="F6_E2M3", shape=[32]), "F6_E2M3 is not read here", A, stricter=True
    ),
    # shapes
    "shape is a number": Bad(lambda: one(shape=6), "shape must be", A),
    "shape is null": Bad(lambda: one(shape=None), "shape must be", A),
    "shape is text": Bad(lambda: one(shape="23"), "shape must be", A),
    "shape is an object": Bad(lambda: one(shape={"0": 6}), "shape must be", A),
    "negative dimensions": Bad(lambda: one(shape=[-2, -3]), r"shape must be .* \[-2, -3\]", A),
    "dimension minus zero": Bad(
        lambda: raw('"dtype":"F32","shape":[-0],"data_offsets":[0,0]', b""), "-0 is not an integer"
    ),
    "float dimension": Bad(lambda: one(shape=[2.0, 3]), "shape must be", A),
    "exponent dimension": Bad(
        lambda: raw('"dtype":"F32","shape":[6e0],"data_offsets":[0,24]'), "shape must be", A
    ),
    "bool dimension": Bad(lambda: one(shape=[True, 6]), "shape must be", A),
    "null dimension": Bad(lambda: one(shape=[None, 6]), "shape must be", A),
    "text dimension": Bad(lambda: one(shape=["6"]), "shape must be", A),
    "nested dimension": Bad(lambda: one(shape=[[2, 3]]), "shape must be", A),
    "rank 33": Bad(lambda: one(shape=[1] * 32 + [6]), "at most 32", A, stricter=True),
    "rank 5000": Bad(lambda: one(shape=[1] * 5000 + [6]), "at most 32", A, stricter=True),
    "shape too large for its data": Bad(
        lambda: one(shape=[3, 3]), r"\(0, 24\) do not match shape \(3, 3\) of F32 \(36 bytes\)", A
    ),
    "shape too small for its data": Bad(
        lambda: one(shape=[2, 2]), r"do not match shape \(2, 2\)", A
    ),
    "wrong itemsize": Bad(lambda: one(dtype="F16"), r"do not match .* F16 \(12 bytes\)", A),
    "scalar with an array's data": Bad(
        lambda: one(shape=[]), r"do not match shape \(\) of F32 \(4 bytes\)", A
    ),
    "dimension 2^32+4": Bad(
        lambda: one(shape=[2**32 + 4, 1], data_offsets=[0, 16], data=bytes(16)), "do not match", A
    ),
    "product wraps to zero": Bad(
        lambda: one(shape=[2**32, 2**32], data_offsets=[0, 0], data=b""), "overflows", A
    ),
    "product wraps to the data": Bad(
        lambda: one(shape=[2**62 + 6], data_offsets=[0, 24]), "overflows", A
    ),
    "product overflows, then zero": Bad(
        lambda: one(shape=[2**40, 2**40, 0], data_offsets=[0, 0], data=b""), "overflows", A
    ),
    "dimension 2^63": Bad(
        lambda: one(shape=[0, 2**63], data_offsets=[0, 0], data=b""),
        "shape must be",
        A,
        stricter=True,
    ),
    "dimension 2^64": Bad(
        lambda: one(shape=[0, 2**64], data_offsets=[0, 0], data=b""), "shape must be", A
    ),
    "dimension of 4000 digits": Bad(lambda: one(shape=[10**4000]), "shape must be", A),
    # offsets
    "offsets are null": Bad(lambda: one(data_offsets=None), "data_offsets must be", A),
    "offsets are an object": Bad(lambda: one(data_offsets={"0": 0}), "data_offsets must be", A),
    "one offset": Bad(lambda: one(data_offsets=[24]), "data_offsets must be", A),
    "three offsets": Bad(lambda: one(data_offsets=[0, 24, 24]), "data_offsets must be", A),
    "float offsets": Bad(lambda: one(data_offsets=[0.0, 24.0]), "data_offsets must be", A),
    "bool offsets": Bad(
        lambda: one(dtype="U8", shape=[1], data_offsets=[False, True], data=b"1"),
        "data_offsets must be",
        A,
    ),
    "text offsets": Bad(lambda: one(data_offsets=["0", "24"]), "data_offsets must be", A),
    "negative offset": Bad(lambda: one(data_offsets=[-24, 0]), "data_offsets must be", A),
    "offsets reversed": Bad(
        lambda: one(data_offsets=[24, 0]), r"data_offsets must be .* \[24, 0\]", A
    ),
    "offsets wrap at 2^64": Bad(
        lambda: one(data_offsets=[0, 2**64 + 24]), "data_offsets must be", A
    ),
    "begin near 2^64": Bad(lambda: one(data_offsets=[2**64 - 12, 12]), "data_offsets must be", A),
    "end near 2^63": Bad(lambda: one(data_offsets=[0, 2**63 - 1]), "reach past the end", A),
    "data cut short": Bad(
        lambda: one(data=bytes(23)), r"\(0, 24\) reach past the end, the file has 23", A
    ),
    "no data at all": Bad(lambda: one(data=b""), "reach past the end, the file has 0", A),
    # the layout of the data
    "trailing bytes": Bad(lambda: one(data=bytes(25)), "1 trailing bytes"),
    "data without a tensor": Bad(lambda: pack(b"{}", b"PK"), "2 trailing bytes"),
    "hole at the start": Bad(
        lambda: one(data_offsets=[4, 28], data=bytes(28)),
        "leaves a hole .* begins at 4, expected 0",
        A,
    ),
    "hole in the middle": Bad(
        lambda: two((0, 4), (8, 12), 12), "leaves a hole .* begins at 8, expected 4", "b.weight"
    ),
    "overlap": Bad(
        lambda: two((0, 8), (4, 12), 12), "overlaps .* begins at 4, expected 8", "b.weight"
    ),
    "same data twice": Bad(
        lambda: two((0, 8), (0, 8), 8), "overlaps .* begins at 0, expected 8", "b.weight"
    ),
    "one inside another": Bad(lambda: two((0, 12), (4, 8), 12), "overlaps", "b.weight"),
    "empty tensor inside another": Bad(lambda: two((0, 12), (4, 4), 12), "overlaps", "b.weight"),
    "empty tensor past the data": Bad(
        lambda: two((0, 12), (13, 13), 12), "reach past the end", "b.weight"
    ),
    "overlap bomb": Bad(
        lambda: pack({f"t{i:04}": entry([1000], [0, 4000]) for i in range(2000)}, bytes(4000)),
        "overlaps",
        "t0001",
    ),
    # other formats under this name, and one that only begins like them
    "length that reads as a pickle's start": Bad(
        lambda: pack(json.dumps({A: entry([9])}).encode().ljust(0x280), bytes(24)),
        "do not match",
        A,
    ),
    "Git LFS pointer": Bad(
        lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        "git lfs pull",
        kind=FileError,
    ),
    "zip archive": Bad(zipped, "pickle or zip", kind=FileError),
    "bare pickle": Bad(
        lambda: pickle.dumps({"a": 1}, protocol=2) + bytes(64), "pickle or zip", kind=FileError
    ),
    "GGUF": Bad(lambda: b"GGUF\3\0\0\0" + bytes(64), "GGUF", kind=FileError),
    "npy": Bad(lambda: b"\x93NUMPY\x01\x00v\x00{'descr': '<f4'}", "NumPy", kind=FileError),
    "login page": Bad(
        lambda: b"<!DOCTYPE html><html><body>Sign in</body></html>", "web page", kind=FileError
    ),
    "PNG": Bad(lambda: b"\x89PNG\r\n\x1a\n" + bytes(64), "a PNG picture", kind=FileError),
    "JPEG": Bad(lambda: b"\xff\xd8\xff\xe0" + bytes(64), "a JPEG picture", kind=FileError),
    "WebP": Bad(lambda: b"RIFF\x0a\0\0\0WEBP" + bytes(64), "a picture", kind=FileError),
    **{
        f"picture {start!r}": Bad(lambda start=start: start + bytes(64), "a pict", kind=FileError)
        for start in (b"GIF89a", b"BM", b"II*\0", b"MM\0*")
    },
    **{
        f"page {start!r}": Bad(lambda start=start: start + b"> " * 9, "web page", kind=FileError)
        for start in (b"\n <HTML", b"<?xml")
    },
    **{
        f"pickle of protocol {protocol}": Bad(
            lambda protocol=protocol: pickle.dumps(1.5, protocol), "pickle", kind=FileError
        )
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
    "JSON": Bad(lambda: b'{"_class_name": "X"}\n' * 9, "but JSON", kind=FileError),
    "list in JSON": Bad(lambda: b'[\n  {"prompt": "a"}\n]', "but JSON", kind=FileError),
    "text": Bad(lambda: b"# A model\n" * 9, "but text", kind=FileError),
    "settings": Bad(lambda: b"[tool.ruff]\nline-length = 100\n", "but text", kind=FileError),
    "short text": Bad(lambda: b"hello", "but text", kind=FileError),
    "text in Cyrillic": Bad(lambda: "лидит \n".encode() * 20, "but text", kind=FileError),
}


@pytest.fixture(params=BAD.values(), ids=list(BAD))
def bad(request: pytest.FixtureRequest) -> Bad:
    return request.param


def test_malformed_file_is_refused_in_one_line(bad: Bad, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(bad.build())
    with pytest.raises(LyditeError) as caught:
        TensorFile.open(path)
    message = str(caught.value)
    assert type(caught.value) is bad.kind
    assert message.startswith(f"{path}: ") and message.endswith(".")
    assert message.isprintable() and len(message) < len(str(path)) + 500
    assert re.search(bad.says, message)
    assert f"tensor {bad.tensor!r}" in message or not bad.tensor
    assert bad.stricter or library_rejects(bad.build())


def test_text_is_recognized_wherever_a_letter_is_cut() -> None:
    data = "лидит 🐈 ".encode() * 3
    for end in range(1, len(data) + 1):
        assert (tensorfile.recognize(data[:end]) or "").startswith("text") or end == 1


def library_rejects(data: bytes) -> bool:
    try:
        safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return True
    return False


def test_too_many_tensors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(two((0, 4), (4, 8), 8))
    assert len(read_header(path).tensors) == 2
    monkeypatch.setattr(tensorfile, "MAX_TENSORS", 1)
    with pytest.raises(TensorFileError, match="2 tensors, limit 1"):
        read_header(path)


def test_brackets_are_counted_before_they_are_parsed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack(b'{"a":[' + b"[]," * 800_000 + b"[]]}"))  # 60 MB as Python lists
    with pytest.raises(TensorFileError, match="more than 800000 brackets"):
        read_header(path)


@pytest.mark.parametrize(
    "data",
    [
        pack(b"{}"),
        pack(b"{}    "),
        pack({"__metadata__": {"note": "two\nlines", "": "é😀"}}),
        pack({"__metadata__": None}),  # MLX writes it
        one("пример.weight"),
        one("a" * 1000),
        one(shape=[], data_offsets=[0, 4], data=bytes(4)),
        one(shape=[0, 2**40], data_offsets=[0, 0], data=b""),
        one(shape=[1] * 31 + [6]),
        two((4, 8), (0, 4), 8),
        two((0, 0), (0, 0), 0),
        two((0, 4), (0, 0), 4),
        pack(json.dumps({A: entry()}).encode().ljust(0x280), bytes(24)),  # begins like a pickle
    ],
)
def test_unusual_but_valid_file_is_read_as_the_library_reads_it(
    data: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with TensorFile.open(path) as file:
        ours = {name: file.read(name).tobytes() for name in file.header.tensors}
    assert ours == {name: bytes(view["data"]) for name, view in safetensors.deserialize(data)}


def test_header_lists_tensors_in_the_order_of_their_data(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(two((4, 8), (0, 4), 8))
    header = read_header(path)
    assert list(header.tensors) == ["b.weight", "a.weight"]
    info = header.tensors["a.weight"]
    assert (info.dtype, info.shape, info.size, info.nbytes) == ("U8", (4,), 4, 4)
    assert (info.start, info.stop) == (header.data_start + 4, path.stat().st_size)


SHAPES = [(), (0,), (3, 0, 2), (1,), (2, 3), (3, 1, 2, 2)]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_every_dtype_comes_back_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    array = sample(dtype, (4, 6))
    arrays = {str(shape): sample(dtype, shape) for shape in SHAPES} | {
        "transposed": array.T,
        "strided": array[::2, ::-3],
        "broadcast": np.broadcast_to(array[0], (2, 6)),
    }
    path = tmp_path / "x.safetensors"
    save(path, {**arrays, "bytes": sample("U8", (3,))}, {"k": "v"})
    library = dict(safetensors.deserialize(path.read_bytes()))
    with TensorFile.open(path) as file:
        assert file.header.metadata == {"k": "v"}
        for name, array in arrays.items():
            back, other = file.read(name), library[name]
            assert (back.dtype, back.shape, back.tobytes()) == (
                array.dtype, array.shape, array.tobytes(),
            )  # fmt: skip
            assert not back.flags.writeable
            assert (other["dtype"], other["shape"]) == (dtype, list(array.shape))
            assert bytes(other["data"]) == array.tobytes()


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_unaligned_data_is_read_and_computed_with(dtype: str, tmp_path: Path) -> None:
    array = sample(dtype, (2, 3))
    text = json.dumps({"a": entry([2, 3], [0, array.nbytes], dtype)}).encode()
    for shift in range(8):
        path = tmp_path / f"{shift}.safetensors"
        path.write_bytes(pack(text + b" " * shift, array.tobytes()))
        with TensorFile.open(path) as file:
            view = file.read("a")
            assert view.tobytes() == array.tobytes()
            wide = np.complex128 if dtype == "C64" else np.float64
            np.testing.assert_array_equal(view.T.astype(wide), array.T.astype(wide))


def test_save_gives_equal_bytes_for_equal_input(tmp_path: Path) -> None:
    dtypes = {"d": "U8", "c": "F64", "b": "BF16", "a": "F32"}
    tensors = {name: sample(dtype, (3,)) for name, dtype in dtypes.items()}
    metadata = {f"key{i}": "v" for i in range(9)}
    for name, order in {"one": 1, "two": -1}.items():
        save(tmp_path / name, dict(list(tensors.items())[::order]), metadata)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_save_aligns_every_tensor(tmp_path: Path) -> None:
    for length in range(8):
        names = {dtype: dtype + "a" * length for dtype in ("U8", "F64", "BF16", "F32")}
        save(tmp_path / "x", {name: sample(dtype, (3,)) for dtype, name in names.items()})
        for info in read_header(tmp_path / "x").tensors.values():
            assert info.start % NUMPY_DTYPES[info.dtype].itemsize == 0


@pytest.mark.parametrize(
    ("tensors", "metadata", "says"),
    [
        ({"a": np.array([object()])}, None, "tensor 'a': .* no dtype object"),
        ({"a": np.zeros(2, ">f4")}, None, "tensor 'a': .* no dtype >f4"),
        ({"__metadata__": np.zeros(2)}, None, "tensor '__metadata__': .* no such name"),
        ({"a\nb": np.zeros(2)}, None, "printable"),
        ({"": np.zeros(2)}, None, "printable"),
        ({"a": np.zeros((1,) * 33)}, None, "at most 32"),
        ({"a": np.zeros(2)}, {"k": 1}, "must map text to text"),
        ({"a": np.zeros(2)}, {"k": "\ud800"}, "not valid Unicode"),
    ],
)
def test_save_refuses_what_could_not_be_read(
    tensors: dict[str, Any], metadata: dict[str, str], says: str, tmp_path: Path
) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"before")
    with pytest.raises(TensorFileError, match=says) as caught:
        save(tmp_path / "x.safetensors", tensors, metadata)
    assert str(caught.value).endswith("Nothing was written.")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"before"]


def test_saved_file_has_the_usual_permissions(tmp_path: Path) -> None:
    save(tmp_path / "x.safetensors", {"a": np.zeros(2)})
    (tmp_path / "plain").touch()
    modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert len(modes) == 1


def test_save_over_an_open_file_leaves_its_reader_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save(path, {"a": np.arange(3)})
    with TensorFile.open(path) as file:
        save(path, {"b": np.arange(5)})
        np.testing.assert_array_equal(file.read("a"), np.arange(3))
    assert list(read_header(path).tensors) == ["b"]


def test_arrays_outlive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save(path, {"a": np.arange(100_000)})
    with TensorFile.open(path) as file:
        view = file.read("a")
    path.unlink()
    assert view.sum() == 100_000 * 99_999 // 2
    with pytest.raises(FileError, match="already closed"):
        file.read("a")


@pytest.mark.parametrize("keep", [0, 8, 100])
def test_file_cut_while_open_is_an_error_not_a_crash(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save(path, {"a": np.zeros(100_000)})
    with TensorFile.open(path) as file:
        os.truncate(path, keep)
        with pytest.raises(TensorFileError, match="changed on disk"):
            file.read("a")


def test_file_rewritten_in_place_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save(path, {"a": np.zeros(4)})
    os.utime(path, ns=(0, 0))
    with TensorFile.open(path) as file:
        path.write_bytes(path.read_bytes()[:-8] + b"12345678")
        os.utime(path, ns=(1, 1))  # within the same second
        with pytest.raises(TensorFileError, match="changed on disk"):
            file.read("a")


def test_a_file_cut_while_a_tensor_is_read_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a mapped file that is gone would end the process by a signal."""
    path = tmp_path / "x.safetensors"
    save(path, {"a": np.ones(100_000)})
    real = os.preadv

    def read_then_cut(*given: Any) -> int:
        count = real(*given)
        os.truncate(path, 1000)
        return count

    monkeypatch.setattr(tensorfile, "PIECE", 4096)
    monkeypatch.setattr(os, "preadv", read_then_cut)
    with (
        TensorFile.open(path) as file,
        pytest.raises(TensorFileError, match="changed on disk while it was open"),
    ):
        file.read("a")


def test_an_array_in_use_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save(path, {"a": np.ones(10)})
    with TensorFile.open(path) as file:
        array = file.read("a")
        assert file.read("a") is array


def test_unknown_tensor_is_reported_with_the_closest_name(tmp_path: Path) -> None:
    save(tmp_path / "x.safetensors", {"block.0.attn.weight": np.zeros(2)})
    with TensorFile.open(tmp_path / "x.safetensors") as file:
        with pytest.raises(TensorFileError, match=r"no tensor .* mean 'block\.0\.attn\.weight'\?"):
            file.read("block.0.atn.weight")
        with pytest.raises(TensorFileError, match="No tensor has a name like it") as caught:
            file.read("\n" * 10_000)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_opening_reads_the_header_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    count = 2**40  # bytes of hole: reading them would take hours
    path.write_bytes(pack({"a": entry([count], [0, count], "U8")}))
    os.truncate(path, path.stat().st_size + count)
    assert read_header(path).tensors["a"].nbytes == count
    with (
        TensorFile.open(path) as file,
        pytest.raises(TensorFileError, match="do not fit into memory"),
    ):
        file.read("a")


def test_what_is_not_a_file_is_a_file_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    cases = {
        "missing.safetensors": "no such file",
        "a\0b.safetensors": "cannot be read .*null",
        "": "not a file",
        "pipe.safetensors": "not a file",
        "n" * 5000: "cannot be read .File name too long",
        "new\nline.safetensors": "no such file",
        "loop.safetensors": "cannot be read .*symbolic",
    }
    for name, says in cases.items():
        with pytest.raises(FileError, match=says) as caught:
            read_header(tmp_path / name)
        assert str(caught.value).isprintable()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission_is_a_file_error(tmp_path: Path) -> None:
    save(tmp_path / "x.safetensors", {})
    (tmp_path / "x.safetensors").chmod(0)
    with pytest.raises(FileError, match="Permission denied"):
        read_header(tmp_path / "x.safetensors")


def test_error_while_reading_is_a_file_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    save(tmp_path / "x.safetensors", {})
    monkeypatch.setattr(tensorfile, "parse_header", broken)
    with pytest.raises(FileError, match="Input/output error"):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("suffix", "says"),
    [
        *(
            (suffix, "pickle files can run code")
            for suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl")
        ),
        (".PT", "pickle files can run code"),
        (".npz", "NumPy files"),
        (".npy", "NumPy files"),
        (".gguf", "GGUF files"),
    ],
)
def test_other_formats_are_refused_unopened(
    suffix: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"model{suffix}"
    save(tmp_path / "good.safetensors", {})
    (tmp_path / "good.safetensors").rename(path)
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("opened"))
    with pytest.raises(FileError, match=says) as caught:
        TensorFile.open(path)
    assert str(caught.value).startswith(f"{path}: ") and str(caught.value).isprintable()


@pytest.mark.parity
def test_the_command_in_the_pickle_hint_converts_the_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    shared = torch.arange(6.0).reshape(2, 3)
    path = tmp_path / "my model.bin"
    torch.save({"state_dict": {"a": shared, "b": shared.T}, "epoch": 3}, path)
    run_hint(path)
    with TensorFile.open(path.with_suffix(".safetensors")) as file:
        np.testing.assert_array_equal(file.read("a"), shared.numpy())
        np.testing.assert_array_equal(file.read("b"), shared.T.numpy())


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_the_command_in_the_numpy_hint_converts_the_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"my model{suffix}"
    np.save(path, np.arange(3)) if suffix == ".npy" else np.savez(path, array=np.arange(3))
    run_hint(path)
    with TensorFile.open(path.with_suffix(".safetensors")) as file:
        np.testing.assert_array_equal(file.read("array"), np.arange(3))


def test_limits_of_a_header_are_met_and_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(one())  # two braces and two brackets, one tensor
    length = int.from_bytes(path.read_bytes()[:8], "little")
    limits = {"MAX_BRACKETS": 4, "MAX_TENSORS": 1, "MAX_HEADER_BYTES": length, "MAX_RANK": 2}
    for name, most in limits.items():
        with monkeypatch.context() as patch:
            patch.setattr(tensorfile, name, most)
            assert read_header(path).tensors
            patch.setattr(tensorfile, name, most - 1)
            with pytest.raises(TensorFileError, match=rf"\b{most - 1}\b"):
                read_header(path)


@pytest.mark.parametrize("length", range(1, 17))
def test_every_tensor_begins_at_a_multiple_of_its_itemsize(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    save(path, {"n" * length: np.zeros(3, np.uint8), "b": np.zeros(1), "c": np.zeros(3, np.int16)})
    for info in read_header(path).tensors.values():
        assert info.start % NUMPY_DTYPES[info.dtype].itemsize == 0


def test_a_tensor_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, values = tmp_path / "x.safetensors", np.arange(100, dtype=np.float64).reshape(4, 25)
    save(path, {"a": values, "b": -values})
    for piece in (1, 7, 799, 800, 801):
        monkeypatch.setattr(tensorfile, "PIECE", piece)
        with TensorFile.open(path) as file:
            np.testing.assert_array_equal(file.read("b"), -values)
            np.testing.assert_array_equal(file.read("a"), values)


def run_hint(path: Path) -> None:
    """Run the command that the refusal of `path` proposes, as a shell would."""
    with pytest.raises(FileError) as caught:
        read_header(path)
    command = shlex.split(str(caught.value).partition(": python ")[2])
    subprocess.run([sys.executable, *command], check=True)


def sample(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Random bits, as nothing may change them; bool knows only two."""
    numpy_dtype = NUMPY_DTYPES[dtype]
    generator = np.random.default_rng(7)
    if dtype == "BOOL":
        return generator.integers(0, 2, shape).astype(bool)
    count = int(np.prod(shape)) * numpy_dtype.itemsize
    return np.frombuffer(generator.bytes(count), numpy_dtype).reshape(shape)
