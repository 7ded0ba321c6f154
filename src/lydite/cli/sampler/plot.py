"""`lydite sampler plot`: curves of sigma, or error over the number of steps."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lydite.cli.complete import complete_sampler_or_schedule, complete_schedule
from lydite.cli.request_options import overwrite_option
from lydite.cli.sampler.options import (
    MODEL_HELP,
    kind_of,
    model_for,
    read_options,
    shared_noise_models,
    start,
)
from lydite.core.errors import InputError

if TYPE_CHECKING:
    from lydite.report.chart import Chart, Line

COUNTS = (4, 6, 8, 12, 16, 24, 32, 48, 64)
LOG = ", logarithmic"
MOST = 12  # lines that can still be distinguished


@click.command("plot")
@click.argument("names", nargs=-1, required=True, shell_complete=complete_sampler_or_schedule)
@click.option("-m", "--model", default=None, metavar="NAME|FOLDER",
              help=f"Whose noise levels: {MODEL_HELP}")  # fmt: skip
@click.option("-n", "--steps", type=click.IntRange(1, 1000), default=None,
              help="Schedules: number of steps. Samplers run 4 to 64. [default: 20]")  # fmt: skip
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE",
              help="An option of the schedules; repeatable.")  # fmt: skip
@click.option("--schedule", metavar="NAME", shell_complete=complete_schedule,
              help="Samplers: the sigmas they run over.")  # fmt: skip
@click.option("--denoiser", default=None, type=click.Choice(["gaussian", "mixture"]),
              help="Samplers: their data. [default: gaussian]")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE",
              help="The PNG. [default: sigmas.png or errors.png]")  # fmt: skip
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE",
              help="Also a page: the picture, and the numbers as a table.")  # fmt: skip
@overwrite_option
def plot(
    names: tuple[str, ...],
    model: str | None,
    steps: int | None,
    options: tuple[str, ...],
    schedule: str | None,
    denoiser: str | None,
    output: Path | None,
    html: Path | None,
    overwrite: bool,
) -> None:
    """Draw the sigmas of schedules, or how fast samplers come to the exact end.

    Sigmas and errors are drawn on logarithmic scales. The error of a sampler of order p falls by
    2^p for twice the steps; it is taken at the last sigma above 0, since the step from there to 0
    is of order 1 in every method. Samplers with an option eta run without their noise, eta = 0.

    \b
    lydite sampler plot normal karras exponential simple -o sigmas.png
    lydite sampler plot flow_shift flux --model sd3 --steps 28
    lydite sampler plot euler heun dpmpp_2m lms -o errors.png --html errors.html
    """
    kinds = {kind_of(name) for name in names}
    if len(kinds) > 1:
        raise InputError("names of samplers and of schedules; one picture shows one kind.")
    names = tuple(dict.fromkeys(names))
    if len(names) > MOST:
        raise InputError(f"{len(names)} lines in one picture; at most {MOST} are readable.")
    from lydite.core.outputs import check_output, write_output
    from lydite.report.chart import draw
    from lydite.report.contact_sheets import png_bytes

    path = output or Path("sigmas.png" if kinds == {"schedule"} else "errors.png")
    if path.suffix.lower() != ".png":
        raise InputError(f"--output is {path}; expected a name that ends in .png.")
    for target in (path, *([html] if html else [])):
        check_output(target, overwrite=overwrite, inputs=[Path(model)] if model else [])
    if kinds == {"schedule"}:
        if schedule or denoiser:
            raise InputError("--schedule and --denoiser are for samplers; these are schedules.")
        chart = _sigmas(names, model, steps or 20, read_options(options))
    else:
        if options:
            raise InputError("--option is for schedules here; samplers run with their defaults.")
        if steps:
            raise InputError(f"--steps is for schedules; samplers run {COUNTS[0]} to {COUNTS[-1]}.")
        chart = _errors(names, model, schedule, denoiser or "gaussian")
    picture = png_bytes(draw(chart))
    write_output(path, picture, overwrite=overwrite)
    click.echo(f"picture: {path}")
    if html:
        page = _page(chart, picture, READ[kinds == {"schedule"}])
        write_output(html, page, overwrite=overwrite)
        click.echo(f"page: {html}")


def _sigmas(
    names: tuple[str, ...], model: str | None, steps: int, options: dict[str, Any]
) -> "Chart":
    from lydite.cli.sampler.show import make
    from lydite.report.chart import Chart
    from lydite.sampling.registry import find_schedule

    shared = shared_noise_models([find_schedule(name) for name in names])
    called = model_for(shared, model)
    known = {name: find_schedule(name).options for name in names}
    for option in options:
        if not any(option in each for each in known.values()):
            raise InputError(f"none of these schedules has an option {option!r:.60}.")
    lines: list[Line] = []
    above: list[str] = []  # those that do not end in 0
    for name in names:
        chosen = {key: value for key, value in options.items() if key in known[name]}
        sigmas = make(name, called, steps, chosen)[0].sigmas.tolist()
        above += [name] if sigmas[-1] > 0 else []
        lines.append(_line(name, [sigma for sigma in sigmas if sigma > 0]))
    flow = "flow" in (shared if len(shared) == 1 else (_noise_model(called),))
    return Chart(
        f"Sigmas of {called}, {steps} steps",
        "step",
        "sigma before each step" + ("" if flow else LOG),
        lines,
        y_scale="linear" if flow else "log",
        note="after these comes 0" + (f", but not for {', '.join(above)}" if above else ""),
    )


def _noise_model(model: str) -> str:
    from lydite.sampling.named_models import find_model

    return find_model(model).noise_model.name


def _line(name: str, values: list[float]) -> "Line":
    from lydite.report.chart import Line

    return Line(name, [(float(index), value) for index, value in enumerate(values)])


def _errors(
    names: tuple[str, ...], model: str | None, schedule: str | None, denoiser: str
) -> "Chart":
    from lydite.conform.convergence import errors
    from lydite.report.chart import Chart, Line
    from lydite.sampling.named_models import default_schedule, find_model
    from lydite.sampling.registry import find_sampler

    shared = shared_noise_models([find_sampler(name) for name in names])
    called = model_for(shared or ("ve",), model)
    levels = find_model(called)
    spacing = schedule or default_schedule(levels)
    lines = [
        Line(
            name,
            [
                (float(count), error)
                for count, error in zip(
                    COUNTS, errors(name, spacing, levels, denoiser, COUNTS, start(1.0)), strict=True
                )
            ],
        )
        for name in names
    ]
    return Chart(
        f"Error on {denoiser} data, {spacing} for {called}",
        "steps",
        "largest difference from the exact x at the last sigma above 0",
        lines,
        x_scale="log",
        y_scale="log",
    )


READ = {  # schedules: how a page is read
    True: "How much noise is left before each step. The steps are short where a curve is flat.",
    False: "How far each sampler ends from the exact answer, over its number of steps. Both scales "
    "are logarithmic: the error of a method of order p falls by 2^p for twice the steps, so that a "
    "steeper line is a higher order. Samplers with an option eta run without their noise. The "
    "error is taken at the last sigma above 0; the step from there to 0 is of order 1 in every "
    "method.",
}


def _page(chart: "Chart", picture: bytes, read: str) -> bytes:
    from lydite.report.page import Chapter, Figure, Figures, Page, Table, render

    places = sorted({x for line in chart.lines for x, _ in line.points})
    rows = []
    for place in places:
        values = [dict(line.points).get(place) for line in chart.lines]
        rows.append((f"{place:g}", *("" if each is None else f"{each:.6g}" for each in values)))
    names = ", ".join(line.name for line in chart.lines)
    label = chart.y_label.removesuffix(LOG)
    head = (chart.x_label, *(line.name for line in chart.lines))
    return render(
        Page(
            chart.title,
            read,
            (
                Chapter("Picture", "", (
                    Figures((Figure(picture, f"{chart.y_label} over {chart.x_label} for {names}"),),
                            size="whole"),
                )),
                Chapter("Numbers", f"{label[0].upper()}{label[1:]}.", (
                    Table(head, tuple(rows), numeric=frozenset(range(len(head)))),
                )),
            ),
            footer="lydite sampler plot",
        )
    )  # fmt: skip
