"""`lydite calibrate verify`: whether every byte of a set is what was written."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lydite.core.errors import InputError, at

if TYPE_CHECKING:
    from lydite.calibrate.store.verify import Verdict

SHOWN, NAMES = 10, 4  # lines of damage and of suspects, items in a line


@click.command("verify")
@click.argument("folder", metavar="SET", type=click.Path(path_type=Path))
@click.option("--sheet", type=click.Path(path_type=Path), metavar="PNG",
              help="Also write the pictures side by side, to look at.")  # fmt: skip
@click.option("--absmax", type=float, help="Largest healthy value of a latent; 10000 by default.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def verify(folder: Path, sheet: Path | None, absmax: float | None, as_json: bool) -> None:
    """Read every byte of SET and hold it against its hashes, its index and its plan.

    Values are looked at too: NaN, infinities, constants, very large ones and latents of another
    shape are named. Exit status: 0 when the set is whole and complete, 1 when it is not.

    \b
    lydite calibrate verify set/
    lydite calibrate verify set/ --sheet sheet.png
    """
    from lydite.calibrate.sheet import check_sheet, write_sheet
    from lydite.calibrate.store.set_file import NAME as SET
    from lydite.calibrate.store.set_file import SHARDS
    from lydite.calibrate.store.value_checks import Healthy
    from lydite.calibrate.store.verify import verify as hold

    if absmax is not None and not 0 < absmax < math.inf:
        raise InputError(f"--absmax is {absmax}; expected a number above 0.")
    if sheet is not None:
        check_sheet(sheet)
    if not any((folder / name).exists() for name in (SET, SHARDS)):
        raise InputError(f"{at(folder)}: no calibration set ({SET} and {SHARDS}/ are missing).")
    found = hold(folder, Healthy() if absmax is None else Healthy(absmax=absmax))
    if as_json:
        click.echo(json.dumps(_as_json(folder, found), indent=1))
    else:
        _print_verdict(folder, found)
    if sheet is not None and found.sound:
        shown = write_sheet(folder, sheet)
        click.echo(f"sheet     {sheet}, {shown} pictures", err=as_json)
    elif sheet is not None:
        click.echo("sheet     not written, since the set is damaged", err=as_json)
    if not found.complete:
        sys.exit(1)


def _as_json(folder: Path, found: "Verdict") -> dict[str, Any]:
    """All that was found, in an order that does not change; `verdict` is one of four words."""
    told = {
        "folder": str(folder),
        "verdict": _word(found),
        "sound": found.sound,
        "complete": found.sound and found.missing == 0,
        "healthy": not found.suspects,
        **asdict(found),
    }
    suspects = sorted(found.suspects, key=lambda each: (each.item, each.why))
    return told | {
        "items": dict(sorted(found.items.items())),
        "suspects": [asdict(each) for each in suspects],
    }


def _word(found: "Verdict") -> str:
    if found.damage:
        return "damaged"
    if found.missing:
        return "incomplete"
    return "unhealthy" if found.suspects else "whole"


def _print_verdict(folder: Path, found: "Verdict") -> None:
    from lydite.calibrate.store.files import size_text

    whole = ", ".join(f"{n} {kind}s" for kind, n in sorted(found.items.items())) or "nothing"
    click.echo(f"{folder}: {whole} whole in {found.shards} shards, {size_text(found.bytes)}")
    lines = [
        f"{each.file}: {each.why}" + (f" ({listed(each.items)})" if each.items else "")
        for each in found.damage
    ]
    _print_some("damaged", lines)
    _print_some("suspect", [f"{each.item}: {each.why}" for each in found.suspects])
    if found.missing:
        click.echo(f"missing   {found.missing} items")
    if found.pending:
        click.echo(f"pending   {found.pending} shards that the next run takes in")
    _print_some("handed ", [f"{each}; the next run sets it aside" for each in found.broken])
    if found.quarantined:
        click.echo(f"aside     damaged shards in quarantine/: {found.quarantined}")
    if found.content_hash:
        click.echo(f"content   {found.content_hash}")
    click.echo(_verdict(folder, found))


def _verdict(folder: Path, found: "Verdict") -> str:
    from lydite.calibrate.store.set_file import read_description
    from lydite.calibrate.store.status import again

    if found.damage:
        return f"verdict   damaged. Run: lydite calibrate repair {folder}"
    if found.missing and found.writer:
        return f"verdict   sound, not complete; {found.writer} is at work on it"
    if found.missing:
        go_on = again(folder, read_description(folder).settings)
        return f"verdict   sound, not complete. Go on with: {go_on}"
    if found.suspects:
        return "verdict   sound and complete, but with samples no network should be given"
    return "verdict   sound and complete"


def listed(names: Sequence[str]) -> str:
    """The first few, and a sign when there are more."""
    return ", ".join(names[:NAMES]) + (", …" if len(names) > NAMES else "")


def _print_some(word: str, lines: list[str]) -> None:
    for line in lines[:SHOWN]:
        click.echo(f"{word}   {line}")
    if len(lines) > SHOWN:
        click.echo(f"{word}   … and {len(lines) - SHOWN} more")
