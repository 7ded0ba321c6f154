"""What `lydite trace` and `lydite parity` share: one picture, recorded on either side."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from lydite import embedded
from lydite.cli.request_options import (
    apply_options,
    read_images,
    read_request,
    read_seeds,
    with_revision,
)
from lydite.core.errors import InputError

if TYPE_CHECKING:
    from lydite.pipelines.family import Run
    from lydite.pipelines.pipeline import Pipeline
    from lydite.reference.jobs import Dtype, Job, TraceOutput
    from lydite.trace.recorder import InjectionSource
    from lydite.trace.writer import Capture, Level

STEPS = 4  # the first, the last, and two between: enough for an error to grow, few enough to keep
BUDGET = "2GB"
LEVELS = ("full", "sketch", "stats")
UNITS = ("", "k", "m", "g", "t")
F = TypeVar("F", bound=Callable[..., Any])

seed_option = click.option(
    "-s",
    "--seed",
    default="0",
    show_default=True,
    help="Of torch's CPU generator, on both sides.",
)


def capture_options(command: F) -> F:
    """How much of the run is recorded."""
    options = (
        click.option("--points", multiple=True, metavar="PATTERN",
                     help="Record only these names, e.g. 'vae/*' or 'vae/*:out'; repeatable."),
        click.option("--budget", default=BUDGET, show_default=True, metavar="BYTES",
                     help="Size of a trace, e.g. 500MB; past it values shrink to sketches and "
                          "statistics, and the run goes on."),
    )  # fmt: skip
    return apply_options(options, command)


def plan_recording(prompt: str, options: dict[str, Any], dtype: str) -> "tuple[Pipeline, Run, int]":
    """The pipeline, nothing of it loaded yet, the planned run, and the seed."""
    from lydite.pipelines.pipeline import Pipeline

    seeds = read_seeds((options["seed"],))
    if len(seeds) != 1:
        raise InputError(
            f"--seed is {options['seed']!r}; expected one number: a trace is of one picture."
        )
    request = read_request(options).replace(prompt=prompt)
    if request.steps is None:
        request = request.replace(steps=STEPS)
    pipeline = Pipeline.open(
        with_revision(options["model"] or embedded.NAME, options["revision"]),
        components=options["components"],
        dtype=dtype,
    )
    image, mask = read_images(options)
    return pipeline, pipeline.plan(request, image, mask), seeds[0]


def read_capture(level: "Level", points: tuple[str, ...], budget: str) -> "Capture":
    """What is kept of a run."""
    from lydite.trace.writer import Capture

    return Capture(level, points or ("*",), budget=read_bytes(budget))


def read_bytes(text: str, option: str = "--budget") -> int:
    """`500MB` or `2GiB` as a number."""
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not found or float(found[1]) == 0:
        raise InputError(f"{option} is {text!r}; expected a size such as 500MB or 2GB.")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** UNITS.index(found[2]))


def record_port(
    pipeline: "Pipeline",
    run: "Run",
    seed: int,
    folder: Path,
    *,
    capture: "Capture",
    on_step: Callable[[], None],
    inject: "InjectionSource | None" = None,
) -> None:
    """Draw with MLX and leave a trace."""
    from lydite.pipelines.observer import StepReporter
    from lydite.pipelines.recording import record

    pipeline.model.prepare()
    observer = StepReporter(lambda _: on_step())
    record(pipeline, run, seed, folder, capture=capture, inject=inject, observer=observer)


def reference_job(
    pipeline: "Pipeline",
    run: "Run",
    seed: int,
    outputs: "tuple[TraceOutput, ...]",
    capture: "Capture",
    **injection: Any,
) -> "Job":
    """The same picture as a job for the reference, which runs the checkpoint's own scheduler."""
    from lydite.pipelines.model_files import locate
    from lydite.pipelines.picture import to_png
    from lydite.reference.jobs import Job

    scheduler, request = pipeline.scheduler, run.request
    if (request.sampler, request.schedule) != (scheduler.sampler, scheduler.schedule):
        raise InputError(
            f"--sampler {request.sampler} with --schedule {request.schedule}: the reference runs "
            f"the checkpoint's own, {scheduler.sampler} with {scheduler.schedule}. Leave them out, "
            "or record --side ours only."
        )
    if request.noise != "torch":
        raise InputError(
            f"--noise {request.noise}: the reference draws torch's noise. Leave it out, or record "
            "--side ours only."
        )
    return Job(
        family=pipeline.family.name,
        model=str(pipeline.model.path),
        name=pipeline.name,
        model_hash=pipeline.model_hash,
        components=str(locate(pipeline.components)) if pipeline.components else None,
        request=request,
        seed=seed,
        prediction=run.prediction.name,
        image=None if run.image is None else to_png(run.image),
        mask=None if run.mask is None else to_png(run.mask),
        outputs=outputs,
        level=capture.level,
        points=capture.points,
        budget=capture.budget,
        **injection,
    )


def floor_dtype(dtype: str) -> "Dtype":
    """The precision whose second run of the reference shows its rounding for a port in `dtype`."""
    return "float64" if dtype == "float32" else cast("Dtype", dtype)
