"""The hash of a model's files: every byte of every tensor, its configs, scheduler and tokenizers.

Hashing takes a second or two for each gigabyte, so the hash of a network is kept in the user's
cache, by the identity of its files: it costs nothing the second time.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np

from lydite.core.checkpoint import open_checkpoint
from lydite.core.config import read_json
from lydite.core.errors import FileError
from lydite.core.files import PIECE, cache_folder, open_regular, read_bounded, write_atomic
from lydite.pipelines.model import Component, Model

CACHE = "model_hashes.json"
MOST_CACHED = 500  # networks
MOST_BYTES = 2**27  # of a tokenizer's file
SETTLED = 2.0  # seconds after which a changed file has another time for certain


def model_hash(model: Model) -> str:
    """Equal exactly when the files hold the same model, however they are cut and formatted."""
    total = hashlib.sha256(_text(_public(model.scheduler)))
    for name, component in sorted(model.components.items()):
        total.update(f"{name} {component_hash(component)}\n".encode())
        total.update(_text(_chosen(component.config)))
    for name, (folder, _) in sorted(model.tokenizers.items()):
        for file, digest in tokenizer_files(folder):
            total.update(f"{name} {file} {digest}\n".encode())
    for lora, weight in model.loras:
        total.update(f"lora {_file_hash(lora.path)} {weight}\n".encode())
    for word in model.embeddings:
        total.update(f"embedding {_file_hash(word.path)} {word.token}\n".encode())
    return total.hexdigest()


def joined_hash(*hashes: str) -> str:
    """Of several models that draw one picture."""
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def component_hash(component: Component) -> str:
    """Of the names, dtypes, shapes and bytes of all tensors of one network."""
    with open_checkpoint(component.path) as checkpoint:
        identity = _identity(checkpoint.files, component.prefix)
    if identity is not None and (known := _read_cache().get(identity)):
        return known
    total = hashlib.sha256()
    with component.scope() as scope:
        for tensor, info in sorted(scope.tensors.items()):
            total.update(f"{tensor} {info.dtype} {info.shape}\n".encode())
            total.update(np.ascontiguousarray(scope.read(tensor)).reshape(-1).view(np.uint8).data)
    if identity is not None:
        _add_to_cache(identity, total.hexdigest())
    return total.hexdigest()


def sampled_hash(model: Model) -> str:
    """What version 0.1 wrote into pictures: names, and a kilobyte from each tensor."""
    total = hashlib.sha256()
    for name, component in sorted(model.components.items()):
        with component.scope() as scope:
            for tensor, info in sorted(scope.tensors.items()):
                total.update(f"{name} {tensor} {info.dtype} {info.shape}\n".encode())
                flat = scope.read(tensor).reshape(-1)
                middle = flat.size // 2
                total.update(flat[middle : middle + 1024 // flat.itemsize].tobytes())
    return total.hexdigest()


def _public(raw: Any) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if not name.startswith("_")}


def _chosen(config: Any) -> dict[str, Any]:
    """The fields that differ from their defaults: a field that is added later changes no hash."""
    chosen: dict[str, Any] = {}
    for field in fields(config):
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        if (value := getattr(config, field.name)) != default:
            chosen[field.name] = value
    return chosen


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _file_hash(path: Path) -> str:
    """Of a file whose size was checked before."""
    total = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(PIECE):
            total.update(piece)
    return total.hexdigest()


def tokenizer_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and SHA-256 of every file of a tokenizer."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            yield path.name, hashlib.sha256(read_bounded(path, MOST_BYTES)).hexdigest()


def _identity(paths: Iterable[Path], prefix: str) -> str | None:
    """Which files these are, or None when they changed a moment ago and might change unseen."""
    rows: list[tuple[object, ...]] = []
    for path in sorted(paths):
        status = os.stat(path)
        if time.time() - max(status.st_mtime, status.st_ctime) < SETTLED:
            return None
        times = status.st_mtime_ns, status.st_ctime_ns
        place = os.path.realpath(path), status.st_dev, status.st_ino
        rows.append((*place, status.st_size, *times))
    return hashlib.sha256(repr((rows, prefix)).encode(errors="surrogateescape")).hexdigest()


def _read_cache() -> dict[str, str]:
    folder = cache_folder()
    if folder is None or not (folder / CACHE).is_file():
        return {}
    with contextlib.suppress(FileError):
        known = read_json(folder / CACHE)
        if all(isinstance(text, str) for text in known.values()):
            return known
    return {}


def _add_to_cache(identity: str, digest: str) -> None:
    folder = cache_folder()
    if folder is None:
        return
    known = {**_read_cache(), identity: digest}
    newest = dict(list(known.items())[-MOST_CACHED:])
    with contextlib.suppress(FileError):  # a cache that cannot be written is no cache
        write_atomic(folder / CACHE, json.dumps(newest).encode())
