"""The folder in which a quantization is under way: what was decided, and each finished block.

It stands beside the result as NAME.work. A block is written when it is finished, in one file with
its hash; whatever ends a run, the next one goes on with the first block that is missing.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.store.lock import WriterLock
from lydite.core.config import read_json
from lydite.core.errors import FileError, InputError, at
from lydite.core.files import make_folder, move, remove_leftovers, write_atomic
from lydite.core.tensorfile import TensorFile, save
from lydite.quantize.grid import Grid
from lydite.quantize.provenance import UnitError
from lydite.quantize.quantize_blocks import BlockResult
from lydite.quantize.quantized_weight import QuantizedWeight
from lydite.weights.quantized_format import Mode

MARK, FINISHED = "work.txt", "finished.txt"
JOB, BLOCKS, SET, MODEL, EVALUATION = "job.json", "blocks", "set", "model", "evaluation"
_GRID = ("integers", "scales", "offsets")
# What users give, for the keys of a job; other keys stand for themselves.
_GIVEN = {
    "source_hash": "MODEL",
    "set_hash": "the calibration set",
    "plan": "--bits, --group, --format, --bpw or --plan",
    "samples": "--samples or --memory",
} | {
    key: f"--{key.replace('_', '-')}"
    for key in (
        *("method", "act_bits", "act_groups", "quantize_input", "rank", "tune", "iterations"),
        "seed",
    )
}


def work_folder(out: Path) -> Path:
    """Where the work on a result stands."""
    return out.with_name(f"{out.name}.work")


class Work:
    """An open folder of work, which one process at a time writes."""

    def __init__(self, folder: Path, lock: WriterLock) -> None:
        self.folder, self._lock = folder, lock

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Begin or resume; a second process, and a folder that is not ours, are refused."""
        if os.path.lexists(folder):
            _check_ours(folder)
        make_folder(folder)
        if not (folder / MARK).exists():
            write_atomic(folder / MARK, b"Lydite quantizes a model here, and then removes this.\n")
        make_folder(folder / BLOCKS)
        work = cls(folder, WriterLock(folder))
        remove_leftovers(folder / BLOCKS)
        return work

    def describe(self, job: Mapping[str, Any]) -> None:
        """Write what decides the result, or InputError where the folder was begun for another."""
        path = self.folder / JOB
        text = msgspec.json.format(msgspec.json.encode(job, order="deterministic"), indent=1)
        if not os.path.lexists(path):
            write_atomic(path, text)
            return
        known, wanted = read_json(path), msgspec.json.decode(text)
        if known != wanted:
            keys = dict.fromkeys(_GIVEN.get(key, key) for key in _differing(known, wanted))
            raise InputError(
                f"{at(self.folder)}: was begun with another value of {', '.join(keys)[:200]}. Give "
                "the same to resume it, remove the folder, or give another --out."
            )

    def results(self) -> dict[str, BlockResult]:
        """The blocks that are finished, by path."""
        found = (read_result(path) for path in sorted((self.folder / BLOCKS).glob("*.safetensors")))
        return {result.path: result for result in found}

    def add(self, number: int, result: BlockResult) -> None:
        """Keep a finished block."""
        write_result(self.folder / BLOCKS / f"{number:03}.safetensors", result)

    def finish(self, out: Path) -> None:
        """Put the model with its evaluation in its place, and remove the folder."""
        move(self.folder / EVALUATION, self.folder / MODEL / EVALUATION)
        write_atomic(self.folder / FINISHED, b"Only this folder is left to be removed.\n")
        move(self.folder / MODEL, out)
        self._lock.release()
        _remove(self.folder)

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_finished(out: Path) -> bool:
    """Whether a result is complete though its run was stopped, and the folder of work was left."""
    folder = work_folder(out)
    left = (folder / FINISHED).is_file() and not (folder / MODEL).exists()
    if not left or folder.is_symlink():
        return False
    _remove(folder)
    return True


