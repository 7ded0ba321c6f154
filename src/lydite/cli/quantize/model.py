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
from lydite.cli.quantize.evaluation import (
    EVALUATED,
    REPORT,
    check_evaluation,
    check_prompts,
    evaluate_export,
    shared_prompts,
)
from lydite.cli.quantize.settings import (
    BPW,
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
from lydite.cli.unnamed_verb import UnnamedVerb
from lydite.core.errors import FileError, at, counted
from lydite.weights.quantized_format import BITS, FORMATS

if TYPE_CHECKING:
    from lydite.calibrate.run import Model
    from lydite.pipelines.pipeline import Pipeline
    from lydite.quantize.provenance import Provenance, UnitError
    from lydite.quantize.quantize_blocks import BlockResult, Settings
    from lydite.quantize.quantize_model import Quantization


@click.command("model", cls=UnnamedVerb)
@click.argument("model", metavar="MODEL")
@click.option("--method", type=click.Choice(METHODS), default="gptq", show_default=True,
              help="Method of rounding. rtn and hqq need no data; gptq takes minutes; adaround, "
                   "joint, taqdit and ptq4dit learn, and take longest.")  # fmt: skip
@click.option("--bits", type=click.Choice([str(bits) for bits in BITS]), default="4",
              show_default=True,
              help="Bits of a weight in the linear layers inside the blocks.")  # fmt: skip
@click.option("--group", type=click.Choice(("32", "64", "128", "channel")), default="64",
              show_default=True, help="Number of inputs that share a scale.")  # fmt: skip
@click.option("--format", type=click.Choice(tuple(FORMATS)), default="affine", show_default=True,
              help="Format of a weight. mxfp4, mxfp8 and nvfp4 are floating-point formats of MLX, "
                   "with bits and groups of their own; for rtn and gptq.")  # fmt: skip
@click.option("--act-bits", type=click.IntRange(2, 8), metavar="N",
              help="Bits of the inputs of these layers, which are then rounded too, with one "
                   "static range for each layer: simulated, MLX has no such products.")  # fmt: skip
@click.option("--act-groups", type=click.IntRange(1), default=1, show_default=True, metavar="N",
              help="Number of groups of steps; each has its own range of these "
                   "inputs.")  # fmt: skip
@click.option("--quantize-input", is_flag=True,
              help="Also round the inputs of these layers to --format nvfp4 or mxfp8, as "
                   "products of MLX do (mx.qqmm); simulated on a device without them.")  # fmt: skip
@click.option("--bpw", type=BPW, metavar="X",
              help="Bits per weight on average over all quantized layers, scales included: "
                   "each layer gets its own number, by measured sensitivity. Instead of "
                   "--bits.")  # fmt: skip
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), metavar="FILE",
              help="Plan with the bits of each layer, from `lydite quantize plan "
                   "--save`.")  # fmt: skip
@click.option("--convolutions", is_flag=True,
              help="Also round the convolutions inside the blocks of a U-Net, to "
                   "nearest.")  # fmt: skip
@click.option("--rank", type=click.IntRange(1, 256), metavar="N",
              help="Rank of a branch in 16 bits that is added to each layer, as in "
                   "SVDQuant.")  # fmt: skip
@click.option("--tune", type=click.IntRange(1), metavar="N",
              help="Number of iterations of DWQ after the method: scales, offsets and biases are "
                   "tuned by distillation through the whole network. --method dwq is rtn and then "
                   f"{TUNED} iterations.")  # fmt: skip
@click.option("--set", "set_folder", type=click.Path(path_type=Path), metavar="SET",
              help="Calibration set of MODEL. By default a small one is drawn.")  # fmt: skip
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE",
              help="File of prompts for the calibration set that is drawn, and for the evaluation "
                   "unless --eval-prompts is given: txt, csv or jsonl.")  # fmt: skip
@click.option("--iterations", type=click.IntRange(1), default=ITERATIONS, show_default=True,
              help="Iterations of a learned method for each module; the papers use "
                   "20,000.")  # fmt: skip
@click.option("--samples", type=click.IntRange(2), metavar="N",
              help="Largest number of samples of the set that are used; all steps equally "
                   "often.")  # fmt: skip
@click.option("--memory", default="4GB", show_default=True, metavar="BYTES",
              help="Memory for inputs and outputs of one block, which decides how many samples are "
                   "used, and as much again for one call of it.")  # fmt: skip
@click.option("-s", "--seed", type=click.IntRange(0, 2**31), default=0, show_default=True,
              help="Seed of the random numbers of learned methods.")  # fmt: skip
@click.option("--eval-prompts", type=click.Path(path_type=Path), metavar="FILE",
              help="File of prompts for the evaluation; best are prompts that are not in the "
                   "calibration set.")  # fmt: skip
@click.option("--eval-images", type=click.IntRange(2), metavar="N",
              help=f"Number of pictures of the evaluation; {EVALUATED} by default.")  # fmt: skip
@click.option("--against", metavar="SET",
              help="Pictures that the original drew before, as `evaluate` leaves them in "
                   "FOLDER/reference.")  # fmt: skip
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="FOLDER",
              help="The new model; FOLDER.work holds what is done until then. Required, except "
                   "with --dry-run.")  # fmt: skip
