"""`lydite calibrate run`: make a calibration set from prompts, or resume one."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lydite import embedded
from lydite.cli.aliases import AliasedOption, ComputeDtype, StoreDtype
from lydite.cli.calibrate.draw_missing import (
    WorkerOptions,
    absolute_model,
    draw_missing,
    print_content,
    resume,
    worker_options,
)
from lydite.cli.request_options import (
    read_request,
    request_options,
    typed_arguments,
    typed_options,
)
from lydite.core.errors import InputError, at, shown

if TYPE_CHECKING:
    from lydite.calibrate.prompts import Prompts

MOST_IMAGES = 100_000
LARGEST_SEED = 2**53
ANY_TIME = {"out", "model", "components", "workers", "ray", "quiet"}  # options that decide no value


@click.command("run")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='txt with one a line, csv with a column prompt, caption or text, or jsonl with "prompt".',
)
@click.option(
    "--images",
    type=click.IntRange(1, MOST_IMAGES),
    metavar="N",
    help="How many; the prompts are taken over and over. By default each prompt once.",
)
@click.option(
    "-s",
    "--seed",
    type=click.IntRange(0, LARGEST_SEED),
    default=0,
    show_default=True,
    help="Seed of the first image; image n uses seed + n.",
)
@click.option(
    "--keep-steps",
    cls=AliasedOption,
    old=("--keep",),
    default="all",
    show_default=True,
    metavar="all|every:N|0,5,10",
    help="The steps whose input is stored.",
)
@click.option(
    "--store-dtype",
    type=StoreDtype(),
    default="float32",
    show_default=True,
    help="Precision of the stored latents.",
)
@click.option(
    "--conditioning", is_flag=True, help="Also store the prompts' embeddings, once a prompt."
)
@request_options
@click.option(
    "--dtype",
    cls=AliasedOption,
    old=("--compute",),
    type=ComputeDtype(("auto", "float32", "bfloat16", "float16")),
    default="auto",
    show_default=True,
    help="Precision the networks run in; auto: float32 on CPU, bfloat16 elsewhere.",
)
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="SET",
    help="The set: a new folder, or one to resume.",
)
@worker_options
@click.pass_context
def run(ctx: click.Context, **options: Any) -> None:  # fmt: skip
    """Draw images and store the inputs of the network at each kept step.

    A sample is the latent x at the beginning of a kept step, with its sigma and timestep. The
    finished pictures are stored too. The set holds prompts, seeds and all settings.

    \b
    lydite calibrate run --prompts prompts.txt --out set/
    lydite calibrate run --prompts coco.csv --images 256 --keep-steps every:4 --out set/
    lydite calibrate run -m sd3-folder/ --prompts p.jsonl --sampler dpmpp_2m --steps 20 --out set/
    lydite calibrate run --prompts prompts.txt --workers 4 --out set/
    lydite calibrate run --out set/                resume it

    The same command again resumes it; other settings are refused, more images or steps are added.
    Ctrl-C and SIGTERM finish the current step and leave a valid set; the image that was being
    drawn is drawn again by the next run.
    """
    worker_settings = WorkerOptions(options["workers"], options["ray"], options["quiet"])
    if options["prompts"] is None:
        _check_resumable(options["out"], typed_options(ctx) - ANY_TIME)
        resume(options["out"], options["model"], options["components"], worker_settings)
    else:
        from lydite.calibrate.store.writer import command_line

        command = command_line("lydite", "calibrate", "run", *typed_arguments(ctx, ()))
        _start(options, worker_settings, command)


def _start(options: dict[str, Any], worker_settings: WorkerOptions, command: str) -> None:
    """Make a set; all options are checked before the model is loaded."""
    from lydite.calibrate.model_session import count_steps, model_hash, open_pipeline
    from lydite.calibrate.prompts import read_prompts
    from lydite.calibrate.request_record import conditions_of, read_keep
    from lydite.calibrate.settings import STORE_DTYPES, Description, Settings, plan_of
    from lydite.calibrate.store.set_file import encode_description

    prompts = read_prompts(options["prompts"])
    model = absolute_model(options["model"] or embedded.NAME, options["components"])
    pipeline = open_pipeline(model, options["dtype"])
    run = pipeline.plan(read_request(options))
    count = options["images"] or len(prompts.texts)
    if count > MOST_IMAGES:
        raise InputError(
            f"{options['prompts']}: {count:,} prompts, and a set has at most {MOST_IMAGES:,} "
            "images. Give --images, or make several sets."
        )
    plan = plan_of(
        prompts.images(count, options["seed"]),
        read_keep(options["keep_steps"], count_steps(run)),
        conditioning=options["conditioning"],
    )
    conditions = conditions_of(run.request, pipeline.model.dtype)
    encode_description(Description(Settings("0" * 64, conditions), plan))  # checks its size
    stored = STORE_DTYPES[options["store_dtype"]]
    _check_settings(options["out"], conditions, stored, plan)
    if not worker_settings.quiet:
        _note_prompts(options["prompts"], prompts)
    pipeline.model.prepare()
    settings = Settings(model_hash(pipeline), conditions, stored, model.name)
    content = draw_missing(
        options["out"], settings, plan, pipeline, model, worker_settings, begin=command
    )
    print_content(content, worker_settings)


def _note_prompts(path: Path, prompts: "Prompts") -> None:
    """Notes about what the author of the file may not expect."""
    if prompts.guessed:
        click.echo(
            f"note: {at(path)}: no column is called prompt, caption or text; its first is taken, "
            f"which begins with {shown(prompts.texts[0])}.",
            err=True,
        )
    if prompts.repeated:
        click.echo(f"note: {prompts.repeated} prompts come twice and are used once.", err=True)


def _check_resumable(folder: Path, typed: set[str]) -> None:
    """Without prompts a set is resumed with its own settings."""
    from lydite.calibrate.store.set_file import NAME, has_shards, read_description

    if has_shards(folder):
        read_description(folder)
    if not (folder / NAME).exists():
        raise InputError(f"{folder}: no set to resume. Make one with --prompts FILE.")
    if typed:
        option = sorted(typed)[0].replace("_", "-")
        raise InputError(
            f"--{option} without --prompts: a set is resumed with its own settings. Leave it out, "
            "or give --prompts too."
        )


def _check_settings(folder: Path, conditions: dict[str, Any], dtype: Any, plan: Any) -> None:
    """Compare the options with the settings of an existing set, before the model is loaded."""
    from lydite.calibrate.settings import Settings
    from lydite.calibrate.store.set_file import NAME, extend_plan, read_description

    if (folder / NAME).exists():
        known = read_description(folder).settings.model_hash
        extend_plan(folder, Settings(known, conditions, dtype), plan)
