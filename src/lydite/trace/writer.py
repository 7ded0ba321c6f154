"""Write a trace: append-only lines, finished shards, a byte budget that never stops the run."""

import hashlib
import re
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from lydite.core import tensorfile
from lydite.core.dtypes import NAMES
from lydite.core.errors import FileError, InputError, TraceError, at, shown
from lydite.core.files import write_atomic
from lydite.trace.events import MAX_RANK, STORED_AS, Event, Header, Stats, WeightInfo
from lydite.trace.statistics import measure, sketch

Level = Literal["full", "sketch", "stats"]
BUDGET = 2 * 2**30  # bytes of a trace
SHARD_BYTES = 256 * 2**20
FLUSH_SECONDS = 2.0  # of values that a crash can lose
FULL_UNTIL, SKETCH_UNTIL = 0.9, 0.97  # of the budget: the rest is for later events
ENTRY_BYTES = 100  # of a shard's header, for each tensor
MAX_HASHES = 100_000
MEASURED = ("activation", "weight")  # other kinds decide the run and are small: always in full

_NAMES = {stored: name for name, stored in STORED_AS.items() if not name.startswith("c")}
_FILE = re.compile(r"trace\.json|events\.jsonl|weights\.json|t-\d+\.safetensors|\.[0-9a-f]+\.part")


@dataclass(frozen=True)
class Capture:
    """What is kept: how much of a value, which sites, in full at which steps, how many bytes."""

    level: Level = "full"
    points: tuple[str, ...] = ("*",)  # shell patterns: NAME, or NAME:SLOT
    full_steps: tuple[int, ...] | None = None  # None: in full at every step
    budget: int = BUDGET

    def __post_init__(self) -> None:
        if self.level not in get_args(Level) or self.budget < 0:
            levels = ", ".join(get_args(Level))
            raise InputError(
                f"level {self.level!r}, budget {self.budget}; expected {levels}, and bytes."
            )


class TraceWriter:
    """The trace of one run. A line is written after the shard that it names."""

    def __init__(self, folder: Path, header: Header, capture: Capture | None = None) -> None:
        self.folder, self.capture = folder, capture or Capture()
        self.header = msgspec.structs.replace(header, capture=asdict(self.capture), complete=False)
        self._start = self._flushed = time.monotonic()
        self._calls: Counter[tuple[str, str, int]] = Counter()
        self._seen: dict[tuple[str, tuple[int, ...], str], Event] = {}
        self._waiting: list[bytes] = []
        self._tensors: dict[str, NDArray[Any]] = {}
        self._pending_bytes = self._used = self._count = self._shards = 0
        self._selftest: list[int] = []
        self._weights: dict[str, WeightInfo] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise FileError(
                    f"{at(folder)}: not empty. Give a new folder, or overwrite=True for a trace."
                )
            self._write_header()
            self._lines = (folder / "events.jsonl").open("ab")
        except OSError as error:
            raise FileError(f"{at(folder)}: {error.strerror or error}.") from error

    def add(
        self,
        name: str,
        value: NDArray[Any],
        *,
        slot: str = "out",
        kind: str = "activation",
        step: int = 0,
        dims: str | None = None,
        dtype: str | None = None,
    ) -> Event:
        """Record a copy of one value; `dtype` is that of the run if the value was widened."""
        self._check_open()
        value = np.asarray(value)
        stored, own = _as_stored(name, value)
        call = self.count(name, slot, step)
        milliseconds = round((time.monotonic() - self._start) * 1000, 3)
        shape = tuple(value.shape)
        event = Event(
            self._count, name, shape, dtype or own, slot, kind, step, call, dims, t_ms=milliseconds
        )
        event = self._with_data(event, stored)
        self._count += 1
        if kind == "selftest":
            self._selftest.append(event.i)
        line = msgspec.json.encode(event) + b"\n"
        self._used += len(line)
        self._waiting.append(line)
        if not self._tensors or self._pending_bytes >= SHARD_BYTES or self._is_due():
            self.flush()
        return event

    def count(self, name: str, slot: str, step: int) -> int:
        """The number of this call; calls that are not recorded count as well."""
        key = (name, slot, step)
        if key not in self._calls:
            _check_name(name)
            _check_name(slot)
        self._calls[key] += 1
        return self._calls[key] - 1

    def describe(self, **changes: Any) -> None:
        """Change fields of the header, on disk too."""
        self.header = msgspec.structs.replace(self.header, **changes)
        self._write_header()

    def add_weights(self, weights: Mapping[str, NDArray[Any]]) -> None:
        """Names, shapes, hashes and statistics of parameters, without the data; calls add up."""
        self._weights |= {name: _weight(name, np.asarray(value)) for name, value in weights.items()}
        write_atomic(self.folder / "weights.json", msgspec.json.encode(self._weights))

    def flush(self) -> None:
        """Write the open shard, then the lines that name it."""
        self._check_open()
        if self._tensors:
            tensorfile.save(self.folder / self._shard, self._tensors)
            self._shards += 1
            self._tensors, self._pending_bytes = {}, 0
        # Cleared first: an interrupt here may lose lines, but never writes one twice.
        lines, self._waiting = b"".join(self._waiting), []
        try:
            self._lines.write(lines)
            self._lines.flush()
        except OSError as error:
            raise FileError(f"{at(self.folder)}: {error.strerror or error}.") from error
        self._flushed = time.monotonic()

    def close(self, *, complete: bool = True) -> None:
        """Write what is pending; `complete`: the run ended by itself."""
        if self._lines.closed:
            return
        self.flush()
        self._lines.close()
        self.describe(complete=complete, selftest=tuple(self._selftest))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(complete=kind is None)

    @property
    def _shard(self) -> str:
        return f"t-{self._shards:05}.safetensors"

    def _with_data(self, event: Event, stored: NDArray[Any]) -> Event:
        """The event with its data, its sketch or its statistics, as the budget allows."""
        level, steps = self.capture.level, self.capture.full_steps
        whole = level == "full" and (steps is None or event.step in steps)
        if whole or event.kind not in MEASURED:
            digest = _digest(stored)
            twin = self._seen.get((digest, event.shape, event.dtype))
            if twin is not None:
                return msgspec.structs.replace(
                    event, hash=digest, alias_of=twin.i, stats=twin.stats
                )
            if self._used + stored.nbytes <= FULL_UNTIL * self.capture.budget:
                where = self._store(event, stored)
                event = msgspec.structs.replace(event, hash=digest, stats=measure(stored), **where)
                if len(self._seen) < MAX_HASHES:
                    self._seen[digest, event.shape, event.dtype] = event
                return event
        changes: dict[str, Stats | tuple[float, ...]] = {"stats": measure(stored)}
        affordable = self._used < SKETCH_UNTIL * self.capture.budget
        if level != "stats" and stored.dtype.kind in "fV" and stored.size and affordable:
            changes["sketch"] = sketch(stored)
        return msgspec.structs.replace(event, **changes)

    def _store(self, event: Event, stored: NDArray[Any]) -> dict[str, Any]:
        key = str(event.i)
        self._tensors[key] = np.array(stored, order="C")  # a copy: the run may change it
        self._pending_bytes += stored.nbytes
        self._used += stored.nbytes + ENTRY_BYTES
        return {"shard": self._shard, "key": key}

    def _check_open(self) -> None:
        if self._lines.closed:
            raise TraceError(f"{at(self.folder)}: this trace is closed; nothing can be added.")

    def _is_due(self) -> bool:
        return time.monotonic() - self._flushed > FLUSH_SECONDS

    def _write_header(self) -> None:
        write_atomic(self.folder / "trace.json", msgspec.json.encode(self.header))


