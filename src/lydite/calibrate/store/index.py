"""The items of a set, by key, read from the headers of its shards whenever a set is opened.

A header takes about half a millisecond, so no copy of this is kept on disk.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lydite.calibrate.settings import Description, differences
from lydite.calibrate.store.set_file import SHARDS
from lydite.calibrate.store.shards import Entry, ShardHeader, read_shard_header, shard_names
from lydite.core.errors import CalibrationError, at, shown


@dataclass(frozen=True, slots=True)
class Row:
    """One item and the shard that holds it."""

    entry: Entry
    shard: str

    @property
    def key(self) -> str:
        """SHA-256 of all that decides its values."""
        return self.entry.key

    @property
    def image(self) -> int | None:
        """The number of its image."""
        return self.entry.image

    @property
    def step(self) -> int | None:
        """Its step."""
        return self.entry.step

    @property
    def digest(self) -> str:
        """SHA-256 of its content."""
        return self.entry.digest


class Index:
    """The items of one set. `damaged` names the shards that cannot be used, with the reason."""

    def __init__(self, folder: Path, description: Description) -> None:
        self.folder, self._settings = folder, description.settings
        self.shards: dict[str, int] = {}  # names and bytes
        self.damaged: dict[str, str] = {}
        self._rows: dict[str, Row] = {}
        self._images = {
            image.number: (image.prompt, image.seed) for image in description.plan.images
        }

    @classmethod
    def read(cls, folder: Path, description: Description) -> "Index":
        """Read the header of every shard."""
        index = cls(folder, description)
        for name in shard_names(folder / SHARDS):
            path = folder / SHARDS / name
            try:
                header = read_shard_header(path)
                index.check_belongs(header)
                index.check_content(header.entries)
                index.add(name, header.bytes, header.entries)
            except CalibrationError as error:
                index.damaged[name] = str(error).removeprefix(f"{at(path)}: ")
        return index

    def add(self, shard: str, size: int, entries: Iterable[Entry]) -> int:
        """Enter a shard and those of its items that are not known; how many they were."""
        before = len(self._rows)
        self.shards[shard] = size
        for entry in entries:
            self._rows.setdefault(entry.key, Row(entry, shard))
            if entry.image is not None and entry.seed is not None:
                self._images.setdefault(entry.image, (entry.prompt, entry.seed))
        return len(self._rows) - before

    def check_belongs(self, header: ShardHeader) -> None:
        """Refuse a shard of another run or another set."""
        if header.settings.hash != self._settings.hash:
            raise CalibrationError(
                "made with other settings than the set "
                f"({differences(header.settings, self._settings)}; the shard's first)"
            )
        self.check_numbers(header.entries)

    def check_content(self, entries: Iterable[Entry]) -> None:
        """Refuse items that the set holds with other values."""
        for entry in entries:
            row = self._rows.get(entry.key)
            if row is not None and row.digest != entry.digest:
                raise CalibrationError(f"{entry.label} has other values in shard {row.shard[:12]}…")

    def check_numbers(self, entries: Iterable[Entry]) -> None:
        """Refuse items whose image number means another prompt or seed in this set."""
        for entry in entries:
            if entry.image is None:
                continue
            prompt, seed = self._images.get(entry.image, (entry.prompt, entry.seed))
            if (prompt, seed) != (entry.prompt, entry.seed):
                raise CalibrationError(
                    f"image {entry.image} is {shown(prompt)} with seed {seed} in the set, and "
                    f"{shown(entry.prompt)} with seed {entry.seed} here; this is from another set"
                )

    def digest(self, key: str) -> str | None:
        """The content digest of an item, or None when the set does not hold it."""
        row = self._rows.get(key)
        return None if row is None else row.digest

    def rows(self, kind: str | None = None) -> Iterator[Row]:
        """Every row, in the order of kind, image, step and key."""
        rows = (row for row in self._rows.values() if kind is None or row.entry.kind == kind)
        return iter(sorted(rows, key=_order))

    def keys(self) -> set[str]:
        """The keys of all items."""
        return set(self._rows)

    def counts(self) -> dict[str, int]:
        """How many items there are of each kind."""
        counts: dict[str, int] = {}
        for row in self._rows.values():
            counts[row.entry.kind] = counts.get(row.entry.kind, 0) + 1
        return counts

    def content_hash(self) -> str:
        """Over all items, whatever the order and number of commits and runs that made them."""
        return content_hash({key: row.digest for key, row in self._rows.items()})

    def require_undamaged(self) -> None:
        """Refuse a set with shards that cannot be used."""
        if self.damaged:
            name, reason = next(iter(self.damaged.items()))
            more = f" So are {len(self.damaged) - 1} others." if len(self.damaged) > 1 else ""
            raise CalibrationError(
                f"{at(self.folder / SHARDS / name)}: {reason.rstrip('.')}.{more} "
                f"Run: lydite calibrate repair {at(self.folder)}"
            )


def content_hash(digests: Mapping[str, str]) -> str:
    """The hash of a set's content, from the digest of each key."""
    total = hashlib.sha256(b"lydite-calibration 1\n")
    for key in sorted(digests):
        total.update(f"{key} {digests[key]}\n".encode())
    return total.hexdigest()


def _order(row: Row) -> tuple[str, int, int, str]:
    entry = row.entry
    return entry.kind, _first(entry.image), _first(entry.step), entry.key


def _first(number: int | None) -> int:
    return -1 if number is None else number
