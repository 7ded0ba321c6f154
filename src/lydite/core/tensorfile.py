"""One safetensors file: a strictly checked header, lazy reads, an atomic write.

Reference: huggingface/safetensors @ 24b0b28, README.md (format) and safetensors/src/tensor.rs.
Stricter than both: no duplicate or unknown keys, no leading space, printable names, limits.
"""

import contextlib
import difflib
import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeGuard, cast
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from lydite.core.config import JsonError, parse_object
from lydite.core.dtypes import NAMES, NUMPY_DTYPES, itemsize
from lydite.core.errors import FileError, TensorFileError, at, shown
from lydite.core.files import atomic_path, open_regular

MAX_HEADER_BYTES = 50_000_000  # half of the format's limit; a tensor takes some 100
MAX_TENSORS = 200_000  # of one file; the largest published models have some 100,000 in many
MAX_BRACKETS = 4 * MAX_TENSORS  # a tensor needs three; each costs some 70 bytes once parsed
MAX_RANK = 32  # NumPy stops at 64, weights at 5
PIECE = 2**28  # bytes of one read
MAX_INT = 2**63 - 1  # a dimension, an offset, the bytes of a tensor


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says about one tensor; `start` and `stop` count from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class Header:
    """A checked header: its tensors lie end to end from `data_start` and fill the file."""

    path: Path
    tensors: dict[str, TensorInfo]  # in the order of their data
    metadata: dict[str, str]
    data_start: int


class BrokenRule(ValueError):
    """Which rule of the format is broken, and what to do; the caller adds the file."""

    def __init__(self, rule: str, advice: str = "") -> None:
        super().__init__(rule)
        self.advice = advice or (
            "The file is damaged or was not written by safetensors; download or export it again."
        )


def parse_header(path: Path, text: bytes, size: int) -> Header:
    """The header in `text`, checked against a file of `size` bytes."""
    if not text.startswith(b"{"):
        raise BrokenRule(f"the header must begin with '{{', found {shown(text[:1])}")
    if text.count(b"[") + text.count(b"{") > MAX_BRACKETS:
        raise BrokenRule(f"the header has more than {MAX_BRACKETS} brackets")
    try:
        entries = parse_object(text)
    except JsonError as error:
        raise BrokenRule(f"header: {error}") from error
    metadata: Any = entries.pop("__metadata__", {})
    if metadata is None:  # MLX writes it for none
        metadata = {}
    if not _is_text_map(metadata):
        raise BrokenRule(f"__metadata__ must map text to text, found {shown(metadata)}")
    if len(entries) > MAX_TENSORS:
        raise BrokenRule(f"{len(entries)} tensors, limit {MAX_TENSORS}")
    data_start = 8 + len(text)
    tensors: list[TensorInfo] = []
    for name, entry in entries.items():
        try:
            tensors.append(_tensor(name, entry, data_start, size))
        except BrokenRule as rule:
            raise BrokenRule(f"tensor {shown(name)}: {rule}", rule.advice) from rule
    tensors.sort(key=lambda info: (info.start, info.stop))
    _check_layout(tensors, data_start, size)
    return Header(path, {info.name: info for info in tensors}, metadata, data_start)


_UNREAD = ("F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")  # in the format, not here


def _is_text_map(value: object) -> TypeGuard[dict[str, str]]:
    """Whether `value` is an object of strings."""
    return isinstance(value, dict) and all(
        isinstance(text, str) for text in cast(dict[str, object], value).values()
    )


