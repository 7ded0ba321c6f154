"""The layout other tools write: `samples/IIII_SSS.npz`, one file a step, and `manifest.json`.

A sample holds x, timestep, sigma and image_id; prompts and seeds stand in the manifest, by image.
Floats travel as float32 (NumPy's files have no bfloat16), which loses nothing of what a set holds.
"""

import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pictures
from PIL import UnidentifiedImageError

from lydite.calibrate.disk import make_folder, write_sealed
from lydite.calibrate.keys import Image, Settings
from lydite.calibrate.setfile import Plan
from lydite.calibrate.shards import Entry, Item
from lydite.calibrate.store import CalibrationSet
from lydite.calibrate.writer import Writer
from lydite.core.dtypes import widen
from lydite.core.errors import CalibrationError, FileError, at, shown
from lydite.core.jsonfile import read_json

MAX_BYTES = 2**30  # of one sample, unpacked
LABELS = ("timestep", "sigma", "image_id")
_SAMPLE = re.compile(r"(\d{4,})_(\d{3,})\.npz")


class _Listed(msgspec.Struct):
    """What a manifest must say of an image; it may say more."""

    prompt: str
    seed: int


def export_npz(folder: Path | str, target: Path) -> int:
    """Write a set in the other layout into a new folder; how many samples there were."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileError(f"{at(target)}: is there and not empty. Give a new folder.")
    with CalibrationSet.open(folder) as opened:
        for name in ("samples", "images", "conditioning"):
            make_folder(target / name)
        first = _first_of_prompt(opened.plan)
        for row in opened.rows(None):
            entry = row.entry
            path, data = _file(entry, dict(opened.read(row)), first)
            write_sealed(target / path, [data])
        text = msgspec.json.format(msgspec.json.encode(_manifest(opened)), indent=2)
        write_sealed(target / "manifest.json", [text])  # last: it says that all is there
        return opened.index.counts().get("sample", 0)


def import_npz(source: Path, folder: Path | str, settings: Settings | None = None) -> int:
    """Make a set of a folder in the other layout; how many items it brought.

    `settings` are needed for a manifest that another tool wrote.
    """
    manifest = read_json(source / "manifest.json")
    files = _samples(source)
    own = manifest.get("lydite")
    if settings is None:
        settings = _own_settings(source, own)
    images = _images(source, manifest, sorted(files))
    plan = Plan(
        images,
        tuple(sorted({step for steps in files.values() for step in steps})),
        pictures=any(_picture_path(source, image.number).exists() for image in images),
        conditioning=any(_conditioning_path(source, image.number).exists() for image in images),
    )
    added = 0
    with Writer.start(folder, settings, plan) as writer:
        for image in images:
            items = _items(writer, source, image, files[image.number])
            added += writer.commit(items).items
    return added


def _items(writer: Writer, source: Path, image: Image, files: dict[int, Path]) -> Iterator[Item]:
    for step, path in sorted(files.items()):
        arrays = _read_npz(path)
        labels = {name: arrays.pop(name, None) for name in LABELS}
        found = labels.pop("image_id")
        if found is not None and int(found) != image.number:
            raise CalibrationError(f"{at(path)}: image_id is {int(found)}, not {image.number}.")
        numbers = {name: None if v is None else float(v) for name, v in labels.items()}
        yield writer.make.sample(image.number, step, arrays, **numbers)
    if (path := _picture_path(source, image.number)).exists():
        yield writer.make.picture(image.number, _read_picture(path))
    if (path := _conditioning_path(source, image.number)).exists():
        yield writer.make.conditioning(image.prompt, _read_npz(path))


def _file(
    entry: Entry, arrays: dict[str, NDArray[Any]], first: dict[str, int]
) -> tuple[Path, bytes]:
    """Where an item goes in the other layout, and its bytes."""
    if clash := arrays.keys() & set(LABELS):
        raise CalibrationError(f"{entry.label}: the layout keeps {sorted(clash)[0]} for itself.")
    if entry.kind == "picture":
        buffer = io.BytesIO()
        Pictures.fromarray(arrays["pixels"]).save(buffer, "PNG")
        return _picture_path(Path(), entry.image or 0), buffer.getvalue()
    wide = {name: widen(array) for name, array in arrays.items()}
    if entry.kind == "conditioning":
        return _conditioning_path(Path(), first[entry.prompt]), _npz(wide)
    numbers = {"timestep": entry.timestep, "sigma": entry.sigma}
    labels = {name: np.asarray(v) for name, v in numbers.items() if v is not None}
    labels["image_id"] = np.asarray(entry.image, np.int32)
    return Path("samples", f"{entry.image:04}_{entry.step:03}.npz"), _npz(wide | labels)


def _npz(arrays: dict[str, NDArray[Any]]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:  # as np.savez: stored, one .npy a name
        for name, array in arrays.items():
            with packed.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return buffer.getvalue()


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
        "lydite": msgspec.to_builtins(opened.settings),
        "content_hash": opened.content_hash,
    }


def _images(source: Path, manifest: dict[str, Any], wanted: list[int]) -> tuple[Image, ...]:
    listed = manifest.get("images")
    if not isinstance(listed, list):
        raise CalibrationError(f"{at(source)}/manifest.json: no list of images.")
    images: list[Image] = []
    for number in wanted:
        found = listed[number] if number < len(listed) else None
        try:
            said = msgspec.convert(found, _Listed)
            images.append(Image(number, said.prompt, said.seed))
        except msgspec.ValidationError as error:
            raise CalibrationError(
                f"{at(source)}/manifest.json: image {number} has samples, but no prompt and seed "
                f"(found {shown(found)})."
            ) from error
    return tuple(images)


def _own_settings(source: Path, own: object) -> Settings:
    try:
        return msgspec.convert(own, Settings)
    except msgspec.ValidationError as error:
        raise CalibrationError(
            f"{at(source)}/manifest.json: does not say what the samples were made with. "
            "Give the model, the sampler, the schedule and the steps."
        ) from error


def _samples(source: Path) -> dict[int, dict[int, Path]]:
    """The file of each step of each image."""
    folder = source / "samples"
    if not folder.is_dir():
        raise CalibrationError(f"{at(source)}: no folder samples/ in it.")
    files: dict[int, dict[int, Path]] = {}
    for path in folder.iterdir():
        if match := _SAMPLE.fullmatch(path.name):
            files.setdefault(int(match[1]), {})[int(match[2])] = path
    return files


def _first_of_prompt(plan: Plan) -> dict[str, int]:
    first: dict[str, int] = {}
    for image in plan.images:
        first.setdefault(image.prompt, image.number)
    return first


def _picture_path(root: Path, number: int) -> Path:
    return root / "images" / f"{number:04}.png"


def _conditioning_path(root: Path, number: int) -> Path:
    return root / "conditioning" / f"{number:04}_conditioning.npz"


def _read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file from a stranger: no pickle, and no more than it may unpack to."""
    try:
        with zipfile.ZipFile(path) as packed:
            size = sum(member.file_size for member in packed.infolist())
        if size > MAX_BYTES:
            raise CalibrationError(f"{at(path)}: {size} bytes unpacked, limit {MAX_BYTES}.")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise CalibrationError(f"{at(path)}: no readable npz file ({error}).") from error


def _read_picture(path: Path) -> NDArray[Any]:
    try:
        with Pictures.open(path) as picture:
            return np.asarray(picture.convert("RGB"))
    except (OSError, UnidentifiedImageError, Pictures.DecompressionBombError) as error:
        raise CalibrationError(f"{at(path)}: no readable picture ({error}).") from error
