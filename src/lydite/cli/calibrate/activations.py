"""`lydite calibrate activations`: statistics of every layer over a set, merged, and drawn."""

import re
from pathlib import Path

import click

from lydite.cli.aliases import AliasedOption
from lydite.cli.calibrate.draw_missing import StopRequest
from lydite.cli.calibrate.model_options import (
    SampleBar,
    model_options,
    model_words,
    note_on_stop,
    open_model,
)
from lydite.cli.request_options import overwrite_option
from lydite.core.errors import InputError, at

MOST_BANDS = 10_000


@click.command("activations")
@click.argument("sources", metavar="SET|FILE…", nargs=-1, required=True,
                type=click.Path(path_type=Path))  # fmt: skip
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="FILE",
              help="The SQLite file that is made.")  # fmt: skip
@click.option("--group-steps", cls=AliasedOption, old=("--per",), default="step",
              show_default=True, metavar="step|N|all",
              help="Statistics of each kept step, of N even groups, or of all.")  # fmt: skip
@click.option("--group", type=click.IntRange(0), default=0, show_default=True, metavar="N",
              help="Neighbouring channels in one histogram; 0: all of a layer.")  # fmt: skip
@click.option("--part", default="1/1", show_default=True, metavar="I/N",
              help="Only this share of the samples, to be merged later.")  # fmt: skip
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE",
              help="Draw the statistics: a page (.html) or a picture (.png).")  # fmt: skip
@overwrite_option
@model_options
def activations(
    sources: tuple[Path, ...],
    out: Path | None,
    group_steps: str,
    group: int,
    part: str,
    plot: Path | None,
    overwrite: bool,
    model: str | None,
    components: str | None,
    quiet: bool,
) -> None:
    """Collect what every layer of the network takes and gives, over all samples of a set.

    Of each channel at each step: count, least, largest, mean, variance, zeros and negative values;
    of each layer histograms and percentiles. Layers are all linears and convolutions of the
    transformer, their inputs and outputs, and q, k, v and softmax of each attention. The network
    is only looked at: nothing it computes changes.

    Interrupt it and run the same command again to resume. Files of different samples are merged;
    a finished file is drawn without the model.

    \b
    lydite calibrate activations set/ --out stats.sqlite --plot stats.html
    lydite calibrate activations set/ --out a.sqlite --part 1/2      on one machine
    lydite calibrate activations a.sqlite b.sqlite --out stats.sqlite
    lydite calibrate activations stats.sqlite --plot stats.png
    sqlite3 stats.sqlite "select layer, place, max(absmax) from layers group by 1,2 order by 3 desc"
    """
    _check_plot(plot, overwrite, sources)
    if out is not None and out.suffix.lower() == ".parquet":
        raise InputError(f"--out is {out}; statistics are written as SQLite, e.g. stats.sqlite.")
    for source in sources:
        if not source.exists():
            raise InputError(
                f"{at(source)}: no such file or folder. Expected a calibration set, or statistics "
                "that this command made of one."
            )
    first, folders = sources[0], [source for source in sources if source.is_dir()]
    if folders and len(sources) > 1:
        raise InputError("one set at a time; several files of statistics can be merged.")
    if folders:
        _check_group_steps(group_steps)
        if out is None:
            raise InputError("--out is missing: the file that the statistics go to.")
        _collect(first, out, (group_steps, group, _read_part(part)), model, components, quiet)
    elif len(sources) > 1 or out is not None:
        if out is None:
            raise InputError("--out is missing: the file that is merged into.")
        _merge(sources, out, overwrite, quiet)
    elif plot is None:
        raise InputError("nothing to do: give a set and --out, files to merge, or --plot.")
    if plot is not None:
        _draw(out or first, plot, overwrite, quiet)


def _collect(
    folder: Path,
    out: Path,
    selection: tuple[str, int, tuple[int, int]],
    model: str | None,
    components: str | None,
    quiet: bool,
) -> None:
    from lydite.calibrate.store.reader import CalibrationSet

    with CalibrationSet.open(folder) as opened:
        pipeline = open_model(opened, model, components)
        if not quiet and (left := len(opened.missing())):
            click.echo(f"note: the set is incomplete: {left} images miss items.", err=True)
        from lydite.calibrate.activations.collect import Selection, collect

        stop = StopRequest()
        with SampleBar(quiet=quiet) as bar, stop.listening(), note_on_stop():
            new = collect(
                opened,
                pipeline,
                out,
                Selection(*selection),
                on_sample=lambda progress: bar.done(progress.done, progress.total),
                stopping=lambda: stop.asked,
                options=model_words(model, components),
            )
    if not quiet:
        click.echo(f"{out}: complete, {new} samples in this run.")


def _merge(sources: tuple[Path, ...], out: Path, overwrite: bool, quiet: bool) -> None:
    from lydite.calibrate.activations.file import merge_files

    samples = merge_files(sources, out, overwrite=overwrite)
    if not quiet:
        click.echo(f"{out}: statistics of {samples} samples.")


def _draw(path: Path, plot: Path, overwrite: bool, quiet: bool) -> None:
    from lydite.core.outputs import write_output
    from lydite.report.activations import page, picture

    is_page = plot.suffix.lower() == ".html"
    write_output(plot, page(path) if is_page else picture(path), overwrite=overwrite)
    if not quiet:
        click.echo(f"{'page' if is_page else 'picture'}: {plot}")


def _check_plot(plot: Path | None, overwrite: bool, inputs: tuple[Path, ...]) -> None:
    if plot is None:
        return
    if plot.suffix.lower() not in (".html", ".png"):
        raise InputError(f"--plot is {plot}; expected a name that ends in .html or .png.")
    from lydite.calibrate.store.set_file import check_output_path

    check_output_path(plot, overwrite=overwrite, inputs=inputs)


def _check_group_steps(rule: str) -> None:
    if rule in ("step", "all"):
        return
    if not rule.isdecimal() or not 1 <= int(rule) <= MOST_BANDS:
        raise InputError(
            f"--group-steps is {rule!r:.40}; expected step, all, or a number of groups."
        )


def _read_part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise InputError(f"--part is {text!r:.40}; expected I/N such as 1/2, with I from 1 to N.")
    return int(found[1]), int(found[2])
