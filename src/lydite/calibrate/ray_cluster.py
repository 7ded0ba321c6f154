"""`--ray`: the same work as tasks of Ray, on as many machines as its cluster has.

Machines share no folder: a task that draws an image returns it as the bytes of a shard. Ray starts
a task again when its worker or its machine is lost, which costs that task only.
"""

import importlib
import os
import signal
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lydite.calibrate.run import Model, RunCallbacks, picklable_error
from lydite.calibrate.settings import Description
from lydite.calibrate.store.set_file import INCOMING
from lydite.calibrate.store.shards import write_shard
from lydite.calibrate.store.writer import Writer, resumable
from lydite.calibrate.worker_pool import PoolCallbacks
from lydite.core.errors import CalibrationError, InputError, LyditeError
from lydite.core.fast_blas import use_one_thread
from lydite.core.files import write_atomic

if TYPE_CHECKING:
    from lydite.calibrate.model_session import ModelSession

RETRIES = 3  # of a task whose worker was lost
AHEAD = 2  # tasks for each core: one runs, one waits
CONNECT_TIMEOUT = 10.0  # seconds
POLL = 0.5  # seconds between checks for a request to stop


def run_ray(writer: Writer, model: Model, address: str, callbacks: RunCallbacks) -> None:
    """Draw all that is missing on a cluster; KeyboardInterrupt on a request to stop."""

    def finished(task: tuple[int, Any], shard: tuple[str, bytes]) -> None:
        name, data = shard
        with resumable(writer.resume):
            write_atomic(writer.folder / INCOMING / name, data, make_parents=False)
        writer.collect()
        callbacks.finished(task[0])

    run_tasks(
        address,
        draw,
        msgspec.json.encode(Description(writer.settings, writer.plan)),
        model,
        [(image.number, tuple(steps)) for image, steps in writer.missing().items()],
        PoolCallbacks(finished, stopping=callbacks.stopping),
        name=lambda task: f"image {task[0]}",
    )


def run_tasks(
    address: str,
    function: Callable[[bytes, Model, Any], Any],
    shared: bytes,
    model: Model,
    tasks: Iterable[Any],
    callbacks: PoolCallbacks,
    name: Callable[[Any], str] = str,
) -> None:
    """Call a function on a cluster with what all tasks share, the model, and one task each.

    What it returns is the result of the task, or an error of lydite, which is raised here.
    """
    ray = _ray()
    if address != "auto":
        _require_listener(address)
    try:
        _join(ray, address)
        _run_all(ray, function, (ray.put(shared), model), deque(tasks), callbacks, name)
    finally:
        ray.shutdown()


def _join(ray: Any, address: str) -> None:
    try:
        with _own_sigterm():
            ray.init(**_where(address), log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"--ray {address}: no cluster there ({_line(error)}).") from error


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray does not get SIGTERM, which stays the caller's.

    It would end the process with it: leave its agents behind when it only starts, and break off
    what is under way later.
    """
    set_handler = signal.signal

    def set_other_signals(number: int, handler: Any) -> Any:
        return (
            signal.getsignal(number) if number == signal.SIGTERM else set_handler(number, handler)
        )

    signal.signal = set_other_signals
    try:
        yield
    finally:
        signal.signal = set_handler


def _run_all(
    ray: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    waiting: deque[Any],
    callbacks: PoolCallbacks,
    name: Callable[[Any], str],
) -> None:
    remote = ray.remote(num_cpus=1, max_retries=RETRIES)(function)
    running: dict[Any, Any] = {}
    while waiting or running:
        if callbacks.stopping():
            raise KeyboardInterrupt  # a task cannot be asked to finish its step: it is dropped
        limit = AHEAD * max(int(ray.cluster_resources().get("CPU", 1)), 1)  # machines may be added
        while waiting and len(running) < limit:
            task = waiting.popleft()
            running[remote.remote(*arguments, task)] = task
        for reference in ray.wait(list(running), timeout=POLL)[0]:
            task = running.pop(reference)
            callbacks.finished(task, _result(ray, reference, name(task)))


def draw(description: bytes, model: Model, task: tuple[int, tuple[int | None, ...]]) -> Any:
    """One image as a shard, its name and its bytes; or what went wrong."""
    number, wanted = task
    try:
        session = _session(description, model)
        image = session.builder.image(number)
        items = session.items(image, wanted)
        session.require_unchanged()
        with tempfile.TemporaryDirectory() as folder:
            name, _ = write_shard(Path(folder), session.builder.settings, items)
            return name, Path(folder, name).read_bytes()
    except LyditeError as error:
        return picklable_error(error)


@lru_cache(maxsize=1)
def _session(description: bytes, model: Model) -> "ModelSession":
    """A worker of Ray lives on from task to task, and so does the model it loaded."""
    use_one_thread()  # before MLX
    from lydite.calibrate.model_session import ModelSession

    return ModelSession.open(msgspec.json.decode(description, type=Description), model)


def _result(ray: Any, reference: Any, name: str) -> Any:
    try:
        result = ray.get(reference)
    except ray.exceptions.RayError as error:
        raise CalibrationError(
            f"{name}: its task was lost {RETRIES + 1} times ({_line(error)})."
        ) from error
    if isinstance(result, LyditeError):
        raise result
    return result


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"  # in C++, which ends the process too
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise InputError(
            "--ray needs the package ray. Install it with: pip install 'lydite[ray]'"
        ) from None


def _where(address: str) -> dict[str, Any]:
    """`auto` is the cluster this machine is in, or one of its own; else HOST:PORT."""
    if address == "auto":
        return {"address": os.environ.get("RAY_ADDRESS"), "include_dashboard": False}
    return {"address": address}


def _require_listener(address: str) -> None:
    """Ray itself would wait for minutes where nobody answers."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"--ray {address}: no cluster there ({_line(error)}). Expected auto or HOST:PORT."
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
