"""`lydite quantize MODEL`: calibrate, round, export, evaluate."""

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lydite.cli.calibrate.draw_missing import StopRequest, absolute_model
from lydite.cli.calibrate.model_options import note_on_stop
from lydite.cli.progress import StepBar
from lydite.cli.quantize.calibration import open_set, take_samples
from lydite.cli.quantize.evaluation import EVALUATED, REPORT, check_evaluation, evaluate_export
from lydite.cli.quantize.settings import (
    ITERATIONS,
    METHODS,
    TUNED,
    check_options,
    check_places,
    measured_plan,
    plan_text,
    read_settings,
)
from lydite.cli.request_options import components_option, device_option, typed_arguments
from lydite.core.errors import FileError, at
from lydite.weights.quantized_format import BITS, FORMATS

if TYPE_CHECKING:
    from lydite.calibrate.run import Model
    from lydite.quantize.provenance import Provenance
    from lydite.quantize.quantize_blocks import BlockResult
    from lydite.quantize.quantize_model import Quantization


@click.command("model")
@click.argument("model", metavar="MODEL")
@click.option("--method", type=click.Choice(METHODS), default="gptq", show_default=True,
              help="rtn and hqq need no data; gptq takes minutes; adaround, joint, taqdit and "
                   "ptq4dit learn, and take longest.")  # fmt: skip
@click.option("--bits", type=click.Choice([str(bits) for bits in BITS]), default="4",
              show_default=True, help="Of the linears inside the blocks.")  # fmt: skip
@click.option("--group", type=click.Choice(("32", "64", "128", "channel")), default="64",
              show_default=True, help="Inputs that share a scale.")  # fmt: skip
@click.option("--format", type=click.Choice(tuple(FORMATS)), default="affine", show_default=True,
              help="mxfp4, mxfp8 and nvfp4 are floating-point formats of MLX, with bits and groups "
                   "of their own; for rtn and gptq.")  # fmt: skip
@click.option("--act-bits", type=click.IntRange(2, 8), metavar="N",
              help="Also round the inputs of these linears, one static range each: simulated, MLX "
                   "has no such products.")  # fmt: skip
@click.option("--act-groups", type=click.IntRange(1), default=1, show_default=True, metavar="N",
              help="Ranges of these inputs for N groups of steps, not one for all.")  # fmt: skip
@click.option("--quantize-input", is_flag=True,
              help="Also round these inputs to --format nvfp4 or mxfp8, as such products of MLX do "
                   "(mx.qqmm); simulated on a device without them.")  # fmt: skip
@click.option("--bpw", type=click.FloatRange(2.5, 9), metavar="X",
              help="Bits per weight on average, by measured sensitivity; instead of "
                   "--bits.")  # fmt: skip
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), metavar="FILE",
              help="Bits of each layer, from `lydite quantize plan --save`.")  # fmt: skip
@click.option("--convolutions", is_flag=True,
              help="Also those inside the blocks of a U-Net, rounded to nearest.")  # fmt: skip
@click.option("--rank", type=click.IntRange(1, 256), metavar="N",
              help="Of a branch in 16 bits beside each weight, as in SVDQuant.")  # fmt: skip
@click.option("--tune", type=click.IntRange(1), metavar="N",
              help="Then N iterations of DWQ: scales, offsets and biases are tuned by distillation "
                   f"through the whole network. --method dwq is rtn with {TUNED}.")  # fmt: skip
@click.option("--set", "set_folder", type=click.Path(path_type=Path), metavar="SET",
              help="A calibration set of MODEL. By default a small one is drawn.")  # fmt: skip
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE",
              help="For a set that is drawn here, and for the evaluation where --eval-prompts is "
                   "not given.")  # fmt: skip
@click.option("--iterations", type=click.IntRange(1), default=ITERATIONS, show_default=True,
              help="Of a learned method, for each module; the papers use 20,000.")  # fmt: skip
@click.option("--samples", type=click.IntRange(2), metavar="N",
              help="Of the set, at most; all steps equally often.")  # fmt: skip
@click.option("--memory", default="4GB", show_default=True, metavar="BYTES",
              help="For inputs and outputs of one block, which decides how many samples are used, "
                   "and as much again for one call of it.")  # fmt: skip
@click.option("-s", "--seed", type=click.IntRange(0, 2**31), default=0, show_default=True,
              help="Of what is random in learning.")  # fmt: skip
@click.option("--eval-prompts", type=click.Path(path_type=Path), metavar="FILE",
              help="Prompts of the evaluation.")  # fmt: skip
@click.option("--eval-images", type=click.IntRange(2), metavar="N",
              help=f"Pictures of the evaluation; {EVALUATED} by default.")  # fmt: skip
@click.option("--against", metavar="SET",
              help="Pictures that the original drew before, as `evaluate` leaves them in "
                   "FOLDER/reference.")  # fmt: skip
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="FOLDER", required=True,
              help="The new model; FOLDER.work holds what is done until then.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@components_option
