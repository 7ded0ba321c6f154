"""Hold everything in a set against everything else: files, hashes, index, plan, ranges."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lydite.calibrate.store import files as disk
from lydite.calibrate.store import seal
from lydite.calibrate.store.consistency import disagreement
from lydite.calibrate.store.database import require_rights
from lydite.calibrate.store.index import NAME as INDEX
from lydite.calibrate.store.index import Index, Row
from lydite.calibrate.store.lock import Holder, holder
from lydite.calibrate.store.recovery import INCOMING, QUARANTINE, shard_names
from lydite.calibrate.store.set_file import NAME as SET
from lydite.calibrate.store.set_file import SHARDS, Description, read_description
from lydite.calibrate.store.shards import Shard
from lydite.calibrate.store.value_checks import Healthy, Latents, complaints
from lydite.core.errors import CalibrationError, LyditeError

ROOM = 2**16  # bytes on the disk that SQLite needs to read the journal of a killed writer


@dataclass(frozen=True)
class Damage:
    """A file that is not what was written, and the items that are lost with it."""

    file: str
    why: str
    items: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suspect:
    """An item that is what was written, with values no network should be given."""

    item: str
    why: str


@dataclass(frozen=True)
class Verdict:
    """What `verify` found."""

    items: dict[str, int]  # of each kind, whole
    shards: int
    bytes: int
    content_hash: str | None  # None when something is damaged
    missing: int | None  # planned items that are not there, or not whole
    damage: tuple[Damage, ...]
    suspects: tuple[Suspect, ...]
    pending: int = 0  # whole shards that a writer has to enter yet
    quarantined: int = 0
    writer: Holder | None = None
    broken: tuple[str, ...] = ()  # shards that workers handed over, and that cannot be used

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged; it may still be incomplete."""
        return not self.damage

    @property
    def complete(self) -> bool:
        """Whether it is sound and holds all that is planned, with values in healthy ranges."""
        return self.sound and self.missing == 0 and not self.suspects


def verify(folder: Path | str, healthy: Healthy | None = None) -> Verdict:
    """Read every byte of a set. It needs no claim, and a run may go on meanwhile."""
    folder = Path(folder)
    writer = holder(folder)
    damage: list[Damage] = []
    description = _description(folder, damage)
    index = _index(folder, writer, damage)
    if description is not None and index is not None:
        damage += _agreement(folder, description, index)
    try:
        try:
            walk, missing, content_hash = _walked(folder, description, index, healthy)
        except CalibrationError as error:  # a page of the index that nothing had read before
            damage.append(Damage(INDEX, str(error)))
            walk, missing, content_hash = _walked(folder, description, None, healthy)
    finally:
        if index is not None:
            index.close()
    aside = folder / QUARANTINE
    return Verdict(
        walk.whole,
        walk.count,
        walk.bytes,
        None if damage or walk.damage else content_hash,
        missing,
        tuple(damage + walk.damage),
        tuple(walk.suspects),
        walk.pending,
        len(shard_names(aside)) if aside.is_dir() else 0,
        writer,
        broken=tuple(_broken(folder)),
    )


def _broken(folder: Path) -> Iterator[str]:
    """What workers handed over, nobody took in, and is damaged: no part of the set, yet told."""
    incoming = folder / INCOMING
    for name in shard_names(incoming) if incoming.is_dir() else []:
        try:
            with Shard.open(incoming / name) as shard:
                if shard.damaged():
                    yield f"{INCOMING}/{name}: tensors do not match their hashes"
        except LyditeError as error:
            if (incoming / name).exists():  # or a run has taken it in meanwhile
                yield f"{INCOMING}/{name}: {error}"


def _walked(
    folder: Path, description: Description | None, index: Index | None, healthy: Healthy | None
) -> "tuple[_Walk, int | None, str | None]":
    walk = _Walk(folder, description, index, healthy or Healthy())
    walk.shards()
    walk.unlike()
    walk.lost()
    return walk, *walk.totals()


