"""One safetensors file: a header checked against every rule, lazy reads, an atomic write.

Reference: huggingface/safetensors @ 24b0b28, README.md (format) and safetensors/src/tensor.rs.
Stricter than both: no duplicate or unknown keys, no leading space, printable names, limits.
"""

import contextlib
import difflib
import json
import math
import mmap
import os
import re
import reprlib
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from lydite.core.dtypes import NAMES, NUMPY_DTYPES, itemsize
from lydite.core.errors import FileError, TensorFileError
from lydite.core.files import atomic_path
from lydite.core.jsonfile import JsonError, parse_object

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_TENSORS = 1_000_000  # the largest published models have some 100,000
MAX_RANK = 32  # NumPy stops at 64, weights at 5
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


def read_header(path: Path) -> Header:
    """Read and check the header of `path`; the tensors themselves are not touched."""
    with _open(path) as file:
        return _read_header(path, file)


@dataclass(frozen=True, eq=False)
class TensorFile:
    """An open safetensors file. Arrays it gave out stay valid after it is closed."""

    header: Header
    _file: BinaryIO
    _map: mmap.mmap
    _stamp: tuple[int, int]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Check the header and map the file; no tensor is read yet."""
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(_open(path))
            stamp = _stamp(file)
            header = _read_header(path, file)
            try:
                mapped = mmap.mmap(file.fileno(), stamp[0], access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:  # ValueError: shorter than a moment ago
                raise FileError(f"{_at(path)}: cannot be mapped ({error}).") from error
            opened = cls(header, file, stack.enter_context(mapped), stamp)
            opened._check_unchanged()
            stack.pop_all()
        return opened

    def read(self, name: str) -> NDArray[Any]:
        """The tensor in its stored dtype, as a read-only view of the file."""
        info = self.header.tensors.get(name)
        if info is None:
            raise unknown_tensor(self.header.path, name, self.header.tensors)
        self._check_unchanged()
        # frombuffer, not ndarray(buffer=...): only it keeps the mapping from closing under a view.
        flat = np.frombuffer(self._map, NUMPY_DTYPES[info.dtype], info.size, info.start)
        return flat.reshape(info.shape)

    def close(self) -> None:
        """Close the file; the mapping goes with the last array that looks into it."""
        self._file.close()
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_unchanged(self) -> None:
        # Touching a mapped page that a truncation took away kills the process, so look first.
        path = _at(self.header.path)
        if self._file.closed:
            raise FileError(f"{path}: already closed. Read its tensors before closing it.")
        if _stamp(self._file) != self._stamp:
            raise TensorFileError(f"{path}: changed on disk while it was open. Open it again.")


def save(
    path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write `tensors` to `path`; equal input gives equal bytes.

    Not through the safetensors package: its metadata order is random, it takes raw pointers without
    asking whether an array is contiguous, and only the owner may read the file it leaves.
    """
    arrays = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    size = 0
    try:
        for name, array in arrays:
            if name == "__metadata__" or array.dtype not in NAMES:
                raise _BrokenRule(f"tensor {shown(name)}: {array.dtype} cannot be stored")
            offsets = [size, size := size + array.nbytes]
            entry = {"dtype": NAMES[array.dtype], "shape": array.shape, "data_offsets": offsets}
            header[name] = entry
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # every tensor then begins at a multiple of its itemsize
        _parse(path, text, 8 + len(text) + size)  # write nothing that would not be read
    except _BrokenRule as rule:
        raise TensorFileError(f"{_at(path)}: {rule}. Nothing was written.") from rule
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in arrays:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def refuse_other_formats(path: Path) -> None:
    """Raise a FileError with a way out when the suffix of `path` is of a format we do not open."""
    reason = _OTHER_SUFFIXES.get(path.suffix.lower())
    if reason is not None:
        files = {"source": path, "target": path.with_suffix(".safetensors")}
        quoted = {key: shlex.quote(_at(file)) for key, file in files.items()}
        raise FileError(f"{_at(path)}: {reason % quoted}")


