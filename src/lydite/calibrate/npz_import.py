"""A set from a folder of npz files, made by `export` or by another tool."""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lydite.calibrate import npz_files
from lydite.calibrate.settings import Image, Plan, Settings, differences
from lydite.calibrate.store.shards import Item
from lydite.calibrate.store.value_checks import LatentShapes
from lydite.calibrate.store.writer import Writer, command_line
from lydite.core.config import read_json
from lydite.core.errors import CalibrationError, LyditeError, at, shown

_Files = dict[int, dict[int, Path]]  # of each step of each image


@dataclass(frozen=True)
class Imported:
    """What an import added."""

    items: int
    missing: int  # of what its manifest plans
    content_hash: str
    exported_hash: str | None  # of the set that was exported, by its manifest


class _Listed(msgspec.Struct):
    """The required fields of an image in a manifest."""

    prompt: str
    seed: int


class _PlanFields(msgspec.Struct):
    """The plan in a manifest that lydite wrote; one of another tool may lack it."""

    steps: tuple[int, ...] = ()
    pictures: bool | None = None
    conditioning: bool | None = None
    content_hash: str | None = None


def import_npz(
    source: Path,
    folder: Path | str,
    settings: Settings | None = None,
    *,
    options: Sequence[str] = (),
) -> Imported:
    """Make a set from a folder of npz files; the same call resumes an interrupted import.

    `settings` are needed for a manifest that another tool wrote. `options` say where they come
    from, for the command that errors name.
    """
    manifest = read_json(source / npz_files.MANIFEST)
    files = npz_files.samples_in(source)
    ours = manifest.get("lydite") is not None
    settings = _settings(source, manifest.get("lydite"), settings)
    fields = _plan_fields(source, manifest) if ours else _PlanFields()
    plan = _plan(source, _images(source, manifest, files, every=ours), files, fields)
    again = command_line("lydite", "calibrate", "import", source, "--out", folder, *options)
    latents = LatentShapes(settings.conditions)
    added = 0
    with _removed_on_failure(folder, settings, plan, again) as writer:
        for image in plan.images:
            items = _items(writer, source, image, files.get(image.number, {}), latents)
            added += writer.commit(items).items
        missing = sum(len(steps) for steps in writer.missing().values())
        return Imported(added, missing, writer.content_hash, fields.content_hash)


@contextlib.contextmanager
def _removed_on_failure(
    folder: Path | str, settings: Settings, plan: Plan, again: str
) -> Iterator[Writer]:
    """A writer whose new folder is removed when the import fails."""
    existed, is_new = Path(folder).exists(), False
    try:
        with Writer.start(folder, settings, plan, resume=again) as writer:
            is_new = not existed and not writer.index.counts()  # and no other process made it
            yield writer
    except LyditeError:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _items(
    writer: Writer, source: Path, image: Image, files: dict[int, Path], latents: LatentShapes
) -> Iterator[Item]:
    for step, path in sorted(files.items()):
        with _with_path(path):
            yield _sample(writer, image, step, path, latents)
    if (path := npz_files.picture_path(source, image.number)).exists():
        with _with_path(path):
            item = writer.builder.picture(image.number, npz_files.read_picture(path))
            if why := latents.problem(item.entry):
                raise CalibrationError(f"{why}.")
            yield item
    if (path := npz_files.conditioning_path(source, image.number)).exists():
        with _with_path(path):
            yield writer.builder.conditioning(image.prompt, npz_files.read_npz(path))


def _sample(writer: Writer, image: Image, step: int, path: Path, latents: LatentShapes) -> Item:
    arrays = npz_files.read_npz(path)
    labels = {name: npz_files.read_label(name, arrays.pop(name, None)) for name in npz_files.LABELS}
    number = labels.pop("image_id")
    if number is not None and number != image.number:
        raise CalibrationError(f"image_id is {number:g}, not {image.number}.")
    if not arrays:
        raise CalibrationError("no array in it but labels. Expected a latent x.")
    item = writer.builder.sample(image.number, step, arrays, **labels)
    why = latents.problem(item.entry) or next((why for _, why in latents.odd_shapes()), None)
    if why:
        raise CalibrationError(f"{why}.")
    return item


@contextlib.contextmanager
def _with_path(path: Path) -> Iterator[None]:
    """Adds the path to errors about a file."""
    try:
        yield
    except CalibrationError as error:
        raise CalibrationError(f"{at(path)}: {error}") from error


def _settings(source: Path, own: object, given: Settings | None) -> Settings:
    """Those of the manifest, or those that were given for one that has none."""
    if own is None:
        if given is not None:
            return given
        raise CalibrationError(
            f"{at(source)}/{npz_files.MANIFEST}: has no settings of the samples. Give "
            "--settings FILE.json with model_hash, conditions and dtype."
        )
    try:
        found = msgspec.convert(own, Settings)
    except msgspec.ValidationError as error:
        raise CalibrationError(
            f"{at(source)}/{npz_files.MANIFEST}: lydite: {error}. Expected the settings of a set."
        ) from error
    if given is not None and given.hash != found.hash:
        raise CalibrationError(
            f"{at(source)}/{npz_files.MANIFEST}: has other settings than --settings "
            f"({differences(found, given)}; the manifest's first). Leave --settings out."
        )
    return found


def _plan_fields(source: Path, manifest: dict[str, Any]) -> _PlanFields:
    try:
        return msgspec.convert(manifest, _PlanFields)
    except msgspec.ValidationError as error:
        raise CalibrationError(f"{at(source)}/{npz_files.MANIFEST}: {error}.") from error


def _plan(source: Path, images: tuple[Image, ...], files: _Files, fields: _PlanFields) -> Plan:
    """What the manifest plans, and all that has a file."""
    seen: dict[tuple[str, int], int] = {}
    for image in images:
        other = seen.setdefault((image.prompt, image.seed), image.number)
        if other != image.number:
            raise CalibrationError(
                f"{at(source)}/{npz_files.MANIFEST}: images {other} and {image.number} are one, "
                f"{shown(image.prompt)} with seed {image.seed}. Expected different images."
            )
    paths = (npz_files.picture_path, npz_files.conditioning_path)
    pictures, conditioning = (
        any(path_of(source, image.number).exists() for image in images) for path_of in paths
    )
    steps = {step for steps in files.values() for step in steps}
    return Plan(
        images,
        tuple(sorted(steps | set(fields.steps))),
        pictures or bool(fields.pictures),
        conditioning or bool(fields.conditioning),
    )


def _images(
    source: Path, manifest: dict[str, Any], files: _Files, *, every: bool
) -> tuple[Image, ...]:
    """The images that have samples; `every`: those too that were planned and not drawn."""
    listed = manifest.get("images")
    if not isinstance(listed, list):
        raise CalibrationError(f"{at(source)}/{npz_files.MANIFEST}: no list of images.")
    planned = {n for n, each in enumerate(listed) if each is not None} if every else set[int]()
    images: list[Image] = []
    for number in sorted(planned | files.keys()):
        found = listed[number] if number < len(listed) else None
        try:
            said = msgspec.convert(found, _Listed)
            images.append(Image(number, said.prompt, said.seed))
        except msgspec.ValidationError as error:
            raise CalibrationError(
                f"{at(source)}/{npz_files.MANIFEST}: image {number}: expected a prompt and a seed, "
                f"found {'nothing' if found is None else shown(found)}."
            ) from error
    return tuple(images)
