"""The calibration set of `lydite quantize MODEL`: the one given, or a small one drawn for it."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lydite import embedded
from lydite.core.errors import InputError, at
from lydite.core.files import size_text, write_atomic

if TYPE_CHECKING:
    from lydite.calibrate.run import Model
    from lydite.calibrate.store.index import Row
    from lydite.calibrate.store.reader import CalibrationSet
    from lydite.pipelines.pipeline import Pipeline

SET_IMAGES = 16  # of a calibration set that is made here
SET_SEED = 4242  # of the embedded model's own prompts


def open_set(
    stack: ExitStack, ctx: click.Context, model: "Model", work: Path, options: dict[str, Any]
) -> "CalibrationSet":
    """A complete set; one that is drawn here is kept in the folder of work."""
    from lydite.calibrate.store.reader import CalibrationSet
    from lydite.quantize.work import SET

    folder: Path | None = options["set_folder"]
    if folder is None:
        folder = work / SET
        _draw_set(folder, ctx, model, work, options)
    opened = stack.enter_context(CalibrationSet.open(folder))
    if opened.missing():
        raise InputError(f"{at(folder)}: the set is not complete. Resume it first.")
    return opened


def _draw_set(
    folder: Path, ctx: click.Context, model: "Model", work: Path, options: dict[str, Any]
) -> None:
    """Draw a small calibration set."""
    from lydite.cli.calibrate.run import run

    prompts = options["prompts"]
    if prompts is None:
        if model.name != embedded.NAME:
            raise InputError(
                "no calibration set: give --set SET, or --prompts FILE and a small one is "
                "drawn. Only the embedded model has prompts of its own."
            )
        from lydite.embedded.captions import training_prompts

        prompts = work / "prompts.txt"
        texts = [prompt.text for prompt in training_prompts(SET_IMAGES, SET_SEED)]
        write_atomic(prompts, ("\n".join(texts) + "\n").encode())
    if not options["quiet"]:
        click.echo(f"drawing a calibration set of {SET_IMAGES} images.", err=True)
    ctx.invoke(
        run,
        prompts=prompts,
        images=SET_IMAGES,
        model=model.name,
        components=model.components,
        out=folder,
        quiet=options["quiet"],
    )


def take_samples(
    pipeline: "Pipeline", opened: "CalibrationSet", memory: int, options: dict[str, Any]
) -> "list[Row]":
    """As many samples as fit the memory."""
    from lydite.quantize.blocks import choose_samples
    from lydite.quantize.quantize_network import sample_bytes

    size = sample_bytes(pipeline, opened)
    chosen = choose_samples(opened, size, memory, options["samples"])
    if not options["quiet"]:
        total = sum(1 for _ in opened.rows("sample"))
        click.echo(
            f"{len(chosen)} of {total} samples of the set, {size_text(len(chosen) * size)} in "
            "memory.",
            err=True,
        )
    return chosen