def unknown_tensor(path: Path, name: str, names: Iterable[str]) -> TensorFileError:
    """The error for a tensor that is not there, with the closest name that is."""
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {shown(close[0])}?" if close else "No tensor has a name like it."
    return TensorFileError(f"{_at(path)}: no tensor {shown(name)}. {hint}")


def shown(value: object) -> str:
    """`value` for an error message: one line, and short whatever a stranger put in it."""
    return _SHORT.repr(value)


class _BrokenRule(ValueError):
    """Which rule of the format is broken, and what to do; the caller adds the file."""

    def __init__(self, rule: str, advice: str = "") -> None:
        super().__init__(rule)
        self.advice = advice or (
            "The file is damaged or was not written by safetensors; download or export it again."
        )


_UNREAD = ("F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")  # in the format, not here
_SURROGATE = re.compile("[\ud800-\udfff]")
_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxlist, _SHORT.maxtuple = 100, 8, 8

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
_OTHER_SUFFIXES: dict[str, str] = {".npz": _NUMPY, ".npy": _NUMPY, ".gguf": _GGUF}
_OTHER_SUFFIXES.update(dict.fromkeys((".bin", ".pt", ".pth", ".ckpt", ".pkl"), _PICKLE))

# What files named .safetensors turn out to be, by their first bytes.
_OTHER_CONTENTS = (
    (rb"version https://git-lfs", "a Git LFS pointer. Fetch the file it stands for: git lfs pull"),
    (rb"PK\x03\x04|\x80[\x02-\x05]", "a pickle or zip file. Get the model's safetensors files"),
    (rb"GGUF|\x93NUMPY", "a GGUF or NumPy file. Get the model's safetensors files"),
    (rb"(?i)\s*<(!doctype|html|\?xml)", "a web page. Log in where it came from, download it again"),
)


def _at(path: Path) -> str:
    text = str(path)
    return text if text.isprintable() else repr(text)


def _open(path: Path) -> BinaryIO:
    refuse_other_formats(path)
    try:
        if path.is_file():  # never a pipe, which would wait for a writer
            return path.open("rb")
        found = "not a file" if path.exists() else "no such file"
    except OSError as error:
        found = f"cannot be read ({error.strerror or error})"
    raise FileError(f"{_at(path)}: {found}. Expected the path of a safetensors file.")


