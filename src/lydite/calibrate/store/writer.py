"""The one writer of a calibration set: a commit that returned is on disk, whatever happens next."""

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lydite.calibrate.settings import Description, Plan, Settings
from lydite.calibrate.store import lock
from lydite.calibrate.store.index import Index
from lydite.calibrate.store.lock import WriterLock
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.set_file import (
    INCOMING,
    NAME,
    OLD_FILES,
    QUARANTINE,
    SHARDS,
    check_description,
    check_outside,
    extend_plan,
    has_shards,
    read_description,
    write_description,
)
from lydite.calibrate.store.shards import (
    Item,
    ItemBuilder,
    Shard,
    ShardHeader,
    shard_names,
    write_shard,
)
from lydite.core import files
from lydite.core.errors import CalibrationError, FileError, at

_OWN_FILES = {NAME, lock.NAME, SHARDS, INCOMING, QUARANTINE, *OLD_FILES}


@dataclass(frozen=True)
class Committed:
    """What a commit added: nothing when the set held it already."""

    items: int
    bytes: int


@dataclass(frozen=True)
class ImportedShards:
    """The result of reading shards that workers or an interrupted run left."""

    added: int = 0  # items
    dropped: tuple[str, ...] = ()  # labels of damaged items, to be computed again
    quarantined: tuple[str, ...] = ()  # names of files

    def __add__(self, other: "ImportedShards") -> "ImportedShards":
        return ImportedShards(
            self.added + other.added,
            self.dropped + other.dropped,
            self.quarantined + other.quarantined,
        )


class Writer(CalibrationSet):
    """The one writer of a set. After a failed write it is closed; the set on disk stays valid."""

    def __init__(
        self, folder: Path, description: Description, index: Index, lock: WriterLock, resume: str
    ) -> None:
        super().__init__(folder, description, index)
        self.builder = ItemBuilder(description)
        self.recovered = ImportedShards()
        self._lock: WriterLock | None = lock
        self.resume, self._process = resume, os.getpid()

    @classmethod
    def start(
        cls,
        folder: Path | str,
        settings: Settings,
        plan: Plan,
        *,
        resume: str | None = None,
        begin: str | None = None,
    ) -> Self:
        """Make a set, or resume one of equal settings.

        For errors: `resume` is the command that resumes it, `begin` the one that makes it.
        """
        folder = Path(folder)
        resume = resume or command_line("lydite", "calibrate", "run", "--out", folder)
        check_outside(folder)
        check_description(folder, Description(settings, plan))  # before anything is made
        with resumable(resume if (folder / NAME).exists() else begin or resume):
            files.make_folder(folder)
            _check_folder(folder)
            writer_lock = WriterLock(folder)
            try:
                prepare_folder(folder)
                if not (folder / NAME).exists() and not has_shards(folder):
                    write_description(folder, Description(settings, plan))
                description = extend_plan(folder, settings, plan)
                index = Index.read(folder, description)
                index.require_undamaged()
                if description != read_description(folder):
                    write_description(folder, description)
                writer = cls(folder, description, index, writer_lock, resume)
                writer.recovered = writer.collect()
            except BaseException:
                writer_lock.release()
                raise
        return writer

    def commit(self, items: Iterable[Item]) -> Committed:
        """Add items, all or none; on return they are on disk, whatever happens next."""
        self._check_usable()
        made = list(items)  # an error in making them does not close the writer
        with self._closed_on_failure():
            new = self._new(made)
            self.index.check_numbers([item.entry for item in new])
            size = write_items(self.folder, self.settings, self.index, new)
        return Committed(len(new), size)

    def collect(self) -> ImportedShards:
        """Commit the shards that workers wrote into `incoming`."""
        self._check_usable()
        result, incoming = ImportedShards(), self.folder / INCOMING
        with self._closed_on_failure():
            for name in shard_names(incoming):
                result += import_shard(self.folder, self.settings, self.index, incoming / name)
        return result

    def close(self) -> None:
        """Release the set."""
        if self._lock is not None and self._process == os.getpid():
            self._release()

    def _new(self, items: Iterable[Item]) -> list[Item]:
        """Those the set does not hold; a second content for a key is refused."""
        new: dict[str, Item] = {}
        for item in items:
            entry = item.entry
            known = self.index.digest(entry.key)
            if known is None and entry.key in new:
                known = new[entry.key].entry.digest
            if known is None:
                new[entry.key] = item
            elif known != entry.digest:
                raise conflict(self.folder, entry.label, entry.key)
        return list(new.values())

    def _check_usable(self) -> None:
        if self._lock is None or self._process != os.getpid():
            raise CalibrationError(
                f"{at(self.folder)}: this writer is closed, or belongs to another process. "
                "Open the set again; workers use ShardWriter."
            )

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            with resumable(self.resume):
                yield
        except FileError:
            self._release()  # what a failed fsync left is not known
            raise

    def _release(self) -> None:
        writer_lock, self._lock = self._lock, None
        super().close()
        if writer_lock is not None:
            writer_lock.release()


