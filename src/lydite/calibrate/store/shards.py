"""A shard: the items of one commit in one safetensors file that describes and proves itself.

The file is named by the SHA-256 of its header, and the header holds the SHA-256 of each tensor, so
every byte is covered.
"""

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.settings import (
    Description,
    Image,
    Kind,
    Settings,
    canonical,
    conditioning_key,
    digest,
    item_key,
    picture_key,
    sample_key,
)
from lydite.core.dtypes import FLOAT_NAMES, NAMES, NUMPY_DTYPES
from lydite.core.errors import CalibrationError, FileError, TensorFileError, at, shown
from lydite.core.files import NotRegular, open_regular, write_atomic
from lydite.core.tensorfile import MAX_HEADER_BYTES, Header, encoded_header, read_header

FORMAT, VERSION = "lydite-calibration", "1"
SHARD = re.compile(r"[0-9a-f]{64}\.safetensors")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stored tensor: what it is, and the hash of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """What a shard's header says of one item."""

    key: str
    kind: Kind
    prompt: str
    tensors: dict[str, TensorEntry]
    image: int | None = None
    seed: int | None = None
    step: int | None = None
    sigma: float | None = None
    timestep: float | None = None

    @cached_property
    def digest(self) -> str:
        """Of the content: tensors, sigma and timestep; not of labels such as the image's number."""
        tensors = {name: [t.dtype, t.shape, t.sha256] for name, t in self.tensors.items()}
        return digest({"sigma": self.sigma, "timestep": self.timestep, "tensors": tensors})

    @property
    def label(self) -> str:
        """The item for people."""
        if self.kind == "sample":
            return f"image {self.image} step {self.step}"
        if self.kind == "picture":
            return f"image {self.image}"
        return f"conditioning of {shown(self.prompt)}"

    @property
    def text(self) -> str:
        """Canonical JSON."""
        return canonical(msgspec.to_builtins(self)).decode()


@dataclass(frozen=True)
class Item:
    """An entry with its arrays."""

    entry: Entry
    arrays: Mapping[str, NDArray[Any]] = field(repr=False)


def make_item(
    kind: Kind,
    key: str,
    prompt: str,
    tensors: Mapping[str, NDArray[Any]],
    dtype: str,
    **labels: Any,
) -> Item:
    """An item with its floats in `dtype` and a hash of every tensor."""
    arrays = {name: _stored(name, np.asarray(value), dtype) for name, value in tensors.items()}
    entries = {
        name: TensorEntry(NAMES[array.dtype], array.shape, _sha256(array))
        for name, array in sorted(arrays.items())
    }
    return Item(Entry(key, kind, prompt, entries, **labels), arrays)


class ItemBuilder:
    """Makes the items of one set; labels come from the plan, so no item names a wrong prompt."""

    def __init__(self, description: Description) -> None:
        self.settings, self.plan = description.settings, description.plan
        self._images = {image.number: image for image in self.plan.images}

    def sample(
        self,
        image: int,
        step: int,
        tensors: Mapping[str, NDArray[Any]],
        *,
        sigma: float | None = None,
        timestep: float | None = None,
    ) -> Item:
        """What went into the network at one step of one image."""
        planned = self.image(image)
        key = sample_key(self.settings, planned, step)
        numbers = {"sigma": _to_float(sigma), "timestep": _to_float(timestep)}
        return self._item("sample", key, planned, tensors, step=step, **numbers)

    def picture(self, image: int, pixels: NDArray[Any]) -> Item:
        """A finished picture, kept to be looked at and measured."""
        planned = self.image(image)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[-1] != 3:
            raise CalibrationError(
                f"image {image}: expected pixels of height × width × 3 in uint8, found "
                f"{list(pixels.shape)} in {pixels.dtype}."
            )
        key = picture_key(self.settings, planned)
        return self._item("picture", key, planned, {"pixels": pixels})

    def conditioning(self, prompt: str, tensors: Mapping[str, NDArray[Any]]) -> Item:
        """What the text encoders make of a prompt: once, whatever the images and steps."""
        key = conditioning_key(self.settings, prompt)
        return make_item("conditioning", key, prompt, tensors, self.settings.dtype)

    def image(self, number: int) -> Image:
        """The planned image of that number."""
        if number not in self._images:
            raise CalibrationError(f"image {number} is not in the plan of this set.")
        return self._images[number]

    def _item(
        self, kind: Any, key: str, image: Image, tensors: Mapping[str, NDArray[Any]], **labels: Any
    ) -> Item:
        labels |= {"image": image.number, "seed": image.seed}
        return make_item(kind, key, image.prompt, tensors, self.settings.dtype, **labels)


