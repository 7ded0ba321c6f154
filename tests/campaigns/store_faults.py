"""What a calibration set survives: kills, failing disks, changed bits. Any loss ends the script.

    python -m campaigns.store_faults                    all, some minutes
    python -m campaigns.store_faults --only kills --kills 1000
    python -m campaigns.store_faults --folder /dev/shm  faster: a disk in memory

`kills` are SIGKILLs of a process that writes, and as many Ctrl-Cs: at random times, each run going
on with the set of the last; then SIGKILL at each call of the store to the disk. `faults` lets each
of these calls fail in turn. `flips` changes single bits of shards and set.json.
"""

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from lydite.calibrate.store.repair import repair
from lydite.calibrate.store.shards import Shard
from lydite.calibrate.store.verify import verify
from lydite.core.errors import LyditeError
from lydite.core.tensorfile import read_header
from support.calibration import (
    KINDS,
    FaultyDisk,
    check_finished,
    check_kept,
    draw,
    faulty,
)

INTERRUPTED = 130


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--only", choices=("kills", "faults", "flips"))
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--flips", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the sets are made")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        parts: dict[str, Callable[[], None]] = {
            "kills": lambda: kills(root, options.kills, rng),
            "faults": lambda: faults(root),
            "flips": lambda: flips(root, options.flips, rng),
        }
        for name, part in parts.items():
            if options.only in (None, name):
                start = time.perf_counter()
                part()
                print(f"  {time.perf_counter() - start:.1f} s", flush=True)


def kills(root: Path, count: int, rng: random.Random) -> None:
    """SIGKILL and Ctrl-C at random times, then SIGKILL at every call to the disk."""
    images = 12
    whole, usual = "", 60.0
    for run in range(3):
        start = time.perf_counter()
        whole = draw(root / f"whole{run}", images)
        usual = min(usual, time.perf_counter() - start)
    for number, name in ((signal.SIGKILL, "kills"), (signal.SIGINT, "interrupts")):
        acknowledged = sets = stopped = 0
        while stopped < count:
            sets += 1
            if sets > 20 * count:
                raise SystemExit(f"{sets} runs ended before {count} {name} hit one")
            new, more = stopped_again_and_again(
                root / f"set{sets}", images, rng, usual, count - stopped, number
            )
            check_finished(root / f"set{sets}", images, whole)
            shutil.rmtree(root / f"set{sets}")
            acknowledged, stopped = acknowledged + new, stopped + more
        print(f"{stopped} {name} at random times over {sets} sets: {acknowledged} acknowledged")
        print("  images, 0 lost, 0 torn; every set equal to a whole one", flush=True)
    boundaries = kill_at_each_call(root)
    print(f"{boundaries} kills, one before each call to the disk: 0 lost, 0 torn")


def stopped_again_and_again(
    folder: Path, images: int, rng: random.Random, usual: float, most: int, number: signal.Signals
) -> tuple[int, int]:
    """Runs on one set until one ends by itself: images acknowledged, and runs that did not."""
    acknowledged: set[int] = set()
    for stopped in range(most):
        done, new = forked(folder, images, after=rng.uniform(0, usual), number=number)
        acknowledged |= new
        if folder.exists() and any(folder.iterdir()):
            check_kept(folder, images, acknowledged)
        if done:
            return len(acknowledged), stopped
    return len(acknowledged), most


def kill_at_each_call(root: Path) -> int:
    images = 2
    whole = draw(root / "small", images)
    for k in range(1, 1000):
        folder = root / "boundary"
        done, acks = forked(folder, images, k=k)
        if done:
            return k - 1
        if folder.exists():
            check_kept(folder, images, acks)
        check_finished(folder, images, whole)
        shutil.rmtree(folder)
    raise SystemExit("a run of more than 1,000 calls")


