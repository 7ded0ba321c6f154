"""A set as npz files for other tools: `samples/IIII_SSS.npz`, one file a step, and a manifest.

A sample holds x, timestep, sigma and image_id; prompts and seeds stand in the manifest, by image.
Floats travel as float32 (NumPy's files have no bfloat16), which loses nothing of what a set holds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lydite.calibrate import npz_files
from lydite.calibrate.settings import Plan
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.set_file import check_outside
from lydite.calibrate.store.shards import Entry
from lydite.core import files
from lydite.core.dtypes import widen
from lydite.core.errors import CalibrationError, FileError, at


@dataclass(frozen=True)
class Exported:
    """What was written for other tools."""

    samples: int
    missing: int  # planned items that the set does not have
    planned: int


def export_npz(folder: Path | str, target: Path) -> Exported:
    """Write a set in the npz layout into a new folder."""
    check_outside(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileError(f"{at(target)}: exists and is not empty. Give a new folder.")
    with CalibrationSet.open(folder) as opened:
        first = _first_of_prompt(opened.plan)
        _check_paths(opened, first)
        for name in npz_files.FOLDERS:
            files.make_folder(target / name)
        for row in opened.rows(None):
            data = _bytes(row.entry, dict(opened.read(row)))
            files.write_atomic(target / _path_of(row.entry, first), data)
        text = msgspec.json.format(msgspec.json.encode(_manifest(opened)), indent=2)
        files.write_atomic(target / npz_files.MANIFEST, text)  # last: it says that all is there
        missing = sum(len(steps) for steps in opened.missing().values())
        planned = sum(1 for _ in opened.plan.keys(opened.settings))
        return Exported(opened.index.counts().get("sample", 0), missing, planned)


def _path_of(entry: Entry, first: dict[str, int]) -> Path:
    """Where an item goes in the other npz_files."""
    if entry.kind == "conditioning":
        return npz_files.conditioning_path(Path(), first[entry.prompt])
    assert entry.image is not None, "only conditioning has no image"
    if entry.kind == "picture":
        return npz_files.picture_path(Path(), entry.image)
    assert entry.step is not None, "a sample has a step"
    return npz_files.sample_path(Path(), entry.image, entry.step)


def _bytes(entry: Entry, arrays: dict[str, NDArray[Any]]) -> bytes:
    """The file of an item in the other npz_files."""
    if entry.kind == "picture":
        return npz_files.png_bytes(arrays["pixels"])
    wide = {name: widen(array) for name, array in arrays.items()}
    if entry.kind == "conditioning":
        return npz_files.npz_bytes(wide)
    numbers = {"timestep": entry.timestep, "sigma": entry.sigma}
    labels = {name: np.asarray(v) for name, v in numbers.items() if v is not None}
    labels["image_id"] = np.asarray(entry.image, np.int32)
    return npz_files.npz_bytes(wide | labels)


def _check_paths(opened: CalibrationSet, first: dict[str, int]) -> None:
    """Before anything is written: each item has a file of its own, of an image in the manifest."""
    images: dict[int | None, tuple[str, int | None]] = {
        image.number: (image.prompt, image.seed) for image in opened.plan.images
    }
    for row in opened.rows(None):
        entry = row.entry
        if clash := entry.tensors.keys() & set(npz_files.LABELS):
            raise CalibrationError(
                f"{entry.label}: the layout keeps {sorted(clash)[0]} for itself."
            )
        if entry.kind == "conditioning":
            is_planned = entry.prompt in first
        else:
            is_planned = images.get(entry.image) == (entry.prompt, entry.seed)
        if not is_planned:
            raise CalibrationError(
                f"{at(opened.folder)}: {entry.label} is not in the plan with its prompt and seed. "
                f"Run: lydite calibrate verify {at(opened.folder)}"
            )


def _manifest(opened: CalibrationSet) -> dict[str, Any]:
    """Images by number, as the other layout looks them up; the settings travel along."""
    images: list[dict[str, Any] | None] = [
        None for _ in range(1 + max((i.number for i in opened.plan.images), default=-1))
    ]
    for image in opened.plan.images:
        images[image.number] = {
            "image_id": image.number,
            "prompt": image.prompt,
            "seed": image.seed,
        }
    return {
        "images": images,
        "steps": opened.plan.steps,
        "pictures": opened.plan.pictures,
        "conditioning": opened.plan.conditioning,
        "lydite": msgspec.to_builtins(opened.settings),
        "content_hash": opened.content_hash,
    }


def _first_of_prompt(plan: Plan) -> dict[str, int]:
    first: dict[str, int] = {}
    for image in plan.images:
        first.setdefault(image.prompt, image.number)
    return first
