"""`lydite calibrate verify`: whether every byte of a set is what was written."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lydite.cli.request_options import overwrite_option
from lydite.core.errors import CalibrationError, InputError, at

if TYPE_CHECKING:
    from lydite.calibrate.store.verify import VerifyResult

SHOWN, NAMES = 10, 4  # lines of damage and of suspicious items, items in a line
MOST_PICTURES = 400  # on a sheet; of more, as many evenly spread over the set
SIDE, TEXT, CAPTION = 128, 11, 80  # pixels of a picture and of letters, characters of a caption


@click.command("verify")
@click.argument("folder", metavar="SET", type=click.Path(path_type=Path))
@click.option("--sheet", type=click.Path(path_type=Path), metavar="PNG",
              help="Also write the pictures side by side, to look at.")  # fmt: skip
@overwrite_option
@click.option("--absmax", type=float, help="Largest plausible value; 10000 by default.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def verify(
    folder: Path, sheet: Path | None, overwrite: bool, absmax: float | None, as_json: bool
) -> None:
    """Read every byte of SET and compare it with its hashes and its plan.

    Values are checked too: NaN, infinities, constants, very large values and latents of another
    shape are listed. The verdict is one word: whole, damaged, incomplete, or unhealthy (suspicious
    values). Exit status: 0 when the set is whole, 1 when it is not.

    \b
    lydite calibrate verify set/
    lydite calibrate verify set/ --sheet sheet.png
    """
    from lydite.calibrate.store.set_file import NAME, SHARDS, check_output_path
    from lydite.calibrate.store.value_checks import ValueLimits
    from lydite.calibrate.store.verify import verify as verify_set

    if absmax is not None and not 0 < absmax < math.inf:
        raise InputError(f"--absmax is {absmax}; expected a number above 0.")
    if sheet is not None:
        check_output_path(sheet, overwrite=overwrite, inputs=[folder])
    if not any((folder / name).exists() for name in (NAME, SHARDS)):
        raise InputError(f"{at(folder)}: no calibration set ({NAME} and {SHARDS}/ are missing).")
    result = verify_set(folder, ValueLimits() if absmax is None else ValueLimits(absmax=absmax))
    if as_json:
        click.echo(json.dumps(_as_json(folder, result), indent=1))
    else:
        _print_result(folder, result)
    if sheet is not None and result.sound:
        count = _write_sheet(folder, sheet, overwrite)
        click.echo(f"sheet     {sheet}, {count} pictures", err=as_json)
    elif sheet is not None:
        click.echo("sheet     not written, since the set is damaged", err=as_json)
    if not result.complete:
        sys.exit(1)


def first_names(names: Sequence[str]) -> str:
    """The first few, and a mark when there are more."""
    return ", ".join(names[:NAMES]) + (", …" if len(names) > NAMES else "")


def _as_json(folder: Path, result: "VerifyResult") -> dict[str, Any]:
    """All that was found, in an order that does not change."""
    suspects = sorted(result.suspects, key=lambda suspect: (suspect.item, suspect.why))
    return {
        "folder": str(folder),
        "verdict": _verdict(result),
        "sound": result.sound,
        "complete": result.sound and result.missing == 0,
        "healthy": not result.suspects,
        **asdict(result),
        "items": dict(sorted(result.items.items())),
        "suspects": [asdict(suspect) for suspect in suspects],
    }


def _verdict(result: "VerifyResult") -> str:
    if result.damage:
        return "damaged"
    if result.missing:
        return "incomplete"
    return "unhealthy" if result.suspects else "whole"


def _print_result(folder: Path, result: "VerifyResult") -> None:
    from lydite.core.files import size_text

    items = ", ".join(f"{n} {kind}s" for kind, n in sorted(result.items.items())) or "nothing"
    size = size_text(result.bytes)
    click.echo(f"{folder}: {items} undamaged in {result.shards} shards, {size}")
    lines = [
        f"{damage.file}: {damage.why}" + (f" ({first_names(damage.items)})" if damage.items else "")
        for damage in result.damage
    ]
    _print_some("damaged ", lines)
    _print_some("suspect ", [f"{suspect.item}: {suspect.why}" for suspect in result.suspects])
    if result.missing:
        click.echo(f"missing   {result.missing} items")
    if result.pending:
        click.echo(f"incoming  {result.pending} shards of workers; the next run collects them")
    _print_some("incoming", [f"{line}; the next run will quarantine it" for line in result.broken])
    if result.quarantined:
        click.echo(f"quarantine {result.quarantined} damaged shards")
    if result.content_hash:
        click.echo(f"content   {result.content_hash}")
    click.echo(f"verdict   {_verdict(result)}{_advice(folder, result)}")


def _advice(folder: Path, result: "VerifyResult") -> str:
    from lydite.calibrate.store.set_file import read_description
    from lydite.calibrate.store.status import resume_advice

    if result.damage:
        return f". Run: lydite calibrate repair {folder}"
    if result.missing and result.writer:
        return f"; {result.writer} is writing it"
    if result.missing:
        return f". Resume with: {resume_advice(folder, read_description(folder).settings)}"
    return ": complete, with values that no network should be given" if result.suspects else ""


def _print_some(word: str, lines: list[str]) -> None:
    for line in lines[:SHOWN]:
        click.echo(f"{word}  {line}")
    if len(lines) > SHOWN:
        click.echo(f"{word}  … and {len(lines) - SHOWN} more")


def _write_sheet(folder: Path, path: Path, overwrite: bool) -> int:
    """Write the pictures of a set into one PNG, with numbers and prompts; how many it shows."""
    from lydite.calibrate.store.reader import CalibrationSet
    from lydite.core.outputs import write_output
    from lydite.report.contact_sheets import Tile, contact_sheet, png_bytes, scale_to_width

    with CalibrationSet.open(folder) as opened:
        rows = list(opened.rows("picture"))
        if not rows:
            raise CalibrationError(f"{at(folder)}: no picture in it yet.")
        count = min(len(rows), MOST_PICTURES)
        tiles: list[Tile] = []
        for row in (rows[n * len(rows) // count] for n in range(count)):
            text = f"{row.image}: {row.entry.prompt}"
            caption = text if len(text) <= CAPTION else f"{text[:CAPTION]} …"
            tiles.append(Tile(scale_to_width(opened.read(row)["pixels"], SIDE), caption))
    columns = math.ceil(math.sqrt(count))
    picture = contact_sheet(tiles, columns=columns, side=SIDE, text=TEXT)
    write_output(path, png_bytes(picture), overwrite=overwrite)
    return count
