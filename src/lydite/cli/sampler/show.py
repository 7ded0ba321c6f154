"""`lydite sampler show`: one schedule as a table, or one sampler on a run to check by hand."""

import json
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from lydite.cli.complete import complete_convention, complete_sampler_or_schedule, complete_schedule
from lydite.cli.sampler.options import (
    kind_of,
    model_for,
    model_options,
    read_options,
    start,
)
from lydite.cli.tables import wide_console

if TYPE_CHECKING:
    from lydite.sampling.schedules.schedule import ModelSigmas, Schedule


@click.command("show")
@click.argument("name", shell_complete=complete_sampler_or_schedule)
@model_options
@click.option("--schedule", metavar="NAME", shell_complete=complete_schedule,
              help="For a sampler: the sigmas it runs over.")  # fmt: skip
@click.option("--denoiser", default="gaussian", show_default=True,
              type=click.Choice(["zero", "identity", "gaussian", "mixture"]),
              help="For a sampler: the analytic denoiser it runs on.")  # fmt: skip
@click.option("--convention", metavar="NAME", shell_complete=complete_convention,
              help="For a schedule: as k-diffusion, comfyui, a1111 or diffusers has "
                   "it.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def show(
    name: str,
    model: str | None,
    steps: int | None,
    options: tuple[str, ...],
    schedule: str | None,
    denoiser: str,
    convention: str | None,
    as_json: bool,
) -> None:
    """Show a schedule's sigmas, timesteps and c_in, or a sampler's options and one of its runs.

    c_in is what the latent is multiplied with before it goes into the model's network: 1/√(σ² + 1)
    for eps and v, 1/√(σ² + ½²) for edm, 1/(σ + 1) for cosmos, 1 for flow models. A sampler
    runs from four fixed values over a schedule, on data drawn from N(0.3, 0.5²) by default, where
    the exact end is known.

    \b
    lydite sampler show karras --steps 10
    lydite sampler show flow_shift --model sd3 --steps 28
    lydite sampler show karras --model my-sdxl/ --option rho=5
    lydite sampler show normal --convention comfyui --steps 20
    lydite sampler show dpmpp_2m --steps 8 --schedule exponential
    """
    given = read_options(options)
    if kind_of(name) == "schedule":
        found = _schedule(name, model, steps or 10, given, convention)
    else:
        found = _sampler(name, model, steps or 8, given, schedule, denoiser)
    if as_json:
        click.echo(json.dumps(found, indent=1))
    elif "timesteps" in found:
        _print_schedule(found)
    else:
        _print_sampler(found)


def make(
    name: str,
    model: str | None,
    steps: int,
    options: dict[str, Any],
    convention: str | None = None,
    sampler: str = "",
) -> "tuple[Schedule, ModelSigmas, str]":
    """A schedule, the model it is for, and that model's name."""
    from lydite.sampling.named_models import find_model
    from lydite.sampling.program_conventions import find_convention, plan_schedule
    from lydite.sampling.registry import find_schedule

    kind = find_schedule(name)
    called = model_for(kind.noise_models, model)
    levels = find_model(called)
    if convention is None:
        return kind.make(steps, levels, **options), levels, called
    program = find_convention(convention)
    made = plan_schedule(
        program, sampler=sampler, schedule=name, steps=steps, model=levels, **options
    )
    return made, levels, called


def _schedule(
    name: str, model: str | None, steps: int, options: dict[str, Any], convention: str | None
) -> dict[str, Any]:
    from lydite.cli.sampler.list import schedule_record
    from lydite.sampling.denoiser import find_prediction
    from lydite.sampling.named_models import default_prediction
    from lydite.sampling.registry import find_schedule

    made, levels, called = make(name, model, steps, options, convention)
    scaled = find_prediction(default_prediction(levels))
    sigmas = made.sigmas.tolist()
    return {
        **schedule_record(find_schedule(name)),
        "model": called,
        "asked": steps,
        "convention": convention,
        "sigmas": sigmas,
        "timesteps": made.timesteps.tolist(),
        "c_in": [scaled.c_in(sigma) for sigma in sigmas[:-1]],
    }


