"""The index: SQLite rows that say which shard holds which item; it follows from the shards."""

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from lydite.calibrate import disk
from lydite.calibrate.shards import Entry, parse_entry
from lydite.core.errors import CalibrationError, at

NAME = "index.sqlite"
APPLICATION = 0x4C594443  # "LYDC"
VERSION = 1

_OF_THE_DISK = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
}
_SCHEMA = """
CREATE TABLE shard (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, bytes INTEGER NOT NULL);
CREATE TABLE item (
    key TEXT NOT NULL PRIMARY KEY, kind TEXT NOT NULL, image INTEGER, step INTEGER,
    digest TEXT NOT NULL, entry TEXT NOT NULL, shard INTEGER NOT NULL REFERENCES shard (id)
);
CREATE INDEX item_place ON item (kind, image, step);
CREATE INDEX item_shard ON item (shard);
"""


@dataclass(frozen=True)
class Row:
    """One line of the index, as it is in the file."""

    key: str
    kind: str
    image: int | None
    step: int | None
    digest: str
    text: str
    shard: str

    @classmethod
    def of(cls, entry: Entry, shard: str) -> Self:
        """The only row an entry can have."""
        place = (entry.key, entry.kind, entry.image, entry.step)
        return cls(*place, entry.digest, entry.text, shard)

    @property
    def entry(self) -> Entry:
        """The row as it is in the shard."""
        try:
            return parse_entry(self.text)
        except (msgspec.MsgspecError, TypeError) as error:  # TypeError: no text at all
            raise CalibrationError(f"{NAME}: a row cannot be read ({error}).") from error


