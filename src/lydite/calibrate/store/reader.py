"""A calibration set, open for reading: any number of readers, also while a run writes."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from lydite.calibrate.settings import Description, Image
from lydite.calibrate.store.index import Index, Row
from lydite.calibrate.store.set_file import SHARDS, read_description, repair_advice
from lydite.calibrate.store.shards import Shard
from lydite.core.errors import CalibrationError, at

MOST_OPEN = 16  # shards


class CalibrationSet:
    """An open set: its items, and the arrays of each."""

    def __init__(self, folder: Path, description: Description, index: Index) -> None:
        self.folder, self.settings, self.plan = folder, description.settings, description.plan
        self.index = index
        self._open: dict[str, Shard] = {}

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Open for reading; damaged shards are an error."""
        opened = cls.open_damaged(folder)
        opened.index.require_undamaged()
        return opened

    @classmethod
    def open_damaged(cls, folder: Path | str) -> Self:
        """The same without the items of damaged shards, which `index.damaged` names."""
        folder = Path(folder)
        description = read_description(folder)
        return cls(folder, description, Index.read(folder, description))

    def rows(self, kind: str | None = "sample") -> Iterator[Row]:
        """The items of a kind, in the order of images and steps; None: all."""
        return self.index.rows(kind)

    def read(self, row: Row) -> Mapping[str, NDArray[Any]]:
        """The arrays of an item, compared with their hashes."""
        shard = self._shard(row.shard)
        number = next((n for n, e in enumerate(shard.entries) if e == row.entry), None)
        arrays = None if number is None else shard.intact(number)
        if arrays is None:
            raise CalibrationError(
                f"{at(shard.path)}: {row.entry.label} is damaged. {repair_advice(self.folder)}"
            )
        return arrays

    def missing(self) -> dict[Image, list[int | None]]:
        """Planned items the set does not hold: the steps of each image; None: without a step."""
        known = self.index.keys()
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
        """Close the shards; arrays that were returned stay valid."""
        while self._open:
            self._open.popitem()[1].close()

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
