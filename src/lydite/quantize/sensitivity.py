"""How far one picture moves when one linear is rounded to nearest, and no other is.

The network starts from the stored noise of a few images and runs to the end in a few Euler steps;
the error of a layer is the relative error of the latents at the end, root mean square over the
images. The relative error of single steps, on stored latents, is mostly that of the last step,
which hardly moves the latents, and leaves out that early errors grow: in two images of the embedded
model, by a factor of 4 to 7 in the first five steps. Which of the two gives better pictures is not
settled: with widths by this one the mean PSNR of 64 pictures is 1.2 dB higher, with a 95 % interval
from -0.2 to 2.6.

The step of a grid, and so the error, goes with 1 / (2 ** bits - 1): for 24 layers of the embedded
model, errors of single steps at 3, 5, 6 and 8 bits are 0.72 to 1.5 times what this rule makes of 4
bits, nine of ten 0.81 to 1.28 times; at 2 bits up to 1.6, in one case 3.8 times. So only one width
is measured by default: all six would take six times as long.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from lydite.calibrate.model_session import open_pipeline, require_model
from lydite.calibrate.ray_cluster import run_tasks
from lydite.calibrate.replay import Replay, latent_of, network
from lydite.calibrate.request_record import request_of
from lydite.calibrate.run import Model, picklable_error
from lydite.calibrate.settings import Settings, digest
from lydite.calibrate.store.index import Row
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.shards import Entry
from lydite.calibrate.worker_pool import Pool, PoolCallbacks, Report
from lydite.core.config import read_json
from lydite.core.dtypes import widen
from lydite.core.errors import CalibrationError, FileError, LyditeError, NotFiniteError, at
from lydite.core.fast_blas import use_one_thread
from lydite.core.files import cache_folder, write_atomic
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize.grid import fit_grid
from lydite.trace.mlx_capture import walk
from lydite.trace.mlx_compilation import not_compiled
from lydite.weights.quantized_format import GROUPS

MEASURED = (3,)  # bits
IMAGES, STEPS = 4, 8
FOLDER = "sensitivity"  # in the user's cache
VERSION = 2  # of the rule by which errors are measured


class Sensitivity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Relative errors of the latents at the end: path of a linear -> bits -> error."""

    fingerprint: str  # of the model, the set and all settings
    group: int
    images: int
    errors: dict[str, dict[int, Annotated[float, Meta(ge=0, le=1e6)]]]

    def squared(self, path: str, bits: int) -> float:
        """The squared error at any width: measured, or by rule from the closest measured one.

        Squares of independent errors add up.
        """
        known = self.errors[path]
        closest = min(known, key=lambda measured: (abs(measured - bits), -measured))
        return (known[closest] * (2**closest - 1) / (2**bits - 1)) ** 2

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def measure_sensitivity(
    pipeline: Pipeline,
    opened: CalibrationSet,
    *,
    group: int = 64,
    images: int = IMAGES,
    steps: int = STEPS,
    widths: Sequence[int] = MEASURED,
    file: Path | None = None,
    elsewhere: "Elsewhere | None" = None,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
    on_note: Callable[[str], None] = lambda line: None,
    stopping: Callable[[], bool] = lambda: False,
) -> Sensitivity:
    """Of every linear of the network whose inputs fill whole groups.

    No linear depends on another one here, so they may be measured `elsewhere`: in processes or on
    a Ray cluster. What is measured is saved in `file` after each linear, by default one in the
    user's cache, and a file that exists is extended. A file of another model, set or settings is
    refused.
    """
    pipeline.model.prepare()
    require_model(opened.settings, pipeline)
    chosen = choose_trajectories(opened, images, steps)
    keys = [[row.key for row in rows] for rows in chosen]
    settings = opened.settings.hash
    fingerprint = digest([VERSION, settings, opened.content_hash, keys, group, sorted(widths)])
    file = file or _cached(fingerprint)
    layers = _linears(network(pipeline), group)
    known = {p: each for p, each in _known(file, fingerprint, widths).items() if p in layers}

    def found() -> Sensitivity:
        ordered = {path: known[path] for path in layers if path in known}
        return Sensitivity(fingerprint, group, len(chosen), ordered)

    def keep(path: str, errors: dict[int, float]) -> None:
        known[path] = errors
        if file is not None:
            write_atomic(file, found().to_json())
        on_layer(len(known), len(layers))

    if left := [path for path in layers if path not in known]:
        starts = [([row.entry for row in rows], latent_of(opened, rows[0])) for rows in chosen]
        measurement = Measurement(opened.settings, starts, group, tuple(widths))
        callbacks = PoolCallbacks(keep, noted=on_note, stopping=stopping)
        if elsewhere is None:
            _measure_here(pipeline, measurement, left, callbacks)
        else:
            pipeline.model.unload()  # workers have their own
            elsewhere(measurement, left, callbacks)
        if not any(any(errors.values()) for errors in known.values()):
            raise CalibrationError("no linear changes the latents: nothing was measured.")
    return found()


@dataclass(frozen=True, eq=False)
class Measurement:
    """What a process has to know to measure a linear: no process but the first has the set."""

    settings: Settings  # of the set
    starts: list[tuple[list[Entry], NDArray[Any]]]  # of each image, its steps and its noise
    group: int
    widths: tuple[int, ...]


# Measures linears by their paths, and calls `finished` with the path and the errors of each.
Elsewhere = Callable[[Measurement, list[str], PoolCallbacks], None]


def in_processes(model: Model, count: int) -> Elsewhere:
    """By worker processes, each with a model of its own."""

    def run(measurement: Measurement, paths: list[str], callbacks: PoolCallbacks) -> None:
        Pool(_measuring, (model, measurement), paths, callbacks).run(count)

    return run


