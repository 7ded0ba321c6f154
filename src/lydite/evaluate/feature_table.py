"""Features of many pictures: computed in batches, kept in a cache, held in mapped files."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.npz_files import npz_bytes, read_npz
from lydite.core.errors import CalibrationError, FileError
from lydite.core.files import write_atomic
from lydite.pipelines.picture import Pixels, pixel_hash

BATCH = 16  # pictures of one size
CACHE = "features"  # folder in the user's cache


class PictureNetwork(Protocol):
    """A feature network: see `features.FeatureNetwork`."""

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def preprocess(self) -> str: ...
    def __call__(self, pixels: Pixels, /) -> Mapping[str, NDArray[np.float32]]: ...


Table = dict[str, NDArray[Any]]  # name of an output -> (N, D), a row a picture


def feature_table(
    pictures: Iterable[Pixels],
    count: int,
    network: PictureNetwork,
    cache: Path | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Table:
    """The features of `count` pictures, in files that are gone when the process ends."""
    table: Table = {}
    for row, vectors in enumerate(_each(pictures, network, cache)):
        for name, vector in vectors.items():
            if name not in table:
                with tempfile.TemporaryFile() as file:  # without a name; the array keeps its bytes
                    table[name] = np.memmap(file, np.float32, "w+", shape=(count, vector.size))
            table[name][row] = vector
        tick()
    return table


def _each(
    pictures: Iterable[Pixels], network: PictureNetwork, cache: Path | None
) -> Iterator[dict[str, NDArray[np.float32]]]:
    """The vectors of each picture, from the cache or computed, in order."""
    waiting: list[tuple[Pixels, Path | None]] = []
    folder = None if cache is None else cache / f"{network.digest[:32]}-{_slug(network.preprocess)}"
    for pixels in pictures:
        path = None
        if folder is not None:
            key = pixel_hash(pixels)
            path = folder / key[:2] / f"{key}.npz"
            if (known := _read(path)) is not None:
                yield from _compute(waiting, network)
                waiting.clear()
                yield known
                continue
        if waiting and (len(waiting) == BATCH or waiting[0][0].shape != pixels.shape):
            yield from _compute(waiting, network)
            waiting.clear()
        waiting.append((pixels, path))
    yield from _compute(waiting, network)


def _compute(
    waiting: list[tuple[Pixels, Path | None]], network: PictureNetwork
) -> Iterator[dict[str, NDArray[np.float32]]]:
    if not waiting:
        return
    outputs = network(np.stack([pixels for pixels, _ in waiting]))
    for row, (_, path) in enumerate(waiting):
        vectors = {name: np.asarray(values[row]) for name, values in outputs.items()}
        if path is not None:
            _write(path, vectors)
        yield vectors


def _read(path: Path) -> dict[str, NDArray[np.float32]] | None:
    """What the cache holds; None where it holds nothing that can be used."""
    if not path.is_file():
        return None
    try:
        vectors = read_npz(path)
    except CalibrationError:
        return None
    usable = all(v.ndim == 1 and v.dtype == np.float32 for v in vectors.values())
    return vectors if vectors and usable else None


def _write(path: Path, vectors: dict[str, NDArray[np.float32]]) -> None:
    try:
        write_atomic(path, npz_bytes(dict(vectors)))
    except FileError:  # a cache that cannot be written is no cache
        return


def _slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text)