def _tensor(name: str, entry: object, data_start: int, size: int) -> TensorInfo:
    if not name or not name.isprintable():
        raise BrokenRule("a name must be printable text and not empty")
    fields = cast(dict[str, object], entry if isinstance(entry, dict) else {})
    if fields.keys() != {"dtype", "shape", "data_offsets"}:
        found = shown(list(fields) if fields else cast(object, entry))
        raise BrokenRule(f"expected just dtype, shape, data_offsets, found {found}")
    dtype = fields["dtype"]
    shape, offsets = _counts(fields["shape"]), _counts(fields["data_offsets"])
    if dtype in _UNREAD:
        raise BrokenRule(f"dtype {dtype} is not read here", "Get the model in another dtype.")
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        raise BrokenRule(f"{shown(dtype)} is not a safetensors dtype")
    if shape is None or len(shape) > MAX_RANK:
        rule = f"at most {MAX_RANK} whole numbers from 0 to 2^63-1"
        raise BrokenRule(f"shape must be {rule}, found {shown(fields['shape'])}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        rule = "two whole numbers [begin, end] with 0 <= begin <= end < 2^63"
        found = shown(fields["data_offsets"])
        raise BrokenRule(f"data_offsets must be {rule}, found {found}")
    if offsets[1] > size - data_start:
        has = f"the file has {size - data_start} bytes of data"
        raise BrokenRule(f"data_offsets {offsets} reach past the end, {has}")
    # A zero counts as one here: NumPy refuses an empty array whose other dimensions overflow.
    if math.prod(dim or 1 for dim in shape) * itemsize(dtype) > MAX_INT:
        raise BrokenRule(f"shape {shown(shape)} of {dtype} overflows 63 bits")
    nbytes = math.prod(shape) * itemsize(dtype)
    if nbytes != offsets[1] - offsets[0]:
        expected = f"shape {shown(shape)} of {dtype} ({nbytes} bytes)"
        raise BrokenRule(f"data_offsets {offsets} do not match {expected}")
    return TensorInfo(name, dtype, shape, data_start + offsets[0], data_start + offsets[1])


def _counts(value: object) -> tuple[int, ...] | None:
    """`value` as a tuple if it is a list of whole numbers we can count with; True is not one."""
    items = cast(list[object], value) if isinstance(value, list) else [None]
    if all(type(item) is int and 0 <= item <= MAX_INT for item in items):
        return tuple(cast(list[int], items))
    return None


def _check_layout(tensors: Iterable[TensorInfo], data_start: int, size: int) -> None:
    """Sorted by their data, the tensors lie end to end and leave nothing over."""
    stop = data_start
    for info in tensors:
        if info.start != stop:
            fault = "overlaps the tensor" if info.start < stop else "leaves a hole"
            begins = f"begins at {info.start - data_start}, expected {stop - data_start}"
            raise BrokenRule(f"tensor {shown(info.name)}: {fault} before it, {begins}")
        stop = info.stop
    if stop != size:
        raise BrokenRule(f"{size - stop} trailing bytes belong to no tensor")


def refuse_other_formats(path: Path) -> None:
    """Raise a FileError with a way out when the suffix of `path` is of a format we do not open."""
    reason = _SUFFIXES.get(path.suffix.lower())
    if reason is not None:
        files = {"source": path, "target": path.with_suffix(".safetensors")}
        quoted = {key: shlex.quote(at(file)) for key, file in files.items()}
        raise FileError(f"{at(path)}: {reason % quoted}")


def recognize(start: bytes) -> str | None:
    """What a file that is not safetensors turns out to be by its first bytes, and what to do."""
    if start[8:9] == b"{":  # a header does begin here; it is broken safetensors
        return None
    found = next((kind for magic, kind in _CONTENTS if re.match(magic, start)), None)
    return found or (_TEXT if _is_text(start) else None)


def _is_text(start: bytes) -> bool:
    text = start.decode(errors="ignore")  # a letter may be cut at the end
    return bool(text) and len(text.encode()) > len(start) - 4 and not _UNWRITTEN.search(text)


_PICKLE = (
    "pickle files can run code when opened, so they are never read here. Convert it to safetensors"
    ' on a machine you trust: python -c "import sys, torch, safetensors.torch as s;'
    " d = torch.load(sys.argv[1], map_location='cpu', weights_only=True);"
    " d = d.get('state_dict', d);"
    " s.save_file({k: v.clone().contiguous() for k, v in d.items() if torch.is_tensor(v)},"
    ' sys.argv[2])" %(source)s %(target)s'
)
_NUMPY = (
    "NumPy files are not read here. Convert it to safetensors:"
    ' python -c "import sys, numpy, safetensors.numpy as s; d = numpy.load(sys.argv[1]);'
    " s.save_file(dict(d) if hasattr(d, 'files') else {'array': d}, sys.argv[2])"
    '" %(source)s %(target)s'
)
_GGUF = "GGUF files are not read here. Get the safetensors files of the model it was made from."
_SUFFIXES: dict[str, str] = {".npz": _NUMPY, ".npy": _NUMPY, ".gguf": _GGUF}
_SUFFIXES.update(dict.fromkeys((".bin", ".pt", ".pth", ".ckpt", ".pkl"), _PICKLE))

_EXPECTED = "Expected a safetensors file or a model's folder"
# What files named .safetensors turn out to be, by their first bytes.
_CONTENTS = (
    (rb"version https://git-lfs", "a Git LFS pointer. Fetch the file it stands for: git lfs pull"),
    (rb"PK\x03\x04|\x80[\x02-\x05]", "a pickle or zip file. Get the model's safetensors files"),
    (rb"GGUF|\x93NUMPY", "a GGUF or NumPy file. Get the model's safetensors files"),
    (rb"(?i)\s*<(!doctype|html|\?xml)", "a web page. Log in where it came from, download it again"),
    (rb"\x89PNG", f"a PNG picture. {_EXPECTED}"),
    (rb"\xff\xd8\xff", f"a JPEG picture. {_EXPECTED}"),
    (rb"(?s)RIFF.{4}WEBP|GIF8|BM|II\*\0|MM\0\*", f"a picture. {_EXPECTED}"),
    (rb"\s*(\{|\[\s*[\[{\"\d])", f"JSON. {_EXPECTED}"),
)
_TEXT = f"text. {_EXPECTED}"
_UNWRITTEN = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")  # no text has these


def read_header(path: Path) -> Header:
    """Read and check the header of `path`; the tensors themselves are not touched."""
    with _open(path) as file:
        return _read_header(path, file)


@dataclass(frozen=True, eq=False)
class TensorFile:
    """An open safetensors file. Arrays read from it stay valid after it is closed."""

    header: Header
    _file: BinaryIO
    _stamp: tuple[int, int]
    _live: WeakValueDictionary[str, NDArray[Any]] = field(
        default_factory=WeakValueDictionary[str, NDArray[Any]]
    )

    @classmethod
    def open(cls, path: Path) -> Self:
        """Check the header; no tensor is read yet."""
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(_open(path))
            opened = cls(_read_header(path, file), file, _stamp(file))
            stack.pop_all()
        return opened

    def read(self, name: str) -> NDArray[Any]:
        """The tensor in its stored dtype, read-only.

        It is read and not mapped: a page of a file that was cut short ends the process without a
        word. An array that is still in use is not read again.
        """
        info = self.header.tensors.get(name)
        if info is None:
            raise unknown_tensor(self.header.path, name, self.header.tensors)
        self._check_unchanged()
        array = self._live.get(name)
        if array is None:
            array = self._read(info).view(NUMPY_DTYPES[info.dtype]).reshape(info.shape)
            self._live[name] = array
        return array

    def _read(self, info: TensorInfo) -> NDArray[np.uint8]:
        path, done = at(self.header.path), 0
        try:
            data = np.empty(info.nbytes, np.uint8)
            while done < info.nbytes:
                piece = data.data[done : done + PIECE]
                count = os.preadv(self._file.fileno(), [piece], info.start + done)
                if count == 0:
                    raise TensorFileError(f"{path}: changed on disk while it was open.")
                done += count
        except OSError as error:
            raise FileError(f"{path}: cannot be read ({error.strerror or error}).") from error
        except MemoryError as error:
            reason = f"{info.nbytes} bytes do not fit into memory"
            raise TensorFileError(f"{path}: tensor {shown(info.name)}: {reason}.") from error
        data.flags.writeable = False
        return data

    def close(self) -> None:
        """Close the file; arrays that were read stay valid."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_unchanged(self) -> None:
        path = at(self.header.path)
        if self._file.closed:
            raise FileError(f"{path}: already closed. Read its tensors before closing it.")
        if _stamp(self._file) != self._stamp:
            raise TensorFileError(f"{path}: changed on disk while it was open. Open it again.")


def save(
    path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write `tensors` to `path`; equal input gives equal bytes.

    Not through the safetensors package: its metadata order is random, it takes raw pointers without
    checking whether an array is contiguous, and only the owner may read the file it writes.
    """
    head = encoded_header(path, {name: (a.dtype, a.shape) for name, a in tensors.items()}, metadata)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(head)
        for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
            file.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)