def on_ray(model: Model, address: str) -> Elsewhere:
    """By tasks on a Ray cluster, each of whose machines has the model."""

    def run(measurement: Measurement, paths: list[str], callbacks: PoolCallbacks) -> None:
        run_tasks(address, measure_layer, pickle.dumps(measurement), model, paths, callbacks)

    return run


def _measure_here(
    pipeline: Pipeline, measurement: Measurement, paths: list[str], callbacks: PoolCallbacks
) -> None:
    with not_compiled():
        errors = _LayerErrors(pipeline, measurement)
        for path in paths:
            if callbacks.stopping():
                raise KeyboardInterrupt
            callbacks.finished(path, errors.of(path))


@contextmanager
def _measuring(
    model: Model, measurement: Measurement
) -> Iterator[Callable[[str, Report], dict[int, float]]]:
    """A worker process."""
    with not_compiled():
        errors = _open(model, measurement)
        yield lambda path, report: errors.of(path)


def measure_layer(measurement: bytes, model: Model, path: str) -> dict[int, float] | LyditeError:
    """A task of Ray: the errors of a linear, or what went wrong."""
    try:
        with not_compiled():
            return _opened_once(measurement, model).of(path)
    except LyditeError as error:
        return picklable_error(error)


@lru_cache(maxsize=1)
def _opened_once(measurement: bytes, model: Model) -> "_LayerErrors":
    """A worker of Ray lives on from task to task, and so does the model it loaded."""
    use_one_thread()
    return _open(model, pickle.loads(measurement))


def _open(model: Model, measurement: Measurement) -> "_LayerErrors":
    pipeline = open_pipeline(model, request_of(measurement.settings.conditions)[1])
    pipeline.model.prepare()
    require_model(measurement.settings, pipeline)
    return _LayerErrors(pipeline, measurement)


def _linears(net: nn.Module, group: int) -> dict[str, Any]:
    return {
        path: module
        for path, module in walk(net)
        if isinstance(module, nn.Linear) and module.weight.shape[1] % (group or min(GROUPS)) == 0
    }


def choose_trajectories(opened: CalibrationSet, images: int, steps: int) -> list[list[Row]]:
    """Some images of a set, with as many of their kept steps, the first included."""
    found: dict[int | None, list[Row]] = {}
    for row in opened.rows("sample"):
        found.setdefault(row.image, []).append(row)
    if not found:
        raise CalibrationError(f"{at(opened.folder)}: no samples. It is not the set of a run.")
    order = np.random.default_rng(0).permutation(len(found))[:images]
    chosen: list[list[Row]] = []
    for rows in (list(found.values())[number] for number in order):
        rows = sorted(rows, key=lambda row: row.step or 0)
        count = min(steps, len(rows))
        chosen.append([rows[number * len(rows) // count] for number in range(count)])
    return chosen


class _LayerErrors:
    """The errors of the latents at the end, when one linear of a network is rounded."""

    def __init__(self, pipeline: Pipeline, measurement: Measurement) -> None:
        self._measurement = measurement
        self._replay = Replay(pipeline, measurement.settings)
        self._layers = _linears(network(pipeline), measurement.group)
        self._wanted = self.ends()

    def of(self, path: str) -> dict[int, float]:
        """At each width."""
        return {bits: self._error(path, bits) for bits in self._measurement.widths}

    def ends(self) -> list[NDArray[np.float64]]:
        """The latents of each image at the end, of the network as it is now."""
        self._replay.forget()
        return [self._end(entries, x) for entries, x in self._measurement.starts]

    def _end(self, entries: Sequence[Entry], start: NDArray[Any]) -> NDArray[np.float64]:
        x = widen(start).astype(np.float64)
        sigmas = [entry.sigma or 0.0 for entry in entries] + [0.0]
        for entry, sigma, after in zip(entries, sigmas, sigmas[1:], strict=False):
            denoised = self._replay.run(entry, x.astype(np.float32))
            x = denoised + after / sigma * (x - denoised)  # Euler's method
        return x

    def _error(self, path: str, bits: int) -> float:
        layer = self._layers[path]
        full = layer.weight
        weight = np.array(full.astype(mx.float32))
        grid = fit_grid(weight, bits, self._measurement.group or None)
        layer.weight = mx.array(grid.values(grid.round(weight))).astype(full.dtype)
        try:
            found = self.ends()
        finally:
            layer.weight = full
        squares = [
            float(np.square(one - other).sum() / np.square(other).sum())
            for one, other in zip(found, self._wanted, strict=True)
        ]
        error = float(np.sqrt(np.mean(squares)))
        if not np.isfinite(error):
            raise NotFiniteError(f"{path} in {bits} bits: the network returns NaN or Inf.")
        return error


def _cached(fingerprint: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / FOLDER / f"{fingerprint}.json"


def _known(
    file: Path | None, fingerprint: str, widths: Sequence[int]
) -> dict[str, dict[int, float]]:
    """What a file has of this measurement."""
    if file is None or not file.exists():
        return {}
    found = read_sensitivity(file)
    if found.fingerprint != fingerprint:
        raise FileError(
            f"{at(file)}: was measured with another model, set or settings. Give another file."
        )
    return {path: each for path, each in found.errors.items() if set(each) == set(widths)}


def read_sensitivity(file: Path) -> Sensitivity:
    """What was measured before, or FileError."""
    try:
        return msgspec.convert(read_json(file), Sensitivity, str_keys=True)
    except msgspec.ValidationError as error:
        raise FileError(f"{at(file)}: not a file of sensitivities ({error}).") from error
