"""`lydite evaluate MODEL --against MODEL`: draw with both, and compare."""

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lydite import embedded
from lydite.cli.calibrate.draw_missing import (
    MOST_WORKERS,
    WorkerOptions,
    absolute_model,
    draw_missing,
)
from lydite.cli.evaluate.calibration_sets import compare_sets
from lydite.cli.evaluate.metric_options import (
    check_page,
    metric_options,
    read_metrics,
)
from lydite.cli.request_options import (
    DTYPES,
    bits_option,
    components_option,
    device_option,
    dtype_option,
    read_request,
    request_options,
    typed_arguments,
)
from lydite.cli.unnamed_verb import UnnamedVerb
from lydite.core.errors import FileError, InputError, at
from lydite.core.files import write_atomic

if TYPE_CHECKING:
    from lydite.calibrate.run import Model
    from lydite.calibrate.settings import Plan
    from lydite.calibrate.store.reader import CalibrationSet
    from lydite.core.request import Request
    from lydite.evaluate.evaluation import Evaluation

REFERENCE, CANDIDATE, RECORD, FLAT = "reference", "candidate", "evaluation.json", "flat"
ROUNDED = "candidate_bits.json"  # --bits, of which the set of the candidate has no record
FLAT_STEPS, FLAT_IMAGES = (4, 8, 16, 32), 4
MOST_IMAGES = 100_000
IMAGES = 32  # of the embedded model, where no prompts are given


@click.command("models", cls=UnnamedVerb)
@click.argument("model", metavar="MODEL")
@click.option("--against", required=True, metavar="MODEL|SET",
              help="The reference: a model, or a calibration set that it drew.")  # fmt: skip
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE",
              help="File of prompts: txt, csv or jsonl. By default, for the embedded model, "
                   "prompts held out from its training.")  # fmt: skip
@click.option("--images", type=click.IntRange(1, MOST_IMAGES), metavar="N",
              help="Number of pictures; the prompts are taken over and over. By default each "
                   "prompt once, or 32 of the embedded model's own.")  # fmt: skip
@click.option("-s", "--seed", type=click.IntRange(0, 2**53), default=0, show_default=True,
              help="Seed of the first image; image n uses seed + n.")  # fmt: skip
@click.option("-o", "--out", type=click.Path(path_type=Path), default=Path("evaluation"),
              show_default=True, metavar="FOLDER",
              help="Where both models draw; the same command resumes it.")  # fmt: skip
@components_option
@dtype_option
@bits_option
@click.option("--against-dtype", type=click.Choice(DTYPES), default="auto", show_default=True,
              help="Precision of the reference.")  # fmt: skip
@click.option("--keep-steps", default="all", show_default=True, metavar="all|every:N|0,5,10",
              help="The steps whose latents are compared.")  # fmt: skip
@click.option("--flat-field", metavar="PROMPT",
              help="Also draw an even surface with 4, 8, 16 and 32 steps: how does noise "
                   "grow?")  # fmt: skip
@request_options
@click.option("--workers", type=click.IntRange(1, MOST_WORKERS), default=1, show_default=True,
              help="Processes that draw, each with a model of its own on one core.")  # fmt: skip
@click.option("--ray", metavar="auto|ADDRESS", help="Draw on a Ray cluster.")
@metric_options
@device_option
@click.option("-q", "--quiet", is_flag=True, help="No progress bar, only errors and the result.")
@click.pass_context
def command(ctx: click.Context, **options: Any) -> None:
    """Draw with MODEL and with the reference from the same prompts and noise, and compare.

    --dtype and --bits are MODEL's. Settings that are not given are the reference's own.

    \b
    lydite evaluate sd3-4bit/ --against sd3/ --prompts coco.csv --images 256 --out run/
    lydite evaluate sd3/ --against sd3/ --bits 4 --prompts p.txt --out run/ --html page.html
    lydite evaluate sd3/ --against run/reference --bits 8 --out run8/     draw the reference once
    lydite evaluate embedded --against embedded --bits 4 --images 64 --out run/ --json

    Both sides are calibration sets in FOLDER, and evaluation.json is the record. Ctrl-C loses only
    the image that is being drawn.
    """
    check_page(options, [options[name] for name in ("model", "against", "prompts", "components")])
    metrics = read_metrics(options)  # a wrong file is found before the work
    settings = WorkerOptions(
        options["workers"], options["ray"], options["quiet"] or options["as_json"]
    )
    resume = _command(ctx)
    folders = _draw_both(options, settings, resume)

    def finish(evaluation: "Evaluation") -> "Evaluation":
        if options["flat_field"]:
            rows = _flat_field(folders, options, settings, resume)
            evaluation = msgspec.structs.replace(evaluation, flat_field=rows)
        write_atomic(options["out"] / RECORD, evaluation.to_json())
        return evaluation

    compare_sets(
        folders[REFERENCE],
        folders[CANDIDATE],
        metrics,
        options,
        lambda one, other: record_of(one, other, options),
        finish,
    )
    if not settings.quiet:
        click.echo(f"record {options['out'] / RECORD}")


