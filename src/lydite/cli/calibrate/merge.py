"""`lydite calibrate merge`: several sets as one."""

from pathlib import Path

import click

FOLDER = click.Path(path_type=Path)


@click.command("merge")
@click.argument("sources", metavar="SET...", nargs=-1, required=True, type=FOLDER)
@click.option("-o", "--out", required=True, type=FOLDER, metavar="SET", help="A new set, or one "
              "that gets what the others have.")  # fmt: skip
def merge(sources: tuple[Path, ...], out: Path) -> None:
    """Merge sets of equal settings, made on any machines.

    An image is known by its prompt and seed. An item that two sets hold must be
    equal to the last bit.

    \b
    lydite calibrate merge set-a/ set-b/ --out all/
    """
    from lydite.calibrate.store.merge import merge as merge_sets

    done = merge_sets(sources, out)
    click.echo(f"{out}: {done.items} items added, {done.known} were there already")
    click.echo(f"content   {done.content_hash}")
