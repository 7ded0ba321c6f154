"""Repair a set: undamaged items stay, the rest is dropped to be computed again."""

import contextlib
import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lydite.calibrate.settings import Description, Image, Plan
from lydite.calibrate.store.index import Index
from lydite.calibrate.store.lock import WriterLock
from lydite.calibrate.store.set_file import (
    MAX_BYTES,
    NAME,
    SHARDS,
    encode_description,
    parse_description,
    write_description,
)
from lydite.calibrate.store.shards import ShardHeader, read_shard_header, shard_names
from lydite.calibrate.store.writer import (
    ImportedShards,
    command_line,
    import_shard,
    prepare_folder,
    quarantine,
    resumable,
)
from lydite.core.errors import CalibrationError, at
from lydite.core.files import read_bounded


@dataclass(frozen=True)
class Repaired:
    """What was done."""

    dropped: tuple[str, ...] = ()  # damaged items that can be named; the next run computes them
    quarantined: tuple[str, ...] = ()  # names of files
    from_shards: bool = False  # set.json was lost: the plan is what the shards hold
    rewritten: bool = False  # set.json was written again
    items: int = 0  # that the set holds now
    missing: int = 0  # planned items that it does not hold


def repair(folder: Path | str, *options: object) -> Repaired:
    """Drop damaged items and keep the others; damaged files move to quarantine.

    Every byte is read. `options` are for the command that errors name.
    """
    folder = Path(folder)
    if not (folder / SHARDS).is_dir() and not (folder / NAME).is_file():
        raise CalibrationError(f"{at(folder)}: no calibration set (there is no {SHARDS}/).")
    with resumable(command_line("lydite", "calibrate", "repair", folder, *options)):
        lock = WriterLock(folder)
        try:
            prepare_folder(folder)
            return _repair(folder)
        finally:
            lock.release()


def _repair(folder: Path) -> Repaired:
    headers = _headers(folder)
    known = parse_description(_set_file(folder))
    from_shards = known is None or not _fits(known, headers)
    description = _describe_shards(folder, headers) if from_shards or known is None else known
    description = _with_shards(description, headers)
    rewritten = _write_set_file(folder, description)
    index, result = Index(folder, description), ImportedShards()
    for name in shard_names(folder / SHARDS):
        result += import_shard(folder, description.settings, index, folder / SHARDS / name)
    planned = {key for key, _, _ in description.plan.keys(description.settings)}
    return Repaired(
        tuple(sorted(set(result.dropped))),
        result.quarantined,
        from_shards,
        rewritten,
        len(index.keys()),
        len(planned - index.keys()),
    )


def _headers(folder: Path) -> list[ShardHeader]:
    """Those that can be read."""
    headers: list[ShardHeader] = []
    for name in shard_names(folder / SHARDS):
        with contextlib.suppress(CalibrationError):
            headers.append(read_shard_header(folder / SHARDS / name, complete=False))
    return headers


def _set_file(folder: Path) -> bytes:
    """The bytes of `set.json`; none when it is missing."""
    path = folder / NAME
    return read_bounded(path, MAX_BYTES) if path.exists() else b""


def _fits(description: Description, headers: list[ShardHeader]) -> bool:
    """Whether at least half of the shards belong to the set that `set.json` describes."""
    return 2 * sum(_belongs(description, header) for header in headers) >= len(headers)


def _belongs(description: Description, header: ShardHeader) -> bool:
    try:
        Index(Path(), description).check_belongs(header)
    except CalibrationError:
        return False
    return True


def _describe_shards(folder: Path, headers: list[ShardHeader]) -> Description:
    """The settings that most shards have. The plan is what they hold, with `_with_shards`."""
    if not headers:
        raise CalibrationError(f"{at(folder)}: no calibration set, and no readable shard.")
    ((settings, _),) = Counter(header.settings.hash for header in headers).most_common(1)
    usual = next(header.settings for header in headers if header.settings.hash == settings)
    return Description(usual, Plan((), (), pictures=False))


def _with_shards(description: Description, headers: list[ShardHeader]) -> Description:
    """The description with all that the set's shards hold: its `set.json` may be an old copy."""
    plan = description.plan
    images = {image.number: image for image in plan.images}
    steps, kinds = set(plan.steps), set[str]()
    for header in headers:
        if not _belongs(description, header):
            continue
        for entry in header.entries:
            kinds.add(entry.kind)
            if entry.image is not None and entry.seed is not None:
                images.setdefault(entry.image, Image(entry.image, entry.prompt, entry.seed))
            if entry.step is not None:
                steps.add(entry.step)
    joined = Plan(
        tuple(images[number] for number in sorted(images)),
        tuple(sorted(steps)),
        plan.pictures or "picture" in kinds,
        plan.conditioning or "conditioning" in kinds,
    )
    return Description(description.settings, joined)


def _write_set_file(folder: Path, description: Description) -> bool:
    """Write `set.json` if it differs, and quarantine the old one; whether it was written."""
    path, old = folder / NAME, _set_file(folder)
    if old == encode_description(description):
        return False
    if old:
        quarantine(folder, path, f"{hashlib.sha256(old).hexdigest()[:12]}-{NAME}")
    write_description(folder, description)
    return True