def _sampler(
    name: str,
    model: str | None,
    steps: int,
    options: dict[str, Any],
    schedule: str | None,
    denoiser: str,
) -> dict[str, Any]:
    import numpy as np

    from lydite.cli.sampler.list import sampler_record
    from lydite.conform.convergence import denoiser_for, exact, trajectory
    from lydite.sampling.named_models import default_schedule, find_model
    from lydite.sampling.registry import find_sampler

    found = find_sampler(name)
    called = model_for(found.noise_models, model)
    levels = find_model(called)
    spacing = schedule or default_schedule(levels)
    sigmas = make(spacing, called, steps, {})[0].sigmas.tolist()
    found.check_options(options)
    denoise, x = denoiser_for(denoiser, levels), start(sigmas[0])
    end = exact(denoise, x, sigmas)
    run = [
        {
            "step": step.index,
            "sigma": step.sigma,
            "sigma_next": step.sigma_next,
            "x": np.asarray(step.x).tolist(),
            "denoised": np.asarray(step.denoised).tolist(),
        }
        for step in trajectory(name, denoise, x, sigmas, options)
    ]
    return {
        **sampler_record(found),
        "note": found.note,
        "model": called,
        "schedule": spacing,
        "denoiser": denoiser,
        "start": x.tolist(),
        "run": run,
        "exact": end.tolist(),
        "error": float(np.abs(np.array(run[-1]["x"]) - end).max()) if run else None,
    }


def _print_schedule(found: dict[str, Any]) -> None:
    click.echo(f"{click.style(found['name'], bold=True)}  {found['about']}")
    _print_record(found)
    count = len(found["timesteps"])
    more = f", not {found['asked']}" if count != found["asked"] else ""
    program = f" as {found['convention']} has it" if found["convention"] else ""
    click.echo(f"{found['model']}, {count} steps{more}{program}\n")
    table = Table(box=None, padding=(0, 3, 0, 0))
    for title in ("step", "sigma", "timestep", "c_in"):
        table.add_column(title, justify="right")
    rows = zip(found["sigmas"], found["timesteps"], found["c_in"], strict=False)
    for index, (sigma, timestep, scale) in enumerate(rows):
        table.add_row(
            str(index),
            f"{sigma:.7g}",
            f"{timestep if abs(timestep) > 1e-9 else 0:.6g}",
            f"{scale:.6f}",
        )
    table.add_row("end", f"{found['sigmas'][-1]:.7g}", "", "")
    wide_console().print(table)


def _print_sampler(found: dict[str, Any]) -> None:
    click.echo(f"{click.style(found['name'], bold=True)}  {found['about']}")
    _print_record(found)
    order = "" if found["order"] is None else f"order {found['order']:g}, "
    noise = {"none": "no noise", "stream": "fresh noise", "path": "noise of a Brownian path"}
    click.echo(
        f"{order}{found['calls']} call{'s' if found['calls'] > 1 else ''} of the network a step, "
        f"{noise[found['noise']]}, for {' and '.join(found['laws'])}"
        f"{', needs the unconditional prediction too' if found['pair'] else ''}\n"
    )
    if found["note"]:
        click.echo(f"note: {found['note']}\n")
    click.echo(f"{found['denoiser']} data, {found['schedule']} for {found['model']}:")
    table = Table(box=None, padding=(0, 3, 0, 0))
    for title in ("step", "sigma", "to", "x", "denoised"):
        table.add_column(title, justify="right")
    table.add_row("", "", "", _few(found["start"]), "")
    for step in found["run"]:
        table.add_row(
            str(step["step"]),
            f"{step['sigma']:.5g}",
            f"{step['sigma_next']:.5g}",
            _few(step["x"]),
            _few(step["denoised"]),
        )
    table.add_row("exact", "", "", _few(found["exact"]), "")
    wide_console().print(table)
    ode = (
        "" if found["noise"] == "none" else " of the ODE, which a sampler with noise does not solve"
    )
    click.echo(f"error against the exact end{ode}: {found['error']:.3g}")


def _print_record(found: dict[str, Any]) -> None:
    click.echo(f"source: {found['source']}")
    click.echo(f"proofs: {found['proof']}")
    chosen = ", ".join(
        f"{name} (needed)" if name in found.get("needs", ()) else f"{name}={value}"
        for name, value in found["options"].items()
    )
    click.echo(f"options: {chosen or 'none'}")


def _few(values: list[float]) -> str:
    return " ".join(f"{value:+9.5f}" for value in values)
