"""What a set holds and what is missing; and all but the arrays as one JSON file."""

import statistics
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from lydite.calibrate.settings import BLOCKS, Settings
from lydite.calibrate.store.lock import LockOwner, lock_owner
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.set_file import SHARDS, check_output_path
from lydite.calibrate.store.shards import FORMAT, VERSION
from lydite.calibrate.store.writer import command_line
from lydite.core.outputs import write_output

RECENT = 20  # shards whose times decide the time left


@dataclass(frozen=True)
class Status:
    """The state of a set, by the headers of its shards; `verify` reads the data too."""

    folder: str
    model: str
    settings_hash: str
    items: dict[str, int]  # of each kind
    planned: int
    missing: int
    images: int
    images_complete: int
    shards: int
    lost: tuple[str, ...]  # shards that are damaged or cut short, as far as headers tell
    bytes: int
    content_hash: str | None  # None when shards are lost
    seconds_left: float | None  # by the usual time between shards; None when that is not known
    writer: LockOwner | None
    again: str  # the command that resumes it

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def status(folder: Path | str) -> Status:
    """Look at a set; a run may write meanwhile."""
    folder = Path(folder)
    with CalibrationSet.open_damaged(folder) as opened:
        index, missing = opened.index, opened.missing()
        left = sum(len(steps) for steps in missing.values())
        return Status(
            str(folder),
            opened.settings.model,
            opened.settings.hash,
            index.counts(),
            sum(1 for _ in opened.plan.keys(opened.settings)),
            left,
            len(opened.plan.images),
            len(opened.plan.images) - len(missing),
            len(index.shards),
            tuple(sorted(index.damaged)),
            sum(index.shards.values()),
            None if index.damaged else opened.content_hash,
            _seconds_left(opened, left) if is_drawable(opened.settings) else None,
            lock_owner(folder),
            command_line("lydite", "calibrate", "repair", folder)
            if index.damaged
            else resume_advice(folder, opened.settings),
        )


def resume_advice(folder: Path, settings: Settings) -> str:
    """What completes a set, for people."""
    if BLOCKS in settings.conditions:
        return "the lydite calibrate blocks command that made it"
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


def write_manifest(folder: Path | str, path: Path, *, overwrite: bool = False) -> None:
    """Export `manifest.json`."""
    check_output_path(path, overwrite=overwrite, inputs=[Path(folder)])
    text = msgspec.json.format(msgspec.json.encode(manifest(folder)), indent=1)
    write_output(path, [text, b"\n"], overwrite=overwrite)


def _seconds_left(opened: CalibrationSet, items: int) -> float | None:
    """By the median time between the newest shards: a pause between two runs does not count."""
    names = opened.index.shards
    times = sorted((opened.folder / SHARDS / name).stat().st_mtime for name in names)[-RECENT:]
    if len(times) < 3:
        return None
    gap = statistics.median(after - before for before, after in pairwise(times))
    per_shard = sum(opened.index.counts().values()) / len(names)
    return gap * items / per_shard