def write_shard(folder: Path, settings: Settings, items: Sequence[Item]) -> tuple[str, int]:
    """Write the items into one shard of `folder`, durably; its name and its size in bytes."""
    items = sorted(items, key=lambda item: item.entry.key)
    head = shard_header(settings, [item.entry for item in items])
    arrays = {
        _tensor_name(number, name): array
        for number, item in enumerate(items)
        for name, array in item.arrays.items()
    }
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    pieces = [memoryview(head), *(_bytes(arrays[name]) for name in order)]
    write_atomic(folder / shard_name(head), pieces, make_parents=False)
    return shard_name(head), sum(piece.nbytes for piece in pieces)


def shard_header(settings: Settings, entries: Sequence[Entry]) -> bytes:
    """The only header a shard with these entries, sorted by key, can have."""
    specs = {
        _tensor_name(number, name): (NUMPY_DTYPES[tensor.dtype], tensor.shape)
        for number, entry in enumerate(entries)
        for name, tensor in entry.tensors.items()
    }
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "settings": canonical(settings.hashed_fields).decode(),
        "entries": f"[{','.join(entry.text for entry in entries)}]",
    }
    return encoded_header(Path("shard"), specs, metadata)


def shard_name(head: bytes) -> str:
    """The file name that goes with a header."""
    return f"{hashlib.sha256(head).hexdigest()}.safetensors"


@dataclass(frozen=True)
class ShardHeader:
    """What a shard holds, without its tensors."""

    settings: Settings
    entries: tuple[Entry, ...]
    bytes: int  # of the whole file, as it was written


class _Metadata(msgspec.Struct):
    """The part of a safetensors header that an index needs."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__")


def read_shard_header(path: Path, *, complete: bool = True) -> ShardHeader:
    """The header of a shard. Tensors are not read, and their places are not checked.

    A file that cannot be read at all is a FileError, one that was damaged a CalibrationError; so is
    one of another length than it was written with, unless `complete` is false.
    """
    with _open(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = min(int.from_bytes(start, "little"), MAX_HEADER_BYTES, size)
            head = start + file.read(length)
        except OSError as error:
            raise CalibrationError(f"{at(path)}: cannot be read ({error.strerror}).") from error
    if shard_name(head) != path.name:
        raise CalibrationError(f"{at(path)}: the header does not match the file's name.")
    try:
        metadata = msgspec.json.decode(head[8:], type=_Metadata).metadata
    except msgspec.MsgspecError as error:
        raise CalibrationError(
            f"{at(path)}: not a shard of a calibration set ({error})."
        ) from error
    settings, entries = _described(path, metadata)
    tensors = (tensor for entry in entries for tensor in entry.tensors.values())
    expected = len(head) + sum(tensor.nbytes for tensor in tensors)
    if complete and size != expected:
        raise CalibrationError(f"{at(path)}: {size} bytes; expected {expected}.")
    return ShardHeader(settings, entries, size)


def shard_names(folder: Path) -> list[str]:
    """The names of the shards in a folder; none when there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if SHARD.fullmatch(path.name))