@device_option
@click.option("-q", "--quiet", is_flag=True, help="No progress, only the result.")
@click.pass_context
def command(ctx: click.Context, **options: Any) -> None:
    """Quantize the network of MODEL, and write a model folder with a report.

    \b
    lydite quantize embedded --bits 4 --out q4/
    lydite quantize sd3/ --method gptq --bits 4 --prompts prompts.txt --out sd3-q4/
    lydite quantize sd3/ --method taqdit --bits 4 --group channel --act-bits 8 --set set/ --out q/
    lydite quantize sd3/ --plan plan.json --set set/ --out mixed/

    Linears inside the blocks are rounded; those that compute modulation get 8 bits; embeddings,
    first and last layers stay. Interrupt it and run the same command again to resume it.
    """
    from lydite.quantize.work import is_finished, work_folder

    out: Path = options["out"]
    if os.path.lexists(out):
        if is_finished(out):
            _say_finished(out, options["quiet"])
            return
        raise FileError(f"{at(out)}: exists already. Give another --out.")
    model = absolute_model(options["model"], options["components"])
    check_options(ctx, options)
    check_places(out, model, options)
    with note_on_stop(), ExitStack() as stack:
        _run(stack, ctx, model, work_folder(out), options)


def _run(
    stack: ExitStack, ctx: click.Context, model: "Model", folder: Path, options: dict[str, Any]
) -> None:
    """One quantization, from the model to the finished folder."""
    from lydite.calibrate.model_session import open_pipeline, require_model
    from lydite.calibrate.request_record import request_of
    from lydite.calibrate.store.writer import command_line
    from lydite.cli.recording import read_bytes
    from lydite.quantize.export import check_exportable
    from lydite.quantize.quantize_model import Quantization
    from lydite.quantize.quantize_network import needs_set
    from lydite.quantize.work import Work

    pipeline = open_pipeline(model, "auto")
    check_exportable(pipeline)
    settings = read_settings(pipeline, options)  # what cannot be done is refused first
    check_evaluation(model, options)
    memory = read_bytes(options["memory"], "--memory")
    if options["dry_run"]:
        click.echo(plan_text(pipeline, settings))
        return
    work = stack.enter_context(Work.open(folder))
    opened = None
    if needs_set(settings) or options["bpw"] or options["set_folder"]:
        opened = open_set(stack, ctx, model, folder, options)
        pipeline = open_pipeline(model, request_of(opened.settings.conditions)[1])
    pipeline.model.prepare()
    if opened is not None:
        require_model(opened.settings, pipeline)
    if opened is not None and options["bpw"]:
        settings = replace(settings, plan=measured_plan(pipeline, opened, options))
    quiet: bool = options["quiet"]
    if not quiet:
        click.echo(plan_text(pipeline, settings))
    samples = take_samples(pipeline, opened, memory, options) if opened else []
    quantization = Quantization(model.name, pipeline, opened, samples, settings, work, memory)
    _round(quantization, quiet)
    if settings.tune:
        _tune(quantization, quiet)
    record = quantization.export()
    if not quiet:
        click.echo(_proof(record))
    resume = command_line("lydite", "quantize", *typed_arguments(ctx, ()))
    evaluate_export(model, opened, folder, options, resume)
    work.finish(options["out"])
    _say_finished(options["out"], quiet)


def _round(quantization: "Quantization", quiet: bool) -> None:
    stop, steps = StopRequest(), quantization.steps_left()
    unit = "iteration" if steps.learned else "block"
    with StepBar(steps.total, quiet=quiet, unit=unit) as bar, stop.listening():

        def stepped(path: str, step: int, loss: float) -> None:
            bar.advance()
            if stop.asked:
                raise KeyboardInterrupt

        def finished(result: "BlockResult") -> None:
            if not steps.learned:
                bar.advance()
            for error in result.errors:
                bar.print(f"{error.path}: error {error.nearest:.4f} → {error.after:.4f}")
            if stop.asked:
                raise KeyboardInterrupt

        quantization.round(stepped, finished)


def _tune(quantization: "Quantization", quiet: bool) -> None:
    stop = StopRequest()
    with (
        StepBar(quantization.settings.tune, quiet=quiet, unit="iteration") as bar,
        stop.listening(),
    ):

        def stepped(step: int, loss: float) -> None:
            bar.advance()
            if stop.asked:
                raise KeyboardInterrupt

        error, gained = quantization.tune(stepped)
    if not quiet:
        verdict = "" if gained else "; nothing was gained, so nothing is changed"
        click.echo(f"network: error {error.nearest:.4f} → {error.after:.4f}{verdict}")


def _say_finished(out: Path, quiet: bool) -> None:
    click.echo(f"report {out / REPORT}")
    if not quiet:
        click.echo(f"{out}: finished. Draw with it: lydite generate PROMPT --model {at(out)}")


def _proof(record: "Provenance") -> str:
    """In a sentence: was anything learned?"""
    shares = list(record.changed.values())
    text = (
        f"{100 * sum(shares) / len(shares):.1f} % of the integers differ from rounding to nearest"
    )
    if record.units:
        text += (
            f"; error of held-out rows smaller in {record.improved} of {len(record.units)} units"
        )
    return f"{text}."
