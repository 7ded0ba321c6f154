"""Whether `set.json`, its copy in the index and the shards are of one set."""

from collections.abc import Callable, Iterable
from pathlib import Path

from lydite.calibrate.settings import differences
from lydite.calibrate.store.index import Index
from lydite.calibrate.store.set_file import NAME as SET
from lydite.calibrate.store.set_file import Description, parse_description
from lydite.calibrate.store.shards import Shard
from lydite.core.errors import CalibrationError, at


def kept_description(index: Index) -> Description | None:
    """The copy of `set.json` that the index has."""
    return parse_description((index.description() or "").encode())


def disagreement(description: Description, index: Index) -> str | None:
    """Why `set.json` is not the one of the index; it may be ahead, since it is written first."""
    kept = kept_description(index)
    if kept is None:
        return None
    if kept.settings.hash != description.settings.hash:
        lines = "; ".join(differences(description.settings, kept.settings))
        return f"it has other settings than the index ({lines}; those of the index last)"
    try:
        both = description.plan.joined(kept.plan, Path())
    except CalibrationError:
        return "it plans other images than the index"
    return None if both == description.plan else "it is older than the index, which plans more"


def require_agreement(folder: Path, description: Description, index: Index) -> None:
    """Refuse a `set.json` that is not the one of the index."""
    if why := disagreement(description, index):
        raise CalibrationError(
            f"{at(folder / SET)}: {why}. Run: lydite calibrate repair {at(folder)}"
        )


class Membership:
    """Which shards can be of the set that a description tells."""

    def __init__(self, description: Description) -> None:
        self._settings = description.settings.hash
        self._images = {image.number: image for image in description.plan.images}

    def holds(self, shard: Shard) -> bool:
        """Whether a shard has the set's settings, and its numbers mean the set's images."""
        return shard.settings.hash == self._settings and all(
            entry.image not in self._images
            or (entry.prompt, entry.seed)
            == (self._images[entry.image].prompt, self._images[entry.image].seed)
            for entry in shard.entries
            if entry.image is not None
        )

    def count(self, paths: Iterable[Path]) -> int:
        """How many of these shards can be of the set."""
        return sum(1 for path in paths if _opened_and(path, self.holds))

    def strangers(self, paths: Iterable[Path]) -> list[Path]:
        """The shards that open and are of another set."""
        return [path for path in paths if _opened_and(path, lambda shard: not self.holds(shard))]


def _opened_and(path: Path, check: Callable[[Shard], bool]) -> bool:
    try:
        with Shard.open(path) as shard:
            return check(shard)
    except CalibrationError:
        return False
