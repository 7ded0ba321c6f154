"""Read a trace from any writer: bounded, checked, values on demand."""

import weakref
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from lydite.core.dtypes import FLOAT_NAMES, NUMPY_DTYPES
from lydite.core.errors import FileError, LyditeError, TraceError, at, shown
from lydite.core.tensorfile import TensorFile
from lydite.trace.events import STORED_AS, Event, EventId, Header, WeightInfo, dtype_name
from lydite.trace.json_files import read_events, read_header, read_weights

MAX_OPEN = 64  # shards


@dataclass(frozen=True, eq=False)
class Trace:
    """An open trace: its events in order; values are read on demand."""

    folder: Path
    header: Header
    events: tuple[Event, ...]
    lost: int = 0  # events at the end whose values are missing after a crash
    _files: dict[str, TensorFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weakref.finalize(self, _close, self._files)  # a trace need not be closed by hand

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Read and check the header and every event; no value is touched yet."""
        folder = Path(folder)
        header = read_header(folder)
        events = tuple(read_events(folder / "events.jsonl"))
        kept = _without_lost(folder, events, header)
        return cls(folder, header, _numbered(kept), len(events) - len(kept))

    @cached_property
    def dtype(self) -> str:
        """The precision of the run: the writer's word, or that of most activations; "" if none."""
        found = Counter(
            event.dtype
            for event in self.events
            if event.kind == "activation" and event.dtype.upper() in FLOAT_NAMES
        )
        return dtype_name(self.header.dtype) or next((name for name, _ in found.most_common(1)), "")

    def has_values(self, event: Event) -> bool:
        """Whether the values were kept, and not only statistics."""
        return self._owner(event).key is not None

    def find(self, name: str, slot: str = "out", step: int = 0, call: int = 0) -> Event | None:
        """The event with this id, or None."""
        return self._by_id.get((name, slot, step, call))

    def read(self, event: Event) -> NDArray[Any]:
        """The values as stored (the dtype may be wider), read-only."""
        owner = self._owner(event)
        if owner.shard is None or owner.key is None:
            raise TraceError(
                f"{at(self.folder)}: event {event.i} ({event.name}) holds no values, only "
                f"{'a sketch' if event.sketch else 'statistics'}. Record it with level full."
            )
        file = self._file(owner.shard)
        info = file.header.tensors.get(owner.key)
        if info is None:
            self._refuse(event, f"shard {owner.shard} has no tensor {shown(owner.key)}")
        paired = owner.dtype in ("c64", "c128")
        shape = (*owner.shape, 2) if paired else owner.shape
        if tuple(info.shape) != shape or owner.shape != event.shape:
            self._refuse(
                event, f"shape is {list(event.shape)}, but the shard holds {list(info.shape)}"
            )
        if owner.dtype != event.dtype or not _holds(info.dtype, owner.dtype):
            self._refuse(event, f"dtype is {event.dtype}, but the shard holds {info.dtype}")
        values = file.read(owner.key)
        if paired:
            pairs = np.complex64 if values.dtype == np.float32 else np.complex128
            return values.view(pairs).reshape(owner.shape)
        return values

    def weights(self) -> dict[str, WeightInfo] | None:
        """Shapes, hashes and statistics of the parameters, or None."""
        return read_weights(self.folder / "weights.json")

    def close(self) -> None:
        """Close the shards; arrays that were read stay valid."""
        _close(self._files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _owner(self, event: Event) -> Event:
        """The event that has the values: itself, or an earlier one with the same content."""
        if event.alias_of is None:
            return event
        owner = self._by_number.get(event.alias_of)
        if owner is None or owner.i >= event.i or owner.alias_of is not None:
            self._refuse(event, f"alias_of {event.alias_of} is no earlier event with values")
        return owner

    @cached_property
    def _by_number(self) -> dict[int, Event]:
        return {event.i: event for event in self.events}

    @cached_property
    def _by_id(self) -> dict[EventId, Event]:
        return {event.id: event for event in self.events}

    def _file(self, shard: str) -> TensorFile:
        if shard not in self._files:
            while len(self._files) >= MAX_OPEN:
                self._files.pop(next(iter(self._files))).close()
            self._files[shard] = TensorFile.open(self.folder / shard)
        return self._files[shard]

    def _refuse(self, event: Event, why: str) -> NoReturn:
        raise TraceError(f"{at(self.folder)}: event {event.i} ({shown(event.name)}): {why}.")


def is_trace(folder: Path) -> bool:
    """Whether the folder looks like a trace at all."""
    return (folder / "trace.json").is_file()


def _close(files: dict[str, TensorFile]) -> None:
    for file in files.values():
        file.close()
    files.clear()


def _holds(stored: str, dtype: str) -> bool:
    """Whether a tensor stored so holds values of `dtype` without loss: the same, or wider."""
    exact = STORED_AS[dtype]
    one, other = NUMPY_DTYPES[exact], NUMPY_DTYPES[stored]
    same_family = (exact in FLOAT_NAMES) == (stored in FLOAT_NAMES) and stored != "C64"
    return stored == exact or (same_family and exact != "BOOL" and np.can_cast(one, other))


def _without_lost(folder: Path, events: tuple[Event, ...], header: Header) -> tuple[Event, ...]:
    """Events up to the last whose shard exists; a crash loses an unfinished shard."""
    missing = {
        shard
        for shard in {event.shard for event in events if event.shard is not None}
        if not _is_shard(folder / shard)
    }
    if not missing:
        return events
    first = next(at for at, event in enumerate(events) if event.shard in missing)
    later = {event.shard for event in events[first:]} - missing - {None}
    if header.complete or later:
        raise FileError(
            f"{at(folder)}: shard {events[first].shard} is missing or damaged, and event "
            f"{events[first].i} ({events[first].name}) is in it."
        )
    return events[:first]


def _is_shard(path: Path) -> bool:
    try:
        if path.is_symlink() or not path.is_file():
            return False
        TensorFile.open(path).close()
    except (LyditeError, OSError):
        return False
    return True


def _numbered(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Count calls where the writer did not: hand-written dumps repeat a name."""
    seen: set[EventId] = set()
    following: dict[tuple[str, str, int], int] = {}
    result: list[Event] = []
    for event in events:
        if event.id in seen:
            call = following[event.name, event.slot, event.step]
            event = msgspec.structs.replace(event, call=call)
        seen.add(event.id)
        key = (event.name, event.slot, event.step)
        following[key] = max(following.get(key, 0), event.call + 1)
        result.append(event)
    return tuple(result)