def _remove(folder: Path) -> None:
    """The file that says so goes last."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != FINISHED:
            path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _check_ours(folder: Path) -> None:
    """FileError for a folder that this program did not make, or that leads elsewhere."""
    if folder.is_symlink() or not folder.is_dir():
        raise FileError(
            f"{at(folder)}: is no folder of earlier work. Remove it, or give another --out."
        )
    if any(folder.iterdir()) and not (folder / MARK).is_file():
        raise FileError(
            f"{at(folder)}: holds files that are not of earlier work, and the work would be done "
            "here. Move them, or give another --out."
        )
    for name in (BLOCKS, SET, MODEL, EVALUATION, MARK, JOB):
        if (folder / name).is_symlink():
            raise FileError(f"{at(folder / name)}: is a link. Remove it.")


def _differing(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The keys in which two descriptions differ, inner ones by their names alone."""
    found: list[str] = []
    for key in sorted({**known, **wanted}):
        one, other = known.get(key), wanted.get(key)
        if isinstance(one, dict) and isinstance(other, dict) and key != "plan":
            found += _differing(one, other)
        elif one != other:
            found.append(key)
    return found


def write_result(path: Path, result: BlockResult) -> None:
    """One file: integers, scales and all else of each layer; errors and a hash as metadata."""
    tensors: dict[str, NDArray[Any]] = {}
    bits: dict[str, int] = {}
    modes: dict[str, Mode] = {}
    for layer, weight in result.weights.items():
        bits[layer], modes[layer] = weight.grid.bits, weight.grid.mode
        tensors[f"{layer}.integers"] = weight.integers
        tensors[f"{layer}.scales"] = weight.grid.scales
        tensors[f"{layer}.offsets"] = weight.grid.offsets
        if weight.bias is not None:
            tensors[f"{layer}.bias"] = weight.bias
        tensors |= {f"{layer}.{name}": array for name, array in weight.extras.items()}
    errors = [[error.path, error.nearest, error.after] for error in result.errors]
    rounded = sorted(layer for layer, each in result.weights.items() if each.quantize_input)
    content = {
        "path": result.path,
        "bits": bits,
        "modes": modes,
        "errors": errors,
        "quantize_input": rounded,
    }
    text = msgspec.json.encode(content, order="deterministic").decode()
    save(path, tensors, {"block": text, "hash": _hash(tensors, text)})


class _Content(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    bits: dict[str, int]
    errors: list[tuple[str, float, float]]
    modes: dict[str, Mode] = {}  # affine where an earlier version wrote none
    quantize_input: list[str] = []


def read_result(path: Path) -> BlockResult:
    """A finished block, or FileError when a bit of it changed."""
    with TensorFile.open(path) as file:
        tensors = {name: np.array(file.read(name)) for name in file.header.tensors}
        metadata = file.header.metadata
    try:
        content = msgspec.json.decode(metadata.get("block", ""), type=_Content)
    except msgspec.DecodeError as error:
        raise _damaged(path) from error
    if metadata.get("hash") != _hash(tensors, metadata["block"]):
        raise _damaged(path)
    layers: dict[str, dict[str, NDArray[Any]]] = {layer: {} for layer in content.bits}
    for name, array in tensors.items():
        layer, _, part = name.rpartition(".")
        layers.setdefault(layer, {})[part] = array
    weights: dict[str, QuantizedWeight] = {}
    for layer, parts in layers.items():
        if layer not in content.bits or not set(_GRID) <= set(parts):
            raise _damaged(path)
        integers, scales, offsets = (parts.pop(name) for name in _GRID)
        bias = parts.pop("bias", None)
        grid = Grid(scales, offsets, content.bits[layer], content.modes.get(layer, "affine"))
        weights[layer] = QuantizedWeight(
            integers, grid, bias, parts, layer in content.quantize_input
        )
    return BlockResult(content.path, weights, [UnitError(*error) for error in content.errors])


def _damaged(path: Path) -> FileError:
    return FileError(f"{at(path)}: is damaged. Remove it; the same command makes it again.")


def _hash(tensors: Mapping[str, NDArray[Any]], text: str) -> str:
    total = hashlib.sha256(text.encode())
    for name, array in sorted(tensors.items()):
        total.update(f"{name} {array.dtype} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()
