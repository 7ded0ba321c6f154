"""`lydite diff`: two traces in, the first wrong number out."""

import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lydite.core.errors import InputError

if TYPE_CHECKING:
    from lydite.diff.renames import Rename
    from lydite.diff.result import Row, Verdict
    from lydite.trace.store import Trace

COLORS = {"agree": "green", "diverge": "red", "cannot-compare": "yellow"}
AROUND = 5  # rows shown before and after the first wrong one


@click.command("diff")
@click.argument("reference", type=click.Path(path_type=Path))
@click.argument("port", type=click.Path(path_type=Path))
@click.option("--floor", type=click.Path(path_type=Path), metavar="FOLDER",
              help="The reference once more in another precision: its own rounding.")  # fmt: skip
@click.option("--map", "renames", type=click.Path(path_type=Path), metavar="FILE",
              help="map.json: port names, axes and outputs that differ.")  # fmt: skip
@click.option("--tolerance", type=click.FloatRange(min=0, min_open=True), metavar="ERROR",
              help="Your own limit on the relative error, not the measured one.")  # fmt: skip
@click.option("--rerun", metavar="COMMAND",
              help="The port's command, run again on the reference's values.")  # fmt: skip
@click.option("--quantized", is_flag=True,
              help="PORT is quantized: errors per layer and step, no verdict.")  # fmt: skip
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE",
              help="Write a page: error curve, module tree, pictures.")  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="Every row, not those around the bug.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(
    reference: Path,
    port: Path,
    floor: Path | None,
    renames: Path | None,
    tolerance: float | None,
    rerun: str | None,
    quantized: bool,
    html: Path | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Find the first wrong number between two traces, without setting a tolerance.

    REFERENCE and PORT are folders that `lydite trace`, a few lines of Rust or a NumPy script wrote
    (docs/trace-format.md). Gates come first: the writers' self-tests, the conditions of the runs,
    token ids, sigma tables, weights. Then values are paired by name, spelling, equal parameters,
    order and content, in whatever axis order, and each error is held against the rounding of the
    reference itself. What follows from the first wrong value is not reported as a bug.

    A port that uses `tap` can be run again with --rerun: every value it computes is recorded and
    then replaced by the reference's, so that what is left of an error was made at that place.

    \b
    lydite diff ref/ port/
    lydite diff ref/ port/ --floor ref-bf16/ --map map.json --html diff.html
    lydite diff ref/ port/ --rerun "cargo run --release -- --prompt 'a star'"
    lydite diff float/ w4/ --quantized

    Exit status: 0 they agree, 1 they diverge, 2 they could not be compared.
    """
    from lydite.diff.compare import compare
    from lydite.diff.renames import read_renames
    from lydite.trace.store import Trace

    console = Console(stderr=True)
    with (
        Trace.open(reference) as theirs,
        Trace.open(port) as ours,
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        second = Trace.open(floor) if floor else None
        names = read_renames(renames) if renames else {}
        task = bar.add_task("comparing", total=None)
        verdict = compare(
            theirs,
            ours,
            floor=second,
            renames=names,
            tolerance=tolerance,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        alone = _isolate(theirs, ours, rerun, verdict, names, tolerance) if rerun else None
        if html:
            from lydite.report.diff import write_page

            write_page(html, verdict, theirs, ours, renames=names)
    if quantized:
        _print_layers(verdict, alone, as_json, everything)
        sys.exit(0 if verdict.rows or verdict.verdict != "cannot-compare" else 2)
    if as_json:
        click.echo(json.dumps(_to_json(verdict, alone), indent=1))
    else:
        _print(verdict, everything)
        if alone:
            _print_alone_rows(alone)
        if html:
            click.echo(f"page: {html}")
    sys.exit(verdict.exit_code)


def _isolate(
    reference: "Trace",
    port: "Trace",
    rerun: str,
    free: "Verdict",
    names: "dict[str, Rename]",
    tolerance: float | None,
) -> "Verdict":
    """The port run once more by its own command, on the reference's values."""
    from lydite.diff.inject import isolate

    try:
        command = shlex.split(rerun)
    except ValueError as error:
        raise InputError(f"--rerun {rerun!r} cannot be read as a command: {error}.") from error

    def run(values: Path, out: Path) -> None:
        told = {"LYDITE_TRACE": out, "LYDITE_INJECT": values, "LYDITE_INJECT_AT": "*:*"}
        variables = os.environ | {key: str(value) for key, value in told.items()}
        try:
            ended = subprocess.run(command, env=variables, check=False)
        except OSError as error:
            raise InputError(f"--rerun: {rerun!r} cannot be run: {error.strerror}.") from error
        if ended.returncode:
            raise InputError(f"--rerun: {rerun!r} ended with status {ended.returncode}.")

    with tempfile.TemporaryDirectory() as scratch:
        return isolate(
            reference, port, run, Path(scratch), free=free, renames=names, tolerance=tolerance
        )


def _print_alone_rows(alone: "Verdict") -> None:
    count = len(alone.sources)
    wrong = f"{count} places wrong by themselves" if count > 1 else "1 place wrong by itself"
    wrong = wrong if count else "none wrong"
    click.echo(f"on the reference's values: {wrong}")
    for row in alone.sources[:10]:
        said = row.note if row.error is None else f"error {row.error:.3g}"
        click.echo(f"  {row.name}, step {row.step}: {said}")


