"""`lydite diff`: the first wrong value between two traces."""

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

from lydite.cli.request_options import overwrite_option
from lydite.cli.safe_streams import progress_stream
from lydite.cli.tables import wide_console
from lydite.core.errors import InputError

if TYPE_CHECKING:
    from lydite.diff.name_map import Rename
    from lydite.diff.repro import Reproduction
    from lydite.diff.result import Row, Verdict
    from lydite.trace.reader import Trace

COLORS = {"agree": "green", "diverge": "red", "cannot-compare": "yellow"}
AROUND = 5  # rows shown before and after the first wrong one
MAX_LAYERS, MAX_SOURCES, MAX_NAMES = 20, 10, 3  # listed without --all


def _check_tolerance(_: object, __: object, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter(f"{value} is not a positive number.")
    return value


@click.command("diff")
@click.argument("reference", type=click.Path(path_type=Path))
@click.argument("port", type=click.Path(path_type=Path))
@click.option("--floor", type=click.Path(path_type=Path), metavar="FOLDER",
              help="The reference in another precision: measures its rounding.")  # fmt: skip
@click.option("--map", "renames", type=click.Path(path_type=Path), metavar="FILE",
              help="map.json: names, axes and slots of the port that differ.")  # fmt: skip
@click.option("--tolerance", type=float, callback=_check_tolerance, metavar="ERROR",
              help="Limit on the relative error, instead of the measured rounding.")  # fmt: skip
@click.option("--rerun", metavar="COMMAND",
              help="Run the port again with this command, on the reference's values.")  # fmt: skip
@click.option("--quantized", is_flag=True,
              help="PORT is quantized: print errors per layer and step, no verdict.")  # fmt: skip
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE",
              help="Write a page: error of every value, module tree, plots.")  # fmt: skip
@click.option("--checkpoint", type=click.Path(path_type=Path), metavar="FOLDER",
              help="The reference's weights: computes linear layers and convolutions again, to "
              "name what is wrong in one.")  # fmt: skip
@click.option("--repro", type=click.Path(path_type=Path), metavar="FOLDER",
              help="Write the first wrong operation alone: inputs, both results, a short "
              "script.")  # fmt: skip