def _draw_both(options: dict[str, Any], settings: WorkerOptions, resume: str) -> dict[str, Path]:
    """The sets of both sides, complete."""
    from lydite.calibrate.model_session import open_pipeline
    from lydite.calibrate.request_record import request_of
    from lydite.calibrate.settings import plan_of
    from lydite.calibrate.store.reader import CalibrationSet
    from lydite.calibrate.store.set_file import NAME

    against, out = Path(options["against"]), options["out"]
    candidate = _candidate(options)
    _check_bits(out, candidate)
    folders = {REFERENCE: out / REFERENCE, CANDIDATE: out / CANDIDATE}
    if os.path.lexists(out / RECORD) and not (folders[CANDIDATE] / NAME).exists():
        raise FileError(
            f"{at(out / RECORD)}: exists and is not of an earlier evaluation. Give another folder."
        )
    if (against / NAME).exists():
        if options["prompts"] or options["images"]:
            raise InputError(
                "--against is a set, which has its own prompts: leave out --prompts and --images."
            )
        folders[REFERENCE], model = against, None
        with CalibrationSet.open(against) as opened:
            if opened.missing():
                raise InputError(f"{at(against)}: the set is not complete. Resume it first.")
            request, plan = request_of(opened.settings.conditions)[0], opened.plan
    else:
        model = absolute_model(options["against"], options["components"])
        pipeline = open_pipeline(model, options["against_dtype"])
        run = pipeline.plan(read_request(options))
        images = evaluated_images(options, model)
        plan = plan_of(images, _kept(options, run.steps))
        request = run.request.replace(prompt="")
        _check_side(folders[REFERENCE], model, options["against_dtype"], request, plan)
    _check_side(folders[CANDIDATE], candidate, options["dtype"], request, plan)
    _check_flat_field(candidate, request, options)
    if model is not None:
        draw_side(
            folders[REFERENCE], model, options["against_dtype"], request, plan, settings, resume
        )
    if not (folders[CANDIDATE] / NAME).exists():
        write_atomic(out / ROUNDED, msgspec.json.encode({"bits": candidate.bits}) + b"\n")
    draw_side(folders[CANDIDATE], candidate, options["dtype"], request, plan, settings, resume)
    return folders


def _check_bits(out: Path, model: "Model") -> None:
    """Refuse other --bits than those that the candidate in this folder was begun with."""
    from lydite.calibrate.store.set_file import NAME
    from lydite.core.config import read_json

    if not (out / CANDIDATE / NAME).exists() or not (out / ROUNDED).exists():
        return
    known = read_json(out / ROUNDED).get("bits")
    if known != model.bits:
        begun, given = (f"with --bits {n}" if n else "without --bits" for n in (known, model.bits))
        raise InputError(
            f"{at(out)}: was begun {begun}, and this command is {given}. Give another --out, or "
            f"the same bits to resume it. The reference need not be drawn again: --against "
            f"{at(out / REFERENCE)}"
        )


def _check_side(folder: Path, model: "Model", dtype: str, request: "Request", plan: "Plan") -> None:
    """Refuse what could not be drawn with this model, or not in this folder; nothing is loaded."""
    from lydite.calibrate.model_session import count_steps, open_pipeline
    from lydite.calibrate.request_record import conditions_of
    from lydite.calibrate.settings import Settings
    from lydite.calibrate.store.set_file import NAME, extend_plan, read_description

    pipeline = open_pipeline(model, dtype)
    run = pipeline.plan(request)
    count_steps(run)
    if (folder / NAME).exists():
        known = read_description(folder).settings.model_hash  # ours is known when it is loaded
        conditions = conditions_of(run.request, pipeline.model.dtype)
        extend_plan(folder, Settings(known, conditions, "F32", model.name), plan)


def _check_flat_field(model: "Model", request: "Request", options: dict[str, Any]) -> None:
    from lydite.calibrate.model_session import count_steps, open_pipeline

    if options["flat_field"]:
        pipeline = open_pipeline(model, options["dtype"])
        for steps in FLAT_STEPS:
            run = pipeline.plan(request.replace(prompt=options["flat_field"], steps=steps))
            count_steps(run)


def _candidate(options: dict[str, Any]) -> "Model":
    model = absolute_model(options["model"], options["components"])
    return replace(model, bits=int(options["bits"]) if options["bits"] else None)


