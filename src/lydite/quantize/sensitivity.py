"""How much the denoiser's output changes when one linear is rounded to nearest, and no other is.

The network is run on stored latents of a calibration set, all steps equally often. What a sampler
takes from the denoiser is a direction, (x - denoised) / sigma; the error of a layer is the relative
error of that direction, root mean square over the samples. So no step counts less because its
noise is low.

Errors are measured at 2 and 4 bits. The step of a grid, and so the error, goes with
1 / (2 ** bits - 1): for 24 layers of the embedded model, errors that were measured at 3, 5, 6 and 8
bits are 0.72 to 1.5 times what this rule makes of 4 bits, nine of ten 0.8 to 1.26 times. At 2 bits
they are up to 3.8 times as large, so these are measured. All six would take three times as long.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.model_session import require_model
from lydite.calibrate.replay import Replay, latent_of, network
from lydite.calibrate.settings import digest
from lydite.calibrate.store.index import Row
from lydite.calibrate.store.reader import CalibrationSet
from lydite.core.config import read_json
from lydite.core.errors import CalibrationError, FileError, NotFiniteError, at
from lydite.core.files import cache_folder, write_atomic
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize.blocks import choose_samples
from lydite.quantize.grid import fit_grid
from lydite.trace.mlx_capture import compiles, walk
from lydite.weights.quantize import GROUPS

MEASURED = (2, 4)  # bits
SAMPLES = 16
FOLDER = "sensitivity"  # in the user's cache
VERSION = 1  # of the rule by which errors are measured


class Sensitivity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Relative errors of the denoiser's direction: path of a linear -> bits -> error."""

    fingerprint: str  # of the model, the set and all settings
    group: int
    samples: int
    errors: dict[str, dict[int, float]]

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
    samples: int = SAMPLES,
    widths: Sequence[int] = MEASURED,
    file: Path | None = None,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
    stopping: Callable[[], bool] = lambda: False,
) -> Sensitivity:
    """Of every linear of the network whose inputs fill whole groups.

    What is measured is saved in `file` after each linear, by default one in the user's cache, and
    a file that exists is extended. A file of another model, set or settings is refused.
    """
    pipeline.model.prepare()
    require_model(opened.settings, pipeline)
    chosen = choose_samples(opened, 1, samples, samples)
    fingerprint = digest(
        [VERSION, opened.settings.hash, opened.content_hash, [row.key for row in chosen], group,
         sorted(widths)]
    )  # fmt: skip
    file = file or _cached(fingerprint)
    found = Sensitivity(fingerprint, group, len(chosen), _known(file, fingerprint, widths))
    layers = _linears(network(pipeline), group)
    left = [path for path in layers if path not in found.errors]
    if not left:
        return found
    with _not_compiled():
        denoiser = _Directions(pipeline, opened, chosen)
        wanted = denoiser.run()
        for path in left:
            if stopping():
                raise KeyboardInterrupt
            found.errors[path] = {
                bits: _error(denoiser, layers[path], path, bits, group, wanted) for bits in widths
            }
            if file is not None:
                write_atomic(file, found.to_json())
            on_layer(len(found.errors), len(layers))
    if not any(any(errors.values()) for errors in found.errors.values()):
        raise CalibrationError("no linear changes the denoiser's output: nothing was measured.")
    return found


def _linears(net: nn.Module, group: int) -> dict[str, Any]:
    return {
        path: module
        for path, module in walk(net)
        if isinstance(module, nn.Linear) and module.weight.shape[1] % (group or min(GROUPS)) == 0
    }


class _Directions:
    """The denoiser's directions at some samples, of the network as it is now."""

    def __init__(self, pipeline: Pipeline, opened: CalibrationSet, samples: Sequence[Row]) -> None:
        self._replay = Replay(pipeline, opened.settings, _Nothing())
        self._samples = [(sample.entry, latent_of(opened, sample)) for sample in samples]

    def run(self) -> list[NDArray[np.float64]]:
        """For each sample, times sigma."""
        self._replay.forget()
        return [x.astype(np.float64) - self._replay.run(entry, x) for entry, x in self._samples]


def _error(
    denoiser: _Directions,
    layer: Any,
    path: str,
    bits: int,
    group: int,
    wanted: Sequence[NDArray[np.float64]],
) -> float:
    full = layer.weight
    weight = np.array(full.astype(mx.float32))
    grid = fit_grid(weight, bits, group or None)
    layer.weight = mx.array(grid.values(grid.round(weight))).astype(full.dtype)
    try:
        found = denoiser.run()
    finally:
        layer.weight = full
    squares = [
        float(np.square(one - other).sum() / np.square(other).sum())
        for one, other in zip(found, wanted, strict=True)
    ]
    error = float(np.sqrt(np.mean(squares)))
    if not np.isfinite(error):
        raise NotFiniteError(f"{path} in {bits} bits: the denoiser returns NaN or Inf.")
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


@contextmanager
def _not_compiled() -> Iterator[None]:
    """A compiled network would keep the weights it was compiled with."""
    compiled = compiles()
    mx.disable_compile()
    try:
        yield
    finally:
        if compiled:
            mx.enable_compile()


class _Nothing:
    """Replay's observer."""

    def wants(self, path: str, slot: str) -> bool:
        return False

    def add(self, path: str, slot: str, value: Any) -> None:
        raise AssertionError("nothing is wanted")