def remove_trace(folder: Path) -> None:
    """Remove a trace. A folder that holds anything else is an error, and stays as it is."""
    if not folder.exists():
        return
    if folder.is_symlink() or not folder.is_dir():
        raise FileError(f"{at(folder)}: not a folder; not overwritten.")
    names = {path.name for path in folder.iterdir()}
    if any(not _FILE.fullmatch(name) for name in names) or (names and "trace.json" not in names):
        raise FileError(f"{at(folder)}: holds files that are not of a trace; not overwritten.")
    shutil.rmtree(folder)


def _as_stored(name: str, value: NDArray[Any]) -> tuple[NDArray[Any], str]:
    """The values C-ordered and little-endian, as a shard holds them, and their dtype's name."""
    if value.ndim > MAX_RANK - 1:
        raise TraceError(f"{name}: {value.ndim} axes, at most {MAX_RANK - 1} can be stored.")
    value = np.asarray(value, value.dtype.newbyteorder("<"), order="C")
    if value.dtype.kind == "c":
        parts, dtype = {8: (np.float32, "c64"), 16: (np.float64, "c128")}[value.dtype.itemsize]
        return value.reshape(*value.shape, 1).view(parts), dtype
    if NAMES.get(value.dtype) not in _NAMES:
        raise TraceError(
            f"{name}: a value of dtype {value.dtype} cannot be stored in a trace. Expected one of "
            f"{', '.join(STORED_AS)}."
        )
    return value, _NAMES[NAMES[value.dtype]]


def _check_name(name: str) -> None:
    if not 0 < len(name) <= 1000 or not name.isprintable():
        raise TraceError(f"{shown(name)} is not a name: expected 1 to 1,000 printable characters.")


def _digest(stored: NDArray[Any]) -> str:
    # the fastest in every Python, where the CPU has instructions for it
    return f"sha256:{hashlib.sha256(stored.reshape(-1).view(np.uint8).data).hexdigest()}"


def _weight(name: str, value: NDArray[Any]) -> WeightInfo:
    stored, dtype = _as_stored(name, value)
    return WeightInfo(tuple(value.shape), dtype, _digest(stored), measure(stored))
