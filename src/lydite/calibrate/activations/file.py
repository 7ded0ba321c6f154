"""Statistics of activations as an SQLite file: tables for people, and all that a merge needs.

Equal statistics give an equal file, byte for byte, with one version of SQLite.
"""

import contextlib
import os
import sqlite3
import zlib
from collections.abc import Generator, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.activations.moments import BINS, Moments
from lydite.calibrate.activations.statistics_state import (
    ContentHash,
    Key,
    Provenance,
    Statistics,
    content_hash,
)
from lydite.calibrate.settings import canonical
from lydite.calibrate.store.lock import NAME as LOCK
from lydite.calibrate.store.lock import WriterLock
from lydite.calibrate.store.set_file import check_output_path
from lydite.calibrate.store.writer import command_line, resumable
from lydite.core import files
from lydite.core.errors import CalibrationError, FileError, at, shown
from lydite.core.files import open_regular

STATE, FINISHED = "state.safetensors", "finished.sqlite"  # in the work folder
APPLICATION, VERSION = 0x4C594441, 1  # "LYDA"
LONGEST_NAME, LONGEST_VALUE = 1000, 2**24  # characters of a layer's name, bytes of a value
SHARES = {"p0_1": 0.001, "p1": 0.01, "p50": 0.5, "p99": 0.99, "p99_9": 0.999}
_SCHEMA = f"""
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE sample (number INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE);
CREATE TABLE band (band INTEGER, step INTEGER PRIMARY KEY);
CREATE TABLE place (
    id INTEGER PRIMARY KEY, layer TEXT NOT NULL, place TEXT NOT NULL, channels INTEGER NOT NULL,
    UNIQUE (layer, place)
);
CREATE TABLE statistic (
    place INTEGER REFERENCES place (id), band INTEGER, count INTEGER, min REAL, max REAL,
    absmax REAL, mean REAL, variance REAL, zero REAL, negative REAL,
    {", ".join(f"{name} REAL" for name in SHARES)}, PRIMARY KEY (place, band)
) WITHOUT ROWID;
CREATE TABLE channel (
    place INTEGER REFERENCES place (id), band INTEGER, channel INTEGER, min REAL, max REAL,
    mean REAL, squares REAL, zeros INTEGER, negatives INTEGER, PRIMARY KEY (place, band, channel)
) WITHOUT ROWID;
CREATE TABLE sketch (
    place INTEGER REFERENCES place (id), band INTEGER, part INTEGER,
    {", ".join(f"{name} REAL" for name in SHARES)}, counts BLOB, PRIMARY KEY (place, band, part)
) WITHOUT ROWID;
CREATE VIEW layers AS
    SELECT layer, place.place AS place, band, channels, count, min, max, absmax, mean, variance,
        (min + max) / 2 AS middle, zero, negative, {", ".join(SHARES)}
    FROM statistic JOIN place ON place.id = statistic.place;
CREATE VIEW quantiles AS
    SELECT layer, place.place AS place, band, part, {", ".join(SHARES)}
    FROM sketch JOIN place ON place.id = sketch.place;
CREATE VIEW channels AS
    SELECT layer, place.place AS place, channel.band AS band, channel, count / channels AS count,
        channel.min AS min, channel.max AS max,
        max(abs(channel.min), abs(channel.max)) AS absmax,
        (channel.min + channel.max) / 2 AS middle, channel.mean AS mean,
        squares / (count / channels) AS variance,
        zeros * 1.0 / (count / channels) AS zero, negatives * 1.0 / (count / channels) AS negative
    FROM channel JOIN place ON place.id = channel.place
        JOIN statistic ON statistic.place = channel.place AND statistic.band = channel.band;
"""


_UNREADABLE = (
    sqlite3.Error,
    ArithmeticError,
    LookupError,
    ValueError,
    TypeError,
    RecursionError,  # of JSON
    zlib.error,
)


def write_file(
    statistics: Statistics, path: Path, temporary: Path, summary: dict[str, Any]
) -> None:
    """Write the statistics to `path`, by way of `temporary` on the same disk."""
    files.remove(temporary)
    try:
        with contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = OFF")  # nobody reads it before it is complete
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("BEGIN")
            _fill(connection, statistics, summary)
            connection.execute("COMMIT")
        files.sync_path(temporary)
        files.system.rename(temporary, path)
        files.sync_path(path.parent)
    except (sqlite3.Error, OSError) as error:
        raise files.DiskError(path, error) from error


class Summary(msgspec.Struct, frozen=True):
    """What a file says of itself, beside what its content proves."""

    samples: int
    model: str
    model_hash: str
    content: str
    per: str
    set: str | None = None
    part: tuple[int, int] | None = None


