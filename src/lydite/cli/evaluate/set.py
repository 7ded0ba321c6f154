"""`lydite evaluate set`: the pictures of a calibration set."""

from contextlib import closing
from pathlib import Path
from typing import Any

import click

from lydite.cli.evaluate.calibration_sets import compare_sets
from lydite.cli.evaluate.metric_options import (
    check_page,
    metric_options,
    print_evaluation,
    read_metrics,
)
from lydite.cli.request_options import device_option
from lydite.core.errors import InputError


@click.command("set")
@click.argument("folder", metavar="SET", type=click.Path(path_type=Path))
@click.option("--against", type=click.Path(path_type=Path), metavar="SET",
              help="A set of the same prompts and seeds, drawn by the reference.")  # fmt: skip
@metric_options
@device_option
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
def command(folder: Path, against: Path | None, **options: Any) -> None:
    """Measure the pictures of a calibration set.

    Prompt accuracy of the embedded model, CLIP score, Inception score; with --against also how far
    it is from another set.

    \b
    lydite evaluate set set/
    lydite evaluate set quantized/ --against full/ --html page.html
    lydite evaluate set set/ --clip clip-vit-large-patch14/
    """
    from lydite.cli.progress import StepBar
    from lydite.evaluate.evaluation import count_ticks, evaluate_one
    from lydite.evaluate.pictures import SetPictures

    check_page(options, [folder, against])
    metrics = read_metrics(options)
    if against is not None:
        compare_sets(against, folder, metrics, options)
        return
    with closing(SetPictures.open(folder)) as source:
        quiet = options["quiet"] or options["as_json"]
        total = count_ticks((source,), None, metrics)
        with StepBar(total, quiet=quiet, unit="picture") as bar:
            metrics.tick = bar.advance
            evaluation = evaluate_one(source, metrics)
        if not evaluation.distribution:
            raise InputError(
                f"{source.where}: nothing to measure. Give --against SET, --clip FOLDER or "
                "--inception FILE."
            )
        print_evaluation(evaluation, source, source, options)
