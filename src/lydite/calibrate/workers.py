"""`--workers N`: processes that draw and hand shards over; the writer of the set collects them.

Each worker talks through a pipe of its own, so that one that is killed leaves no lock behind. It
costs the image it drew: that one goes to another worker.
"""

import contextlib
import multiprocessing
import signal
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from lydite.calibrate.run import Model, Watcher, portable
from lydite.calibrate.store.set_file import Description
from lydite.calibrate.store.writer import Writer, resumable
from lydite.calibrate.worker_shards import Worker
from lydite.core.blas import use_one_thread
from lydite.core.errors import CalibrationError, LyditeError, at

MOST_LOSSES = 2  # of one image, or of workers that did not even start
PATIENCE = 0.2  # seconds between looks at whether to stop
_Task = tuple[int, tuple[int | None, ...]]  # the number of an image, and what is wanted of it


def run_workers(writer: Writer, model: Model, count: int, watcher: Watcher) -> None:
    """Draw all that is missing in `count` processes; KeyboardInterrupt when told to stop."""
    missing = [(image.number, tuple(steps)) for image, steps in writer.missing().items()]
    pool = _Pool(writer, model, deque(missing), watcher)
    try:
        pool.run(min(count, len(missing)))
    except KeyboardInterrupt:
        pool.end()
        writer.collect()  # what was handed over in the last moment
        raise
    finally:
        pool.end()


@dataclass(eq=False)
class _Hand:
    """One worker as the pool sees it."""

    process: BaseProcess
    pipe: Connection
    task: _Task | None = None
    done: bool = False  # its model was the same at the end


class _Pool:
    def __init__(
        self, writer: Writer, model: Model, waiting: deque[_Task], watcher: Watcher
    ) -> None:
        self._writer, self._model, self._watcher = writer, model, watcher
        self._waiting, self._hands = waiting, list[_Hand]()
        self._losses: Counter[int | None] = Counter()
        self._stopping = False

    def run(self, count: int) -> None:
        for _ in range(count):
            self._hire()
        while self._hands:
            ready = wait([hand.pipe for hand in self._hands], PATIENCE)
            for hand in [hand for hand in self._hands if hand.pipe in ready]:
                self._hear(hand)
            if self._watcher.stopping() and not self._stopping:
                self._stopping = True
                self._waiting.clear()
                for hand in self._hands:
                    _tell(hand, None)
        if self._stopping:
            raise KeyboardInterrupt

    def end(self) -> None:
        """Whatever happened, no worker is left."""
        while self._hands:
            hand = self._hands.pop()
            hand.pipe.close()
            hand.process.terminate()
            hand.process.join()

    def _hire(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share MLX's threads
        ours, theirs = context.Pipe()
        description = Description(self._writer.settings, self._writer.plan)
        folder, resume = str(self._writer.folder), self._writer.resume
        arguments = (theirs, folder, description, self._model, resume)
        process = context.Process(target=_work, args=arguments, daemon=True)
        with _deaf():
            process.start()
        theirs.close()  # so that the end of the worker is the end of the pipe
        self._hands.append(_Hand(process, ours))

    def _hear(self, hand: _Hand) -> None:
        try:
            what, value = hand.pipe.recv()
        except (EOFError, OSError):
            self._lost(hand)
            return
        if what == "step" and hand.task is not None:
            self._watcher.stepped(hand.task[0], value)
        elif what == "image":
            self._writer.collect(drawn=time.time())
            self._watcher.finished(value)
            self._give(hand)
        elif what == "ready":
            self._give(hand)
        elif what == "end":
            hand.done = True
        elif what == "error":
            raise value

    def _give(self, hand: _Hand) -> None:
        hand.task = self._waiting.popleft() if self._waiting else None
        _tell(hand, hand.task)

    def _lost(self, hand: _Hand) -> None:
        """A worker ended: as it should, or killed, and then another takes its image."""
        self._hands.remove(hand)
        hand.process.join()
        if hand.done or self._stopping:
            return
        number = hand.task[0] if hand.task else None
        what = "at its start" if number is None else f"at image {number}"
        self._losses[number] += 1
        code = hand.process.exitcode
        if self._losses[number] > MOST_LOSSES:
            raise CalibrationError(
                f"{at(self._writer.folder)}: {self._losses[number]} workers ended {what}, the last "
                f"with code {code}. Is there memory for all of them? Try fewer --workers."
            )
        self._watcher.noted(f"a worker ended {what} (code {code}); another takes over.")
        if hand.task is not None:
            self._waiting.appendleft(hand.task)
        self._hire()


def _tell(hand: _Hand, task: _Task | None) -> None:
    with contextlib.suppress(OSError):  # its end is heard of in a moment
        hand.pipe.send(task)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """A process that is started here has Ctrl-C blocked from its first instruction on."""
    resource_tracker.ensure_running()  # its own start would undo the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # now we hear what came meanwhile


def _work(
    pipe: Connection, folder: str, description: Description, model: Model, resume: str
) -> None:
    """The life of a worker: open the model, draw what comes, check the model again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the pool decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    with contextlib.suppress(EOFError, OSError):  # the pool has gone: nobody needs us
        try:
            _serve(pipe, Worker(Path(folder)), description, model, resume)
            pipe.send(("end", None))
        except KeyboardInterrupt:
            pipe.send(("end", None))
        except LyditeError as error:
            pipe.send(("error", portable(error)))


def _serve(
    pipe: Connection, worker: Worker, description: Description, model: Model, resume: str
) -> None:
    use_one_thread()  # before MLX
    from lydite.calibrate.model_session import ModelSession

    def stepped(step: int) -> None:
        pipe.send(("step", step))
        if pipe.poll():  # only the word to stop comes while an image is drawn
            raise KeyboardInterrupt

    images = {image.number: image for image in description.plan.images}
    session = ModelSession.open(description, model)
    pipe.send(("ready", None))
    try:
        while (task := pipe.recv()) is not None:
            number, wanted = task
            items = session.items(images[number], wanted, stepped)
            with resumable(resume):
                worker.hand_over(items)
            pipe.send(("image", number))
    finally:
        session.require_unchanged()