def encoded_header(
    path: Path,
    specs: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """The header of a file with these tensors, its length before it, as `save` writes it."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    size = 0
    try:
        for name in sorted(specs, key=lambda name: (-specs[name][0].itemsize, name)):
            dtype, shape = specs[name]
            if name == "__metadata__" or dtype not in NAMES:
                reason = f"the format has no such name or no dtype {dtype}"
                raise BrokenRule(f"tensor {shown(name)}: {reason}")
            offsets = [size, size := size + math.prod(shape) * dtype.itemsize]
            header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # every tensor then begins at a multiple of its itemsize
        parse_header(path, text, 8 + len(text) + size)  # write nothing that would not be read
    except BrokenRule as rule:
        raise TensorFileError(f"{at(path)}: {rule}. Nothing was written.") from rule
    return len(text).to_bytes(8, "little") + text


def unknown_tensor(path: Path, name: str, names: Iterable[str]) -> TensorFileError:
    """The error for a tensor that is not there, with the closest name that is."""
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {shown(close[0])}?" if close else "No tensor has a name like it."
    return TensorFileError(f"{at(path)}: no tensor {shown(name)}. {hint}")


def _open(path: Path) -> BinaryIO:
    refuse_other_formats(path)
    return open_regular(path)


def _stamp(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _read_header(path: Path, file: BinaryIO) -> Header:
    start = b""
    try:
        size = _stamp(file)[0]
        start = file.read(64)
        if size < 8:
            raise BrokenRule(f"{size} bytes, too short for a header" if size else "empty (0 bytes)")
        length = int.from_bytes(start[:8], "little")
        if length > MAX_HEADER_BYTES:
            raise BrokenRule(f"header length {length} bytes, limit {MAX_HEADER_BYTES}")
        if length > size - 8:
            raise BrokenRule(f"header length {length} bytes, but only {size - 8} follow it")
        file.seek(8)
        return parse_header(path, file.read(length), size)
    except OSError as error:
        raise FileError(f"{at(path)}: cannot be read ({error.strerror or error}).") from error
    except BrokenRule as rule:
        if kind := recognize(start):
            raise FileError(f"{at(path)}: not safetensors but {kind}.") from rule
        raise TensorFileError(f"{at(path)}: {rule}. {rule.advice}") from rule
