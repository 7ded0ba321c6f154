"""The one writer of a calibration set: a commit that returned is on disk, whatever happens next."""

import contextlib
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lydite.calibrate.settings import Settings
from lydite.calibrate.store import files as disk
from lydite.calibrate.store import seal
from lydite.calibrate.store.consistency import require_agreement
from lydite.calibrate.store.index import NAME as INDEX
from lydite.calibrate.store.index import Index, is_blank
from lydite.calibrate.store.items import Maker
from lydite.calibrate.store.lock import NAME as CLAIM
from lydite.calibrate.store.lock import Claim
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.recovery import (
    INCOMING,
    QUARANTINE,
    TakenIn,
    adopt,
    conflict,
    enter,
    lost_shards,
    take_in,
)
from lydite.calibrate.store.set_file import NAME as SET
from lydite.calibrate.store.set_file import (
    SHARDS,
    Description,
    Plan,
    agreed,
    encoded,
    has_shards,
    read_description,
    write_description,
)
from lydite.calibrate.store.shards import SHARD, Item
from lydite.core.errors import CalibrationError, FileError, at

_OURS = {SET, CLAIM, INDEX, f"{INDEX}-wal", f"{INDEX}-shm", seal.SEAL, SHARDS, INCOMING, QUARANTINE}


@dataclass(frozen=True)
class Committed:
    """What a commit added: nothing when the set had it already."""

    items: int
    bytes: int


class Writer(CalibrationSet):
    """The one writer of a set. After a failure of the disk it is closed, and the set is whole."""

    def __init__(
        self, folder: Path, description: Description, index: Index, claim: Claim, resume: str
    ) -> None:
        super().__init__(folder, description, index)
        self.make = Maker(description)
        self.recovered = TakenIn()
        self._claim: Claim | None = claim
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
        """Make a set, or go on with one of equal settings.

        For errors: `resume` is the command to go on with, `begin` the one when there is no set yet.
        """
        folder = Path(folder)
        resume = resume or command_line("lydite", "calibrate", "run", "--out", folder)
        with resumable(resume if (folder / SET).exists() else begin or resume):
            disk.make_folder(folder)
            _check_ours(folder)
            with contextlib.ExitStack() as undo:
                claim = Claim(folder)
                undo.callback(claim.release)
                description = _described(folder, settings, plan)
                index = open_index(folder)
                undo.callback(_quietly, index.close)
                require_agreement(folder, read_description(folder), index)
                _check_lost(folder, index)
                _describe(folder, description, index)
                writer = cls(folder, description, index, claim, resume)
                writer.recovered = adopt(folder, description.settings, index)
                writer.recovered += writer.collect()
                undo.pop_all()
        return writer

    def commit(self, items: Iterable[Item], drawn: float | None = None) -> Committed:
        """Add items, all or none; on return they are on disk whatever happens next.

        An interrupt may come at any moment: the shard is entered after it is whole, and a whole
        shard that was not entered is found when the set is opened again. `drawn` is the time at
        which a run finished them, from which the time that is left follows.
        """
        self._check_usable()
        made = list(items)  # whatever making them raises is the caller's
        with self._failing():
            new = self._new(made)
            self.index.check_numbers([item.entry for item in new])
            size = enter(self.folder, self.settings, self.index, new, drawn)
        return Committed(len(new), size)

    def collect(self, drawn: float | None = None) -> TakenIn:
        """Commit what workers handed over."""
        self._check_usable()
        result, incoming = TakenIn(), self.folder / INCOMING
        with self._failing():
            for path in sorted(incoming.iterdir()):
                if SHARD.fullmatch(path.name):
                    result += take_in(self.folder, self.settings, self.index, path, drawn)
        return result

    def require_room(self, bytes_per_item: int | None = None) -> None:
        """Refuse to go on when what is missing will not fit, by the size of what is there."""
        count = sum(self.index.counts().values())
        if bytes_per_item is None:
            bytes_per_item = sum(self.index.shards().values()) // count if count else 0
        left = sum(len(steps) for steps in self.missing().values())
        disk.require_room(self.folder, left * bytes_per_item)

    def close(self) -> None:
        """Close and seal the set. It is as safe without, only opened a little slower."""
        if self._claim is None or self._process != os.getpid():
            return
        try:
            with self._failing():
                self.close_shards()
                settled = self.index.settle()
                self.index.close()
                if settled:
                    seal.write_seal(self.index.path)
        finally:
            self._abandon()

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
        if self._claim is None or self._process != os.getpid():
            raise CalibrationError(
                f"{at(self.folder)}: this writer is closed, or belongs to another process. "
                "Open the set again; workers hand over through Worker."
            )

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            with resumable(self.resume):
                yield
        except FileError:
            self._abandon()  # what a failed fsync left is not known: nothing is built on it
            raise

    def _abandon(self) -> None:
        claim, self._claim = self._claim, None
        self.close_shards()
        _quietly(self.index.close)
        if claim is not None:
            claim.release()


