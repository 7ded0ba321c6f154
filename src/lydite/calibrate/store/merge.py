"""Merge several sets of equal settings into one."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lydite.calibrate.settings import Image, Plan, Settings, differences
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.set_file import NAME, SHARDS
from lydite.calibrate.store.shards import Item, Shard
from lydite.calibrate.store.writer import Writer, command_line, conflict
from lydite.core.errors import CalibrationError, at

_Identity = tuple[str, int]  # prompt and seed: what an image is, whatever its number


@dataclass(frozen=True)
class Merged:
    """What a merge added."""

    items: int
    bytes: int
    known: int  # items that more than one set held
    content_hash: str


def merge(sources: Sequence[Path | str], target: Path | str) -> Merged:
    """Bring all items of `sources` into `target`; an item may be in many, with one content.

    An image is known by its prompt and seed; where two have the same number, one gets a new number.
    """
    target = Path(target)
    with contextlib.ExitStack() as stack:
        sets = [stack.enter_context(CalibrationSet.open(source)) for source in sources]
        if not sets:
            raise CalibrationError("merge: no set was given.")
        settings = _settings(sets)
        if (target / NAME).exists():
            sets.insert(0, stack.enter_context(CalibrationSet.open(target)))
        _check_conflicts(sets)
        plan = _joined([opened.plan for opened in sets])
        numbers = {(image.prompt, image.seed): image.number for image in plan.images}
        resume = command_line("lydite", "calibrate", "merge", *sources, "--out", target)
        with Writer.start(target, settings, plan, resume=resume) as writer:
            items = size = known = 0
            for opened in sets:
                if opened.folder == target:
                    continue
                for commit in _commits(opened, numbers):
                    done = writer.commit(commit)
                    items, size = items + done.items, size + done.bytes
                    known += len(commit) - done.items
            return Merged(items, size, known, writer.content_hash)


def _settings(sets: Sequence[CalibrationSet]) -> Settings:
    first = sets[0]
    for other in sets[1:]:
        if other.settings.hash != first.settings.hash:
            raise CalibrationError(
                f"{at(other.folder)}: made with other settings than {at(first.folder)} "
                f"({differences(first.settings, other.settings)}; the latter's first). Only sets "
                "of equal settings can be merged."
            )
    return first.settings


def _check_conflicts(sets: Sequence[CalibrationSet]) -> None:
    """Before anything is written: each key has one content."""
    seen: dict[str, str] = {}
    for opened in sets:
        for row in opened.rows(None):
            if seen.setdefault(row.key, row.digest) != row.digest:
                raise conflict(opened.folder, row.entry.label, row.key)


def _joined(plans: Sequence[Plan]) -> Plan:
    images: dict[_Identity, Image] = {}
    taken: set[int] = set()
    for plan in plans:
        for image in plan.images:
            if (image.prompt, image.seed) not in images:
                number = image.number if image.number not in taken else max(taken) + 1
                taken.add(number)
                images[image.prompt, image.seed] = Image(number, image.prompt, image.seed)
    return Plan(
        tuple(sorted(images.values(), key=lambda image: image.number)),
        tuple(sorted({step for plan in plans for step in plan.steps})),
        any(plan.pictures for plan in plans),
        any(plan.conditioning for plan in plans),
    )


def _commits(opened: CalibrationSet, numbers: dict[_Identity, int]) -> Iterator[list[Item]]:
    """The items of each shard, whole, under the numbers they have in the merged set."""
    for name in opened.index.shards:
        with Shard.open(opened.folder / SHARDS / name) as shard:
            if shard.damaged():
                raise CalibrationError(
                    f"{at(shard.path)}: damaged. Run first: lydite calibrate repair "
                    f"{at(opened.folder)}"
                )
            yield [_renumbered(shard.item(n), numbers) for n in range(len(shard.entries))]


def _renumbered(item: Item, numbers: dict[_Identity, int]) -> Item:
    entry = item.entry
    if entry.seed is None:
        return item
    number = numbers.get((entry.prompt, entry.seed), entry.image)
    return Item(msgspec.structs.replace(entry, image=number), item.arrays)
