"""`lydite sampler compare`: where two schedules or two samplers part, and by how much."""

import json
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from lydite.cli.complete import complete_sampler_or_schedule, complete_schedule
from lydite.cli.sampler.options import (
    kind_of,
    model_for,
    model_options,
    read_options,
    shared_noise_models,
    start,
)
from lydite.cli.tables import wide_console
from lydite.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lydite.sampling.registry import Method

SAME = 1e-9  # relative: two ways to write one formula


@click.command("compare")
@click.argument("a", shell_complete=complete_sampler_or_schedule)
@click.argument("b", shell_complete=complete_sampler_or_schedule)
@model_options
@click.option("--schedule", metavar="NAME", shell_complete=complete_schedule,
              help="For samplers: the sigmas they run over.")  # fmt: skip
@click.option("--denoiser", default="mixture", show_default=True,
              type=click.Choice(["zero", "identity", "gaussian", "mixture"]),
              help="For samplers: the analytic denoiser they run on.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def compare(
    a: str,
    b: str,
    model: str | None,
    steps: int | None,
    options: tuple[str, ...],
    schedule: str | None,
    denoiser: str,
    as_json: bool,
) -> None:
    """Compare two schedules sigma by sigma, or two samplers step by step.

    Samplers run from the same values on the same data, with the same noise; options go to whichever
    of the two has them.

    \b
    lydite sampler compare beta_timesteps beta_sigmas --steps 20
    lydite sampler compare flow_shift sd3_diffusers
    lydite sampler compare euler heun --steps 10
    lydite sampler compare dpmpp_2m_sde dpmpp_2m --option eta=0

    Exit status: 0 whatever they are; only input that cannot be used ends with 2.
    """
    kinds = {kind_of(a), kind_of(b)}
    if len(kinds) > 1:
        raise InputError(f"{a} and {b} are not of one kind; compare two samplers or two schedules.")
    given = read_options(options)
    if kinds == {"schedule"}:
        found = _schedules(a, b, model, steps or 10, given)
    else:
        found = _samplers(a, b, model, steps or 8, given, schedule, denoiser)
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        _print(found)


def _model(methods: "Sequence[Method]", model: str | None) -> str:
    """The model that was named, or one that both are for."""
    return model_for(shared_noise_models(methods), model)


def _split(given: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in known}


def _check_used(given: dict[str, Any], *known: dict[str, Any]) -> None:
    for name in given:
        if not any(name in each for each in known):
            raise InputError(f"neither of the two has an option {name!r:.60}.")


def _schedules(
    a: str, b: str, model: str | None, steps: int, given: dict[str, Any]
) -> dict[str, Any]:
    from lydite.cli.sampler.show import make
    from lydite.sampling.registry import find_schedule

    one, other = find_schedule(a), find_schedule(b)
    called = _model((one, other), model)
    _check_used(given, one.options, other.options)
    first = make(a, called, steps, _split(given, one.options))[0]
    second = make(b, called, steps, _split(given, other.options))[0]
    rows = []
    for index in range(max(len(first.sigmas), len(second.sigmas))):
        pair = [
            float(each.sigmas[index]) if index < len(each.sigmas) else None
            for each in (first, second)
        ]
        timesteps = [
            float(each.timesteps[index]) if index < len(each.timesteps) else None
            for each in (first, second)
        ]
        rows.append({"step": index, "a": pair[0], "b": pair[1], "timesteps": timesteps,
                     "difference": _relative(*pair)})  # fmt: skip
    measured = [row for row in rows if row["difference"] is not None]
    worst = max(measured, key=lambda row: row["difference"])
    parted = next((row["step"] for row in rows if _apart(row["difference"])), None)
    return {"kind": "schedule", "a": a, "b": b, "model": called, "first": parted,
            "largest": worst["difference"], "at": worst["step"], "rows": rows}  # fmt: skip


def _samplers(
    a: str,
    b: str,
    model: str | None,
    steps: int,
    given: dict[str, Any],
    schedule: str | None,
    denoiser: str,
) -> dict[str, Any]:
    import numpy as np

    from lydite.cli.sampler.show import make
    from lydite.conform.convergence import denoiser_for, trajectory
    from lydite.sampling.named_models import default_schedule, find_model
    from lydite.sampling.registry import find_sampler

    called = _model((find_sampler(a), find_sampler(b)), model)
    levels = find_model(called)
    spacing = schedule or default_schedule(levels)
    sigmas = make(spacing, called, steps, {})[0].sigmas.tolist()
    _check_used(given, find_sampler(a).options, find_sampler(b).options)
    runs = [
        trajectory(
            name,
            denoiser_for(denoiser, levels),
            start(sigmas[0]),
            sigmas,
            _split(given, find_sampler(name).options),
        )
        for name in (a, b)
    ]
    rows = []
    for index in range(max(map(len, runs))):
        xs = [np.asarray(run[index].x) if index < len(run) else None for run in runs]
        difference = None
        if xs[0] is not None and xs[1] is not None:
            size = max(1.0, float(np.abs(xs[0]).max()))
            difference = float(np.abs(xs[1] - xs[0]).max()) / size
        rows.append({"step": index, "a": None if xs[0] is None else xs[0].tolist(),
                     "b": None if xs[1] is None else xs[1].tolist(),
                     "difference": difference})  # fmt: skip
    measured = [row for row in rows if row["difference"] is not None]
    worst = max(measured, key=lambda row: row["difference"])
    parted = next((row["step"] for row in rows if _apart(row["difference"])), None)
    return {"kind": "sampler", "a": a, "b": b, "model": called, "schedule": spacing,
            "denoiser": denoiser, "first": parted, "largest": worst["difference"],
            "at": worst["step"], "rows": rows}  # fmt: skip


def _relative(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return None
    return 0.0 if a == b else abs(b - a) / max(abs(a), 1e-12)


def _apart(difference: float | None) -> bool:
    return difference is None or difference > SAME


def _print(found: dict[str, Any]) -> None:
    a, b = found["a"], found["b"]
    where = found["model"] if found["kind"] == "schedule" else (
        f"{found['denoiser']} data, {found['schedule']} for {found['model']}"
    )  # fmt: skip
    if found["first"] is None:
        click.echo(f"{a} and {b} are the same here ({where}).")
    else:
        by = f"{found['largest']:.2%}" if found["kind"] == "schedule" else f"{found['largest']:.3g}"
        click.echo(f"{a} and {b} part at step {found['first']}; at step {found['at']} they are "
                   f"{by} apart ({where}).")  # fmt: skip
    table = Table(box=None, padding=(0, 3, 0, 0))
    for title in ("step", a, b, "difference"):
        table.add_column(title, justify="right")
    for row in found["rows"]:
        difference = row["difference"]
        shown = "" if difference is None else f"{difference:.2e}" if difference else "0"
        table.add_row(
            str(row["step"]),
            _cell(row["a"]),
            _cell(row["b"]),
            f"[red]{shown}[/]" if _apart(difference) else f"[green]{shown}[/]",
        )
    wide_console().print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return " ".join(f"{each:+.5f}" for each in value)
    return f"{value:.7g}"
