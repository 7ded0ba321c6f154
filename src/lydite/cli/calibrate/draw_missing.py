"""What `lydite calibrate run` and `repair` share: draw what a set misses."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from lydite import embedded
from lydite.cli.calibrate.model_options import model_options
from lydite.core.errors import FileError, InputError, counted

if TYPE_CHECKING:
    from lydite.calibrate.run import Model, RunCallbacks
    from lydite.calibrate.settings import Plan, Settings
    from lydite.calibrate.store.writer import Writer
    from lydite.pipelines.pipeline import Pipeline

MOST_WORKERS = 256
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class WorkerOptions:
    """Which processes draw, and whether progress is printed."""

    workers: int
    ray: str | None
    quiet: bool

    def __post_init__(self) -> None:
        if self.ray is not None and self.workers > 1:
            raise InputError(
                "--workers and --ray exclude each other; a cluster has its own workers."
            )

    @property
    def words(self) -> tuple[object, ...]:
        """The options again, for a command in a message."""
        if self.ray is not None:
            return "--ray", self.ray
        return ("--workers", self.workers) if self.workers > 1 else ()


def worker_options(command: F) -> F:
    """Options of the model and of the processes that draw; none of them changes a value."""
    return process_options(model_options(command))


def process_options(command: F) -> F:
    """`--workers` and `--ray`, which exclude each other."""
    options = (
        click.option("--workers", type=click.IntRange(1, MOST_WORKERS), default=1,
                     show_default=True,
                     help="Processes, each with a model of its own on one core."),
        click.option("--ray", metavar="auto|ADDRESS",
                     help="Work on a Ray cluster; each machine needs lydite and the model."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def draw_missing(
    folder: Path,
    settings: "Settings",
    plan: "Plan",
    pipeline: "Pipeline",
    model: "Model",
    options: WorkerOptions,
    begin: str | None = None,
    command: str | None = None,
) -> str:
    """Draw all that the set misses, and return the hash of its content.

    The pipeline is loaded, and its hash is the settings'. `begin` is for errors before there is a
    set: the command that makes it. `command` resumes it; by default `lydite calibrate run`.
    """
    from lydite.calibrate.model_session import item_sizes
    from lydite.calibrate.request_record import request_of
    from lydite.calibrate.run import require_space_for, resume_command
    from lydite.calibrate.store.writer import Writer, resumable

    command = command or resume_command(folder, model, *options.words)
    run = pipeline.plan(request_of(settings.conditions)[0])
    sizes = item_sizes(pipeline, run, conditioning=plan.conditioning)
    with resumable(command):
        require_space_for(folder, settings, plan, sizes)
    with Writer.start(folder, settings, plan, resume=command, begin=begin) as writer:
        if writer.recovered.added:
            _print_note(
                options,
                f"recovered {counted(writer.recovered.added, 'item')} from an interrupted run.",
            )
        if writer.plan != plan:
            known = (
                f"{counted(len(writer.plan.images), 'image')} and "
                f"{counted(len(writer.plan.steps), 'step')} of each"
            )
            _print_note(
                options,
                f"note: the set plans {known}; images and steps are never removed from a set.",
            )
        missing = len(writer.missing())
        if missing:
            _draw(
                writer, pipeline, model, options, images=missing, steps=run.steps, command=command
            )
        held = len(writer.plan.images) - len(writer.missing())
        total = counted(len(writer.plan.images), "image")
        _print_note(options, f"{folder}: {held} of {total} complete.")
        return writer.content_hash


def resume(folder: Path, name: str | None, components: str | None, options: WorkerOptions) -> None:
    """Resume a set with its own settings."""
    from lydite.calibrate.model_session import open_pipeline, require_model
    from lydite.calibrate.request_record import request_of
    from lydite.calibrate.store.set_file import read_description

    description = read_description(folder)
    _, dtype = request_of(description.settings.conditions)
    model = absolute_model(
        name or description.settings.model or embedded.NAME, components, fetch=name is not None
    )
    try:
        pipeline = open_pipeline(model, dtype)
    except FileError as error:
        moved = "" if name else " The set names this model; if it moved, give --model."
        raise FileError(f"{error}{moved}") from error
    pipeline.model.prepare()
    require_model(description.settings, pipeline)
    settings = msgspec.structs.replace(description.settings, model=model.name)
    print_content(
        draw_missing(folder, settings, description.plan, pipeline, model, options), options
    )


def print_content(content_hash: str, options: WorkerOptions) -> None:
    """By which two sets are compared."""
    if not options.quiet:
        click.echo(f"content   {content_hash}")


def absolute_model(name: str, components: str | None, *, fetch: bool = True) -> "Model":
    """The model with absolute paths; a hub id and the embedded model stay as they are."""
    from lydite.calibrate.run import Model

    def absolute(word: str) -> str:
        if word == embedded.NAME or not Path(word).exists():
            return word
        return str(Path(word).absolute())

    return Model(absolute(name), absolute(components) if components else None, fetch)


class StopRequest:
    """Ctrl-C or SIGTERM: stop after the current step; a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals, and restore the old handlers afterwards."""
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._ask) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def _draw(
    writer: "Writer",
    pipeline: "Pipeline",
    model: "Model",
    options: WorkerOptions,
    *,
    images: int,
    steps: int,
    command: str,
) -> None:
    from lydite.calibrate.run import RunCallbacks
    from lydite.cli.progress import StepBar

    stop, seen, finished = StopRequest(), set[tuple[int, int]](), 0
    with StepBar(images * steps, quiet=options.quiet) as bar, stop.listening():

        def stepped(image: int, step: int) -> None:
            if (image, step) not in seen:  # an image that a lost worker began comes again
                seen.add((image, step))
                bar.advance()

        def counted(image: int) -> None:
            nonlocal finished
            finished += 1
            for step in range(steps):  # a cluster reports whole images only
                stepped(image, step)

        callbacks = RunCallbacks(stepped, counted, bar.print, lambda: stop.asked)
        try:
            _run_on_workers(writer, pipeline, model, options, callbacks)
        except KeyboardInterrupt:
            bar.print(f"stopped: {finished} of the {images} missing images are drawn. Resume with:")
            bar.print(command)
            raise


def _run_on_workers(
    writer: "Writer",
    pipeline: "Pipeline",
    model: "Model",
    options: WorkerOptions,
    callbacks: "RunCallbacks",
) -> None:
    from lydite.calibrate.model_session import ModelSession
    from lydite.calibrate.ray_cluster import run_ray
    from lydite.calibrate.run import run_here
    from lydite.calibrate.settings import Description
    from lydite.calibrate.workers import run_workers

    if options.ray is None and options.workers == 1:
        run_here(
            writer, ModelSession(Description(writer.settings, writer.plan), pipeline), callbacks
        )
        return
    pipeline.model.unload()  # workers have their own
    if options.ray is None:
        run_workers(writer, model, options.workers, callbacks)
    else:
        run_ray(writer, model, options.ray, callbacks)


def _print_note(options: WorkerOptions, line: str) -> None:
    if not options.quiet:
        click.echo(line, err=True)
