"""`--ray`: the same work as tasks of Ray, on as many machines as its cluster has.

A task draws one image and returns it as the bytes of a shard; machines share no folder. Ray starts
a task again when its worker or its machine is lost, which costs that image only.
"""

import importlib
import os
import socket
import tempfile
from collections import deque
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lydite.calibrate.disk import write_sealed
from lydite.calibrate.recovery import INCOMING
from lydite.calibrate.run import Model, Watcher
from lydite.calibrate.setfile import Description
from lydite.calibrate.shards import write_shard
from lydite.calibrate.steady import preload_steady
from lydite.calibrate.writer import Writer, resumable
from lydite.core.errors import CalibrationError, InputError, LyditeError, at

if TYPE_CHECKING:
    from lydite.calibrate.studio import Studio

RETRIES = 3  # of a task whose worker was lost
AHEAD = 2  # tasks for each core: one runs, one waits
LISTENING = 10.0  # seconds until a machine must have answered
PATIENCE = 0.5  # seconds between looks at whether to stop


def run_ray(writer: Writer, model: Model, address: str, watcher: Watcher) -> None:
    """Draw all that is missing on a cluster; KeyboardInterrupt when told to stop."""
    ray = _ray()
    if address != "auto":
        _require_listener(address)
    try:
        ray.init(**_where(address), log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"--ray {address}: no cluster there ({_line(error)}).") from error
    try:
        _draw_all(ray, writer, model, watcher)
    finally:
        ray.shutdown()


def _draw_all(ray: Any, writer: Writer, model: Model, watcher: Watcher) -> None:
    description = Description(writer.settings, writer.plan)
    told = ray.put(msgspec.json.encode(description))
    task = ray.remote(num_cpus=1, max_retries=RETRIES)(draw)
    waiting = deque((image.number, tuple(steps)) for image, steps in writer.missing().items())
    running: dict[Any, int] = {}
    while waiting or running:
        if watcher.stopping():
            raise KeyboardInterrupt  # a task cannot be asked to finish its step: it is dropped
        room = AHEAD * max(int(ray.cluster_resources().get("CPU", 1)), 1)  # machines may be added
        while waiting and len(running) < room:
            number, wanted = waiting.popleft()
            running[task.remote(told, model, number, wanted)] = number
        for reference in ray.wait(list(running), timeout=PATIENCE)[0]:
            number = running.pop(reference)
            name, data = _result(ray, reference, number)
            with resumable(f"lydite calibrate run --out {at(writer.folder)}"):
                write_sealed(writer.folder / INCOMING / name, [data])
            writer.collect()
            watcher.finished(number)


def draw(told: bytes, model: Model, number: int, wanted: tuple[int | None, ...]) -> Any:
    """One image as a shard, its name and its bytes; a LyditeError comes back as text."""
    try:
        studio = _studio(told, model)
        image = studio.make.image(number)
        items = studio.trajectories.items(image, wanted)
        studio.require_unchanged()
        with tempfile.TemporaryDirectory() as folder:
            name, _ = write_shard(Path(folder), studio.make.settings, items)
            return name, Path(folder, name).read_bytes()
    except LyditeError as error:
        return str(error), None


@lru_cache(maxsize=1)
def _studio(told: bytes, model: Model) -> "Studio":
    """A worker of Ray lives on from task to task, and so does the model it loaded."""
    preload_steady()  # before MLX
    from lydite.calibrate.studio import Studio

    return Studio.open(msgspec.json.decode(told, type=Description), model)


def _result(ray: Any, reference: Any, number: int) -> tuple[str, bytes]:
    try:
        name, data = ray.get(reference)
    except ray.exceptions.RayError as error:
        raise CalibrationError(
            f"image {number}: its task was lost {RETRIES + 1} times ({_line(error)})."
        ) from error
    if data is None:
        raise CalibrationError(f"image {number}: {name}")
    return name, data


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
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
        socket.create_connection((host, int(port)), timeout=LISTENING).close()
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"--ray {address}: no cluster there ({_line(error)}). Expected auto or HOST:PORT."
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
