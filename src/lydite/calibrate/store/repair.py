"""Repair a set, or build its index anew: what is whole stays, the rest is to be computed again."""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from lydite.calibrate.settings import Image, Settings
from lydite.calibrate.store import files as disk
from lydite.calibrate.store import seal
from lydite.calibrate.store.consistency import Membership, disagreement, kept_description
from lydite.calibrate.store.index import NAME as INDEX
from lydite.calibrate.store.index import Index
from lydite.calibrate.store.lock import Claim
from lydite.calibrate.store.recovery import (
    TakenIn,
    adopt,
    mend_header,
    set_aside,
    shard_names,
    take_in,
)
from lydite.calibrate.store.set_file import NAME as SET
from lydite.calibrate.store.set_file import (
    SHARDS,
    Description,
    Plan,
    encoded,
    parse_description,
    write_description,
)
from lydite.calibrate.store.shards import Shard
from lydite.calibrate.store.verify import disagreements
from lydite.calibrate.store.writer import command_line, open_index, resumable
from lydite.core.errors import CalibrationError, at

Source = Literal["itself", "the index", "the shards"]


@dataclass(frozen=True)
class Repaired:
    """What was done. `again` names the items that the next run has to compute."""

    again: tuple[str, ...] = ()
    mended: int = 0  # shards whose header was written anew
    quarantined: tuple[str, ...] = ()
    index_rebuilt: bool = False
    set_from: Source | None = None  # what set.json was written anew from
    items: int = 0  # in the index afterwards


def repair(folder: Path | str, *options: object) -> Repaired:
    """Drop what is damaged and keep the rest, sample by sample; damaged files are set aside.

    `options` are for the command that errors name.
    """
    with _held(Path(folder), "repair", *options) as folder:
        description, source = _description(folder)
        settings = description.settings
        result = TakenIn(mended=_mend_headers(folder, settings))
        result += _set_strangers_aside(folder, description)
        index = _agreeing_index(folder, description)
        if index is None:
            return _rebuilt(folder, description, result, source)
        with contextlib.closing(index):
            index.describe(encoded(description).decode())
            result += adopt(folder, settings, index)
            for name in index.shards():
                result += _checked(folder, settings, index, name)
            return _finished(index, result, False, source)


def rebuild(folder: Path | str) -> Repaired:
    """Make the index, and if need be `set.json`, from the shards alone."""
    with _held(Path(folder), "rebuild") as folder:
        description, source = _description(folder)
        result = TakenIn(mended=_mend_headers(folder, description.settings))
        result += _set_strangers_aside(folder, description)
        return _rebuilt(folder, description, result, source)


def _rebuilt(
    folder: Path, description: Description, so_far: TakenIn, source: Source | None
) -> Repaired:
    path = folder / INDEX
    seal.remove_index(path)
    with contextlib.closing(Index.create(path)) as index:
        index.describe(encoded(description).decode())
        result = so_far + adopt(folder, description.settings, index)
        return _finished(index, result, True, source)


def _checked(folder: Path, settings: Settings, index: Index, name: str) -> TakenIn:
    """One shard of the index: left alone, or what is whole of it entered anew."""
    path = folder / SHARDS / name
    labels = tuple(row.entry.label for row in index.rows_of(name))
    if not path.exists():
        index.drop(name)
        return TakenIn(dropped=labels)
    if not _opens(path):
        index.drop(name)
        return TakenIn(dropped=labels) + set_aside(folder, path)
    with Shard.open(path) as shard:
        if not shard.damaged():
            return TakenIn()
    index.drop(name)
    return take_in(folder, settings, index, path)


def _agreeing_index(folder: Path, description: Description) -> Index | None:
    """The index, unless it is damaged, or says other things than the shards or `set.json`."""
    try:
        index = open_index(folder)
    except CalibrationError:
        return None
    if disagreement(description, index):
        index.close()
        return None
    for name, size in index.shards().items():
        path = folder / SHARDS / name
        if path.exists() and _opens(path):
            with Shard.open(path) as shard:
                wrong = list(disagreements(name, shard, index.rows_of(name), size, index))
            if wrong:
                index.close()
                return None
    return index


def _mend_headers(folder: Path, settings: Settings) -> int:
    """Write damaged headers anew from what can be read of the index; each proves itself."""
    broken = [name for name in shard_names(folder / SHARDS) if not _opens(folder / SHARDS / name)]
    mended = 0
    if broken:
        with (
            contextlib.suppress(CalibrationError),
            contextlib.closing(Index.open(folder / INDEX)) as index,
        ):
            for name in broken:
                mended += mend_header(folder, settings, index, name)
    return mended