def _stamp(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _read_header(path: Path, file: BinaryIO) -> Header:
    start = b""
    try:
        size = _stamp(file)[0]
        start = file.read(64)
        if size < 8:
            raise _BrokenRule(f"{size} bytes, no room for a header" if size else "empty (0 bytes)")
        length = int.from_bytes(start[:8], "little")
        if length > MAX_HEADER_BYTES:
            raise _BrokenRule(f"header length {length} bytes, limit {MAX_HEADER_BYTES}")
        if length > size - 8:
            raise _BrokenRule(f"header length {length} bytes, but only {size - 8} follow it")
        file.seek(8)
        return _parse(path, file.read(length), size)
    except OSError as error:
        raise FileError(f"{_at(path)}: cannot be read ({error.strerror or error}).") from error
    except _BrokenRule as rule:
        for magic, kind in _OTHER_CONTENTS:
            if start[8:9] != b"{" and re.match(magic, start):
                raise FileError(f"{_at(path)}: not safetensors but {kind}.") from rule
        raise TensorFileError(f"{_at(path)}: {rule}. {rule.advice}") from rule


def _parse(path: Path, text: bytes, size: int) -> Header:
    """The header in `text`, checked against a file of `size` bytes."""
    if not text.startswith(b"{"):
        raise _BrokenRule(f"the header must begin with '{{', found {shown(text[:1])}")
    try:
        entries = parse_object(text)
    except JsonError as error:
        raise _BrokenRule(f"header: {error}") from error
    metadata = entries.pop("__metadata__", {})
    if not _is_text_map(metadata):
        raise _BrokenRule(f"__metadata__ must map text to text, found {shown(metadata)}")
    if len(entries) > MAX_TENSORS:
        raise _BrokenRule(f"{len(entries)} tensors, limit {MAX_TENSORS}")
    data_start = stop = 8 + len(text)
    tensors = [_tensor(name, entry, data_start, size) for name, entry in entries.items()]
    tensors.sort(key=lambda info: (info.start, info.stop))
    for info in tensors:
        if info.start != stop:
            fault = "overlaps the tensor" if info.start < stop else "leaves a hole"
            begin, end = info.start - data_start, stop - data_start
            raise _BrokenRule(
                f"tensor {shown(info.name)} {fault} before it: begins at {begin}, expected {end}"
            )
        stop = info.stop
    if stop != size:
        raise _BrokenRule(f"{size - stop} trailing bytes belong to no tensor")
    return Header(path, {info.name: info for info in tensors}, metadata, data_start)


def _tensor(name: str, entry: object, data_start: int, size: int) -> TensorInfo:
    where = f"tensor {shown(name)}"
    if not name or not name.isprintable():
        raise _BrokenRule(f"{where}: a name must be printable text and not empty")
    fields = cast(dict[str, object], entry if isinstance(entry, dict) else {})
    if fields.keys() != {"dtype", "shape", "data_offsets"}:
        found = shown(list(fields) if fields else cast(object, entry))
        raise _BrokenRule(f"{where}: expected just dtype, shape, data_offsets, found {found}")
    dtype = fields["dtype"]
    shape, offsets = _counts(fields["shape"]), _counts(fields["data_offsets"])
    if dtype in _UNREAD:
        raise _BrokenRule(f"{where}: dtype {dtype} is not read here", "Get another dtype.")
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        raise _BrokenRule(f"{where}: {shown(dtype)} is not a safetensors dtype")
    if shape is None or len(shape) > MAX_RANK:
        rule = f"at most {MAX_RANK} whole numbers from 0 to 2^63-1"
        raise _BrokenRule(f"{where}: shape must be {rule}, found {shown(fields['shape'])}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        rule = "two whole numbers [begin, end] with 0 <= begin <= end < 2^63"
        found = shown(fields["data_offsets"])
        raise _BrokenRule(f"{where}: data_offsets must be {rule}, found {found}")
    if offsets[1] > size - data_start:
        has = f"the file has {size - data_start} bytes of data"
        raise _BrokenRule(f"{where}: data_offsets {offsets} reach past the end, {has}")
    # A zero counts as one here: NumPy refuses an empty array whose other dimensions overflow.
    if math.prod(dim or 1 for dim in shape) * itemsize(dtype) > MAX_INT:
        raise _BrokenRule(f"{where}: shape {shown(shape)} of {dtype} overflows 63 bits")
    nbytes = math.prod(shape) * itemsize(dtype)
    if nbytes != offsets[1] - offsets[0]:
        asked = f"shape {shown(shape)} of {dtype} ({nbytes} bytes)"
        raise _BrokenRule(f"{where}: data_offsets {offsets} do not match {asked}")
    return TensorInfo(name, dtype, shape, data_start + offsets[0], data_start + offsets[1])


def _counts(value: object) -> tuple[int, ...] | None:
    """`value` as a tuple if it is a list of whole numbers we can count with; True is not one."""
    items = cast(list[object], value) if isinstance(value, list) else [None]
    if all(type(item) is int and 0 <= item <= MAX_INT for item in items):
        return tuple(cast(list[int], items))
    return None


def _is_text_map(value: object) -> TypeGuard[dict[str, str]]:
    """Whether `value` is an object of strings, free of the lone surrogates that Python lets in."""
    return isinstance(value, dict) and all(
        isinstance(text, str) and not _SURROGATE.search(key + text)
        for key, text in cast(dict[str, object], value).items()
    )