def read_file(path: Path) -> Statistics:
    """All that was written, back; equal to the bit, or an error."""
    with open_statistics(path) as file:
        statistics = Statistics(file.provenance, list(file.samples))
        statistics.table.update(file.moments())
    return statistics


def read_summary(path: Path) -> Summary:
    """What the file says of itself: samples, model, hashes."""
    with open_statistics(path) as file:
        return file.summary


class StatisticsFile:
    """An open statistics file of the expected schema."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        about = dict(connection.execute("SELECT name, value FROM about"))
        self.summary = msgspec.json.decode(about["told"], type=Summary)
        self.provenance = msgspec.json.decode(about["collected"], type=Provenance, strict=False)
        query = "SELECT key FROM sample ORDER BY number"
        self.samples: list[str] = [key for (key,) in connection.execute(query)]

    def moments(self) -> Iterator[tuple[Key, Moments]]:
        """The statistics of each place and band in order; at the end the content hash is checked.

        The tables for people follow from these, and nothing in the package reads them.
        """
        content = ContentHash(self.samples)
        places = self._connection.execute(
            "SELECT id, layer, place.place, band, count / channels FROM place "
            "JOIN statistic ON statistic.place = place.id ORDER BY layer, place.place, band"
        ).fetchall()
        if not places:
            raise ValueError("no layer in it")
        for number, layer, place, band, count in places:
            if max(len(layer), len(place)) > LONGEST_NAME:
                raise ValueError(f"a name of more than {LONGEST_NAME} characters")
            moments = _moments(self._connection, number, band, count)
            content.add((layer, place, band), moments)
            yield (layer, place, band), moments
        if self.summary.content != content.hexdigest():
            raise ValueError("wrong hash")


@contextlib.contextmanager
def open_statistics(path: Path) -> Generator[StatisticsFile]:
    """An open statistics file; anything else is refused, and no query of it runs without end."""
    with open_regular(path) as opened:
        size = os.fstat(opened.fileno()).st_size
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with (
            contextlib.closing(sqlite3.connect(uri, uri=True)) as connection,
            np.errstate(all="ignore"),  # the hash of what is computed from is checked at the end
        ):
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
            connection.execute("PRAGMA trusted_schema = OFF")
            (kind,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if (kind, version) != (APPLICATION, VERSION):
                raise CalibrationError(
                    f"{at(path)}: expected statistics of activations, version {VERSION}; found "
                    "another SQLite file. Run: lydite calibrate activations SET --out FILE"
                )
            left = iter(range(1000 + size // 2**10))  # a few instructions for each byte
            connection.set_progress_handler(lambda: next(left, None) is None, 2**14)
            if _schema(connection) != _expected_schema():
                raise ValueError("other tables than ours")
            yield StatisticsFile(connection)
    except _UNREADABLE as error:
        raise CalibrationError(
            f"{at(path)}: not statistics of activations, or damaged ({error})."
        ) from error


def _schema(connection: sqlite3.Connection) -> set[tuple[str, ...]]:
    return set(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))


@cache
def _expected_schema() -> set[tuple[str, ...]]:
    """As SQLite itself records what `write_file` makes."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        for statement in filter(str.strip, _SCHEMA.split(";")):
            connection.execute(statement)
        return _schema(connection)


def merge_files(paths: Sequence[Path], out: Path, *, overwrite: bool = False) -> int:
    """Join the statistics of different samples into one file; how many samples it has."""
    check_output_path(out, overwrite=overwrite, inputs=paths)
    first, *rest = paths
    statistics, summary = read_file(first), read_summary(first)
    for path in rest:
        statistics.join(read_file(path), path)
    sets = {read_summary(path).set for path in paths}
    whose = summary.set if len(sets) == 1 else None
    summary = msgspec.structs.replace(summary, samples=len(statistics.keys), part=None, set=whose)
    again = command_line("lydite", "calibrate", "activations", *paths, "--out", out)
    with resumable(again), open_work_folder(out) as work:
        write_file(statistics, out, work / FINISHED, msgspec.to_builtins(summary))
    return len(statistics.keys)


@contextlib.contextmanager
def open_work_folder(out: Path) -> Generator[Path]:
    """The folder of the state, locked: one process collects into one file.

    It stays as long as it holds a state.
    """
    work = work_folder(out)
    lock = _lock_work_folder(work)
    try:
        files.remove_leftovers(work)
        yield work
    finally:
        if not (work / STATE).exists():  # remove it while nobody else can have it
            with contextlib.suppress(OSError):  # it may hold files that are not ours
                for name in (FINISHED, LOCK):
                    (work / name).unlink(missing_ok=True)
                work.rmdir()
        lock.release()