@contextlib.contextmanager
def resumable(command: str) -> Iterator[None]:
    """A disk's failure with what is safe and how to go on."""
    try:
        yield
    except disk.DiskError as error:
        raise FileError(
            f"{error} What was committed is safe. When the disk is well, go on with: {command}"
        ) from error
    except OSError as error:
        raise FileError(f"{error}. When the disk is well, go on with: {command}") from error


def command_line(*words: object) -> str:
    """A command for a message: quoted where a shell needs it, and on one line."""
    line = shlex.join(str(word) for word in words)
    return line if line.isprintable() else repr(line)


def open_index(folder: Path) -> Index:
    """The index, ready for changes: swept, checked, its seal broken. The claim must be held."""
    path = folder / INDEX
    for name in (SHARDS, INCOMING):
        disk.make_folder(folder / name)
        disk.sweep(folder / name)
    disk.sweep(folder)
    if not seal.is_sealed(path) and is_blank(path):
        seal.remove_index(path)
        return Index.create(path)
    fault = seal.seal_fault(path) if seal.is_sealed(path) else None
    if fault is None:
        index = Index.open(path, write=True)
        faults = [] if seal.is_sealed(path) else index.faults()
        if not faults:
            seal.break_seal(path)
            return index
        fault = faults[0]
        index.close()
    raise CalibrationError(
        f"{at(path)}: damaged ({fault}). Run: lydite calibrate repair {at(folder)}"
    )


def _described(folder: Path, settings: Settings, plan: Plan) -> Description:
    """What the set is to be; a new one is described before there is anything of it."""
    if not (folder / SET).exists() and not has_shards(folder):
        write_description(folder, Description(settings, plan))
    return agreed(folder, settings, plan)


def _describe(folder: Path, description: Description, index: Index) -> None:
    """Write it where it is not written yet, and keep a copy in the index."""
    if description != read_description(folder):
        write_description(folder, description)
    index.describe(encoded(description).decode())


def _check_lost(folder: Path, index: Index) -> None:
    """Nothing is built on a set whose files somebody took away or cut short."""
    if lost := lost_shards(folder / SHARDS, index):
        more = f" So are {len(lost) - 1} others." if len(lost) > 1 else ""
        raise CalibrationError(
            f"{at(folder / SHARDS / lost[0])}: gone, or not as long as it was.{more} "
            f"Run: lydite calibrate repair {at(folder)}"
        )


def _check_ours(folder: Path) -> None:
    strange = sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in _OURS and not path.name.endswith(disk.PART)
    )
    if strange and not (folder / SET).exists():
        raise FileError(
            f"{at(folder)}: not empty, and no calibration set (it holds {strange[0]!r}). "
            "Give a new folder."
        )


def _quietly(close: Callable[[], None]) -> None:
    with contextlib.suppress(CalibrationError, FileError):
        close()