@overwrite_option
@click.option("--all", "everything", is_flag=True, help="Print every row, not only around the bug.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(reference: Path, port: Path, **options: Any) -> None:
    """Find the first wrong value between two traces, without setting a tolerance.

    REFERENCE and PORT are folders written by `lydite trace`, a few lines of Rust or a NumPy script
    (docs/trace-format.md). First the gates: the self-tests of the traces, the conditions of the
    runs, token ids, sigma tables, weights. Then values are paired by name, spelling, equal
    parameters, order and content, in any axis order, and each error is compared with the rounding
    of the reference itself. Values that are wrong because of the first wrong value are not
    reported.

    A port that uses `tap` can be run again with --rerun: every value it computes is recorded and
    then replaced by the reference's, so that each module gets the right inputs.

    \b
    lydite diff ref/ port/
    lydite diff ref/ port/ --floor ref-bf16/ --map map.json --html diff.html
    lydite diff ref/ port/ --rerun "cargo run --release -- --prompt 'a star'"
    lydite diff ref/ port/ --checkpoint model/ --repro wrong/
    lydite diff float/ w4/ --quantized

    Exit status: 0 agree, 1 diverge, 2 could not be compared.
    """
    from lydite.core.outputs import check_output

    html, repro, overwrite = options["html"], options["repro"], options["overwrite"]
    read = (options[name] for name in ("floor", "renames", "checkpoint"))
    inputs = [path for path in (reference, port, *read) if path]
    for path in (html, repro and repro / "check.py"):
        if path:
            check_output(path, overwrite=overwrite, inputs=inputs)
    verdict, isolated, wrong = _compare(reference, port, options)
    if repro and wrong and wrong[0].inputs:
        wrong[0].write(repro, overwrite=overwrite, inputs=inputs)
    if options["quantized"]:
        _print_layers(verdict, isolated, options["as_json"], options["everything"])
        sys.exit(0 if verdict.rows or verdict.verdict != "cannot-compare" else 2)
    if options["as_json"]:
        click.echo(json.dumps(_to_json(verdict, isolated), indent=1))
    else:
        _print(verdict, options["everything"])
        if isolated:
            _print_sources(isolated, options["everything"])
        if html:
            click.echo(f"page: {html}")
        if repro:
            click.echo(_repro_text(repro, wrong))
        if following := _next(verdict, checkpoint=bool(options["checkpoint"]), repro=bool(repro)):
            click.echo(f"next: {following}")
    sys.exit(verdict.exit_code)


def _compare(
    reference: Path, port: Path, options: dict[str, Any]
) -> "tuple[Verdict, Verdict | None, list[Reproduction]]":
    """The verdict, with --rerun that of the second run, and the first wrong operation."""
    from lydite.diff.compare import compare
    from lydite.diff.name_map import read_name_map
    from lydite.trace.reader import Trace

    wrong: list[Reproduction] = []
    console = Console(file=progress_stream())
    with (
        Trace.open(reference) as reference_trace,
        Trace.open(port) as port_trace,
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        traces = reference_trace, port_trace
        names = read_name_map(options["renames"]) if options["renames"] else {}
        tolerance = options["tolerance"]
        task = bar.add_task("comparing", total=None)
        verdict = compare(
            *traces,
            floor=Trace.open(options["floor"]) if options["floor"] else None,
            renames=names,
            tolerance=tolerance,
            checkpoint=options["checkpoint"],
            reproduce=wrong.append if options["repro"] else None,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        isolated = None
        if options["rerun"] is not None:
            isolated = _isolate(*traces, options["rerun"], verdict, names, tolerance)
        if options["html"]:
            from lydite.report.diff.page import write_page

            overwrite = options["overwrite"]
            write_page(options["html"], verdict, *traces, renames=names, overwrite=overwrite)
    return verdict, isolated, wrong


def _next(verdict: "Verdict", *, checkpoint: bool, repro: bool) -> str | None:
    """What brings a verdict without a cause further."""
    if verdict.verdict != "diverge" or verdict.findings or verdict.error is None:
        return None
    if not checkpoint and (verdict.slot or "").startswith("out"):
        return "--checkpoint MODEL gives the reference's weights, to compute the layer again"
    return None if repro else "--repro FOLDER writes this operation alone, with its inputs"


def _repro_text(repro: Path, wrong: "Sequence[Reproduction]") -> str:
    if not wrong:
        return "repro: not written; no operation is wrong by itself"
    if not wrong[0].inputs:
        return (
            f"repro: not written; no value from which {wrong[0].name} is computed is recorded in "
            "the reference. Record the inputs of its module there"
        )
    return f"repro: {repro / 'check.py'}, beside it what the operation gets and returns"


def _isolate(
    reference: "Trace",
    port: "Trace",
    rerun: str,
    free: "Verdict",
    names: "dict[str, Rename]",
    tolerance: float | None,
) -> "Verdict":
    """Run the port again by its own command, on the reference's values."""
    from lydite.diff.divergence.write_injection import isolate
    from lydite.trace.reader import is_trace

    try:
        command = shlex.split(rerun)
    except ValueError as error:
        raise InputError(f"--rerun {rerun!r} is not a command: {error}.") from error
    if not command:
        raise InputError("--rerun is empty; expected the command that runs the port.")

    def run(values: Path, out: Path) -> None:
        added = {"LYDITE_TRACE": out, "LYDITE_INJECT": values, "LYDITE_INJECT_AT": "*:*"}
        variables = os.environ | {key: str(value) for key, value in added.items()}
        try:
            process = subprocess.run(command, env=variables, check=False)
        except OSError as error:
            raise InputError(f"--rerun: {rerun!r} cannot be run: {error.strerror}.") from error
        if process.returncode:
            raise InputError(f"--rerun: {rerun!r} ended with status {process.returncode}.")
        if not is_trace(out):
            raise InputError(f"--rerun: {rerun!r} wrote no trace to the folder in LYDITE_TRACE.")

    with tempfile.TemporaryDirectory() as scratch:
        return isolate(
            reference, port, run, Path(scratch), free=free, renames=names, tolerance=tolerance
        )


def _print_sources(isolated: "Verdict", everything: bool) -> None:
    from lydite.diff.verdict_text import error_text

    sources = isolated.sources
    count = {0: "no value is", 1: "1 value is"}.get(len(sources), f"{len(sources)} values are")
    shown = sources if everything else sources[:MAX_SOURCES]
    part = "" if len(shown) == len(sources) else f"; the first {len(shown)}, --all for the rest"
    click.echo(f"{count} still wrong when computed from the reference's values{part}")
    for row in shown:
        text = row.note if row.error is None else f"error {error_text(row.error)}"
        click.echo(f"  {row.full_name}, step {row.step}: {text}")


def _print_layers(
    verdict: "Verdict", isolated: "Verdict | None", as_json: bool, everything: bool
) -> None:
    from lydite.diff.quantized import layer_errors
    from lydite.diff.result import to_json

    layers = layer_errors(verdict.rows, isolated.rows if isolated else ())
    if as_json:
        click.echo(json.dumps(to_json({"layers": [asdict(layer) for layer in layers]}), indent=1))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("layer")
    for title in ("local", "accumulated", "first step", "last step"):
        table.add_column(title, justify="right")
    for layer in layers if everything else layers[:MAX_LAYERS]:
        local = "" if layer.local is None else f"{layer.local:.3g}"
        first, last = layer.by_step[0], layer.by_step[-1]
        name = layer.site.replace("[", "\\[")
        table.add_row(name, local, f"{layer.accumulated:.3g}", f"{first:.3g}", f"{last:.3g}")
    wide_console().print(table)
    if len(layers) > MAX_LAYERS and not everything:
        click.echo(f"… and {len(layers) - MAX_LAYERS} more (--all)")
    if not isolated:
        click.echo("local errors need a run on the reference's values: --rerun COMMAND")


def print_answer(verdict: "Verdict") -> None:
    """The answer in one word, its sentence, and what was found; no evidence twice."""
    label = click.style(verdict.verdict, fg=COLORS[verdict.verdict], bold=True)
    click.echo(f"{label}  {verdict.sentence}")
    for side in verdict.incomplete:
        click.echo(f"incomplete: the run of the {side} did not end, or its trace does not say so")
    for finding in verdict.findings:
        known = finding.evidence.rstrip(".") in verdict.sentence
        evidence = "" if known else f": {finding.evidence}"
        click.echo(f"  {click.style(finding.label, bold=True)}{evidence}")
        click.echo(f"    {finding.advice}: {finding.fix}")


def _print(verdict: "Verdict", everything: bool) -> None:
    print_answer(verdict)
    rows = verdict.rows if everything else _around(verdict)
    if rows:
        _print_rows(rows, verdict)
    click.echo(f"gates: {_gates_text(verdict)}")
    if verdict.floor_source:
        click.echo(f"rounding: {verdict.floor_source}")
    for remark in verdict.remarks:
        click.echo(f"note: {remark}")
    for remark in verdict.health:
        click.echo(f"health: {remark}")
    _print_unpaired("reference", verdict.unpaired_reference, everything)
    _print_unpaired("port", verdict.unpaired_port, everything)


def _gates_text(verdict: "Verdict") -> str:
    """The gates that ran, then those that could not."""
    texts = [f"{g.name} {g.word} ({g.detail})" for g in verdict.gates if g.compared or not g.passed]
    reasons: dict[str, list[str]] = {}
    for gate in verdict.gates:
        if gate.passed and not gate.compared:
            reasons.setdefault(gate.detail, []).append(gate.name)
    skipped = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
    if not texts:
        return f"none could run ({skipped})"
    return "; ".join([*texts, f"not compared ({skipped})"] if skipped else texts)


def _around(verdict: "Verdict") -> "Sequence[Row]":
    """The rows around the bug, and the last one. The largest errors when all agree."""
    rows = [row for row in verdict.rows if row.error is not None or row.wrong]
    at = next(
        (
            index
            for index, row in enumerate(rows)
            if (row.site, row.slot, row.step) == (verdict.site, verdict.slot, verdict.step)
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
    renamed = any(row.port_site != row.site for row in rows)
    names = ("value of the port", "of the reference") if renamed else ("value",)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("", *names, *(("step",) if several else ()), "error", "limit", "rounding", "×"):
        table.add_column(title, justify="left" if title in ("", *names) else "right")
    for row in rows:
        first = (row.site, row.slot, row.step) == (verdict.site, verdict.slot, verdict.step)
        known = row.wrong or row.error is not None
        mark = "[red]→[/]" if first else "[red]·[/]" if row.wrong else "[green]✓[/]"
        name = row.name.replace("[", "\\[")
        own = row.port_name.replace("[", "\\[") if renamed else name
        times = f"{row.error / row.floor:.3g}" if row.error is not None and row.floor else ""
        table.add_row(
            mark if known else "",
            f"[bold]{own}[/]" if first else own,
            *((name,) if renamed else ()),
            *((str(row.step),) if several else ()),
            ("shape" if row.wrong else "not compared") if row.error is None else f"{row.error:.2e}",
            "" if row.limit is None else f"{row.limit:.1e}",
            "" if row.floor is None else f"{row.floor:.1e}",
            times,
        )
    wide_console().print(table)


def _print_unpaired(side: str, names: Sequence[str], everything: bool) -> None:
    if names and everything:
        click.echo("\n  ".join((f"only in the {side}, {len(names)} names:", *names)))
    elif names:
        more = f" and {len(names) - MAX_NAMES} more (--all)" if len(names) > MAX_NAMES else ""
        click.echo(f"only in the {side}: {', '.join(names[:MAX_NAMES])}{more}")


def _to_json(verdict: "Verdict", isolated: "Verdict | None") -> dict[str, Any]:
    result = verdict.to_json()
    if isolated is not None:
        result["sources"] = isolated.to_json()["sources"]
    return result
