"""Compare every byte of a set with its hashes, its plan and plausible ranges of values."""

from dataclasses import dataclass
from pathlib import Path

from lydite.calibrate.settings import Description
from lydite.calibrate.store.index import Index, content_hash
from lydite.calibrate.store.lock import LockOwner, lock_owner
from lydite.calibrate.store.set_file import INCOMING, NAME, QUARANTINE, SHARDS, read_description
from lydite.calibrate.store.shards import Shard, ShardHeader, shard_names
from lydite.calibrate.store.value_checks import LatentShapes, ValueLimits, value_problems
from lydite.core.errors import LyditeError


@dataclass(frozen=True)
class Damage:
    """A file that is not what was written, and the items that are lost with it."""

    file: str
    why: str
    items: tuple[str, ...] = ()


@dataclass(frozen=True)
class SuspiciousItem:
    """An item that is what was written, with values that no network should be given."""

    item: str
    why: str


@dataclass(frozen=True)
class VerifyResult:
    """What `verify` found; the names of its fields are the keys of the JSON."""

    items: dict[str, int]  # undamaged, of each kind
    shards: int
    bytes: int
    content_hash: str | None  # None when something is damaged
    missing: int | None  # planned items that are absent or damaged; None without a plan
    damage: tuple[Damage, ...]
    suspects: tuple[SuspiciousItem, ...]
    pending: int = 0  # complete shards of workers that the next run collects
    quarantined: int = 0
    writer: LockOwner | None = None
    broken: tuple[str, ...] = ()  # shards of workers that cannot be used

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged; it may still be incomplete."""
        return not self.damage

    @property
    def complete(self) -> bool:
        """Whether it is undamaged and holds all that is planned, with plausible values."""
        return self.sound and self.missing == 0 and not self.suspects


def verify(folder: Path | str, limits: ValueLimits | None = None) -> VerifyResult:
    """Read every byte of a set. It needs no lock; a run may write meanwhile."""
    folder = Path(folder)
    damage: list[Damage] = []
    description = _read_set_file(folder, damage)
    shards = _ShardCheck(folder, description, limits or ValueLimits())
    for name in shard_names(folder / SHARDS):
        shards.check(name)
    damage += shards.damage + shards.unplanned()
    incoming = [_incoming_problem(folder, name) for name in shard_names(folder / INCOMING)]
    return VerifyResult(
        shards.items,
        shards.count,
        shards.bytes,
        None if damage else content_hash(shards.digests),
        shards.missing(),
        tuple(damage),
        tuple(shards.all_suspects()),
        incoming.count(None),
        len(shard_names(folder / QUARANTINE)),
        lock_owner(folder),
        broken=tuple(problem for problem in incoming if problem),
    )


class _ShardCheck:
    """Reads shards one at a time: memory does not grow with their content."""

    def __init__(self, folder: Path, description: Description | None, limits: ValueLimits) -> None:
        self._folder, self._limits = folder, limits
        self._index = Index(folder, description) if description else None
        self._latents = LatentShapes(description.settings.conditions if description else {})
        self._suspects: list[SuspiciousItem] = []
        self._planned = _planned_keys(description) if description else set[str]()
        self.damage: list[Damage] = []
        self.items: dict[str, int] = {}  # undamaged, of each kind
        self.digests: dict[str, str] = {}  # of the undamaged items, by key
        self.count = self.bytes = 0

    def check(self, name: str) -> None:
        """Read one shard."""
        path, file = self._folder / SHARDS / name, f"{SHARDS}/{name}"
        self.count += 1
        try:
            self.bytes += path.stat().st_size
            with Shard.open(path) as shard:
                if self._index is not None:
                    header = ShardHeader(shard.settings, shard.entries, shard.size)
                    self._index.check_belongs(header)
                    self._index.check_content(shard.entries)
                    self._index.add(name, shard.size, shard.entries)
                numbers = range(len(shard.entries))
                lost = [shard.entries[n].label for n in numbers if not self._check_item(shard, n)]
            if lost:
                self.damage.append(Damage(file, "tensors do not match their hashes", tuple(lost)))
        except (LyditeError, OSError) as error:
            _raise_if_denied(error)
            self.damage.append(Damage(file, str(error)))

    def _check_item(self, shard: Shard, number: int) -> bool:
        """Whether an item is what was written; then its values are checked too."""
        entry, arrays = shard.entries[number], shard.intact(number)
        if arrays is None:
            return False
        if entry.key not in self.digests:
            self.items[entry.kind] = self.items.get(entry.kind, 0) + 1
        self.digests[entry.key] = entry.digest
        problems = list(value_problems(arrays, self._limits))
        if entry.kind != "conditioning" and (problem := self._latents.problem(entry)):
            problems.append(problem)
        self._suspects.extend(SuspiciousItem(entry.label, problem) for problem in problems)
        return True

    def all_suspects(self) -> list[SuspiciousItem]:
        """Items with suspicious values, and samples of another shape than the rest."""
        odd = [SuspiciousItem(*item) for item in self._latents.odd_shapes()]
        return self._suspects + odd

    def missing(self) -> int | None:
        """How many planned items are absent or damaged."""
        return len(self._planned - self.digests.keys()) if self._index else None

    def unplanned(self) -> list[Damage]:
        """Damage when shards hold what `set.json` does not plan: it is then an old copy."""
        if self._index is None:
            return []
        extra = self._index.keys() - self._planned
        if extra:  # a writer may have replaced it meanwhile
            extra -= _planned_keys(read_description(self._folder))
        if not extra:
            return []
        why = f"{len(extra)} items of the shards are not in its plan; it may be an old copy"
        return [Damage(NAME, why)]


def _planned_keys(description: Description) -> set[str]:
    return {key for key, _, _ in description.plan.keys(description.settings)}


def _incoming_problem(folder: Path, name: str) -> str | None:
    """What is wrong with a shard that a worker wrote and no run collected yet."""
    path = folder / INCOMING / name
    try:
        with Shard.open(path) as shard:
            return (
                f"{INCOMING}/{name}: tensors do not match their hashes" if shard.damaged() else None
            )
    except LyditeError as error:
        return f"{INCOMING}/{name}: {error}" if path.exists() else None


def _read_set_file(folder: Path, damage: list[Damage]) -> Description | None:
    try:
        return read_description(folder)
    except LyditeError as error:
        _raise_if_denied(error)
        damage.append(Damage(NAME, str(error)))
        return None


def _raise_if_denied(error: Exception) -> None:
    """A file that may not be read is not called damaged."""
    if isinstance(error, PermissionError) or isinstance(error.__cause__, PermissionError):
        raise error
