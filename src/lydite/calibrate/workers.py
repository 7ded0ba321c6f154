"""`--workers N`: processes that draw images into shards, which the writer of the set collects.

Each worker has a pipe of its own, so that one that is killed leaves no lock behind. Only the image
it was drawing is lost, and goes to another worker.
"""

import contextlib
import multiprocessing
import signal
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from lydite.calibrate.run import Model, RunCallbacks, picklable_error
from lydite.calibrate.settings import Description
from lydite.calibrate.store.writer import ShardWriter, Writer, resumable
from lydite.core.errors import CalibrationError, LyditeError, at
from lydite.core.fast_blas import use_one_thread

MOST_LOSSES = 2  # of one image, or of workers that did not even start
POLL = 0.2  # seconds between checks for a request to stop
_Task = tuple[int, tuple[int | None, ...]]  # the number of an image, and what is wanted of it


def run_workers(writer: Writer, model: Model, count: int, callbacks: RunCallbacks) -> None:
    """Draw all that is missing in `count` processes; KeyboardInterrupt on a request to stop."""
    missing = [(image.number, tuple(steps)) for image, steps in writer.missing().items()]
    pool = _Pool(writer, model, deque(missing), callbacks)
    try:
        pool.run(min(count, len(missing)))
    except KeyboardInterrupt:
        pool.end()
        writer.collect()  # what workers wrote in the last moment
        raise
    finally:
        pool.end()


@dataclass(eq=False)
class _WorkerHandle:
    """One worker process, for the pool."""

    process: BaseProcess
    pipe: Connection
    task: _Task | None = None
    done: bool = False  # its model was the same at the end


class _Pool:
    def __init__(
        self, writer: Writer, model: Model, waiting: deque[_Task], callbacks: RunCallbacks
    ) -> None:
        self._writer, self._model, self._callbacks = writer, model, callbacks
        self._waiting, self._handles = waiting, list[_WorkerHandle]()
        self._losses: Counter[int | None] = Counter()
        self._stopping = False

    def run(self, count: int) -> None:
        for _ in range(count):
            self._spawn()
        while self._handles:
            ready = wait([handle.pipe for handle in self._handles], POLL)
            for handle in [handle for handle in self._handles if handle.pipe in ready]:
                self._receive(handle)
            if self._callbacks.stopping() and not self._stopping:
                self._stopping = True
                self._waiting.clear()
                for handle in self._handles:
                    _send(handle, None)
        if self._stopping:
            raise KeyboardInterrupt

    def end(self) -> None:
        """Whatever happened, no worker is left."""
        while self._handles:
            handle = self._handles.pop()
            handle.pipe.close()
            handle.process.terminate()
            handle.process.join()

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share MLX's threads
        pipe, worker_pipe = context.Pipe()
        description = Description(self._writer.settings, self._writer.plan)
        folder, resume = str(self._writer.folder), self._writer.resume
        arguments = (worker_pipe, folder, description, self._model, resume)
        process = context.Process(target=_work, args=arguments, daemon=True)
        with _block_sigint():
            process.start()
        worker_pipe.close()  # so that the end of the worker is the end of the pipe
        self._handles.append(_WorkerHandle(process, pipe))

    def _receive(self, handle: _WorkerHandle) -> None:
        try:
            what, value = handle.pipe.recv()
        except (EOFError, OSError):
            self._lost(handle)
            return
        if what == "step" and handle.task is not None:
            self._callbacks.stepped(handle.task[0], value)
        elif what == "image":
            self._writer.collect()
            self._callbacks.finished(value)
            self._assign(handle)
        elif what == "ready":
            self._assign(handle)
        elif what == "end":
            handle.done = True
        elif what == "error":
            raise value

    def _assign(self, handle: _WorkerHandle) -> None:
        handle.task = self._waiting.popleft() if self._waiting else None
        _send(handle, handle.task)

    def _lost(self, handle: _WorkerHandle) -> None:
        """A worker ended: as it should, or killed, and then another takes its image."""
        self._handles.remove(handle)
        handle.process.join()
        if handle.done or self._stopping:
            return
        number = handle.task[0] if handle.task else None
        what = "at its start" if number is None else f"at image {number}"
        self._losses[number] += 1
        code = handle.process.exitcode
        if self._losses[number] > MOST_LOSSES:
            raise CalibrationError(
                f"{at(self._writer.folder)}: {self._losses[number]} workers ended {what}, the last "
                f"with code {code}. Is there memory for all of them? Try fewer --workers."
            )
        self._callbacks.noted(f"a worker ended {what} (code {code}); another takes over.")
        if handle.task is not None:
            self._waiting.appendleft(handle.task)
        self._spawn()


def _send(handle: _WorkerHandle, task: _Task | None) -> None:
    with contextlib.suppress(OSError):  # the pool notices its end in a moment
        handle.pipe.send(task)


@contextlib.contextmanager
def _block_sigint() -> Iterator[None]:
    """A process that is started here has Ctrl-C blocked from its first instruction on."""
    resource_tracker.ensure_running()  # its own start would undo the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(
            signal.SIG_SETMASK, before
        )  # signals that came meanwhile are delivered now


def _work(
    pipe: Connection, folder: str, description: Description, model: Model, resume: str
) -> None:
    """The main function of a worker: open the model, draw the images it is sent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the pool decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    with contextlib.suppress(EOFError, OSError):  # the pool has ended
        try:
            _serve(pipe, ShardWriter(Path(folder)), description, model, resume)
            pipe.send(("end", None))
        except KeyboardInterrupt:
            pipe.send(("end", None))
        except LyditeError as error:
            pipe.send(("error", picklable_error(error)))


def _serve(
    pipe: Connection, shards: ShardWriter, description: Description, model: Model, resume: str
) -> None:
    use_one_thread()  # before MLX
    from lydite.calibrate.model_session import ModelSession

    def stepped(step: int) -> None:
        pipe.send(("step", step))
        if pipe.poll():  # only a request to stop comes while an image is drawn
            raise KeyboardInterrupt

    images = {image.number: image for image in description.plan.images}
    session = ModelSession.open(description, model)
    pipe.send(("ready", None))
    try:
        while (task := pipe.recv()) is not None:
            number, wanted = task
            items = session.items(images[number], wanted, stepped)
            with resumable(resume):
                shards.write(items)
            pipe.send(("image", number))
    finally:
        session.require_unchanged()
