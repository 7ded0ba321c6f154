"""`lydite audit`: does a checkpoint have exactly the tensors that the model needs?"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lydite.cli.request_options import overwrite_option, revision_option, with_revision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lydite.weights.audit import Finding, Ledger
    from lydite.weights.lora import Lora

HEADINGS = {
    "missing": "missing: the model needs it, the file lacks it",
    "unexpected": "unexpected: in the file, not in the model",
    "wrong_shape": "wrong shape",
    "wrong_dtype": "wrong dtype",
    "not_finite": "NaN or Inf",
    "different": "different from what it should equal",
}


@click.command("audit")
@click.argument("model")
@revision_option
@click.option(
    "--against", metavar="MODEL|DIGESTS", help="Compare every value with a second checkpoint."
)
@click.option(
    "--digests", type=click.Path(path_type=Path), help="Write this checkpoint's digests here."
)
@overwrite_option
@click.option("--for", "base", metavar="MODEL",
              help="MODEL is a LoRA: does each of its tensors change a weight of this one?"
              )  # fmt: skip
@click.option("--headers-only", is_flag=True, help="Do not read values; misses NaN and Inf.")
@click.option(
    "--all", "everything", is_flag=True, help="List every entry, not the first ten of a kind."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(
    model: str,
    revision: str | None,
    against: str | None,
    base: str | None,
    digests: Path | None,
    overwrite: bool,
    headers_only: bool,
    everything: bool,
    as_json: bool,
) -> None:
    """Check that a checkpoint has exactly the tensors the model needs.

    MODEL is a pipeline folder, one component's folder, a single file in diffusers' or the original
    SD3 layout, or a hub id. Each tensor is loaded, dropped on purpose, missing, unexpected, of a
    wrong shape or of a wrong dtype. Values are read for NaN and Inf; odd statistics (all zero,
    constant, like a fresh initialisation) are noted.

    The shape of a square matrix does not show whether it is stored transposed. Such tensors are
    counted, and listed with --all. --against decides: it compares with another copy of the model
    in any float precision and layout, or with a digests file that --digests wrote from one.

    \b
    lydite audit sd3.5_medium.safetensors
    lydite audit my-export/ --against sd3-folder/
    lydite audit sd3-folder/ --digests sd3.json
    lydite audit my-export/ --against sd3.json
    lydite audit style.safetensors --for sdxl-folder/

    Exit status: 0 clean, 1 something is wrong, 2 the checkpoint could not be read.
    """
    from lydite.core.outputs import check_output
    from lydite.pipelines.audits import audit_model, write_digests
    from lydite.pipelines.model_files import locate

    if base is not None:
        _audit_lora(model, base, as_json)
        return
    path = locate(with_revision(model, revision))
    if digests:
        inputs = [path, *([Path(against)] if against else [])]
        check_output(digests, overwrite=overwrite, inputs=inputs)
    ledgers = audit_model(path, against=against, values=not headers_only)
    clean = all(ledger.clean for ledger in ledgers.values())
    if digests and clean:
        write_digests(path, digests, overwrite=overwrite)
    elif digests:
        click.echo(f"not clean, so {digests} was not written", err=True)
    if as_json:
        report = {name: ledger.to_json() for name, ledger in ledgers.items()}
        click.echo(json.dumps({"model": model, "clean": clean, "components": report}, indent=1))
    else:
        _print_verdict(ledgers, clean)
        for name, ledger in sorted(ledgers.items(), key=lambda item: item[1].clean):  # wrong first
            _print(name, ledger, None if everything else 10)
        if clean and (path / "model_index.json").is_file():
            _print_what_else_is_missing(path)
    sys.exit(0 if clean else 1)


def _print_what_else_is_missing(path: Path) -> None:
    """Of a pipeline folder whose tensors are right: tokenizers, a scheduler, configs that fit."""
    from lydite.core.errors import LyditeError
    from lydite.pipelines.model_files import open_model

    try:
        open_model(path)
    except LyditeError as error:
        click.echo(f"note: the tensors are right, but the model cannot be run: {error}")


def _audit_lora(name: str, base: str, as_json: bool) -> None:
    """Every tensor of a LoRA has its place, or WeightsError."""
    from lydite.pipelines.model_files import locate, open_model
    from lydite.weights.lora import read_lora

    family, model, _ = open_model(locate(base))
    lora = read_lora(Path(name), family.lora_networks(model.components))
    layers = Counter(layer.network.name for layer in lora.layers)
    if as_json:
        click.echo(json.dumps({"model": name, "clean": True, "layers": layers}, indent=1))
        return
    label = click.style("clean", fg="green", bold=True)
    parts = ", ".join(f"{count} of {network}" for network, count in layers.items())
    click.echo(f"{label}: every tensor has its place; it changes {parts} ({_ranks(lora)})")


def _ranks(lora: "Lora") -> str:
    ranks = sorted({len(layer.down) for layer in lora.layers})
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _print_verdict(ledgers: "Mapping[str, Ledger]", clean: bool) -> None:
    label = click.style(
        "clean" if clean else "not clean", fg="green" if clean else "red", bold=True
    )
    loaded = sum(len(ledger.loaded) for ledger in ledgers.values())
    wrong = sum(_count_wrong(ledger) for ledger in ledgers.values())
    click.echo(f"{label}: {_tensors(loaded)} loaded, {wrong} wrong")


def _count_wrong(ledger: "Ledger") -> int:
    return sum(len(getattr(ledger, name)) for name in ledger.WRONG)


def _tensors(count: int, kind: str = "") -> str:
    return f"{count} {kind}tensor{'' if count == 1 else 's'}"


def _print(name: str, ledger: "Ledger", limit: int | None) -> None:
    color = "green" if ledger.clean else "red"
    click.echo(
        f"{click.style(name, bold=True, fg=color)}: {len(ledger.loaded)} loaded, "
        f"{len(ledger.dropped)} dropped on purpose, {_count_wrong(ledger)} wrong"
    )
    for bin_name, heading in HEADINGS.items():
        _print_bin(heading, getattr(ledger, bin_name), limit)
    _print_bin("dropped on purpose", ledger.dropped, limit)
    _print_bin("not in the file, filled in", ledger.filled, limit)
    _print_bin("note: odd values", ledger.suspicious, limit)
    _print_undecidable(ledger, limit)


def _print_undecidable(ledger: "Ledger", limit: int | None) -> None:
    """A line for each reason; the tensors with --all."""
    from lydite.weights.audit import TRANSPOSABLE

    if limit is None:
        _print_bin("not decidable", ledger.undecidable, None)
        return
    for reason, count in Counter(finding.detail for finding in ledger.undecidable).items():
        if reason == TRANSPOSABLE:
            click.echo(
                f"  {_tensors(count, 'square ')} cannot be checked for transposition; "
                "--against a copy decides"
            )
        else:
            click.echo(f"  not compared: {reason} ({_tensors(count)})")


def _print_bin(heading: str, findings: "tuple[Finding, ...]", limit: int | None) -> None:
    if not findings:
        return
    click.echo(f"  {heading} ({len(findings)})")
    for finding in findings[:limit]:
        click.echo(f"    {finding.tensor}: {finding.detail}")
    if limit is not None and len(findings) > limit:
        click.echo(f"    … and {len(findings) - limit} more (--all)")
