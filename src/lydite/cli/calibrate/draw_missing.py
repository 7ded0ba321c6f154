"""What `lydite calibrate run` and `repair` share: a set is drawn until nothing is missing."""

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
from lydite.core.errors import FileError, InputError

if TYPE_CHECKING:
    from lydite.calibrate.run import Model, RunCallbacks
    from lydite.calibrate.settings import Plan, Settings
    from lydite.calibrate.store.writer import Writer
    from lydite.pipelines.pipeline import Pipeline

MOST_WORKERS = 256
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Hands:
    """Who draws, and whether that is told."""

    workers: int
    ray: str | None
    quiet: bool

    @property
    def words(self) -> tuple[object, ...]:
        """The options again, for a command in a message."""
        if self.ray is not None:
            return "--ray", self.ray
        return ("--workers", self.workers) if self.workers > 1 else ()


def hands_options(command: F) -> F:
    """The options that decide who draws; none of them changes a value."""
    options = (
        click.option("-m", "--model", metavar="FOLDER|FILE|HUB-ID",
                     help="As for `lydite generate`; the set's own, or the embedded one, by "
                          "default."),
        click.option("--components", metavar="FOLDER",
                     help="Take what MODEL lacks (text encoders, tokenizers, VAE) from here."),
        click.option("--workers", type=click.IntRange(1, MOST_WORKERS), default=1,
                     show_default=True,
                     help="Processes that draw, each with a model of its own on one core."),
        click.option("--ray", metavar="auto|ADDRESS",
                     help="Draw on a Ray cluster; each machine needs lydite and the model."),
        click.option("-q", "--quiet", is_flag=True, help="No progress bar, only errors."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def finish(
    folder: Path,
    settings: "Settings",
    plan: "Plan",
    pipeline: "Pipeline",
    model: "Model",
    hands: Hands,
    begin: str | None = None,
) -> None:
    """Draw all that the set misses; the pipeline is loaded, and its hash is the settings'.

    `begin` is for errors before there is a set: the command that makes it.
    """
    from lydite.calibrate.conditions import request_of
    from lydite.calibrate.model_session import item_sizes
    from lydite.calibrate.run import require_space_for, resume_command
    from lydite.calibrate.store.writer import Writer, resumable

    again = resume_command(folder, model, *hands.words)
    run = pipeline.plan(request_of(settings.conditions)[0])
    sizes = item_sizes(pipeline, run, conditioning=plan.conditioning)
    with resumable(again):
        require_space_for(folder, settings, plan, sizes)
    with Writer.start(folder, settings, plan, resume=again, begin=begin) as writer:
        if writer.recovered.added:
            _tell(hands, f"recovered {writer.recovered.added} items from an interrupted run.")
        if writer.plan != plan:
            known = f"{len(writer.plan.images)} images and {len(writer.plan.steps)} steps of each"
            _tell(
                hands,
                f"note: the set plans {known}; images and steps are never removed from a set.",
            )
        missing = len(writer.missing())
        if missing:
            _draw(writer, pipeline, model, hands, images=missing, steps=run.steps, again=again)
        held = len(writer.plan.images) - len(writer.missing())
        _tell(hands, f"{folder}: {held} of {len(writer.plan.images)} images complete.")
        if not hands.quiet:
            click.echo(f"content   {writer.content_hash}")


def resume(folder: Path, name: str | None, components: str | None, hands: Hands) -> None:
    """Go on with a set by what it says of itself."""
    from lydite.calibrate.conditions import request_of
    from lydite.calibrate.model_session import open_pipeline, require_model
    from lydite.calibrate.store.set_file import read_description

    description = read_description(folder)
    _, dtype = request_of(description.settings.conditions)
    model = lasting_model(name or description.settings.model or embedded.NAME, components)
    try:
        pipeline = open_pipeline(model, dtype)
    except FileError as error:
        moved = "" if name else " The set names this model; if it moved, give --model."
        raise FileError(f"{error}{moved}") from error
    pipeline.model.prepare()
    require_model(description.settings, pipeline)
    settings = msgspec.structs.replace(description.settings, model=model.name)
    finish(folder, settings, description.plan, pipeline, model, hands)


def lasting_model(name: str, components: str | None) -> "Model":
    """Paths that are good from any folder; a hub id and the embedded model stay as they are."""
    from lydite.calibrate.run import Model

    def lasting(word: str) -> str:
        if word == embedded.NAME or not Path(word).exists():
            return word
        return str(Path(word).absolute())

    return Model(lasting(name), lasting(components) if components else None)


class Stop:
    """Ctrl-C and SIGTERM as a wish to stop after the step under way; a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen, and afterwards leave the signals as they were."""
        heard = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._ask) for number in heard}
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
    hands: Hands,
    *,
    images: int,
    steps: int,
    again: str,
) -> None:
    from lydite.calibrate.run import RunCallbacks
    from lydite.cli.progress import StepBar

    stop, seen, finished = Stop(), set[tuple[int, int]](), 0
    with StepBar(images * steps, quiet=hands.quiet) as bar, stop.listening():

        def stepped(image: int, step: int) -> None:
            if (image, step) not in seen:  # an image that a lost worker began comes again
                seen.add((image, step))
                bar.advance()

        def counted(image: int) -> None:
            nonlocal finished
            finished += 1
            for step in range(steps):  # a cluster tells of whole images only
                stepped(image, step)

        watcher = RunCallbacks(stepped, counted, bar.print, lambda: stop.asked)
        try:
            _by_hands(writer, pipeline, model, hands, watcher)
        except KeyboardInterrupt:
            bar.print(f"stopped: {finished} of the {images} missing images are drawn. Resume with:")
            bar.print(again)
            raise


def _by_hands(
    writer: "Writer",
    pipeline: "Pipeline",
    model: "Model",
    hands: Hands,
    watcher: "RunCallbacks",
) -> None:
    from lydite.calibrate.model_session import ModelSession
    from lydite.calibrate.ray_cluster import run_ray
    from lydite.calibrate.run import run_here
    from lydite.calibrate.settings import Description
    from lydite.calibrate.workers import run_workers

    if hands.ray is None and hands.workers == 1:
        run_here(writer, ModelSession(Description(writer.settings, writer.plan), pipeline), watcher)
        return
    pipeline.model.unload()  # workers have their own
    if hands.ray is None:
        run_workers(writer, model, hands.workers, watcher)
    else:
        run_ray(writer, model, hands.ray, watcher)


def _tell(hands: Hands, line: str) -> None:
    if not hands.quiet:
        click.echo(line, err=True)


def check_hands(hands: Hands) -> None:
    """Refuse what cannot be meant."""
    if hands.ray is not None and hands.workers > 1:
        raise InputError("--workers and --ray exclude each other; a cluster has its own workers.")