@click.option(
    "--dry-run", is_flag=True, help="Only print the plan: layers, bits, size. Nothing is written."
)
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

    Linear layers inside the blocks are rounded; those that compute modulation get 8 bits;
    embeddings, first and last layers stay. Interrupt it and run the same command again to resume.
    """
    from lydite.quantize.work import is_finished

    out: Path | None = options["out"]
    if out is None and not options["dry_run"]:
        raise click.MissingParameter(ctx=ctx, param_hint="'--out'", param_type="option")
    if out is not None and os.path.lexists(out):
        if is_finished(out):
            _say_finished(out, options["quiet"])
            return
        raise FileError(f"{at(out)}: exists already. Give another --out.")
    model = absolute_model(options["model"], options["components"])
    check_options(ctx, options)
    if out is not None:
        check_places(out, model, options)
    if out is None or options["dry_run"]:
        _check(model, options)
        return
    with note_on_stop(), ExitStack() as stack:
        _run(stack, ctx, model, out, options)


def _check(model: "Model", options: dict[str, Any]) -> "tuple[Pipeline, Settings, int]":
    """The model, settings and memory; all that cannot be done is refused, before any work."""
    from lydite.calibrate.model_session import open_pipeline
    from lydite.cli.recording import read_bytes
    from lydite.quantize.export import check_exportable

    pipeline = open_pipeline(model, "auto")
    check_exportable(pipeline)
    settings = read_settings(pipeline, options)
    memory = read_bytes(options["memory"], "--memory")
    check_prompts(options)
    if options["dry_run"]:
        click.echo(plan_text(pipeline, settings))
    else:
        check_evaluation(model, options)
    return pipeline, settings, memory


def _run(
    stack: ExitStack, ctx: click.Context, model: "Model", out: Path, options: dict[str, Any]
) -> None:
    """One quantization, from the model to the finished folder."""
    from lydite.calibrate.model_session import open_pipeline, require_model
    from lydite.calibrate.request_record import request_of
    from lydite.calibrate.store.writer import command_line
    from lydite.quantize.quantize_model import Quantization
    from lydite.quantize.quantize_network import needs_set
    from lydite.quantize.work import Work, work_folder

    pipeline, settings, memory = _check(model, options)
    folder = work_folder(out)
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
    shared = shared_prompts(model, opened, options)
    if not quiet:
        click.echo(plan_text(pipeline, settings))
        if shared:
            click.echo(f"note: {shared}", err=True)
    samples = take_samples(pipeline, opened, memory, options) if opened else []
    quantization = Quantization(model.name, pipeline, opened, samples, settings, work, memory)
    _round(quantization, quiet)
    if settings.tune:
        _tune(quantization, quiet)
    record = quantization.export()
    if not quiet:
        click.echo(_proof(record))
    resume = command_line("lydite", "quantize", *typed_arguments(ctx, ()))
    evaluate_export(model, opened, folder, options, resume, shared)
    work.finish(out)
    _say_finished(out, quiet)


def _error_head(settings: "Settings") -> str:
    """What the numbers behind the name of a module are."""
    last = "" if _is_nearest(settings) else f" → as exported ({settings.method})"
    return (
        "errors of modules, relative, on held-out rows (samples that are not learned from): "
        f"rounded to nearest{last}"
    )


def _error_line(settings: "Settings", error: "UnitError") -> str:
    last = "" if _is_nearest(settings) else f" → {error.after:.4f}"
    return f"{error.path}: error {error.nearest:.4f}{last}"


def _is_nearest(settings: "Settings") -> bool:
    """Whether weights are rounded to nearest and nothing else is done."""
    return settings.method == "rtn" and not settings.rank and not settings.act_bits


def _round(quantization: "Quantization", quiet: bool) -> None:
    from lydite.quantize.quantize_network import OUTSIDE

    stop, steps = StopRequest(), quantization.steps_left()
    unit, settings = "iteration" if steps.learned else "block", quantization.settings
    if steps.finished and not quiet:
        blocks = counted(steps.blocks, "block")
        click.echo(f"resuming: {steps.finished} of {blocks} are done.", err=True)
    explained = False
    with StepBar(steps.total, quiet=quiet, unit=unit) as bar, stop.listening():

        def stepped(path: str, step: int, loss: float) -> None:
            bar.advance()
            if stop.asked:
                raise KeyboardInterrupt

        def finished(result: "BlockResult") -> None:
            nonlocal explained
            if not steps.learned and result.path != OUTSIDE:
                bar.advance()
            if result.errors and not explained:
                bar.print(_error_head(settings))
                explained = True
            for error in result.errors:
                bar.print(_error_line(settings, error))
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
        click.echo(
            f"network: error {error.nearest:.4f} → {error.after:.4f} (before → after "
            f"tuning){verdict}"
        )


def _say_finished(out: Path, quiet: bool) -> None:
    click.echo(f"report {out / REPORT}")
    if not quiet:
        click.echo(f"{out}: finished. Draw with it: lydite generate PROMPT --model {at(out)}")


def _proof(record: "Provenance") -> str:
    """In a sentence: was anything learned?"""
    if record.method == "rtn":
        return f"{counted(len(record.changed), 'layer')} rounded to nearest."
    shares = list(record.changed.values())
    text = (
        f"{100 * sum(shares) / len(shares):.1f} % of the integers differ from rounding to nearest"
    )
    if record.units and not record.method.startswith("rtn"):
        text += (
            f"; the error is smaller in {record.improved} of {counted(len(record.units), 'module')}"
        )
    return f"{text}."
