"""`lydite calibrate merge`, `export` and `import`: sets from and for elsewhere."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lydite.core.errors import InputError, at

if TYPE_CHECKING:
    from lydite.calibrate.keys import Settings

FOLDER = click.Path(path_type=Path)


@click.command("merge")
@click.argument("sources", metavar="SET...", nargs=-1, required=True, type=FOLDER)
@click.option("-o", "--out", required=True, type=FOLDER, metavar="SET", help="A new set, or one "
              "that gets what the others have.")  # fmt: skip
def merge(sources: tuple[Path, ...], out: Path) -> None:
    """Bring sets of equal settings together, made on any machines.

    An image is known by its prompt and seed. What two sets hold must be equal, to the last bit.

    \b
    lydite calibrate merge set-a/ set-b/ --out all/
    """
    from lydite.calibrate.merge import merge as join

    done = join(sources, out)
    click.echo(f"{out}: {done.items} items added, {done.known} were there already")
    click.echo(f"content   {done.content_hash}")


@click.command("export")
@click.argument("folder", metavar="SET", type=FOLDER)
@click.option("-o", "--out", type=FOLDER, metavar="FOLDER", help="Write samples/0001_004.npz, "
              "images/0001.png and manifest.json into this new folder.")  # fmt: skip
@click.option("--manifest", type=FOLDER, metavar="FILE", help="Write everything but the arrays "
              "into this JSON file.")  # fmt: skip
def export(folder: Path, out: Path | None, manifest: Path | None) -> None:
    """Write SET for people and other tools.

    \b
    lydite calibrate export set/ --manifest manifest.json
    lydite calibrate export set/ --out npz/
    """
    from lydite.calibrate.exchange import export_npz
    from lydite.calibrate.outputs import check_output
    from lydite.calibrate.status import MANIFEST, write_manifest

    if out is None and manifest is None:
        raise InputError("nothing to write. Give --out FOLDER, --manifest FILE, or both.")
    if manifest is not None:
        check_output(manifest, MANIFEST)
    if out is not None:
        done = export_npz(folder, out)
        click.echo(f"{out}: {done.samples} samples")
        if done.missing:
            click.echo(f"missing   {done.missing} of {done.planned} items; the set is not complete")
    if manifest is not None:
        write_manifest(folder, manifest)
        click.echo(f"{manifest}")


@click.command("import")
@click.argument("source", metavar="FOLDER", type=FOLDER)
@click.option("-o", "--out", required=True, type=FOLDER, metavar="SET", help="A new set.")
@click.option("--settings", type=FOLDER, metavar="JSON",
              help="What the samples were made with, for a manifest that does not say: an object "
                   'with "model_hash", "conditions" and "dtype" (F32, F16, BF16).')  # fmt: skip
def bring_in(source: Path, out: Path, settings: Path | None) -> None:
    """Make a set of FOLDER, which has manifest.json and samples/IIII_SSS.npz.

    Latents must be alike, and fit the size in the settings. What cannot be used leaves no
    new folder behind. The same command goes on with an import that was interrupted.

    \b
    lydite calibrate import npz/ --out set/
    lydite calibrate import others-npz/ --settings made-with.json --out set/
    """
    from lydite.calibrate.intake import import_npz

    if not source.is_dir():
        raise InputError(f"{at(source)}: no such folder.")
    given = None if settings is None else _settings(settings)
    words = [] if settings is None else ["--settings", str(settings)]
    done = import_npz(source, out, given, options=words)
    click.echo(f"{out}: {done.items} items")
    if done.missing:
        click.echo(f"missing   {done.missing} items; the set is not complete")
    click.echo(f"content   {done.content_hash}")
    if done.told_hash not in (None, done.content_hash):
        click.echo(f"differs   from what was exported, {done.told_hash:.64}")


def _settings(path: Path) -> "Settings":
    import msgspec

    from lydite.calibrate.keys import Settings
    from lydite.core.jsonfile import read_json

    try:
        return msgspec.convert(read_json(path), Settings)
    except msgspec.ValidationError as error:
        raise InputError(
            f"{at(path)}: {error}. Expected model_hash, conditions and dtype, and perhaps model."
        ) from error
