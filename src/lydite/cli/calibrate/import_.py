"""`lydite calibrate import`: a set from a folder of npz files."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lydite.core.errors import InputError, at

if TYPE_CHECKING:
    from lydite.calibrate.settings import Settings

FOLDER = click.Path(path_type=Path)


@click.command("import")
@click.argument("source", metavar="FOLDER", type=FOLDER)
@click.option("-o", "--out", required=True, type=FOLDER, metavar="SET", help="A new set.")
@click.option("--settings", type=FOLDER, metavar="JSON",
              help="What the samples were made with, for a manifest that does not say: an object "
                   'with "model_hash", "conditions" and "dtype" (F32, F16, BF16).')  # fmt: skip
def import_(source: Path, out: Path, settings: Path | None) -> None:
    """Make a set from FOLDER, which has manifest.json and samples/IIII_SSS.npz.

    All latents must have one shape, which fits the size in the settings. A failed import leaves no
    new folder behind. The same command resumes an import that was interrupted.

    \b
    lydite calibrate import npz/ --out set/
    lydite calibrate import others-npz/ --settings made-with.json --out set/
    """
    from lydite.calibrate.npz_import import import_npz

    if not source.is_dir():
        raise InputError(f"{at(source)}: no such folder.")
    given = None if settings is None else _settings(settings)
    words = [] if settings is None else ["--settings", str(settings)]
    done = import_npz(source, out, given, options=words)
    click.echo(f"{out}: {done.items} items")
    if done.missing:
        click.echo(f"missing   {done.missing} items; the set is incomplete")
    click.echo(f"content   {done.content_hash}")
    if done.exported_hash not in (None, done.content_hash):
        click.echo(f"differs   from what was exported, {done.exported_hash:.64}")


def _settings(path: Path) -> "Settings":
    import msgspec

    from lydite.calibrate.settings import Settings
    from lydite.core.config import read_json

    try:
        return msgspec.convert(read_json(path), Settings)
    except msgspec.ValidationError as error:
        raise InputError(
            f"{at(path)}: {error}. Expected model_hash, conditions and dtype, and perhaps model."
        ) from error
