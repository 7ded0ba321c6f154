"""`set.json`: what a set was made with, and what it is to hold. Checked to the last bit."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from lydite.calibrate.settings import (
    Image,
    Settings,
    conditioning_key,
    differences,
    digest,
    picture_key,
    sample_key,
)
from lydite.calibrate.store.files import size_text, write_sealed
from lydite.calibrate.store.shards import FORMAT, SHARD, VERSION
from lydite.core.errors import CalibrationError, InputError, at, shown
from lydite.core.jsonfile import JsonError, parse_object, read_json

NAME, SHARDS = "set.json", "shards"
MAX_BYTES = 64 * 2**20


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the set holds when it is complete."""

    images: tuple[Image, ...]
    steps: tuple[int, ...]  # those that are kept of each image
    pictures: bool = True  # finished pictures are kept too
    conditioning: bool = False  # each prompt's conditioning is kept once

    def keys(self, settings: Settings) -> Iterator[tuple[str, Image, int | None]]:
        """The key of every planned item with its image, and its step; None for what has none."""
        prompts: set[str] = set()
        for image in self.images:
            for step in self.steps:
                yield sample_key(settings, image, step), image, step
            if self.pictures:
                yield picture_key(settings, image), image, None
            if self.conditioning and image.prompt not in prompts:
                prompts.add(image.prompt)
                yield conditioning_key(settings, image.prompt), image, None

    def joined(self, other: "Plan", where: Path) -> "Plan":
        """Both plans in one; an image number means one prompt and one seed."""
        images = {image.number: image for image in self.images}
        for image in other.images:
            known = images.setdefault(image.number, image)
            if known != image:
                raise CalibrationError(
                    f"{at(where)}: image {image.number} is {shown(known.prompt)} with seed "
                    f"{known.seed} there, and {shown(image.prompt)} with seed {image.seed} here. "
                    "Give the same prompts and seeds, or another folder."
                )
        return Plan(
            tuple(images[number] for number in sorted(images)),
            tuple(sorted({*self.steps, *other.steps})),
            self.pictures or other.pictures,
            self.conditioning or other.conditioning,
        )


class Description(msgspec.Struct, frozen=True):
    """A set's settings and plan."""

    settings: Settings
    plan: Plan


def read_description(folder: Path) -> Description:
    """Settings and plan of a set; any changed bit of the file is an error."""
    path = folder / NAME
    if not path.exists():
        if has_shards(folder):
            raise CalibrationError(f"{at(path)}: missing, its shards are there. {_mend(path)}")
        raise CalibrationError(f"{at(folder)}: no calibration set ({NAME} is missing).")
    description = _parsed(path, read_json(path, MAX_BYTES))
    if path.read_bytes() != encoded(description):
        raise CalibrationError(f"{at(path)}: damaged (its check sum is another). {_mend(path)}")
    return description


def has_shards(folder: Path) -> bool:
    """Whether there is data that belongs to some set."""
    place = folder / SHARDS
    return place.is_dir() and any(SHARD.fullmatch(path.name) for path in place.iterdir())


def parse_description(text: bytes) -> Description | None:
    """What a text says, however it is spaced, if its check sum is right."""
    try:
        raw = parse_object(text)
        check = raw.pop("check", None)
        return _parsed(Path(NAME), raw) if check == digest(raw) else None
    except (JsonError, CalibrationError):
        return None


def write_description(folder: Path, description: Description) -> None:
    """Write `set.json` whole."""
    numbers = [image.number for image in description.plan.images]
    if len(set(numbers)) != len(numbers) or min([0, *numbers, *description.plan.steps]) < 0:
        raise CalibrationError(
            f"{at(folder)}: a plan needs images of different numbers, and numbers and steps from 0."
        )
    write_sealed(folder / NAME, [encoded(description)])


def agreed(folder: Path, settings: Settings, plan: Plan) -> Description:
    """The description of the set with `plan` added; refused when the settings are others."""
    found = read_description(folder)
    if found.settings.hash != settings.hash:
        lines = "; ".join(differences(found.settings, settings))
        raise CalibrationError(
            f"{at(folder)}: made with other settings ({lines}; the set's first). "
            "Give the same settings to resume it, or another folder."
        )
    model = settings.model or found.settings.model  # where it is now
    renamed = msgspec.structs.replace(found.settings, model=model)
    return Description(renamed, found.plan.joined(plan, folder))


def plan_of(images: Iterable[tuple[str, int]], steps: Iterable[int], **keeps: bool) -> Plan:
    """A plan from prompts with their seeds, numbered from 0, and the steps that are kept."""
    numbered = tuple(Image(number, *image) for number, image in enumerate(images))
    return Plan(numbered, tuple(sorted(set(steps))), **keeps)


def encoded(description: Description) -> bytes:
    """The only text of a description."""
    raw: dict[str, Any] = {
        "format": FORMAT,
        "version": int(VERSION),
        "settings_hash": description.settings.hash,
        **msgspec.to_builtins(description),
    }
    raw["check"] = digest(raw)
    text = json.dumps(raw, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if len(text.encode()) > MAX_BYTES:
        raise InputError(
            f"the plan of {len(description.plan.images):,} images takes "
            f"{size_text(len(text.encode()))} in {NAME}; at most {size_text(MAX_BYTES)} are read. "
            "Make several sets, and merge what they give."
        )
    return text.encode()


def _parsed(path: Path, raw: dict[str, Any]) -> Description:
    try:
        return msgspec.convert(
            {"settings": raw.get("settings"), "plan": raw.get("plan")}, Description
        )
    except msgspec.ValidationError as error:
        raise CalibrationError(f"{at(path)}: damaged ({error}). {_mend(path)}") from error


def _mend(path: Path) -> str:
    return f"Run: lydite calibrate repair {at(path.parent)}"
