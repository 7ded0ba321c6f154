"""`lydite sampler list`: every sampler and schedule with its proofs and its source."""

import json
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from lydite.cli.aliases import AliasedOption
from lydite.cli.tables import wide_console

if TYPE_CHECKING:
    from lydite.sampling.registry import Sampler, ScheduleKind

WIDE = 160  # columns for everything; with fewer, proofs and sources are left out
LEGEND = (
    "",
    "order: twice the steps make the error 2^order times smaller. calls: of the network, a step.",
    "noise: stream is drawn anew at each step, path is that of a Brownian path; empty is none.",
    "for: ve are eps, v, x0, edm and cosmos models, flow are flow models such as SD3 and FLUX.",
    "steps: n is the number given; T is the number of timesteps in training.",
)
PROOFS = (
    "proofs: a program whose numbers ours are; identity, a case that equals another sampler; "
    "order, its measured convergence; stationarity, the spread that its noise keeps."
)
MORE = "Proofs and sources: lydite sampler show NAME, or this list in a window of 160 columns."


@click.command("list")
@click.argument("words", nargs=-1)
@click.option("--noise-model", cls=AliasedOption, old=("--law",),
              type=click.Choice(["ve", "flow"]),
              help="Only those for eps and v models (ve), or for flow models.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def list_(words: tuple[str, ...], noise_model: str | None, as_json: bool) -> None:
    """List samplers and schedules with what proves each of them and where it is from.

    WORDS choose names that contain one of them.

    \b
    lydite sampler list
    lydite sampler list dpmpp karras
    lydite sampler list --noise-model flow
    lydite sampler list | grep ancestral           one line each when it is piped
    lydite sampler list --json | jq -r '.samplers[] | [.name, .proof] | @tsv'
    """
    from lydite.core.errors import InputError
    from lydite.sampling.registry import SAMPLERS, SCHEDULES

    def is_chosen(each: "Sampler | ScheduleKind") -> bool:
        named = not words or any(word.lower() in each.name for word in words)
        return named and (noise_model is None or noise_model in each.noise_models)

    samplers = [each for each in SAMPLERS.values() if is_chosen(each)]
    schedules = [each for each in SCHEDULES.values() if is_chosen(each)]
    if words and not samplers and not schedules:
        raise InputError(f"no sampler or schedule has {' or '.join(map(repr, words))} in its name.")
    if as_json:
        records = {
            "samplers": [sampler_record(each) for each in samplers],
            "schedules": [schedule_record(each) for each in schedules],
        }
        click.echo(json.dumps(records, indent=1))
        return
    console = wide_console()
    if not console.is_terminal:  # one line each, for grep and cut
        for each in (*samplers, *schedules):
            noise_models = ",".join(each.noise_models)
            click.echo(f"{each.name}\t{each.kind}\t{noise_models}\t{each.about}")
        return
    whole = console.width >= WIDE
    if samplers:
        console.print(_samplers(samplers, whole))
    if schedules:
        console.print(_schedules(schedules, whole))
    for line in (*LEGEND, PROOFS if whole else MORE):
        click.echo(line)


def sampler_record(sampler: "Sampler") -> dict[str, Any]:
    """What is known of a sampler, as JSON takes it."""
    return {
        "name": sampler.name,
        "about": sampler.about,
        "order": sampler.order,
        "calls": sampler.calls,
        "noise": sampler.noise,
        "laws": list(sampler.noise_models),
        "pair": sampler.pair,
        "options": {name: _plain(value) for name, value in sampler.options.items()},
        "proofs": list(sampler.proofs),
        "proof": "; ".join(sampler.proofs),
        "source": sampler.source,
    }


def schedule_record(kind: "ScheduleKind") -> dict[str, Any]:
    """What is known of a schedule, as JSON takes it."""
    return {
        "name": kind.name,
        "about": kind.about,
        "steps": kind.count,
        "laws": list(kind.noise_models),
        "options": {
            name: None if name in kind.needs else _plain(value)
            for name, value in kind.options.items()
        },
        "needs": list(kind.needs),
        "proofs": list(kind.proofs),
        "proof": "; ".join(kind.proofs),
        "source": kind.source,
    }


def _samplers(samplers: "list[Sampler]", whole: bool) -> Table:
    count = f"{len(samplers)} sampler{'s' if len(samplers) != 1 else ''}"
    table = _table(count, "order", "calls", "noise", "for", "what it does", whole=whole)
    for each in samplers:
        cells = (
            "" if each.order is None else f"{each.order:g}",
            str(each.calls),
            "" if each.noise == "none" else each.noise,
            " ".join(each.noise_models),
            each.about,
        )
        _add(table, each, cells, whole)
    return table


def _schedules(schedules: "list[ScheduleKind]", whole: bool) -> Table:
    count = f"{len(schedules)} schedule{'s' if len(schedules) != 1 else ''}"
    table = _table(count, "steps", "for", "what it does", whole=whole)
    for each in schedules:
        _add(table, each, (each.count, " ".join(each.noise_models), each.about), whole)
    return table


def _table(title: str, *columns: str, whole: bool) -> Table:
    columns = ("", *columns, *(("proofs", "source") if whole else ()))
    table = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    return table


def _add(table: Table, each: "Sampler | ScheduleKind", cells: tuple[str, ...], whole: bool) -> None:
    more = ("; ".join(each.proofs), each.source) if whole else ()
    table.add_row(f"[bold]{each.name}[/]", *cells, *more)


def _plain(value: Any) -> Any:
    """A default as JSON has it; other objects as their text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
