"""What a calibration set keeps when the power goes: states a disk may be left in, by simulation.

    python -m campaigns.store_power --states 2000

A run is recorded call by call. For each state a moment is drawn, and all that was not flushed by
then is kept, cut short or forgotten at random: the bytes of a file, and each name that was made,
moved or removed in a folder.
Then the set is opened, what was acknowledged must be in it, and the finished set is like any other.
"""

import argparse
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from lydite.calibrate.store.writer import ShardWriter, Writer
from lydite.core import files
from support.calibration import SETTINGS, check_finished, check_kept, draw, faulty, items, plan

IMAGES = 5


@dataclass(frozen=True)
class Event:
    """One call to the disk, or an acknowledged image."""

    what: str
    path: Path = Path()
    other: Path = Path()
    data: bytes = b""
    image: int = -1


@dataclass
class File:
    """What was written to a file, and how much of it was flushed."""

    data: bytearray = field(default_factory=bytearray)
    flushed: int = 0


class Recorder(files.SystemCalls):
    """The real disk, and a list of what was asked of it."""

    def __init__(self) -> None:
        self.events = list[Event]()
        self._paths: dict[int, Path] = {}

    def open(self, path: Path, flags: int) -> int:
        new = flags & os.O_CREAT and not path.exists()
        handle = super().open(path, flags)
        self._paths[handle] = path
        if new:
            self.events.append(Event("create", path))
        return handle

    def write(self, handle: int, data: files.Bytes) -> int:
        count = super().write(handle, data)
        self.events.append(Event("write", self._paths[handle], data=bytes(data[:count])))
        return count

    def sync(self, handle: int) -> None:
        super().sync(handle)
        self.events.append(Event("sync", self._paths[handle]))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.events.append(Event("rename", old, new))

    def link(self, old: Path, new: Path) -> None:
        super().link(old, new)
        self.events.append(Event("link", old, new))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.events.append(Event("unlink", path))

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self.events.append(Event("mkdir", path))


class Disk:
    """A disk in a power cut: names and bytes that were flushed, and those that were not."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.live: dict[Path, File | None] = {}  # None: a folder
        self.kept: dict[Path, File | None] = {}
        self.waiting: dict[Path, list[tuple[Path, File | None, bool]]] = {}  # by folder

    def replay(self, event: Event) -> None:
        """One call that came back."""
        path, other = event.path, event.other
        if event.what == "sync":
            self._sync(path)
        elif event.what == "write":
            file = self.live[path]
            assert file is not None
            file.data += event.data
        elif event.what in ("rename", "link"):
            self._name(other, self.live[path])
            if event.what == "rename":
                self._unname(path)
        elif event.what == "unlink":
            self._unname(path)
        else:
            self._name(path, None if event.what == "mkdir" else File())

    def cut(self, target: Path, rng: random.Random) -> None:
        """Write one of the states that a power cut could leave."""
        names = dict(self.kept)
        for waiting in self.waiting.values():
            for path, file, there in waiting:
                if rng.random() < 0.5:
                    names.pop(path, None)
                    if there:
                        names[path] = file
        for path, file in sorted(names.items()):
            place = target / path.relative_to(self.root)
            if file is None:
                place.mkdir(parents=True, exist_ok=True)
            elif place.parent.is_dir():
                place.write_bytes(_left(file, rng))

    def _sync(self, path: Path) -> None:
        file = self.live.get(path)
        if file is not None:
            file.flushed = len(file.data)
            return
        for name, content, there in self.waiting.pop(path, []):
            self.kept.pop(name, None)
            if there:
                self.kept[name] = content

    def _name(self, path: Path, file: File | None) -> None:
        self.live[path] = file
        self.waiting.setdefault(path.parent, []).append((path, file, True))

    def _unname(self, path: Path) -> None:
        self.waiting.setdefault(path.parent, []).append((path, self.live.pop(path, None), False))


def _left(file: File, rng: random.Random) -> bytes:
    """Flushed bytes, and any number of the others, or as many zeros."""
    more = bytes(file.data[file.flushed :])[: rng.randint(0, len(file.data) - file.flushed)]
    return bytes(file.data[: file.flushed]) + (more if rng.random() < 0.7 else bytes(len(more)))


def record(folder: Path) -> list[Event]:
    """Two runs and a worker, call by call, with what they acknowledged."""
    recorder = Recorder()
    with faulty(recorder):
        with Writer.start(folder, SETTINGS, plan(3)) as writer:
            writer.commit(items(writer.builder, 0))
            recorder.events.append(Event("ack", image=0))
            worker = ShardWriter(folder)
            worker.write(items(worker.builder, 1))
            recorder.events.append(Event("ack", image=1))
            writer.collect()
            writer.commit(items(writer.builder, 2))
            recorder.events.append(Event("ack", image=2))
        draw(folder, IMAGES, lambda image: recorder.events.append(Event("ack", image=image)))
    return recorder.events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--states", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the sets are made")
    options = parser.parse_args()
    rng, start = random.Random(options.seed), time.perf_counter()
    seen: Counter[int] = Counter()
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        whole = draw(Path(root, "whole"), IMAGES)
        events = record(Path(root, "set"))
        for _ in range(options.states):
            cut = rng.randrange(len(events) + 1)
            cut_disk, acknowledged, target = Disk(Path(root, "set")), set[int](), Path(root, "cut")
            for event in events[:cut]:
                if event.what == "ack":
                    acknowledged.add(event.image)
                else:
                    cut_disk.replay(event)
            cut_disk.cut(target, rng)
            if target.is_dir() and any(target.iterdir()):
                check_kept(target, IMAGES, acknowledged)
            check_finished(target, IMAGES, whole)
            shutil.rmtree(target)
            seen[len(acknowledged)] += 1
    print(f"{options.states} states after a power cut during {len(events)} calls: 0 acknowledged")
    print(f"  images lost, 0 torn; states by images acknowledged: {dict(sorted(seen.items()))}")
    print(f"  {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
