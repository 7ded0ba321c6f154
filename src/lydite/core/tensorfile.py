"""One safetensors file: a checked header, lazy reads, an atomic write."""

import contextlib
import difflib
import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from lydite.core.dtypes import NAMES, NUMPY_DTYPES
from lydite.core.errors import FileError, TensorFileError, at, shown
from lydite.core.files import atomic_path
from lydite.core.tensorheader import MAX_HEADER_BYTES, BrokenRule, Header, parse_header
from lydite.core.unsupported_formats import recognize, refuse_other_formats


def read_header(path: Path) -> Header:
    """Read and check the header of `path`; the tensors themselves are not touched."""
    with _open(path) as file:
        return _read_header(path, file)


@dataclass(frozen=True, eq=False)
class TensorFile:
    """An open safetensors file. Arrays read from it stay valid after it is closed."""

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
                raise FileError(f"{at(path)}: cannot be mapped ({error}).") from error
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
        """Close the file; the mapping is freed with the last array that uses it."""
        self._file.close()
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_unchanged(self) -> None:
        # Touching a mapped page that a truncation took away kills the process, so look first.
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
    try:
        if path.is_file():  # never a pipe, which would wait for a writer
            return path.open("rb")
        problem = "not a file" if path.exists() else "no such file"
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
    raise FileError(f"{at(path)}: {problem}. Expected the path of a safetensors file.")


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