def _opens(path: Path) -> bool:
    try:
        Shard.open(path).close()
    except CalibrationError:
        return False
    return True


def _finished(index: Index, result: TakenIn, rebuilt: bool, source: Source | None) -> Repaired:
    items = sum(index.counts().values())
    settled = index.settle()
    index.close()
    if settled:
        seal.write_seal(index.path)
    again = tuple(sorted(set(result.dropped)))
    return Repaired(again, result.mended, result.set_aside, rebuilt, source, items)


def _description(folder: Path) -> tuple[Description, Source | None]:
    """Settings and plan, and where they were found when `set.json` is not the right one."""
    description, source = _right_description(folder)
    if (folder / SET).is_file() and (folder / SET).read_bytes() == encoded(description):
        return description, None
    _replace_description(folder, description)
    return description, source


def _right_description(folder: Path) -> tuple[Description, Source]:
    """That of `set.json` and its copy which more of the shards fit, with what the other adds."""
    shards = [path for path in _shard_paths(folder) if _opens(path)]
    told = {"itself": _own_description(folder), "the index": _kept_description(folder)}
    fits = {
        source: (Membership(each).count(shards), each)
        for source, each in told.items()
        if each is not None
    }
    found = {source: each for source, (count, each) in fits.items() if count or not shards}
    if not found:
        return _described_by_shards(folder), "the shards"
    source = max(found, key=lambda name: fits[name][0])
    description = found.pop(source)
    for name, other in found.items():
        with contextlib.suppress(CalibrationError):  # it plans other images
            plan = description.plan.joined(other.plan, folder)
            if other.settings.hash == description.settings.hash and plan != description.plan:
                source, description = name, Description(description.settings, plan)
    return description, cast(Source, source)


def _shard_paths(folder: Path) -> list[Path]:
    return [folder / SHARDS / name for name in shard_names(folder / SHARDS)]


def _own_description(folder: Path) -> Description | None:
    """What `set.json` says, however it is spaced."""
    with contextlib.suppress(OSError):
        return parse_description((folder / SET).read_bytes())
    return None


def _kept_description(folder: Path) -> Description | None:
    with (
        contextlib.suppress(CalibrationError),
        contextlib.closing(Index.open(folder / INDEX)) as index,
    ):
        return kept_description(index)
    return None


def _replace_description(folder: Path, description: Description) -> None:
    """Write `set.json` anew; the old one is set aside."""
    path = folder / SET
    if path.is_file():
        name = f"{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}-{SET}"
        set_aside(folder, path, name)
    write_description(folder, description)


def _set_strangers_aside(folder: Path, description: Description) -> TakenIn:
    """Shards of other sets, which somebody put there."""
    result = TakenIn()
    for path in Membership(description).strangers(_shard_paths(folder)):
        result += set_aside(folder, path)
    return result


def _described_by_shards(folder: Path) -> Description:
    """What the shards say of themselves; planned images without a sample are not known to them."""
    settings: Settings | None = None
    images: dict[int, Image] = {}
    steps: set[int] = set()
    kinds: set[str] = set()
    for name in shard_names(folder / SHARDS):
        with contextlib.suppress(CalibrationError), Shard.open(folder / SHARDS / name) as shard:
            settings = settings or shard.settings
            for entry in shard.entries:
                kinds.add(entry.kind)
                if entry.image is not None and entry.seed is not None:
                    image = Image(entry.image, entry.prompt, entry.seed)
                    images.setdefault(entry.image, image)  # another with its number is refused
                if entry.step is not None:
                    steps.add(entry.step)
    if settings is None:
        raise CalibrationError(f"{at(folder)}: no calibration set, and no shard to make one from.")
    numbered = tuple(images[number] for number in sorted(images))
    plan = Plan(numbered, tuple(sorted(steps)), "picture" in kinds, "conditioning" in kinds)
    return Description(settings, plan)


@contextlib.contextmanager
def _held(folder: Path, verb: str, *options: object) -> Iterator[Path]:
    """The set, claimed; a disk that fails is reported with the command to try again."""
    if not (folder / SHARDS).is_dir() and not (folder / SET).is_file():
        raise CalibrationError(f"{at(folder)}: no calibration set (there is no {SHARDS}/).")
    with resumable(command_line("lydite", "calibrate", verb, folder, *options)):
        claim = Claim(folder)
        try:
            disk.make_folder(folder / SHARDS)
            disk.sweep(folder)
            disk.sweep(folder / SHARDS)
            yield folder
        finally:
            claim.release()
