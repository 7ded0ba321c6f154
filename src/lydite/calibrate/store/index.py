"""The index: SQLite rows that say which shard holds which item; it follows from the shards.

Beside them it keeps a copy of `set.json`, whose plan follows from nothing else.
"""

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from lydite.calibrate.store import files as disk
from lydite.calibrate.store.database import (
    connect,
    connect_reader,
    make_durable,
    rebuilding,
    reported,
    require_rights,
)
from lydite.calibrate.store.shards import Entry, parse_entry
from lydite.core.errors import CalibrationError, at, shown

NAME = "index.sqlite"
APPLICATION = 0x4C594443  # "LYDC"
VERSION = 2

_SCHEMA = """
CREATE TABLE description (text TEXT NOT NULL);
CREATE TABLE shard (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, bytes INTEGER NOT NULL, drawn REAL
);
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
    """An open index. `add`, `drop` and `describe` change it, each in one transaction."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self._db = path, connection

    @classmethod
    def create(cls, path: Path) -> Self:
        """A new, empty index."""
        with reported(path):
            connection = connect(path, "rwc")
            try:
                make_durable(connection)
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
            raise CalibrationError(f"{at(path)}: no such file. {rebuilding(path)}")
        require_rights(path)
        with reported(path):
            connection = connect(path, "rw") if write else connect_reader(path)
            try:
                _check_kind(path, connection)
                if write:
                    make_durable(connection)
            except BaseException:
                connection.close()
                raise
        return cls(path, connection)

    def add(
        self, shard: str, size: int, entries: Sequence[Entry], drawn: float | None = None
    ) -> int:
        """Enter a shard and those of its items that are not known; how many they were.

        `drawn` is the time at which a run finished it; None for what was brought from elsewhere.
        """
        self.check_numbers(entries)
        with self._transaction():
            return self._insert(shard, size, entries, drawn)

    def drop(self, shard: str) -> None:
        """Take a shard and its items out."""
        with self._transaction():
            number = self._shard_id(shard)
            self._db.execute("DELETE FROM item WHERE shard = ?", (number,))
            self._db.execute("DELETE FROM shard WHERE id = ?", (number,))

    def describe(self, text: str) -> None:
        """Keep a copy of `set.json`."""
        if self.description() != text:
            with self._transaction():
                self._db.execute("DELETE FROM description")
                self._db.execute("INSERT INTO description VALUES (?)", (text,))

    def description(self) -> str | None:
        """The copy of `set.json`."""
        with reported(self.path):
            found = self._db.execute("SELECT text FROM description").fetchone()
        return None if found is None else str(found[0])

    def digest(self, key: str) -> str | None:
        """The content digest of an item, or None when it is not there."""
        with reported(self.path):
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
        with reported(self.path):
            return {key for (key,) in self._db.execute("SELECT key FROM item")}

    def shards(self) -> dict[str, int]:
        """Names and sizes of the shards."""
        with reported(self.path):
            return dict(self._db.execute("SELECT name, bytes FROM shard").fetchall())

    def drawn(self) -> list[float]:
        """When runs finished their shards, in order."""
        with reported(self.path):
            query = "SELECT drawn FROM shard WHERE drawn IS NOT NULL ORDER BY drawn"
            return [float(time) for (time,) in self._db.execute(query)]

    def counts(self) -> dict[str, int]:
        """How many items there are of each kind."""
        with reported(self.path):
            return dict(
                self._db.execute("SELECT kind, count(*) FROM item GROUP BY kind").fetchall()
            )

    def content_hash(self) -> str:
        """Over all items, whatever the order and number of commits and runs that made them."""
        total = hashlib.sha256(b"lydite-calibration 1\n")
        with reported(self.path):
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
        with reported(self.path):
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
        with reported(self.path):
            self._db.close()

    def check_numbers(self, entries: Iterable[Entry]) -> None:
        """Refuse items whose image is another than the one their number means: prompt and seed."""
        for entry in {entry.image: entry for entry in entries if entry.image is not None}.values():
            with reported(self.path):
                found = self._db.execute(
                    "SELECT entry FROM item "
                    "WHERE kind IN ('sample', 'picture') AND image = ? LIMIT 1",
                    (entry.image,),
                ).fetchone()
            known = entry if found is None else parse_entry(found[0])
            if (known.prompt, known.seed) != (entry.prompt, entry.seed):
                raise CalibrationError(
                    f"{at(self.path.parent)}: image {entry.image} is {shown(known.prompt)} with "
                    f"seed {known.seed} there, and here {shown(entry.prompt)} with seed "
                    f"{entry.seed}. This is of another set. lydite calibrate repair sets such "
                    "shards aside, and merge joins sets."
                )

    def _insert(self, shard: str, size: int, entries: Iterable[Entry], drawn: float | None) -> int:
        self._db.execute(
            "INSERT INTO shard (name, bytes, drawn) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            (shard, size, drawn),
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
        with reported(self.path):
            for values_of_row in self._db.execute(query, values):
                yield Row(*values_of_row)

    def _shard_id(self, name: str) -> int:
        found = self._db.execute("SELECT id FROM shard WHERE name = ?", (name,)).fetchone()
        return -1 if found is None else found[0]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with reported(self.path):
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
    with contextlib.suppress(sqlite3.Error), contextlib.closing(connect(path, "rw")) as database:
        return not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    return False


def _check_kind(path: Path, connection: sqlite3.Connection) -> None:
    (kind,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if kind == APPLICATION and version < VERSION:
        raise CalibrationError(
            f"{at(path)}: written by an older lydite; nothing is lost. {rebuilding(path)}"
        )
    if (kind, version) != (APPLICATION, VERSION):
        raise CalibrationError(
            f"{at(path)}: no index of version {VERSION} (found {kind:#x}, {version}). "
            f"{rebuilding(path)}"
        )