def work_folder(out: Path) -> Path:
    """The folder beside a file in which it is made."""
    return out.with_name(f"{out.name}.work")


def _lock_work_folder(work: Path) -> WriterLock:
    """The folder, locked; made again when its last owner removed it while we waited."""
    if work.is_symlink():
        raise FileError(f"{at(work)}: is a link. Remove it, or give another name.")
    while True:
        files.make_folder(work)
        lock = WriterLock(work)
        if lock.is_current:
            return lock
        lock.release()


def _fill(connection: sqlite3.Connection, statistics: Statistics, summary: dict[str, Any]) -> None:
    for statement in filter(str.strip, _SCHEMA.split(";")):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    summary = {**summary, "content": content_hash(statistics)}
    about = {
        "collected": msgspec.to_builtins(statistics.provenance, str_keys=True),
        "told": summary,
    }
    texts = [(name, canonical(value).decode()) for name, value in about.items()]
    connection.executemany("INSERT INTO about VALUES (?, ?)", texts)
    connection.executemany("INSERT INTO sample VALUES (?, ?)", enumerate(statistics.keys))
    bands = [(band, step) for step, band in sorted(statistics.provenance.bands.items())]
    connection.executemany("INSERT INTO band VALUES (?, ?)", bands)
    places = sorted({(layer, place) for layer, place, _ in statistics.table})
    numbers = {place: number for number, place in enumerate(places)}
    for key in sorted(statistics.table):
        layer, place, band = key
        moments, number = statistics.table[key], numbers[layer, place]
        row = (number, layer, place, len(moments.mean))
        connection.execute("INSERT OR IGNORE INTO place VALUES (?, ?, ?, ?)", row)
        _insert(connection, "statistic", [(number, band, *statistic_row(moments))])
        _insert(connection, "channel", _channels(number, band, moments))
        _insert(connection, "sketch", _sketches(number, band, moments))


def _insert(connection: sqlite3.Connection, table: str, rows: Any) -> None:
    rows = list(rows)
    marks = ", ".join("?" * len(rows[0]))
    connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)


def statistic_row(moments: Moments) -> tuple[float, ...]:
    """Count, min, max, absmax, mean, variance, zeros, negative values and quantiles."""
    values = moments.count * len(moments.mean)
    low, high, (mean, variance) = moments.low.min(), moments.high.max(), moments.whole()
    shares = (int(moments.zeros.sum()) / values, int(moments.negative.sum()) / values)
    quantiles = (moments.quantile(share) for share in SHARES.values())
    ends = (float(low), float(high), float(moments.absmax.max()))
    return (values, *ends, mean, variance, *shares, *quantiles)


def _channels(number: int, band: int, moments: Moments) -> Iterator[tuple[float, ...]]:
    names = ("low", "high", "mean", "squares", "zeros", "negative")
    columns = [getattr(moments, name).tolist() for name in names]
    for channel, values in enumerate(zip(*columns, strict=True)):
        yield number, band, channel, *values


def _sketches(number: int, band: int, moments: Moments) -> Iterator[tuple[Any, ...]]:
    for part, counts in enumerate(moments.counts):
        quantiles = (moments.quantile(share, part) for share in SHARES.values())
        yield number, band, part, *quantiles, zlib.compress(counts.astype("<i8").tobytes(), 6)


def _moments(connection: sqlite3.Connection, number: int, band: int, count: object) -> Moments:
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"a count of {shown(count)} values")
    here = "WHERE place = ? AND band = ?"
    rows = connection.execute(
        f"SELECT min, max, mean, squares, zeros, negatives FROM channel {here} ORDER BY channel",
        (number, band),
    ).fetchall()
    low, high, mean, squares, zeros, negative = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    packed = connection.execute(
        f"SELECT counts FROM sketch {here} ORDER BY part", (number, band)
    ).fetchall()
    counts = [_unpacked(blob) for (blob,) in packed]
    return Moments(
        count,
        low.astype(np.float32),
        high.astype(np.float32),
        mean.astype(np.float64),
        squares.astype(np.float64),
        zeros.astype(np.int64),
        negative.astype(np.int64),
        np.array(counts),
    )


def _unpacked(blob: bytes) -> NDArray[np.int64]:
    """A histogram; a few bytes may unpack to gigabytes, and no more than its own are unpacked."""
    data = zlib.decompressobj().decompress(blob, 8 * BINS + 1)
    if len(data) != 8 * BINS:
        raise ValueError(f"a histogram that is not of {BINS} bins")
    return np.frombuffer(data, "<i8")
