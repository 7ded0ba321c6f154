"""Read the JSON files of a trace: header, events and weights, checked and bounded."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from lydite.core.errors import FileError, TraceError, at, shown
from lydite.core.files import open_regular, read_bounded
from lydite.trace.events import (
    FORMAT,
    MAX_VALUES,
    SHARD_NAME,
    STORED_AS,
    VERSION,
    Event,
    Header,
    WeightInfo,
    dtype_name,
)

MAX_LINE = 2**20
MAX_EVENTS = 1_000_000  # a comparison takes 0.3 ms and 1.4 kB an event
MAX_HEADER, MAX_WEIGHTS = 2**24, 2**28
_BAD_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)


def read_header(folder: Path) -> Header:
    """trace.json of a folder that should be a trace."""
    path = folder / "trace.json"
    if not folder.is_dir():
        found = "not a folder" if folder.exists() else "no such folder"
        raise FileError(f"{at(folder)}: {found}. Expected the folder of a trace.")
    if not path.exists():
        raise FileError(f"{at(folder)}: no trace.json in it, so it is not a trace.")
    try:
        header = msgspec.json.decode(read_bounded(path, MAX_HEADER), type=Header)
    except _BAD_JSON as error:
        raise TraceError(f"{at(path)}: {error}.") from error
    if (header.format, header.version) != (FORMAT, VERSION):
        found = f"{shown(header.format)} version {header.version}"
        raise TraceError(f"{at(path)}: expected {FORMAT} version {VERSION}, found {found}.")
    for field in (header.side, header.framework, header.device, header.dtype):
        if not field.isprintable():
            raise TraceError(f"{at(path)}: {shown(field)} cannot be printed.")
    return header


def read_events(path: Path) -> Iterator[Event]:
    """Every finished line of events.jsonl."""
    decoder = msgspec.json.Decoder(Event)
    last = -1
    try:
        with open_regular(path) as lines:
            number = 0
            while line := lines.readline(MAX_LINE + 1):
                number += 1
                if not line.endswith(b"\n"):
                    if len(line) > MAX_LINE:
                        raise TraceError(f"{at(path)}:{number}: longer than {MAX_LINE} bytes.")
                    return  # the run ended inside this line
                if line.isspace():
                    continue
                event = _event(decoder, line, f"{at(path)}:{number}")
                if event.i <= last:
                    raise TraceError(
                        f"{at(path)}:{number}: event number {event.i} after {last}; expected them "
                        "to count up."
                    )
                if number > MAX_EVENTS:
                    raise TraceError(
                        f"{at(path)}: more than {MAX_EVENTS:,} events. Record fewer steps, or "
                        "fewer values with --points."
                    )
                last = event.i
                yield event
    except OSError as error:
        raise FileError(f"{at(path)}: cannot be read ({error.strerror or error}).") from error


def read_weights(path: Path) -> dict[str, WeightInfo] | None:
    """weights.json, or None when there is none."""
    if not path.exists():
        return None
    try:
        infos = msgspec.json.decode(read_bounded(path, MAX_WEIGHTS), type=dict[str, WeightInfo])
    except _BAD_JSON as error:
        raise TraceError(f"{at(path)}: {error}.") from error
    return {
        name: msgspec.structs.replace(info, dtype=_dtype(info.dtype, f"{at(path)}: {shown(name)}"))
        for name, info in infos.items()
    }


def _event(decoder: "msgspec.json.Decoder[Event]", line: bytes, where: str) -> Event:
    try:
        event = decoder.decode(line)
    except _BAD_JSON as error:
        raise TraceError(f"{where}: {error}. Expected one event as JSON; NaN is null.") from error
    for word in (event.name, event.slot, event.kind, event.dims or ""):
        if not word.isprintable():
            raise TraceError(f"{where}: {shown(word)} cannot be printed.")
    if event.shard is not None and not SHARD_NAME.fullmatch(event.shard):
        raise TraceError(
            f"{where}: shard {shown(event.shard)}; expected a file name in the trace's own folder "
            "that ends in .safetensors."
        )
    if (event.shard is None) != (event.key is None):
        raise TraceError(f"{where}: shard and key are given together or not at all.")
    values = 1
    for size in event.shape:
        values *= size
    if values > MAX_VALUES:
        raise TraceError(f"{where}: shape {list(event.shape)} holds more than 2^40 values.")
    dtype = _dtype(event.dtype, where)
    return event if dtype == event.dtype else msgspec.structs.replace(event, dtype=dtype)


def _dtype(text: str, where: str) -> str:
    dtype = dtype_name(text)
    if dtype not in STORED_AS:
        raise TraceError(f"{where}: dtype {shown(text)}; expected one of {', '.join(STORED_AS)}.")
    return dtype
