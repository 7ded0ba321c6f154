"""How SQLite files are opened: durable for the writer, and for a reader who may not write, too."""

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lydite.calibrate.store import files as disk
from lydite.core.errors import CalibrationError, FileError, at

_OF_THE_DISK = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
}


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """A connection without transactions of its own."""
    quoted = str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    return sqlite3.connect(f"file:{quoted}?mode={mode}", uri=True, isolation_level=None, timeout=10)


def connect_reader(path: Path) -> sqlite3.Connection:
    """A connection that changes nothing that can be read.

    SQLite wants to write beside a file whose journal it reads. Who may not write there takes the
    shared memory that a writer left, or a copy; without a journal the file is all there is.
    """
    if os.access(path.parent, os.W_OK):
        connection = connect(path, "rw")
        connection.execute("PRAGMA query_only = 1")
        return connection
    journal, memory = (path.with_name(f"{path.name}-{end}") for end in ("wal", "shm"))
    if not journal.exists() or journal.stat().st_size == 0:
        return connect(path, "ro&immutable=1")
    return connect(path, "ro") if memory.exists() else _connect_copy(path, journal)


def _connect_copy(path: Path, journal: Path) -> sqlite3.Connection:
    with tempfile.TemporaryDirectory() as folder:
        for file in (path, journal):
            shutil.copyfile(file, Path(folder, file.name))
        connection = connect(Path(folder, path.name), "rw")
        connection.execute("SELECT count(*) FROM sqlite_master")  # opens the journal too
    return connection  # the files have no name any more, and go with it


def require_rights(path: Path) -> None:
    """Refuse a file that may not be read; SQLite would say that it cannot be opened."""
    if path.exists() and not os.access(path, os.R_OK):
        reason = PermissionError("Permission denied")
        raise FileError(f"{at(path)}: cannot be read ({reason}).") from reason


def make_durable(connection: sqlite3.Connection) -> None:
    """What is committed is on disk."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")  # in WAL mode: an fsync at each commit
    connection.execute("PRAGMA fullfsync = 1")  # on macOS down to the drive; elsewhere no effect


def rebuilding(path: Path) -> str:
    """What to do about an index that cannot be read."""
    return f"Run: lydite calibrate rebuild {at(path.parent)}"


@contextlib.contextmanager
def reported(path: Path) -> Iterator[None]:
    """SQLite's errors as ours: a disk that fails, or an index that must be rebuilt."""
    try:
        yield
    except OSError as error:
        raise disk.DiskError(path, error) from error
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _OF_THE_DISK:
            raise disk.DiskError(path, error) from error
        raise CalibrationError(f"{at(path)}: damaged ({error}). {rebuilding(path)}") from error
