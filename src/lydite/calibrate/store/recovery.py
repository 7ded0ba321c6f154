"""Shards that the index does not know, or that rot has touched: taken in, saved or set aside."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from lydite.calibrate.settings import Settings, differences
from lydite.calibrate.store import files as disk
from lydite.calibrate.store.index import Index
from lydite.calibrate.store.set_file import SHARDS
from lydite.calibrate.store.shards import (
    SHARD,
    Item,
    Shard,
    shard_header,
    shard_name,
    write_shard,
)
from lydite.core.errors import CalibrationError, at

INCOMING, QUARANTINE = "incoming", "quarantine"


@dataclass(frozen=True)
class TakenIn:
    """What became of shards that were looked through."""

    added: int = 0  # items
    mended: int = 0  # shards whose header was written anew
    dropped: tuple[str, ...] = ()  # labels of items that have to be computed again
    set_aside: tuple[str, ...] = ()  # files now in quarantine

    def __add__(self, other: "TakenIn") -> "TakenIn":
        return TakenIn(
            self.added + other.added,
            self.mended + other.mended,
            self.dropped + other.dropped,
            self.set_aside + other.set_aside,
        )


def shard_names(folder: Path) -> list[str]:
    """The shards that are on disk."""
    return sorted(path.name for path in folder.iterdir() if SHARD.fullmatch(path.name))


def adopt(folder: Path, settings: Settings, index: Index) -> TakenIn:
    """Enter every shard the index misses: a crash between the two loses nothing."""
    known, result = index.shards(), TakenIn()
    for name in shard_names(folder / SHARDS):
        if name not in known:
            result += take_in(folder, settings, index, folder / SHARDS / name)
    return result


def lost_shards(folder: Path, index: Index) -> list[str]:
    """Shards whose files are gone or have another size than the index says; none is read."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as files:
        sizes = {file.name: file.stat().st_size for file in files}
    return sorted(name for name, size in index.shards().items() if sizes.get(name) != size)


def take_in(
    folder: Path, settings: Settings, index: Index, path: Path, drawn: float | None = None
) -> TakenIn:
    """Enter one shard; of a damaged one what is whole, and the file goes to quarantine."""
    try:
        shard = Shard.open(path)
    except CalibrationError:
        return set_aside(folder, path)
    with shard:
        if shard.settings.hash != settings.hash:
            if path.parent.name == SHARDS:
                raise other_settings(shard, settings)
            return set_aside(folder, path)  # a worker of another run
        try:
            index.check_numbers(shard.entries)
        except CalibrationError:
            if path.parent.name == SHARDS:
                raise
            return set_aside(folder, path)  # of another set
        sorted_out = _sort(index, shard)
        if len(sorted_out.new) == len(shard.entries):
            _settle(folder, path)
            return TakenIn(index.add(path.name, shard.size, shard.entries, drawn))
        enter(folder, settings, index, [shard.item(n) for n in sorted_out.new], drawn)
        added = len(sorted_out.new)
    if not sorted_out.damaged and not sorted_out.conflicting:
        disk.remove(path)  # the set holds the rest of it already
        return TakenIn(added)
    dropped = tuple(shard.entries[n].label for n in sorted_out.damaged)
    return TakenIn(added, dropped=dropped) + set_aside(folder, path)


def enter(
    folder: Path, settings: Settings, index: Index, items: list[Item], drawn: float | None
) -> int:
    """Write items as one shard, then enter it, in this order; the bytes written."""
    if not items:
        return 0
    name, size = write_shard(folder / SHARDS, settings, items)
    index.add(name, size, [item.entry for item in items], drawn)
    return size


def mend_header(folder: Path, settings: Settings, index: Index, name: str) -> bool:
    """Write a damaged header anew from the index; the file's name proves that it is right."""
    path = folder / SHARDS / name
    try:
        head = shard_header(settings, [row.entry for row in index.rows_of(name)])
        data = path.read_bytes()
    except (CalibrationError, OSError):
        return False
    if shard_name(head) != name or len(data) < len(head):
        return False
    disk.write_sealed(path, [head, memoryview(data)[len(head) :]])
    return True


def other_settings(shard: Shard, settings: Settings) -> CalibrationError:
    """The error for a shard of another run."""
    lines = "; ".join(differences(shard.settings, settings))
    return CalibrationError(
        f"{at(shard.path)}: made with other settings ({lines}; the shard's first). "
        "Take it out of the folder."
    )


def set_aside(folder: Path, path: Path, name: str | None = None) -> TakenIn:
    """Move a file where nothing reads it; nothing is ever deleted for being damaged."""
    disk.make_folder(folder / QUARANTINE)
    disk.move(path, folder / QUARANTINE / (name or path.name))
    return TakenIn(set_aside=(path.name,))


def _settle(folder: Path, path: Path) -> None:
    """Bring a shard that a worker handed over to its place."""
    if path.parent.name != SHARDS:
        disk.move(path, folder / SHARDS / path.name)


def conflict(where: Path, label: str, key: str) -> CalibrationError:
    """One key with two contents: the run is not a function of its settings."""
    return CalibrationError(
        f"{at(where)}: {label} (key {key[:12]}) differs from the one the set holds, though the "
        "settings are equal. Compute it again on one machine, or keep the sets apart."
    )


@dataclass(frozen=True)
class _Sorted:
    """Numbers of a shard's entries; those that are in none of the lists the set has already."""

    new: list[int]
    damaged: list[int]
    conflicting: list[int]


def _sort(index: Index, shard: Shard) -> _Sorted:
    result = _Sorted([], shard.damaged(), [])
    for number, entry in enumerate(shard.entries):
        known = index.digest(entry.key)
        if number in result.damaged:
            continue
        if known is None:
            result.new.append(number)
        elif known != entry.digest:
            result.conflicting.append(number)
    return result
