"""Processes that do the same work on many tasks, such as images to draw.

Each worker has a pipe of its own, so that one that is killed leaves no lock behind. Only the task
it was at is lost, and goes to another worker.
"""

import contextlib
import multiprocessing
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from lydite.calibrate.run import picklable_error
from lydite.core.errors import CalibrationError, LyditeError
from lydite.core.fast_blas import use_one_thread

MOST_LOSSES = 2  # at one task, or of workers that did not even start
POLL = 0.2  # seconds between checks for a request to stop
Report = Callable[[Any], None]  # of progress within a task; raises KeyboardInterrupt to stop it


@dataclass(frozen=True)
class PoolCallbacks:
    """What happens to tasks, and whether to stop."""

    finished: Callable[[Any, Any], None]  # task, result
    reported: Callable[[Any, Any], None] = lambda task, value: None
    noted: Callable[[str], None] = lambda line: None
    stopping: Callable[[], bool] = lambda: False


@dataclass(eq=False)
class WorkerHandle:
    """One worker process, for the pool."""

    process: BaseProcess
    pipe: Connection
    task: Any = None
    done: bool = False  # it ended as it should


@dataclass(eq=False)
class Pool:
    """Workers that begin with `start(*arguments)`: a context with a function of a task.

    That function is called with a task and a `Report`. `start` is imported by each worker, and its
    arguments are pickled.
    """

    start: Callable[..., contextlib.AbstractContextManager[Callable[[Any, Report], Any]]]
    arguments: tuple[Any, ...]
    tasks: Iterable[Any]
    callbacks: PoolCallbacks
    name: Callable[[Any], str] = str  # of a task, in messages
    waiting: deque[Any] = field(init=False)
    handles: list[WorkerHandle] = field(init=False, default_factory=list[WorkerHandle])

    def __post_init__(self) -> None:
        self.waiting = deque(self.tasks)
        self._losses: Counter[str | None] = Counter()
        self._stopping = False

    def run(self, count: int) -> None:
        """Do all tasks in at most `count` processes; KeyboardInterrupt on a request to stop."""
        try:
            self._run(min(count, len(self.waiting)))
        finally:
            self._end()

    def _run(self, count: int) -> None:
        for _ in range(count):
            self._spawn()
        while self.handles:
            ready = wait([handle.pipe for handle in self.handles], POLL)
            for handle in [handle for handle in self.handles if handle.pipe in ready]:
                self._receive(handle)
            if self.callbacks.stopping() and not self._stopping:
                self._stopping = True
                self.waiting.clear()
                for handle in self.handles:
                    _send(handle, None)
        if self._stopping:
            raise KeyboardInterrupt

    def _end(self) -> None:
        """Whatever happened, no worker is left."""
        while self.handles:
            handle = self.handles.pop()
            handle.pipe.close()
            handle.process.terminate()
            handle.process.join()

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share MLX's threads
        pipe, worker_pipe = context.Pipe()
        process = context.Process(
            target=_work, args=(worker_pipe, self.start, self.arguments), daemon=True
        )
        with _block_sigint():
            process.start()
        worker_pipe.close()  # so that the end of the worker is the end of the pipe
        self.handles.append(WorkerHandle(process, pipe))

    def _receive(self, handle: WorkerHandle) -> None:
        try:
            what, value = handle.pipe.recv()
        except (EOFError, OSError):
            self.lost(handle)
            return
        if what == "report" and handle.task is not None:
            self.callbacks.reported(handle.task, value)
        elif what == "result":
            self.callbacks.finished(handle.task, value)
            self._assign(handle)
        elif what == "ready":
            self._assign(handle)
        elif what == "end":
            handle.done = True
        elif what == "error":
            raise value

    def _assign(self, handle: WorkerHandle) -> None:
        handle.task = self.waiting.popleft() if self.waiting else None
        _send(handle, handle.task)

    def lost(self, handle: WorkerHandle) -> None:
        """A worker ended: as it should, or killed, and then another takes its task."""
        self.handles.remove(handle)
        handle.process.join()
        if handle.done or self._stopping:
            return
        name = None if handle.task is None else self.name(handle.task)
        what = "at its start" if name is None else f"at {name}"
        self._losses[name] += 1
        code = handle.process.exitcode
        if self._losses[name] > MOST_LOSSES:
            raise CalibrationError(
                f"{self._losses[name]} workers ended {what}, the last with code {code}. Is there "
                "memory for all of them? Try fewer --workers."
            )
        self.callbacks.noted(f"a worker ended {what} (code {code}); another takes over.")
        if handle.task is not None:
            self.waiting.appendleft(handle.task)
        self._spawn()


def _send(handle: WorkerHandle, task: Any) -> None:
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


def _work(pipe: Connection, start: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """The main function of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the pool decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))

    def report(value: Any) -> None:
        pipe.send(("report", value))
        if pipe.poll():  # only a request to stop comes while a task is under way
            raise KeyboardInterrupt

    with contextlib.suppress(EOFError, OSError):  # the pool has ended
        try:
            use_one_thread()  # before MLX
            with start(*arguments) as do:
                pipe.send(("ready", None))
                while (task := pipe.recv()) is not None:
                    pipe.send(("result", do(task, report)))
            pipe.send(("end", None))
        except KeyboardInterrupt:
            pipe.send(("end", None))
        except LyditeError as error:
            pipe.send(("error", picklable_error(error)))
