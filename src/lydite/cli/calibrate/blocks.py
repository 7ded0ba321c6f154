"""`lydite calibrate blocks`: inputs and outputs of attention and feed-forward modules on disk."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lydite.cli.aliases import AliasedOption, StoreDtype
from lydite.cli.calibrate.draw_missing import StopRequest
from lydite.cli.calibrate.model_options import (
    SampleBar,
    model_options,
    model_words,
    note_on_stop,
    open_model,
)
from lydite.core.errors import InputError

if TYPE_CHECKING:
    from lydite.calibrate.blocks import SizeEstimate


@click.command("blocks")
@click.argument("folder", metavar="SET", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="FOLDER", required=True,
              help="A new folder, or one to resume.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(1), metavar="N",
              help="Keep N tokens of each stream; all by default.")  # fmt: skip
@click.option("--modules", default="*", metavar="PATTERN",
              help="Only modules of such names, as transformer_blocks.0.* or *.ff.")  # fmt: skip
@click.option("--budget", default="2GB", show_default=True, metavar="BYTES",
              help="Of all that is written; as many images as fit are taken.")  # fmt: skip
@click.option("--store-dtype", cls=AliasedOption, old=("--dtype",), type=StoreDtype(),
              default="float16", show_default=True,
              help="Precision of what is stored.")  # fmt: skip
@model_options
def blocks(
    folder: Path,
    out: Path,
    tokens: int | None,
    modules: str,
    budget: str,
    store_dtype: str,
    model: str | None,
    components: str | None,
    quiet: bool,
) -> None:
    """Write what the attention and feed-forward modules of each block take and give.

    The network runs again on the latents of SET, once for each sample. Of a feed-forward, --tokens
    are kept of input and output; of an attention all of the input, since each output depends on
    it, and --tokens of the output. Who learns one block at a time names it with --modules. How much
    will be written is printed before it begins.

    The result is a calibration set: interrupt it and run the same command again to resume, and
    verify, merge or repair it like any other.

    \b
    lydite calibrate blocks set/ --out blocks/
    lydite calibrate blocks set/ --out blocks/ --tokens 64 --budget 500MB
    lydite calibrate blocks set/ --out block0/ --modules 'transformer_blocks.0.*'
    lydite calibrate verify blocks/
    """
    from lydite.calibrate.store.reader import CalibrationSet
    from lydite.cli.recording import read_bytes

    allowed = read_bytes(budget)
    if os.path.realpath(out) == os.path.realpath(folder):
        raise InputError("--out is the set itself; give another folder.")
    with CalibrationSet.open(folder) as opened:
        pipeline = open_model(opened, model, components)
        from lydite.calibrate.blocks import BlockOptions, store_blocks
        from lydite.calibrate.settings import STORE_DTYPES

        stop = StopRequest()
        with SampleBar(quiet=quiet) as bar, stop.listening(), note_on_stop():
            volume = store_blocks(
                opened,
                pipeline,
                out,
                BlockOptions(tokens or 0, STORE_DTYPES[store_dtype], modules),
                allowed,
                on_estimate=lambda volume: (
                    None if quiet else click.echo(_size_text(volume), err=True)
                ),
                on_sample=bar.done,
                stopping=lambda: stop.asked,
                options=model_words(model, components),
            )
    if not quiet:
        click.echo(f"{out}: {volume.samples} samples of {volume.images} images.")


def _size_text(volume: "SizeEstimate") -> str:
    from lydite.core.files import size_text

    return (
        f"{size_text(volume.bytes)} for {volume.samples} samples of {volume.images} of "
        f"{volume.of} images."
    )
