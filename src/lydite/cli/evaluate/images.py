"""`lydite evaluate images`: two folders of pictures, npz files or calibration sets."""

from contextlib import closing
from pathlib import Path
from typing import Any

import click

from lydite.cli.evaluate.metric_options import (
    check_page,
    metric_options,
    print_evaluation,
    read_metrics,
)
from lydite.cli.request_options import device_option
from lydite.core.errors import InputError


@click.command("images")
@click.argument("reference", metavar="A", type=click.Path(path_type=Path))
@click.argument("candidate", metavar="B", type=click.Path(path_type=Path))
@click.option("--common", is_flag=True, help="Compare the names that both have; leave out others.")
@click.option("--unpaired", is_flag=True, help="Only distances between the sets.")
@metric_options
@device_option
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
def command(reference: Path, candidate: Path, **options: Any) -> None:
    """Compare the pictures of B with those of A, the reference.

    A and B are folders, npz files with an array (N, H, W, 3) of bytes, or calibration sets.
    Pictures of equal names are pairs; the ending of a name does not count.

    \b
    lydite evaluate images full/ quantized/
    lydite evaluate images full/ quantized/ --lpips alex alexnet.safetensors alex.safetensors
    lydite evaluate images real.npz drawn/ --unpaired --inception pt_inception.safetensors
    lydite evaluate images a/ b/ --json > record.json

    Weights of the networks are safetensors files. Of a downloaded .pth file, `lydite inspect
    FILE.pth` prints the command that converts it.

    RGBA, grey and 16-bit pictures are converted to RGB of 8 bits, and that is said.
    """
    from lydite.cli.progress import StepBar
    from lydite.evaluate.evaluation import count_ticks, evaluate, require_something
    from lydite.evaluate.pictures import common_names, open_source

    if options["common"] and options["unpaired"]:
        raise InputError("--common and --unpaired exclude each other.")
    check_page(options, [reference, candidate])
    with closing(open_source(reference)) as one, closing(open_source(candidate)) as other:
        names = None
        if not options["unpaired"]:
            names = common_names(one, other, only_common=options["common"])
        metrics = read_metrics(options)
        require_something(names, metrics)
        total = count_ticks((one, other), names, metrics)
        quiet = options["quiet"] or options["as_json"]
        with StepBar(total, quiet=quiet, unit="picture") as bar:
            metrics.tick = bar.advance
            record = {"reference": reference.name, "candidate": candidate.name}
            evaluation = evaluate(one, other, names, metrics, record=record)
        print_evaluation(evaluation, one, other, options)
