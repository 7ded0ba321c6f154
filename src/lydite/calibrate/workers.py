"""`--workers N`: processes that draw images into shards, which the writer of the set collects."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lydite.calibrate.run import Model, RunCallbacks
from lydite.calibrate.settings import Description
from lydite.calibrate.store.writer import ShardWriter, Writer, resumable
from lydite.calibrate.worker_pool import Pool, PoolCallbacks, Report

_Task = tuple[int, tuple[int | None, ...]]  # the number of an image, and what is wanted of it


def run_workers(writer: Writer, model: Model, count: int, callbacks: RunCallbacks) -> None:
    """Draw all that is missing in `count` processes; KeyboardInterrupt on a request to stop."""

    def finished(task: _Task, result: None) -> None:
        writer.collect()
        callbacks.finished(task[0])

    def stepped(task: _Task, step: int) -> None:
        callbacks.stepped(task[0], step)

    description = Description(writer.settings, writer.plan)
    pool = Pool(
        _drawing,
        (writer.folder, description, model, writer.resume),
        [(image.number, tuple(steps)) for image, steps in writer.missing().items()],
        PoolCallbacks(finished, stepped, callbacks.noted, callbacks.stopping),
        name=lambda task: f"image {task[0]}",
    )
    try:
        pool.run(count)
    except KeyboardInterrupt:
        writer.collect()  # what workers wrote in the last moment
        raise


@contextmanager
def _drawing(
    folder: Path, description: Description, model: Model, resume: str
) -> Iterator[Callable[[_Task, Report], None]]:
    """A worker: open the model, draw the images it is sent."""
    from lydite.calibrate.model_session import ModelSession

    shards = ShardWriter(folder)
    images = {image.number: image for image in description.plan.images}
    session = ModelSession.open(description, model)

    def draw(task: _Task, report: Report) -> None:
        number, wanted = task
        items = session.items(images[number], wanted, report)
        with resumable(resume):
            shards.write(items)

    try:
        yield draw
    finally:
        session.require_unchanged()