def _print_layers(
    verdict: "Verdict", alone: "Verdict | None", as_json: bool, everything: bool
) -> None:
    from lydite.diff.quantized import layer_errors

    layers = layer_errors(verdict.rows, alone.rows if alone else ())
    if as_json:
        click.echo(json.dumps(_plain({"layers": [asdict(each) for each in layers]}), indent=1))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("layer")
    for title in ("local", "accumulated", "first step", "last step"):
        table.add_column(title, justify="right")
    for each in layers if everything else layers[:20]:
        local = "" if each.local is None else f"{each.local:.3g}"
        first, last = each.by_step[0], each.by_step[-1]
        name = each.site.replace("[", "\\[")
        table.add_row(name, local, f"{each.accumulated:.3g}", f"{first:.3g}", f"{last:.3g}")
    _wide_console().print(table)
    if len(layers) > 20 and not everything:
        click.echo(f"… and {len(layers) - 20} more (--all)")
    if not alone:
        click.echo("local errors need the model run again on exact values: --rerun COMMAND")


def _print(verdict: "Verdict", everything: bool) -> None:
    label = click.style(verdict.verdict, fg=COLORS[verdict.verdict], bold=True)
    click.echo(f"{label}  {verdict.sentence}")
    for side in verdict.incomplete:
        click.echo(
            f"incomplete: the trace of the {side} was cut off, or does not say that it ended"
        )
    for finding in verdict.findings:
        said = finding.evidence.rstrip(".") in verdict.sentence
        evidence = "" if said else f": {finding.evidence}"
        click.echo(f"  {click.style(finding.cause, bold=True)}{evidence}")
        click.echo(f"    fix: {finding.fix}")
    rows = verdict.rows if everything else _around(verdict)
    if rows:
        _print_rows(rows, verdict)
    click.echo("gates: " + "; ".join(
        f"{gate.name} {gate.word} ({gate.detail})" for gate in verdict.gates
    ))  # fmt: skip
    if verdict.floor_source:
        click.echo(f"floor: {verdict.floor_source}")
    for remark in verdict.remarks:
        click.echo(f"note: {remark}")
    for remark in verdict.health:
        click.echo(f"health: {remark}")
    _print_alone("reference", verdict.unpaired_reference, everything)
    _print_alone("port", verdict.unpaired_port, everything)


def _around(verdict: "Verdict") -> "Sequence[Row]":
    """The rows next to the bug, and the last: what it grows to. The worst ones when all agree."""
    rows = [row for row in verdict.rows if row.error is not None or row.wrong]
    at = next(
        (
            index
            for index, row in enumerate(rows)
            if (row.site, row.place, row.step) == (verdict.site, verdict.place, verdict.step)
        ),
        None,
    )
    if at is not None:
        near = rows[max(0, at - AROUND) : at + AROUND + 1]
        return [*near, *([rows[-1]] if rows[-1] not in near else [])]
    if verdict.verdict != "diverge":
        return sorted(rows, key=lambda row: -(row.error or 0) / (row.floor or 1))[:AROUND]
    return []


def _print_rows(rows: "Sequence[Row]", verdict: "Verdict") -> None:
    several = len({row.step for row in verdict.rows}) > 1
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("", "value", *(("step",) if several else ()), "error", "limit", "rounding", "×"):
        table.add_column(title, justify="left" if title in ("", "value") else "right")
    for row in rows:
        first = (row.site, row.place, row.step) == (verdict.site, verdict.place, verdict.step)
        known = row.wrong or row.error is not None
        mark = "[red]→[/]" if first else "[red]·[/]" if row.wrong else "[green]✓[/]"
        name = row.name.replace("[", "\\[")
        times = f"{row.error / row.floor:.3g}" if row.error is not None and row.floor else ""
        table.add_row(
            mark if known else "",
            f"[bold]{name}[/]" if first else name,
            *((str(row.step),) if several else ()),
            ("shape" if row.wrong else "not compared") if row.error is None else f"{row.error:.2e}",
            "" if row.limit is None else f"{row.limit:.1e}",
            "" if row.floor is None else f"{row.floor:.1e}",
            times,
        )
    _wide_console().print(table)


def _wide_console() -> Console:
    """Names are long: a file or a pipe gets them whole, a terminal what it has room for."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def _print_alone(side: str, names: Sequence[str], everything: bool) -> None:
    if names and everything:
        click.echo("\n  ".join((f"only in the {side}, {len(names)} names:", *names)))
    elif names:
        more = f" and {len(names) - 3} more (--all)" if len(names) > 3 else ""
        click.echo(f"only in the {side}: {', '.join(names[:3])}{more}")


def _to_json(verdict: "Verdict", alone: "Verdict | None") -> dict[str, Any]:
    result = asdict(verdict)
    if alone is not None:
        result["sources"] = [asdict(row) for row in alone.sources]
    return _plain(result)


def _plain(value: Any) -> Any:
    """JSON has no infinity: null stands for it, as for an error that could not be measured."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