def forked(
    folder: Path,
    images: int,
    *,
    k: int = 0,
    after: float | None = None,
    number: signal.Signals = signal.SIGKILL,
) -> tuple[bool, set[int]]:
    """Draw in a child that is stopped; whether it ended before, and what it acknowledged."""
    reading, writing = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # not while Python forks
    child = os.fork()
    if not child:
        status = 1
        try:
            # A job in the background may have been started to ignore it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            with faulty(FaultyDisk(k, "kill")):
                draw(folder, images, lambda image: os.write(writing, f"{image}\n".encode()))
            status = 0
        except KeyboardInterrupt:
            status = INTERRUPTED
        finally:
            os._exit(status)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    os.close(writing)
    if after is not None:
        time.sleep(after)
        os.kill(child, number)
    with os.fdopen(reading) as lines:
        acknowledged = {int(line) for line in lines}
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, INTERRUPTED, -signal.SIGKILL):
        raise SystemExit("a run ended with an error of its own")
    return status == 0, acknowledged


def faults(root: Path) -> None:
    """Each call to the disk fails once, or it and all after it."""
    images, outcomes = 2, Counter[str]()
    whole = draw(root / "fault-free", images)
    with faulty(FaultyDisk()) as counted:
        draw(root / "counted", images)
    for fault, once in KINDS:
        for k in range(1, counted.calls + 1):
            outcomes[fails(root / "faulty", images, FaultyDisk(k, fault, once=once), whole)] += 1
    del outcomes["no fault"]  # a short write where nothing is written
    print(f"{counted.calls} calls, {len(KINDS)} kinds of failure: {dict(outcomes)},")
    print("  0 silent losses, every set opened and finished")


def fails(folder: Path, images: int, system: FaultyDisk, whole: str) -> str:
    """One run on a failing disk, and how it ended. A short write alone is no failure."""
    acks: set[int] = set()
    outcome = "gone on after a short write" if system.fault == "short" else "in silence"
    try:
        with faulty(system):
            draw(folder, images, acks.add)
    except LyditeError as error:
        outcome = "clear errors"
        for part in (str(folder), "free", "lydite calibrate run"):
            assert part in str(error), error
    assert outcome != "in silence"
    if folder.exists():
        check_kept(folder, images, acks)
    check_finished(folder, images, whole)
    shutil.rmtree(folder)
    return outcome if system.hits else "no fault"


def flips(root: Path, count: int, rng: random.Random) -> None:
    """Single bits of every file of a set."""
    images, found = 4, Counter[str]()
    whole = draw(root / "whole", images)
    repaired = 0
    for number in range(count):
        path, place = flip_somewhere(root / "whole", root / "flipped", rng)
        result = verify(root / "flipped")
        assert not result.sound, (path, place)
        found[path.parent.name if path.parent.name == "shards" else path.name] += 1
        if number % 10 == 0:
            check_repair(root / "flipped", path, place, images, whole)
            repaired += 1
    print(f"{count} single bits of a set changed, all found: {dict(found)}")
    print(f"  {repaired} of them repaired: only what the bit damaged was dropped")


def flip_somewhere(source: Path, target: Path, rng: random.Random) -> tuple[Path, int]:
    """A fresh copy of a set with one bit changed: the file, and the byte."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    shards = sorted((target / "shards").iterdir())
    path = rng.choice([rng.choice(shards), rng.choice(shards), target / "set.json"])
    return path, flip(path, rng)


def flip(path: Path, rng: random.Random) -> int:
    data = bytearray(path.read_bytes())
    place = rng.randrange(len(data))
    data[place] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return place


def check_repair(folder: Path, path: Path, place: int, images: int, whole: str) -> None:
    """Repair drops at most the sample that was hit, or the shard whose header was."""
    original = folder.with_name("whole") / path.relative_to(folder)
    hit, missing = (), 0
    if path.parent.name == "shards":
        with Shard.open(original) as shard:
            hit = hit_entries(shard, original, place)
            missing = len(hit) or len(shard.entries)
    done = repair(folder)
    assert done.dropped == hit and done.missing == missing, (path, place, done, hit)
    result = verify(folder)
    assert result.sound and result.missing == missing, result
    assert draw(folder, images) == whole
    assert verify(folder).complete


def hit_entries(shard: Shard, path: Path, place: int) -> tuple[str, ...]:
    """The item whose tensor has that byte; none when it is in the header."""
    for name, info in read_header(path).tensors.items():
        if info.start <= place < info.stop:
            return (shard.entries[int(name.split("/")[0])].label,)
    return ()


if __name__ == "__main__":
    main()