class _Walk:
    """One pass over the shards, one at a time: memory does not grow with the set."""

    def __init__(
        self, folder: Path, description: Description | None, index: Index | None, healthy: Healthy
    ) -> None:
        self.folder, self.index, self.healthy = folder, index, healthy
        self.description = description
        self._latents = Latents(description.settings.conditions if description else {})
        self.damage: list[Damage] = []
        self.suspects: list[Suspect] = []
        self.whole: dict[str, int] = {}
        self._keys: set[str] = set()  # of the items that are whole
        self._images: dict[int, tuple[str, int | None]] = {}  # prompt and seed of each number
        self.count = self.bytes = self.pending = 0
        self.known = index.shards() if index else {}  # before the folder is listed: a run goes on
        self.names = shard_names(folder / SHARDS) if (folder / SHARDS).is_dir() else []

    def shards(self) -> None:
        """Look through every shard on disk."""
        for name in self.names:
            self.count += 1
            path = self.folder / SHARDS / name
            self.bytes += path.stat().st_size
            rows = self.index.rows_of(name) if self.index else []
            try:
                with Shard.open(path) as shard:
                    self._shard(name, shard, rows)
            except LyditeError as error:
                _raise_if_denied(error)
                labels = tuple(_label(row) for row in rows)
                self.damage.append(Damage(f"{SHARDS}/{name}", str(error), labels))

    def unlike(self) -> None:
        """Samples of another shape than the rest."""
        self.suspects.extend(Suspect(*each) for each in self._latents.unlike())

    def lost(self) -> None:
        """Shards that the index names and the folder does not have."""
        for name in sorted(self.known.keys() - set(self.names)):
            rows = self.index.rows_of(name) if self.index else []
            labels = tuple(_label(row) for row in rows)
            self.damage.append(Damage(f"{SHARDS}/{name}", "the file is missing", labels))

    def totals(self) -> tuple[int | None, str | None]:
        """How many planned items are missing, and the hash over all content."""
        if self.index is None or self.description is None:
            return None, None
        planned = {key for key, _, _ in self.description.plan.keys(self.description.settings)}
        return len(planned - self._keys), self.index.content_hash()

    def _shard(self, name: str, shard: Shard, rows: list[Row]) -> None:
        file = f"{SHARDS}/{name}"
        if self.description and shard.settings.hash != self.description.settings.hash:
            self.damage.append(Damage(file, "it belongs to a run with other settings"))
            return
        lost = tuple(
            entry.label for n, entry in enumerate(shard.entries) if not self._entry(shard, n)
        )
        if lost:
            self.damage.append(Damage(file, "tensors do not match their hashes", lost))
        if twice := self._renumbered(shard):
            why = "its images have numbers that others of the set have; shards of two sets are here"
            self.damage.append(Damage(file, why, twice))
        if self.index is None:
            return
        if name not in self.known:
            self.pending += 1
            return
        for why in disagreements(name, shard, rows, self.known[name], self.index):
            self.damage.append(Damage(INDEX, why))

    def _renumbered(self, shard: Shard) -> tuple[str, ...]:
        """Items whose image is another picture than the one that number stands for elsewhere."""
        return tuple(
            entry.label
            for entry in shard.entries
            if entry.image is not None
            and self._images.setdefault(entry.image, (entry.prompt, entry.seed))
            != (entry.prompt, entry.seed)
        )

    def _entry(self, shard: Shard, number: int) -> bool:
        """Whether an item is what was written; then its values are looked at, too."""
        entry, arrays = shard.entries[number], shard.intact(number)
        if arrays is None:
            return False
        self._keys.add(entry.key)
        self.whole[entry.kind] = self.whole.get(entry.kind, 0) + 1
        found = list(complaints(arrays, self.healthy))
        if entry.kind == "sample" and (why := self._latents.complaint(entry)):
            found.append(why)
        self.suspects.extend(Suspect(entry.label, why) for why in found)
        return True


def disagreements(
    name: str, shard: Shard, rows: list[Row], size: int, index: Index
) -> Iterator[str]:
    """Where the index and a shard say different things."""
    if size != shard.size:
        yield f"shard {name[:12]} has {shard.size} bytes, the index says {size}"
    found = {row.key: row for row in rows}
    for entry in shard.entries:
        row = found.pop(entry.key, None)
        if row is None and index.digest(entry.key) != entry.digest:
            yield f"{entry.label} of shard {name[:12]} is not in the index"
        elif row is not None and row != Row.of(entry, name):
            yield f"the row of {entry.label} is not what shard {name[:12]} says"
    if found:
        yield f"{len(found)} rows name shard {name[:12]}, which does not hold them"


def _description(folder: Path, damage: list[Damage]) -> Description | None:
    try:
        return read_description(folder)
    except LyditeError as error:
        _raise_if_denied(error)
        damage.append(Damage(SET, str(error)))
        return None


def _index(folder: Path, writer: Holder | None, damage: list[Damage]) -> Index | None:
    """The index if it can be read; the seal is looked at only when nobody writes."""
    path = folder / INDEX
    require_rights(path)
    sealed = writer is None and seal.is_sealed(path)
    try:
        fault = seal.seal_fault(path) if sealed else None
        if fault is not None and (writer := holder(folder)):
            fault = None  # one that came a moment ago has broken the seal
        if fault is None:
            index = Index.open(path)
            faults = [] if sealed or writer else index.faults()
            if not faults:
                return index
            index.close()
            fault = faults[0]
    except LyditeError as error:
        _raise_if_denied(error)
        free = disk.free_bytes(folder)
        if isinstance(error, disk.DiskError) and free is not None and free < ROOM:
            raise  # the disk is full, and nothing is known about the index
        fault = str(error)
    damage.append(Damage(INDEX, fault))
    return None


def _agreement(folder: Path, description: Description, index: Index) -> Iterator[Damage]:
    """Damage of a `set.json` that is another one than the index knows."""
    if disagreement(description, index):
        description = read_description(folder)  # a writer may just have replaced it
    if why := disagreement(description, index):
        yield Damage(SET, why)


def _raise_if_denied(error: LyditeError) -> None:
    """What may not be read is not damaged; nothing is known about it."""
    if isinstance(error.__cause__, PermissionError):
        raise error


def _label(row: Row) -> str:
    try:
        return row.entry.label
    except LyditeError:
        return f"item {row.key[:12]}"