@dataclass(frozen=True, eq=False)
class Shard:
    """An open shard whose header is the one that was written.

    Tensors are read and not mapped: on a failing disk a mapped page ends the process.
    """

    path: Path
    settings: Settings
    entries: tuple[Entry, ...]
    _header: Header
    _file: BinaryIO

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open and hold the header against the file's name; no tensor is read yet.

        A file that cannot be read at all is a FileError, one that was damaged a CalibrationError.
        """
        file = _open(path)
        try:
            header = read_header(path)
            if shard_name(file.read(header.data_start)) != path.name:
                raise CalibrationError(f"{at(path)}: the header does not match the file's name.")
            return cls(path, *_described(path, header.metadata), header, file)
        except BaseException as error:
            file.close()
            if isinstance(error, (TensorFileError, FileError, OSError)):
                raise CalibrationError(f"{error}") from error
            raise

    def read(self, number: int) -> dict[str, NDArray[Any]]:
        """The arrays of entry `number`, as they are on disk."""
        return {
            name: self._tensor(_tensor_name(number, name)) for name in self.entries[number].tensors
        }

    def matches(self, number: int, arrays: Mapping[str, NDArray[Any]]) -> bool:
        """Whether arrays are those that were written for an entry."""
        tensors = self.entries[number].tensors
        return all(_sha256(arrays[name]) == tensor.sha256 for name, tensor in tensors.items())

    def damaged(self) -> list[int]:
        """Numbers of the entries whose tensors cannot be read, or do not match their hashes."""
        return [number for number in range(len(self.entries)) if self.intact(number) is None]

    def intact(self, number: int) -> dict[str, NDArray[Any]] | None:
        """The arrays of an entry if they are what was written."""
        try:
            arrays = self.read(number)
        except CalibrationError:
            return None
        return arrays if self.matches(number, arrays) else None

    def item(self, number: int) -> Item:
        """An entry with its arrays."""
        return Item(self.entries[number], self.read(number))

    @property
    def size(self) -> int:
        """Bytes of the file."""
        stops = (info.stop for info in self._header.tensors.values())
        return max(stops, default=self._header.data_start)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tensor(self, name: str) -> NDArray[Any]:
        info = self._header.tensors.get(name)
        data = b""
        try:
            if info is not None:
                self._file.seek(info.start)
                data = self._file.read(info.nbytes)
        except OSError as error:
            raise CalibrationError(f"{at(self.path)}: {name}: {error.strerror}.") from error
        if info is None or len(data) != info.nbytes:
            raise CalibrationError(f"{at(self.path)}: {name} is not in the file.")
        return np.frombuffer(data, NUMPY_DTYPES[info.dtype]).reshape(info.shape)


def _described(path: Path, metadata: Mapping[str, str]) -> tuple[Settings, tuple[Entry, ...]]:
    try:
        if (metadata["format"], metadata["version"]) != (FORMAT, VERSION):
            found = f"{shown(metadata['format'])} {shown(metadata['version'])}"
            raise CalibrationError(f"{at(path)}: expected {FORMAT} {VERSION}, found {found}.")
        settings = _parse_settings(metadata["settings"])
        entries = msgspec.json.decode(metadata["entries"], type=tuple[Entry, ...])
    except (KeyError, msgspec.MsgspecError) as error:
        raise CalibrationError(
            f"{at(path)}: not a shard of a calibration set ({error})."
        ) from error
    for entry in entries:
        if entry.key != item_key(settings, entry.kind, entry.prompt, entry.seed, entry.step):
            raise CalibrationError(f"{at(path)}: the key of {entry.label} does not match its run.")
        if unknown := {tensor.dtype for tensor in entry.tensors.values()} - NUMPY_DTYPES.keys():
            raise CalibrationError(f"{at(path)}: {entry.label} has dtype {shown(min(unknown))}.")
    return settings, entries


def _open(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except NotRegular as error:
        raise CalibrationError(str(error)) from error


@lru_cache(maxsize=16)
def _parse_settings(text: str) -> Settings:
    """Equal texts give one object, whose hash and key texts are then computed once."""
    return msgspec.json.decode(text, type=Settings)


def _to_float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _tensor_name(number: int, name: str) -> str:
    return f"{number:04}/{name}"


def _stored(name: str, value: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The values C-ordered and little-endian; floats in the set's dtype, if they fit into it."""
    if not _NAME.fullmatch(name) or NAMES.get(value.dtype.newbyteorder("<")) is None:
        raise CalibrationError(
            f"tensor {shown(name)} of dtype {value.dtype}: expected a name of letters, digits and "
            "._-, and a dtype safetensors knows."
        )
    value = np.asarray(value, value.dtype.newbyteorder("<"), order="C")
    if NAMES[value.dtype] not in FLOAT_NAMES or NAMES[value.dtype] == dtype:
        return value
    with np.errstate(over="ignore"):
        narrow = value.astype(NUMPY_DTYPES[dtype])
    if not np.array_equal(np.isfinite(narrow), np.isfinite(value)):
        most = np.abs(value.astype(np.float64)[np.isfinite(value)]).max()
        advice = " Store with --store-dtype bfloat16 or float32." if dtype == "F16" else ""
        raise CalibrationError(
            f"tensor {shown(name)}: values up to {most:.3g} do not fit into {dtype}.{advice}"
        )
    return narrow


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _sha256(array: NDArray[Any]) -> str:
    return hashlib.sha256(_bytes(array)).hexdigest()
