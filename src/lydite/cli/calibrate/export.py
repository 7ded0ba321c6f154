"""`lydite calibrate export`: a set for people and other tools."""

from pathlib import Path

import click

from lydite.cli.request_options import overwrite_option
from lydite.core.errors import InputError

FOLDER = click.Path(path_type=Path)


@click.command("export")
@click.argument("folder", metavar="SET", type=FOLDER)
@click.option("-o", "--out", type=FOLDER, metavar="FOLDER", help="Write samples/0001_004.npz, "
              "images/0001.png and manifest.json into this new folder.")  # fmt: skip
@click.option("--manifest", type=FOLDER, metavar="FILE", help="Write everything but the arrays "
              "into this JSON file.")  # fmt: skip
@overwrite_option
def export(folder: Path, out: Path | None, manifest: Path | None, overwrite: bool) -> None:
    """Write SET for people and other tools.

    \b
    lydite calibrate export set/ --manifest manifest.json
    lydite calibrate export set/ --out npz/
    """
    from lydite.calibrate.npz_export import export_npz
    from lydite.calibrate.store.set_file import check_output_path
    from lydite.calibrate.store.status import write_manifest

    if out is None and manifest is None:
        raise InputError("nothing to write. Give --out FOLDER, --manifest FILE, or both.")
    if manifest is not None:
        check_output_path(manifest, overwrite=overwrite, inputs=[folder])
    if out is not None:
        done = export_npz(folder, out)
        click.echo(f"{out}: {done.samples} samples")
        if done.missing:
            click.echo(f"missing   {done.missing} of {done.planned} items; the set is incomplete")
    if manifest is not None:
        write_manifest(folder, manifest, overwrite=overwrite)
        click.echo(f"{manifest}")