class ShardWriter:
    """Writes shards for a set whose writer is another process, which collects them.

    It needs no lock. What it wrote is complete and durable; writing the same twice changes nothing.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.builder = ItemBuilder(read_description(self.folder))

    def write(self, items: Iterable[Item]) -> str:
        """Write items where the writer collects them; the shard's name."""
        by_key = {item.entry.key: item for item in items}
        if not by_key:
            raise CalibrationError(f"{at(self.folder)}: no items to write.")
        settings = self.builder.settings
        return write_shard(self.folder / INCOMING, settings, list(by_key.values()))[0]


def prepare_folder(folder: Path) -> None:
    """Make the folders of a set, and remove what interrupted writes and earlier versions left.

    Files in these folders are moved and removed, so none of them may be a link to another place.
    """
    for name in (SHARDS, INCOMING, QUARANTINE):
        if (folder / name).is_symlink():
            raise FileError(
                f"{at(folder / name)}: is a link. A set that is written has its own folders; move "
                "the files themselves there."
            )
    for name in (SHARDS, INCOMING):
        files.make_folder(folder / name)
        files.remove_leftovers(folder / name)
    files.remove_leftovers(folder)
    for name in OLD_FILES:
        if (folder / name).is_file():
            files.remove(folder / name)


def import_shard(folder: Path, settings: Settings, index: Index, path: Path) -> ImportedShards:
    """Enter one shard; of a damaged one the undamaged items, and the file goes to quarantine."""
    if path.parent.name == SHARDS and path.name in index.shards:
        return ImportedShards()
    try:
        with Shard.open(path) as shard:
            index.check_belongs(ShardHeader(shard.settings, shard.entries, shard.size))
            new, damaged, conflicting = _classify(index, shard)
            if len(new) == len(shard.entries):
                if path.parent.name != SHARDS:
                    files.move(path, folder / SHARDS / path.name)
                return ImportedShards(index.add(path.name, shard.size, shard.entries))
            write_items(folder, settings, index, [shard.item(number) for number in new])
    except CalibrationError:  # damaged, or of another run or set
        return quarantine(folder, path)
    if not damaged and not conflicting:
        files.remove(path)  # the set holds the rest of it already
        return ImportedShards(len(new))
    labels = tuple(shard.entries[number].label for number in damaged)
    return ImportedShards(len(new), dropped=labels) + quarantine(folder, path)


def write_items(folder: Path, settings: Settings, index: Index, items: list[Item]) -> int:
    """Write items as one shard, then enter it into the index; the bytes written."""
    if not items:
        return 0
    name, size = write_shard(folder / SHARDS, settings, items)
    index.add(name, size, [item.entry for item in items])
    return size


def quarantine(folder: Path, path: Path, name: str | None = None) -> ImportedShards:
    """Move a file to `quarantine`, where nothing reads it; damaged files are never deleted."""
    files.make_folder(folder / QUARANTINE)
    files.move(path, folder / QUARANTINE / (name or path.name))
    return ImportedShards(quarantined=(path.name,))


def conflict(where: Path, label: str, key: str) -> CalibrationError:
    """The error for one key with two contents."""
    return CalibrationError(
        f"{at(where)}: {label} (key {key[:12]}) differs from the one the set holds, though the "
        "settings are equal. Compute it again on one machine, or keep the sets apart."
    )


@contextlib.contextmanager
def resumable(command: str) -> Iterator[None]:
    """Adds to the error of a failed write what is safe and how to resume."""
    try:
        yield
    except files.DiskError as error:
        raise FileError(
            f"{error} What was committed is safe. When the disk works again, resume with: {command}"
        ) from error
    except OSError as error:
        raise FileError(f"{error}. When the disk works again, resume with: {command}") from error


def command_line(*words: object) -> str:
    """A command for a message: quoted where a shell needs it, and on one line."""
    line = shlex.join(str(word) for word in words)
    return line if line.isprintable() else repr(line)


def _classify(index: Index, shard: Shard) -> tuple[list[int], list[int], list[int]]:
    """Numbers of a shard's entries: new, damaged, conflicting; the set holds the others."""
    new, damaged, conflicting = list[int](), shard.damaged(), list[int]()
    for number, entry in enumerate(shard.entries):
        known = index.digest(entry.key)
        if number in damaged:
            continue
        if known is None:
            new.append(number)
        elif known != entry.digest:
            conflicting.append(number)
    return new, damaged, conflicting


def _check_folder(folder: Path) -> None:
    foreign = sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in _OWN_FILES and not path.name.endswith(files.PART)
    )
    if foreign and not (folder / NAME).exists():
        raise FileError(
            f"{at(folder)}: not empty and not a calibration set (it holds {foreign[0]!r}). "
            "Give a new folder."
        )
