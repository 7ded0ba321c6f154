"""`lydite calibrate status`: what a set holds and what is missing."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from lydite.calibrate.store.status import Status


@click.command("status")
@click.argument("folder", metavar="SET", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def status(folder: Path, as_json: bool) -> None:
    """Say what SET holds, what is missing, and how long that may take. A run may go on meanwhile.

    The content hash is over all items. It is equal for sets of equal content, however many runs,
    workers and machines made them.

    \b
    lydite calibrate status set/
    lydite calibrate status set/ --json | jq -r .content_hash
    """
    from lydite.calibrate.store.status import status as look

    found = look(folder)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        _print_status(found)


def _print_status(found: "Status") -> None:
    from lydite.calibrate.store.files import size_text

    held = ", ".join(f"{count} {kind}s" for kind, count in sorted(found.items.items())) or "nothing"
    click.echo(f"{found.folder}: {held} in {found.shards} shards, {size_text(found.bytes)}")
    click.echo(f"model     {found.model}")
    click.echo(f"images    {found.images_complete} of {found.images} complete")
    if found.missing:
        left = "" if found.seconds_left is None else f", about {duration(found.seconds_left)} left"
        click.echo(f"missing   {found.missing} of {found.planned} items{left}")
    if found.writer:
        click.echo(f"writer    {found.writer}")
    elif found.lost:
        lost = f"{len(found.lost)} shards are gone or cut short"
        click.echo(f"damaged   {lost}. Run: lydite calibrate repair {found.folder}")
    elif found.missing:
        click.echo(f"go on     {found.again}")
    if found.content_hash:
        click.echo(f"content   {found.content_hash}")


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
