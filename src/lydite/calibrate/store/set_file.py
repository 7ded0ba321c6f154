"""The folder of a calibration set, and `set.json`: its settings and its plan, with a checksum."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from lydite.calibrate.settings import EXACT, Description, Plan, Settings, differences, digest
from lydite.calibrate.store.shards import FORMAT, VERSION, shard_names
from lydite.core.config import JsonError, parse_object, read_json
from lydite.core.errors import CalibrationError, FileError, InputError, at
from lydite.core.files import read_bounded, size_text, write_atomic
from lydite.core.outputs import check_output

NAME, SHARDS, INCOMING, QUARANTINE = "set.json", "shards", "incoming", "quarantine"
# Earlier versions kept an index on disk. It is not read, and the next writer removes it.
OLD_FILES = ("index.seal", "index.sqlite-wal", "index.sqlite-shm", "index.sqlite")
MAX_BYTES = 64 * 2**20


def read_description(folder: Path) -> Description:
    """Settings and plan of a set; any changed bit of the file is an error."""
    path = folder / NAME
    if not path.exists():
        if has_shards(folder):
            raise CalibrationError(
                f"{at(path)}: missing, but shards exist. {repair_advice(folder)}"
            )
        raise CalibrationError(f"{at(folder)}: no calibration set ({NAME} is missing).")
    description = _parse(path, read_json(path, MAX_BYTES))
    if read_bounded(path, MAX_BYTES) != encode_description(description):
        raise CalibrationError(f"{at(path)}: damaged (wrong checksum). {repair_advice(folder)}")
    return description


def has_shards(folder: Path) -> bool:
    """Whether there is data that belongs to some set."""
    return bool(shard_names(folder / SHARDS))


def parse_description(text: bytes) -> Description | None:
    """The content of a `set.json`, however it is spaced, if its checksum is right."""
    try:
        raw = parse_object(text)
        check = raw.pop("check", None)
        return _parse(Path(NAME), raw) if check == digest(raw) else None
    except (JsonError, CalibrationError):
        return None


def write_description(folder: Path, description: Description) -> None:
    """Write `set.json` atomically."""
    text = check_description(folder, description)
    write_atomic(folder / NAME, text, make_parents=False)


def check_description(folder: Path, description: Description) -> bytes:
    """The text of `set.json`; CalibrationError for a plan that no run could complete."""
    plan, total = description.plan, description.settings.conditions.get("steps")
    numbers = [image.number for image in plan.images]
    if len(set(numbers)) != len(numbers) or min([0, *numbers, *plan.steps]) < 0:
        raise CalibrationError(
            f"{at(folder)}: a plan needs images of different numbers, and numbers and steps from 0."
        )
    last = total - 1 if isinstance(total, int) and total > 0 else EXACT
    if max([0, *plan.steps]) > last:
        raise CalibrationError(f"{at(folder)}: step {max(plan.steps)} of a run of {total} steps.")
    if outside := [n for n in (*numbers, *(i.seed for i in plan.images)) if not _is_seed(n)]:
        raise CalibrationError(
            f"{at(folder)}: {outside[0]} is no seed and no image number; they are from -2^63 to "
            "2^64 - 1."
        )
    return encode_description(description)


def extend_plan(folder: Path, settings: Settings, plan: Plan) -> Description:
    """The description of the set with `plan` added; refused when the settings differ."""
    known = read_description(folder)
    if known.settings.hash != settings.hash:
        other = known.settings.model_hash != settings.model_hash
        model = " Its model has other weights: another folder or file, or other --bits." * other
        raise CalibrationError(
            f"{at(folder)}: made with other settings ({differences(known.settings, settings)}; the "
            f"set's first).{model} Give the same settings to resume it, or another folder."
        )
    model = settings.model or known.settings.model  # where it is now
    renamed = msgspec.structs.replace(known.settings, model=model)
    return Description(renamed, known.plan.joined(plan, folder))


def encode_description(description: Description) -> bytes:
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
            f"{size_text(len(text.encode()))} in {NAME}; the limit is {size_text(MAX_BYTES)}. "
            "Make several sets."
        )
    return text.encode()


def check_outside(path: Path) -> None:
    """Refuse an output path inside a calibration set, which holds nothing but its own files."""
    for folder in Path(os.path.realpath(path)).parents:
        if (folder / SHARDS).is_dir() and any((folder / n).exists() for n in (NAME, *OLD_FILES)):
            raise FileError(
                f"{at(path)}: lies inside the calibration set {at(folder)}. Give a path outside it."
            )


def check_output_path(path: Path, *, overwrite: bool = False, inputs: Iterable[Path] = ()) -> None:
    """Refuse an output file inside a set, or one that would replace something it must not."""
    check_outside(path)
    check_output(path, overwrite=overwrite, inputs=inputs)


def repair_advice(folder: Path) -> str:
    """The end of an error message about a damaged set."""
    return f"Run: lydite calibrate repair {at(folder)}"


def _is_seed(number: int) -> bool:
    return -(2**63) <= number < 2**64


def _parse(path: Path, raw: dict[str, Any]) -> Description:
    try:
        return msgspec.convert(
            {"settings": raw.get("settings"), "plan": raw.get("plan")}, Description
        )
    except msgspec.ValidationError as error:
        advice = repair_advice(path.parent)
        raise CalibrationError(f"{at(path)}: damaged ({error}). {advice}") from error
