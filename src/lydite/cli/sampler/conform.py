"""`lydite sampler conform`: a problem to solve, and the verdict on an answer."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from lydite.cli.complete import complete_convention, complete_sampler, complete_schedule
from lydite.cli.request_options import overwrite_option
from lydite.cli.sampler.options import MODEL_HELP, finite, read_options
from lydite.cli.tables import wide_console
from lydite.core.errors import InputError

if TYPE_CHECKING:
    from lydite.conform.result import Row, Verdict

COLORS = {"conforms": "green", "deviates": "red", "cannot-judge": "yellow"}
AROUND = 4  # rows shown on either side of the first wrong one


@click.command("conform")
@click.argument("problem", type=click.Path(path_type=Path), required=False)
@click.argument("answer", type=click.Path(path_type=Path), required=False)
@click.option("--write", type=click.Path(path_type=Path), metavar="FILE",
              help="Write a problem instead of judging one.")  # fmt: skip
@overwrite_option
@click.option("--sampler", default=None, metavar="NAME", shell_complete=complete_sampler,
              help="[default: euler]")  # fmt: skip
@click.option("--schedule", default=None, metavar="NAME", shell_complete=complete_schedule,
              help="The sigmas. [default: karras, or flow_shift for flow models]")  # fmt: skip
@click.option("--schedule-only", is_flag=True, help="Ask for the tables alone, no sampler.")
@click.option("-n", "--steps", type=click.IntRange(1, 1000), default=None, help="[default: 8]")
@click.option("-m", "--model", default=None, metavar="NAME|FOLDER",
              help=f"Whose noise levels: {MODEL_HELP} [default: sd15]")  # fmt: skip
@click.option("--prediction", type=click.Choice(
                  ["denoised", "eps", "v", "x0", "edm", "cosmos", "flow"]),
              help="What the stand-in for a network predicts. [default: the model's]")  # fmt: skip
@click.option("--denoiser", type=click.Choice(["zero", "identity", "gaussian", "mixture"]),
              help="What its data is. [default: mixture]")  # fmt: skip
@click.option("--guidance", type=float, default=None, metavar="SCALE",
              help="Classifier-free guidance, on two such networks.")  # fmt: skip
@click.option("--convention", metavar="NAME", shell_complete=complete_convention,
              help="Timesteps and start as k-diffusion, comfyui, a1111 or diffusers has "
                   "them.")  # fmt: skip
@click.option("--seed", type=int, default=None, help="Of all noise in the problem. [default: 0]")
@click.option("-o", "--option", "options", multiple=True, metavar="NAME=VALUE",
              help="An option of the sampler; repeatable.")  # fmt: skip
@click.option("--schedule-option", "settings", multiple=True, metavar="NAME=VALUE",
              help="An option of the schedule; repeatable.")  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="Every value in the table.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def conform(
    problem: Path | None,
    answer: Path | None,
    write: Path | None,
    overwrite: bool,
    everything: bool,
    as_json: bool,
    **spec: Any,
) -> None:
    """Judge a sampler or a schedule in any language, without a network.

    A problem is one JSON file: sigmas, timesteps, where to start, and a network that is a formula
    of five lines. Your program reads it, runs its own loop, and writes x after each step: as JSON,
    {"x": [[…], […], …]}, or as event sampler/x of a trace (docs/conform.md;
    examples/sampler_candidate.py is one in NumPy). We run the same problem, say which step goes
    wrong and by how much beyond rounding, and name what was done instead, if replaying 65 known
    mistakes, every other sampler and every other schedule gives your numbers.

    \b
    lydite sampler conform --write problem.json --sampler dpmpp_2m --guidance 5
    lydite sampler conform --write problem.json --model sd3 --sampler euler --steps 12
    lydite sampler conform --write table.json --schedule karras --schedule-only --steps 20
    python examples/sampler_candidate.py problem.json run
    lydite sampler conform problem.json run
    lydite sampler conform problem.json answer.json --json

    Exit status: 0 it conforms, 1 it deviates, 2 it could not be judged.
    """
    if write:
        if problem:
            raise InputError(
                "--write makes a problem; judging takes PROBLEM and ANSWER without it."
            )
        _write(write, overwrite, as_json, **spec)
        return
    if problem is None or answer is None:
        raise InputError(
            "nothing to judge: give PROBLEM and ANSWER, or --write FILE to make a problem."
        )
    for name, value in spec.items():
        if value is not None and value is not False and value != ():  # 0 is a value
            raise InputError(
                f"--{name.replace('_', '-')} goes with --write; a problem has its own."
            )
    from lydite.conform.judge import judge_path
    from lydite.conform.problem import read_problem

    verdict = judge_path(read_problem(problem), answer)
    if as_json:
        click.echo(json.dumps(_to_json(verdict), indent=1))
    else:
        _print(verdict, everything)
    sys.exit(verdict.exit_code)


def _write(
    path: Path,
    overwrite: bool,
    as_json: bool,
    *,
    sampler: str | None,
    schedule: str | None,
    schedule_only: bool,
    steps: int | None,
    model: str | None,
    prediction: str | None,
    denoiser: str | None,
    guidance: float | None,
    convention: str | None,
    seed: int | None,
    options: tuple[str, ...],
    settings: tuple[str, ...],
) -> None:
    from lydite.conform.make_problem import ProblemSpec, make_problem
    from lydite.conform.problem import write_problem
    from lydite.core.outputs import check_output

    if schedule_only and (sampler or options):
        raise InputError(
            "--schedule-only asks for tables; --sampler and --option are for a sampler."
        )
    spec = ProblemSpec(
        None if schedule_only else sampler or "euler",
        schedule,
        8 if steps is None else steps,
        model or "sd15",
        prediction,
        denoiser or "mixture",
        guidance,
        seed or 0,
        read_options(options),
        read_options(settings),
        convention,
    )
    check_output(path, overwrite=overwrite, inputs=[Path(model)] if model else [])
    made = make_problem(spec)
    write_problem(path, made, overwrite=overwrite)
    if as_json:
        click.echo(json.dumps({"problem": str(path), "sampler": made.sampler,
                               "schedule": made.schedule, "steps": made.steps}))  # fmt: skip
        return
    what = made.sampler or "tables only"
    click.echo(
        f"{path}: {what}, {made.schedule}, {made.steps} steps, {made.prediction} "
        f"prediction of {made.denoiser.name} data"
    )
    if made.sampler is None:
        click.echo('Write the tables as {"sigmas": […], "timesteps": […]} into answer.json; then:')
    else:
        click.echo('Write x after each step as {"x": [[…], […], …]} into answer.json; then:')
    click.echo(f"  lydite sampler conform {path} answer.json")


def _print(verdict: "Verdict", everything: bool) -> None:
    label = click.style(verdict.verdict, fg=COLORS[verdict.verdict], bold=True)
    click.echo(f"{label}  {verdict.sentence}")
    for finding in verdict.findings:
        click.echo(f"  {click.style(finding.cause, bold=True)}: {finding.evidence}")
        click.echo(f"    fix: {finding.fix}")
    rows = verdict.rows if everything else _chosen(verdict)
    if rows:
        _print_rows(rows, verdict)
        if len(rows) < len(verdict.rows):
            click.echo(f"… and {len(verdict.rows) - len(rows)} more values (--all)")
    for remark in verdict.remarks:
        click.echo(f"note: {remark}")


def _chosen(verdict: "Verdict") -> "list[Row]":
    """What is judged, around the first wrong value; and what is wrong right before it."""
    first = next((i for i, row in enumerate(verdict.rows) if row.judged and row.wrong), None)
    judged = [
        row
        for i, row in enumerate(verdict.rows)
        if row.judged or (first is not None and first - AROUND <= i < first)
    ]
    if first is None:
        return judged[-2 * AROUND :]
    at = judged.index(verdict.rows[first])
    return judged[max(0, at - AROUND) : at + 2 * AROUND]


def _print_rows(rows: "list[Row] | tuple[Row, ...]", verdict: "Verdict") -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("", "step", "value", "error", "rounding", "allowed"):
        table.add_column(title, justify="left" if title in ("", "value") else "right")
    first = next((row for row in verdict.rows if row.judged and row.wrong), None)
    for row in rows:
        mark = "[red]→[/]" if row is first else "[red]·[/]" if row.wrong else "[green]✓[/]"
        name = row.name + (f", call {row.call}" if row.call else "")
        error = "missing" if row.error is None else f"{row.error:.2e}"
        table.add_row(mark, str(row.step), name, error, f"{row.floor:.1e}", f"{row.limit:.1e}")
    wide_console().print(table)


def _to_json(verdict: "Verdict") -> dict[str, Any]:
    found = finite(asdict(verdict))
    for raw, row in zip(found["rows"], verdict.rows, strict=True):
        raw["wrong"] = row.wrong
    return found
