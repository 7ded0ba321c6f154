"""`lydite audit`: is every tensor of a checkpoint accounted for?"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from lydite.weights.audit import Finding, Ledger

HEADINGS = {
    "missing": "missing: the model needs it, the file lacks it",
    "unexpected": "unexpected: in the file, no place in the model",
    "wrong_shape": "wrong shape",
    "wrong_dtype": "wrong dtype",
    "not_finite": "NaN or Inf",
    "different": "different from what it should equal",
}


@click.command("audit")
@click.argument("model")
@click.option(
    "--against", metavar="MODEL|DIGESTS", help="Hold every value against a second checkpoint."
)
@click.option(
    "--digests", type=click.Path(path_type=Path), help="Write this checkpoint's digests here."
)
@click.option("--headers-only", is_flag=True, help="Do not read values; misses NaN and Inf.")
@click.option(
    "--all", "everything", is_flag=True, help="List every entry, not the first ten of a bin."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(
    model: str,
    against: str | None,
    digests: Path | None,
    headers_only: bool,
    everything: bool,
    as_json: bool,
) -> None:
    """Put every tensor in exactly one bin, before a step is run.

    MODEL is a pipeline folder, one component's folder, a single file in diffusers' or the original
    SD3 layout, or a hub id. Bins: loaded, dropped on purpose, missing, unexpected, wrong shape,
    wrong dtype; values are read for NaN and Inf, and odd statistics (all zero, constant, like a
    fresh initialisation) are noted.

    A square matrix stored transposed shows in no shape. Such tensors are listed as not decidable;
    --against decides them, with another copy of the model in any float precision and layout, or
    with the digests file that --digests wrote from one.

    \b
    lydite audit sd3.5_medium.safetensors
    lydite audit my-export/ --against sd3-folder/
    lydite audit sd3-folder/ --digests sd3.json
    lydite audit my-export/ --against sd3.json

    Exit status: 0 clean, 1 something is wrong, 2 the checkpoint could not be read.
    """
    from lydite.pipelines.audits import audit_model, write_digests
    from lydite.pipelines.hub import locate

    path = locate(model)
    ledgers = audit_model(path, against=against, values=not headers_only)
    clean = all(ledger.clean for ledger in ledgers.values())
    if digests and clean:
        write_digests(path, digests)
    elif digests:
        click.echo(f"not clean, so {digests} was not written", err=True)
    if as_json:
        report = {name: ledger.to_json() for name, ledger in ledgers.items()}
        click.echo(json.dumps({"model": model, "clean": clean, "components": report}, indent=1))
    else:
        for name, ledger in ledgers.items():
            _print(name, ledger, None if everything else 10)
        click.secho("clean" if clean else "not clean", fg="green" if clean else "red", bold=True)
    sys.exit(0 if clean else 1)


def _print(name: str, ledger: "Ledger", limit: int | None) -> None:
    color = "green" if ledger.clean else "red"
    wrong = sum(len(getattr(ledger, name)) for name in ledger.WRONG)
    click.echo(
        f"{click.style(name, bold=True, fg=color)}: {len(ledger.loaded)} loaded, "
        f"{len(ledger.dropped)} dropped on purpose, {wrong} wrong"
    )
    for bin_name, heading in HEADINGS.items():
        _print_bin(heading, getattr(ledger, bin_name), limit)
    _print_bin("dropped on purpose", ledger.dropped, limit)
    _print_bin("not in the file, filled in", ledger.filled, limit)
    _print_bin("note: odd values", ledger.suspicious, limit)
    heading = "not decidable here; --against a copy of the model may tell"
    _print_bin(heading, ledger.undecidable, limit and 3)


def _print_bin(heading: str, findings: "tuple[Finding, ...]", limit: int | None) -> None:
    if not findings:
        return
    click.echo(f"  {heading} ({len(findings)})")
    for finding in findings[:limit]:
        click.echo(f"    {finding.tensor}: {finding.detail}")
    if limit is not None and len(findings) > limit:
        click.echo(f"    … and {len(findings) - limit} more (--all)")
