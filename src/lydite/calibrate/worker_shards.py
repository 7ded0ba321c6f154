"""Many processes, one writer: workers hand shards over, the writer commits them.

A worker needs no claim. What it hands over is whole and durable; handing the same over twice, or
computing it twice, changes nothing.
"""

from collections.abc import Iterable
from pathlib import Path

from lydite.calibrate.store.items import Maker
from lydite.calibrate.store.recovery import INCOMING
from lydite.calibrate.store.set_file import read_description
from lydite.calibrate.store.shards import Item, write_shard
from lydite.core.errors import CalibrationError, at


class Worker:
    """One who computes items for a set that another process writes."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.make = Maker(read_description(self.folder))

    def hand_over(self, items: Iterable[Item]) -> str:
        """Write items where the writer collects them, and return the shard's name."""
        kept = {item.entry.key: item for item in items}
        if not kept:
            raise CalibrationError(f"{at(self.folder)}: nothing to hand over.")
        return write_shard(self.folder / INCOMING, self.make.settings, list(kept.values()))[0]
