"""`lydite calibrate status` and `verify`: what a set holds, and whether it is whole."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lydite.core.errors import InputError, at

if TYPE_CHECKING:
    from lydite.calibrate.status import Status
    from lydite.calibrate.verify import Verdict

SHOWN = 10  # lines of damage, and of suspects


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
    from lydite.calibrate.status import status as look

    found = look(folder)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1))
    else:
        _print_status(found)


def _print_status(found: "Status") -> None:
    from lydite.calibrate.disk import size_text

    held = ", ".join(f"{count} {kind}s" for kind, count in sorted(found.items.items())) or "nothing"
    click.echo(f"{found.folder}: {held} in {found.shards} shards, {size_text(found.bytes)}")
    click.echo(f"model     {found.model}")
    click.echo(f"images    {found.images_complete} of {found.images} complete")
    if found.missing:
        left = "" if found.seconds_left is None else f", about {duration(found.seconds_left)} left"
        click.echo(f"missing   {found.missing} of {found.planned} items{left}")
    if found.writer:
        click.echo(f"writer    {found.writer}")
    elif found.missing:
        click.echo(f"go on     lydite calibrate run --out {found.folder}")
    click.echo(f"content   {found.content_hash}")


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


@click.command("verify")
@click.argument("folder", metavar="SET", type=click.Path(path_type=Path))
@click.option("--sheet", type=click.Path(path_type=Path), metavar="PNG",
              help="Also write the pictures side by side, to look at.")  # fmt: skip
@click.option("--absmax", type=float, help="Largest healthy value of a latent; 10000 by default.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def verify(folder: Path, sheet: Path | None, absmax: float | None, as_json: bool) -> None:
    """Read every byte of SET and hold it against its hashes, its index and its plan.

    Values are looked at too: NaN, infinities, constants and very large ones are named. Exit status:
    0 when the set is whole and complete, 1 when it is not.

    \b
    lydite calibrate verify set/
    lydite calibrate verify set/ --sheet sheet.png
    """
    from lydite.calibrate.health import Healthy
    from lydite.calibrate.recovery import SHARDS
    from lydite.calibrate.setfile import NAME as SET
    from lydite.calibrate.sheet import write_sheet
    from lydite.calibrate.verify import verify as hold

    if not any((folder / name).exists() for name in (SET, SHARDS)):
        raise InputError(f"{at(folder)}: no calibration set ({SET} and {SHARDS}/ are missing).")
    found = hold(folder, Healthy() if absmax is None else Healthy(absmax=absmax))
    if as_json:
        told = asdict(found) | {"sound": found.sound, "complete": found.complete}
        click.echo(json.dumps(told, indent=1))
    else:
        _print_verdict(folder, found)
    if sheet is not None and found.sound:
        shown = write_sheet(folder, sheet)
        click.echo(f"sheet     {sheet}, {shown} pictures", err=as_json)
    if not found.complete:
        sys.exit(1)


def _print_verdict(folder: Path, found: "Verdict") -> None:
    from lydite.calibrate.disk import size_text

    whole = ", ".join(f"{n} {kind}s" for kind, n in sorted(found.items.items())) or "nothing"
    click.echo(f"{folder}: {whole} whole in {found.shards} shards, {size_text(found.bytes)}")
    lines = [
        f"{each.file}: {each.why}" + (f" ({', '.join(each.items[:4])})" if each.items else "")
        for each in found.damage
    ]
    _print_some("damaged", lines)
    _print_some("suspect", [f"{each.item}: {each.why}" for each in found.suspects])
    if found.missing:
        click.echo(f"missing   {found.missing} items")
    if found.pending:
        click.echo(f"pending   {found.pending} shards that the next run takes in")
    if found.content_hash:
        click.echo(f"content   {found.content_hash}")
    click.echo(_verdict(folder, found))


def _verdict(folder: Path, found: "Verdict") -> str:
    if found.damage:
        return f"verdict   damaged. Run: lydite calibrate repair {folder}"
    if found.missing:
        return f"verdict   sound, not complete. Run: lydite calibrate run --out {folder}"
    if found.suspects:
        return "verdict   sound and complete, but with values no network should be given"
    return "verdict   sound and complete"


def _print_some(word: str, lines: list[str]) -> None:
    for line in lines[:SHOWN]:
        click.echo(f"{word}   {line}")
    if len(lines) > SHOWN:
        click.echo(f"{word}   … and {len(lines) - SHOWN} more")