def evaluated_images(options: dict[str, Any], model: "Model") -> list[tuple[str, int]]:
    from lydite.calibrate.prompts import Prompts, read_prompts
    from lydite.evaluate.embedded_metrics import held_out

    if options["prompts"] is not None:
        prompts = read_prompts(options["prompts"])
        count = options["images"] or len(prompts.texts)
    elif model.name == embedded.NAME:
        prompts, count = Prompts(tuple(held_out())), options["images"] or IMAGES
    else:
        raise InputError("no prompts: give --prompts FILE. Only the embedded model has its own.")
    if count > MOST_IMAGES:
        raise InputError(f"{count:,} images; at most {MOST_IMAGES:,}. Give --images.")
    return prompts.images(count, options["seed"])


def _kept(options: dict[str, Any], steps: int) -> tuple[int, ...]:
    from lydite.calibrate.request_record import read_keep

    return read_keep(options["keep_steps"], steps)


def draw_side(
    folder: Path,
    model: "Model",
    dtype: str,
    request: "Request",
    plan: "Plan",
    settings: WorkerOptions,
    resume: str,
) -> None:
    """Draw what one side misses; `resume` is the command that goes on with it."""
    from lydite.calibrate.model_session import count_steps, model_hash, open_pipeline
    from lydite.calibrate.request_record import conditions_of
    from lydite.calibrate.settings import Settings

    pipeline = open_pipeline(model, dtype)
    run = pipeline.plan(request)
    count_steps(run)
    conditions = conditions_of(run.request, pipeline.model.dtype)
    pipeline.model.prepare()
    made = Settings(model_hash(pipeline), conditions, "F32", model.name)
    draw_missing(folder, made, plan, pipeline, model, settings, begin=resume, command=resume)
    pipeline.model.unload()


def record_of(
    reference: "CalibrationSet", candidate: "CalibrationSet", options: dict[str, Any]
) -> dict[str, Any]:
    """What both sides were drawn with."""
    from importlib.metadata import version

    from lydite.calibrate.settings import digest
    from lydite.core.device import current_device

    conditions = dict(reference.settings.conditions)
    conditions.pop("compute", None)
    sides = {
        side: {
            "model": Path(opened.settings.model).name or opened.settings.model,
            "model_hash": opened.settings.model_hash,
            "dtype": opened.settings.conditions.get("compute"),
            "set": opened.content_hash,
        }
        for side, opened in ((REFERENCE, reference), (CANDIDATE, candidate))
    }
    sides[CANDIDATE]["bits"] = int(options["bits"]) if options["bits"] else None
    images = reference.plan.images
    return {
        "mlx": version("mlx"),
        "device": current_device().describe(),
        "prompts": {
            "count": len({image.prompt for image in images}),
            "hash": digest([image.prompt for image in images]),
        },
        "seeds": {
            "first": images[0].seed,
            "last": images[-1].seed,
            "hash": digest([image.seed for image in images]),
        },
        "request": conditions,
        **sides,
    }


def _flat_field(
    folders: dict[str, Path], options: dict[str, Any], settings: WorkerOptions, resume: str
) -> list[dict[str, Any]]:
    """Noise of an even surface, drawn by both models with more and more steps."""
    from lydite.calibrate.request_record import request_of
    from lydite.calibrate.settings import plan_of
    from lydite.calibrate.store.set_file import read_description
    from lydite.evaluate.flat_field import residual_noise
    from lydite.evaluate.pictures import SetPictures

    described = {side: read_description(folder).settings for side, folder in folders.items()}
    models = {
        REFERENCE: absolute_model(described[REFERENCE].model, options["components"]),
        CANDIDATE: _candidate(options),
    }
    rows: list[dict[str, Any]] = []
    images = [(options["flat_field"], options["seed"] + n) for n in range(FLAT_IMAGES)]
    for steps in FLAT_STEPS:
        row: dict[str, Any] = {"steps": steps}
        for side, model in models.items():
            request, dtype = request_of(described[side].conditions)
            folder = options["out"] / FLAT / f"{side}_{steps:02}"
            request = request.replace(steps=steps)
            draw_side(folder, model, dtype, request, plan_of(images, ()), settings, resume)
            with closing(SetPictures.open(folder)) as source:
                row[side] = fmean(residual_noise(pixels) for _, pixels in source.pictures())
        rows.append(row)
    return rows


def _command(ctx: click.Context) -> str:
    """The command as it was given, by which it is resumed."""
    from lydite.calibrate.store.writer import command_line

    return command_line("lydite", "evaluate", *typed_arguments(ctx, ()))
