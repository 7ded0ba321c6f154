"""What a set holds and what is missing; and the same as one JSON for people and other tools."""

import statistics
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from lydite.calibrate.outputs import Kind, check_output
from lydite.calibrate.settings import BLOCKS, Settings
from lydite.calibrate.store import seal
from lydite.calibrate.store.files import make_folder, write_sealed
from lydite.calibrate.store.index import Index
from lydite.calibrate.store.lock import Holder, holder
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.recovery import lost_shards
from lydite.calibrate.store.set_file import SHARDS
from lydite.calibrate.store.shards import FORMAT, VERSION
from lydite.calibrate.store.writer import command_line

MANIFEST = Kind("manifest", lambda head: head.startswith(f'{{\n "format": "{FORMAT}"'.encode()))


@dataclass(frozen=True)
class Status:
    """The state of a set, from its index alone; `verify` reads the data too."""

    folder: str
    model: str
    settings_hash: str
    items: dict[str, int]  # of each kind
    planned: int
    missing: int
    images: int
    images_complete: int
    shards: int
    lost: tuple[str, ...]  # shards that are gone, or have another size than they had
    bytes: int
    content_hash: str | None  # None when shards are lost
    seconds_left: float | None  # by the usual time between commits; None when that is not known
    sealed: bool
    writer: Holder | None
    again: str  # the command that goes on with it

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def status(folder: Path | str) -> Status:
    """Look at a set; a run may go on meanwhile."""
    folder = Path(folder)
    with CalibrationSet.open(folder) as opened:
        shards, lost = opened.index.shards(), lost_shards(folder / SHARDS, opened.index)
        missing = opened.missing({row.key for name in lost for row in opened.index.rows_of(name)})
        left = sum(len(steps) for steps in missing.values())
        return Status(
            str(folder),
            opened.settings.model,
            opened.settings.hash,
            opened.index.counts(),
            sum(1 for _ in opened.plan.keys(opened.settings)),
            left,
            len(opened.plan.images),
            len(opened.plan.images) - len(missing),
            len(shards),
            tuple(lost),
            sum(shards.values()),
            None if lost else opened.content_hash,
            _seconds_left(opened.index, left),
            seal.is_sealed(opened.index.path),
            holder(folder),
            command_line("lydite", "calibrate", "repair", folder)
            if lost
            else again(folder, opened.settings),
        )


def again(folder: Path, settings: Settings) -> str:
    """What goes on with an incomplete set, for people."""
    if BLOCKS in settings.conditions:
        return "the lydite calibrate blocks command that began it"
    if not is_drawable(settings):
        return "the tool that made it"
    model = () if settings.model else ("--model", "MODEL")
    return command_line("lydite", "calibrate", "run", "--out", folder, *model)


def is_drawable(settings: Settings) -> bool:
    """Whether `calibrate run` made the set, and can draw what it misses."""
    return "compute" in settings.conditions and BLOCKS not in settings.conditions


def manifest(folder: Path | str) -> dict[str, Any]:
    """Everything but the arrays: settings, images, and where each item lies."""
    with CalibrationSet.open(folder) as opened:
        items = [
            {"shard": row.shard, "digest": row.digest, **msgspec.to_builtins(row.entry)}
            for row in opened.rows(None)
        ]
        return {
            "format": FORMAT,
            "version": int(VERSION),
            "settings": msgspec.to_builtins(opened.settings),
            "settings_hash": opened.settings.hash,
            "plan": msgspec.to_builtins(opened.plan),
            "content_hash": opened.content_hash,
            "items": items,
        }


def write_manifest(folder: Path | str, path: Path) -> None:
    """Export `manifest.json`."""
    check_output(path, MANIFEST)
    text = msgspec.json.format(msgspec.json.encode(manifest(folder)), indent=1)
    make_folder(path.parent)
    write_sealed(path, [text, b"\n"])


def _seconds_left(index: Index, items: int) -> float | None:
    """By the median of the gaps between commits: a pause between two runs does not count."""
    times = index.drawn()
    if len(times) < 3:
        return None
    gap = statistics.median(after - before for before, after in pairwise(times))
    each = sum(index.counts().values()) / len(index.shards())
    return gap * items / each
