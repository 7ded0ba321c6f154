"""A calibration set, open for reading: any number of readers, and none waits for the writer."""

from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from lydite.calibrate.settings import Image
from lydite.calibrate.store.consistency import disagreement, require_agreement
from lydite.calibrate.store.index import NAME as INDEX
from lydite.calibrate.store.index import Index, Row
from lydite.calibrate.store.set_file import SHARDS, Description, read_description
from lydite.calibrate.store.shards import Shard
from lydite.core.errors import CalibrationError, at

MOST_OPEN = 16  # shards


class CalibrationSet:
    """An open set: what is there, and the arrays of each item. Reading waits for nobody."""

    def __init__(self, folder: Path, description: Description, index: Index) -> None:
        self.folder, self.settings, self.plan = folder, description.settings, description.plan
        self.index = index
        self._open: dict[str, Shard] = {}

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Open for reading, also while a run writes."""
        folder = Path(folder)
        description, index = read_description(folder), Index.open(folder / INDEX)
        try:
            if disagreement(description, index):
                description = read_description(folder)  # a writer may just have replaced it
            require_agreement(folder, description, index)
        except BaseException:
            index.close()
            raise
        return cls(folder, description, index)

    def rows(self, kind: str | None = "sample") -> Iterator[Row]:
        """What is there, in the order of images and steps."""
        return self.index.rows(kind)

    def read(self, row: Row) -> Mapping[str, NDArray[Any]]:
        """The arrays of an item, held against their hashes: nobody computes on damaged data."""
        shard = self._shard(row.shard)
        number = next((n for n, e in enumerate(shard.entries) if e.key == row.key), None)
        arrays = None if number is None else shard.intact(number)
        if arrays is None:
            raise CalibrationError(
                f"{at(shard.path)}: {row.entry.label} is damaged. Run: lydite calibrate repair "
                f"{at(self.folder)}"
            )
        return arrays

    def missing(self, lost: Set[str] = frozenset()) -> dict[Image, list[int | None]]:
        """Planned and not there: the steps of each image; None stands for what has no step.

        `lost` are keys of items that the index names and the shards do not hold any more.
        """
        known = self.index.keys() - lost
        result: dict[Image, list[int | None]] = {}
        for key, image, step in self.plan.keys(self.settings):
            if key not in known:
                result.setdefault(image, []).append(step)
        return result

    @property
    def content_hash(self) -> str:
        """Equal for sets with equal content, however they were made."""
        return self.index.content_hash()

    def close(self) -> None:
        """Close the files; arrays that were given out stay valid."""
        self.close_shards()
        self.index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _shard(self, name: str) -> Shard:
        if name not in self._open:
            while len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[name] = Shard.open(self.folder / SHARDS / name)
        return self._open[name]

    def close_shards(self) -> None:
        """Close the payload alone; it is opened again when asked for."""
        while self._open:
            self._open.popitem()[1].close()
