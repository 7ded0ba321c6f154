"""The header of a safetensors file, checked against every rule of the format.

Reference: huggingface/safetensors @ 24b0b28, README.md (format) and safetensors/src/tensor.rs.
Stricter than both: no duplicate or unknown keys, no leading space, printable names, limits.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard, cast

from lydite.core.dtypes import NUMPY_DTYPES, itemsize
from lydite.core.errors import shown
from lydite.core.jsonfile import JsonError, parse_object

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_TENSORS = 1_000_000  # the largest published models have some 100,000
MAX_BRACKETS = 4 * MAX_TENSORS  # a tensor needs three; each costs some 70 bytes once parsed
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
    metadata = entries.pop("__metadata__", {})
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
_SURROGATE = re.compile("[\ud800-\udfff]")


def _is_text_map(value: object) -> TypeGuard[dict[str, str]]:
    """Whether `value` is an object of strings, free of the lone surrogates that Python lets in."""
    return isinstance(value, dict) and all(
        isinstance(text, str) and not _SURROGATE.search(key + text)
        for key, text in cast(dict[str, object], value).items()
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
