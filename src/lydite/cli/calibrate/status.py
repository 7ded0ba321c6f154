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
    """Show what SET holds, what is missing, and how long that may take, also while a run writes.

    The content hash is over all items. It is equal for sets of equal content, however many runs,
    workers and machines made them.

    \b
    lydite calibrate status set/
    lydite calibrate status set/ --json | jq -r .content_hash
    """
    from lydite.calibrate.store.status import status as read_status

    state = read_status(folder)
    if as_json:
        click.echo(json.dumps(state.as_json(), indent=1))
    else:
        _print_status(state)


def _print_status(state: "Status") -> None:
    from lydite.core.files import size_text

    items = (
        ", ".join(f"{count} {kind}s" for kind, count in sorted(state.items.items())) or "nothing"
    )
    click.echo(f"{state.folder}: {items} in {state.shards} shards, {size_text(state.bytes)}")
    click.echo(f"model     {state.model}")
    click.echo(f"images    {state.images_complete} of {state.images} complete")
    if state.missing:
        left = "" if state.seconds_left is None else f", about {duration(state.seconds_left)} left"
        click.echo(f"missing   {state.missing} of {state.planned} items{left}")
    if state.writer:
        click.echo(f"writer    {state.writer}")
    elif state.lost:
        lost = f"{len(state.lost)} shards"
        click.echo(f"damaged   {lost}. Run: lydite calibrate repair {state.folder}")
    elif state.missing:
        click.echo(f"resume    {state.again}")
    if state.content_hash:
        click.echo(f"content   {state.content_hash}")


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
