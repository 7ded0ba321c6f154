"""What a set holds and what is missing; and the same as one JSON for people and other tools."""

import statistics
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from lydite.calibrate import seal
from lydite.calibrate.claim import Holder, holder
from lydite.calibrate.disk import write_sealed
from lydite.calibrate.recovery import SHARDS
from lydite.calibrate.shards import FORMAT, VERSION
from lydite.calibrate.store import CalibrationSet


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
    bytes: int
    content_hash: str
    seconds_left: float | None  # by the usual time between commits; None when that is not known
    sealed: bool
    writer: Holder | None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def status(folder: Path | str) -> Status:
    """Look at a set; a run may go on meanwhile."""
    folder = Path(folder)
    with CalibrationSet.open(folder) as opened:
        missing, shards = opened.missing(), opened.index.shards()
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
            sum(shards.values()),
            opened.content_hash,
            _seconds_left(folder, shards, len(missing)),
            seal.is_sealed(opened.index.path),
            holder(folder),
        )


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
    text = msgspec.json.format(msgspec.json.encode(manifest(folder)), indent=1)
    write_sealed(path, [text, b"\n"])


def _seconds_left(folder: Path, shards: dict[str, int], images: int) -> float | None:
    """The median of the gaps: a pause between two runs does not count."""
    times = sorted(
        path.stat().st_mtime
        for path in (folder / SHARDS / name for name in shards)
        if path.exists()
    )
    if len(times) < 3:
        return None
    gaps = [after - before for before, after in pairwise(times)]
    return statistics.median(gaps) * images