class Index:
    """An open index. Only `add` and `drop` change it, each in one transaction."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self._db = path, connection

    @classmethod
    def create(cls, path: Path) -> Self:
        """A new, empty index."""
        with _reported(path):
            connection = _connect(path, "rwc")
            try:
                _make_durable(connection)
                disk.system.execute(connection, "BEGIN IMMEDIATE")
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
                connection.execute(f"PRAGMA user_version = {VERSION}")
                disk.system.execute(connection, "COMMIT")
                disk.sync_folder(path.parent)
            except BaseException:
                connection.close()
                raise
        return cls(path, connection)

    @classmethod
    def open(cls, path: Path, *, write: bool = False) -> Self:
        """An index that is there. A reader leaves no trace and waits for nobody."""
        if not path.is_file():
            raise CalibrationError(f"{at(path)}: no such file. {_mend(path)}")
        with _reported(path):
            writable = os.access(path.parent, os.W_OK)
            connection = _connect(path, "rw" if writable else "ro&immutable=1")
            try:
                _check_kind(path, connection)
                if write:
                    _make_durable(connection)
                else:
                    connection.execute("PRAGMA query_only = 1")
            except BaseException:
                connection.close()
                raise
        return cls(path, connection)

    def add(self, shard: str, size: int, entries: Iterable[Entry]) -> int:
        """Enter a shard and those of its items that are not known; how many they were."""
        with self._transaction():
            return self._insert(shard, size, entries)

    def replace(self, old: str, new: str | None, size: int, entries: Iterable[Entry]) -> None:
        """Take a shard and its items out, and enter what was saved of it, in one transaction."""
        with self._transaction():
            number = self._shard_id(old)
            self._db.execute("DELETE FROM item WHERE shard = ?", (number,))
            self._db.execute("DELETE FROM shard WHERE id = ?", (number,))
            if new is not None:
                self._insert(new, size, entries)

    def digest(self, key: str) -> str | None:
        """The content digest of an item, or None when it is not there."""
        with _reported(self.path):
            row = self._db.execute("SELECT digest FROM item WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def find(self, key: str) -> Row | None:
        """The row of an item, or None."""
        return next(self._rows("WHERE item.key = ?", (key,)), None)

    def rows(self, kind: str | None = None) -> Iterator[Row]:
        """Every row, in the order of image and step."""
        where = "WHERE kind = ? " if kind else ""
        return self._rows(where + "ORDER BY kind, image, step, key", (kind,) if kind else ())

    def rows_of(self, shard: str) -> list[Row]:
        """The items of one shard, in the order of their keys, as in its header."""
        return list(self._rows("WHERE shard.name = ? ORDER BY item.key", (shard,)))

    def keys(self) -> set[str]:
        """The keys of all items."""
        with _reported(self.path):
            return {key for (key,) in self._db.execute("SELECT key FROM item")}

    def shards(self) -> dict[str, int]:
        """Names and sizes of the shards."""
        with _reported(self.path):
            return dict(self._db.execute("SELECT name, bytes FROM shard").fetchall())

    def counts(self) -> dict[str, int]:
        """How many items there are of each kind."""
        with _reported(self.path):
            return dict(
                self._db.execute("SELECT kind, count(*) FROM item GROUP BY kind").fetchall()
            )

    def content_hash(self) -> str:
        """Over all items, whatever the order and number of commits and runs that made them."""
        total = hashlib.sha256(b"lydite-calibration 1\n")
        with _reported(self.path):
            for key, content in self._db.execute("SELECT key, digest FROM item ORDER BY key"):
                total.update(f"{key} {content}\n".encode())
        return total.hexdigest()

    def faults(self) -> list[str]:
        """What SQLite itself finds wrong with the file."""
        try:
            found = self._db.execute("PRAGMA integrity_check").fetchall()
        except sqlite3.Error as error:
            return [str(error)]
        return [str(line) for (line,) in found if line != "ok"]

    def settle(self) -> bool:
        """Move the journal into the file; False when a reader or a broken-off query is open."""
        with _reported(self.path):
            self._db.execute("PRAGMA busy_timeout = 500")
            try:
                busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_LOCKED:
                    raise
                return False
        return not busy

    def close(self) -> None:
        """Close the file."""
        with _reported(self.path):
            self._db.close()

    def _insert(self, shard: str, size: int, entries: Iterable[Entry]) -> int:
        self._db.execute(
            "INSERT INTO shard (name, bytes) VALUES (?, ?) ON CONFLICT DO NOTHING", (shard, size)
        )
        number = self._shard_id(shard)
        rows = [Row.of(entry, shard) for entry in entries]
        before = self._db.total_changes
        self._db.executemany(
            "INSERT INTO item VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            [(r.key, r.kind, r.image, r.step, r.digest, r.text, number) for r in rows],
        )
        return self._db.total_changes - before

    def _rows(self, rest: str, values: tuple[Any, ...]) -> Iterator[Row]:
        columns = "key, kind, image, step, digest, entry, name"
        query = f"SELECT {columns} FROM item JOIN shard ON shard.id = shard {rest}"
        with _reported(self.path):
            for values_of_row in self._db.execute(query, values):
                yield Row(*values_of_row)

    def _shard_id(self, name: str) -> int:
        found = self._db.execute("SELECT id FROM shard WHERE name = ?", (name,)).fetchone()
        return -1 if found is None else found[0]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with _reported(self.path):
            disk.system.execute(self._db, "BEGIN IMMEDIATE")
            try:
                yield
                disk.system.execute(self._db, "COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        self._db.execute("ROLLBACK")
                raise


def is_blank(path: Path) -> bool:
    """Whether there is no index, or one that a crash left before its first commit."""
    if not path.exists():
        return True
    with contextlib.suppress(sqlite3.Error), contextlib.closing(_connect(path, "rw")) as database:
        return not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    return False


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    quoted = str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    return sqlite3.connect(f"file:{quoted}?mode={mode}", uri=True, isolation_level=None, timeout=10)


def _make_durable(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")  # in WAL mode: an fsync at each commit
    connection.execute("PRAGMA fullfsync = 1")  # on macOS down to the drive; elsewhere no effect


def _check_kind(path: Path, connection: sqlite3.Connection) -> None:
    (kind,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if (kind, version) != (APPLICATION, VERSION):
        raise CalibrationError(
            f"{at(path)}: no index of version {VERSION} (found {kind:#x}, {version}). {_mend(path)}"
        )


def _mend(path: Path) -> str:
    return f"Run: lydite calibrate rebuild {at(path.parent)}"


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    """SQLite's errors as ours: a disk that fails, or an index that must be rebuilt."""
    try:
        yield
    except OSError as error:
        raise disk.DiskError(path, error) from error
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _OF_THE_DISK:
            raise disk.DiskError(path, error) from error
        raise CalibrationError(f"{at(path)}: damaged ({error}). {_mend(path)}") from error
