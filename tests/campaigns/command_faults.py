"""What `calibrate run`, `activations`, `blocks` and `quantize` survive: kills and failing disks.

    python -m campaigns.command_faults --job blocks             all; some ten minutes
    python -m campaigns.command_faults --job run --workers 2 --only kills --kills 50
    python -m campaigns.command_faults --job run --only faults --part 2/4
    python -m campaigns.command_faults --job run --folder /dev/shm    faster
    python -m campaigns.command_faults --job quantize --only kills boundaries

The commands are the real ones, with a tiny untrained model. `kills` are SIGKILLs at random times,
of the command alone or of its workers too, each going on with the result of the last. `boundaries`
are SIGKILLs before each call to the disk. `faults` lets each of these calls fail in six ways.
`rows` does both on one result: the first command is hit at its first call, the next at its second.
`full` (needs unshare) fills a real disk before each call. `--part` takes every N-th of them.

After each of these, what the command called safe must be there. The one that goes on, after a
failure by the words of the error, must end with the result of an undisturbed command: the same
bytes, or the same content hash. Any loss ends the script.
"""

import argparse
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import get_args

from support.calibration_jobs import (  # first of all: it says how many threads BLAS may have
    KINDS,
    Ended,
    Fault,
    FaultyDisk,
    FillingDisk,
    Job,
    Name,
)

RESUME = "resume with: lydite "
CLEAR = "clear errors"
MOUNT = """
mount -t tmpfs -o size=48m none "$1"
shift
exec "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--job", choices=get_args(Name), required=True)
    choices = ("kills", "boundaries", "faults", "rows", "full")
    parser.add_argument("--only", nargs="+", choices=choices, default=choices)
    parser.add_argument("--kills", type=int, default=100, help="at random times")
    parts = "the I-th, then each N-th; one for each of --only, or one for all"
    parser.add_argument("--part", nargs="+", default=["1/1"], metavar="I/N", help=parts)
    parser.add_argument("--images", type=int, default=3, help="of a set")
    parser.add_argument("--workers", type=int, default=1, help="of run")
    parser.add_argument("--seed", type=int, default=0, help="of the times")
    parser.add_argument("--folder", type=Path, help="where all is made")
    parser.add_argument("--mounted", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    campaigns: dict[str, Callable[[Job, slice], str]] = {
        "kills": lambda job, _: kills(job, options.kills, random.Random(options.seed)),
        "boundaries": boundaries,
        "faults": faults,
        "rows": rows,
        "full": lambda job, part: full(job, part) if options.mounted else on_a_small_disk(),
    }
    with (
        tempfile.TemporaryDirectory(dir=options.mounted or options.folder) as folder,
        tempfile.TemporaryDirectory() as notes,
    ):
        sizes = {"images": options.images, "workers": options.workers}
        job = Job(options.job, Path(folder), Path(notes), **sizes)
        parts = options.part if len(options.part) > 1 else options.part * len(options.only)
        for name, text in zip(options.only, parts, strict=True):
            begin = time.perf_counter()
            first, step = map(int, text.split("/"))
            said = campaigns[name](job, slice(first - 1, None, step))
            print(f"{options.job}, {options.workers} workers, {name}: {said}")
            print(f"  {time.perf_counter() - begin:.1f} s", flush=True)


def kills(job: Job, count: int, chance: random.Random) -> str:
    """SIGKILL at random times; each command goes on where the last one was killed."""
    done = results = promises = 0
    while done < count:
        job.start_anew()
        killed = True
        while killed and done < count:
            after, workers_too = chance.uniform(0, job.seconds), chance.random() < 0.5
            ended = job.run(after=after, workers_too=workers_too)
            job.check_kept()
            killed = check_end(ended)
            done += killed
        promises += len(job.promised)
        finish(job)
        results += 1
    return f"{done} kills at random times, {promises} promises kept, {results} results equal"


def boundaries(job: Job, part: slice) -> str:
    """SIGKILL before the k-th call to the disk; then the command goes on."""
    done = promises = 0
    for k in range(1, job.calls + 1)[part]:
        job.start_anew()
        killed = check_end(job.run(FaultyDisk(k, "kill")))
        job.check_kept()
        done, promises = done + killed, promises + len(job.promised)
        if killed:
            finish(job)
        else:  # with workers the number of calls is not always the same
            job.check_finished()
    return f"{done} kills, {promises} promises kept, results equal"


def faults(job: Job, part: slice) -> str:
    """The k-th call fails, or it and all that follow: one clear error, and nothing is lost."""
    outcomes = Counter[str]()
    for k, (fault, once) in list(product(range(1, job.calls + 1), KINDS))[part]:
        job.start_anew()
        ended = job.run(FaultyDisk(k, fault, once=once))
        job.check_kept()
        outcomes[how(ended, fault)] += 1
        finish_after(job, ended)
    return f"{job.calls} calls, {len(KINDS)} kinds: {dict(outcomes)}, results equal"


def rows(job: Job, part: slice) -> str:
    """On one result the first command is hit at its first call, the next at its second."""
    hits = 0
    ways: list[tuple[Fault, bool]] = [("kill", True), *KINDS]
    for fault, once in ways[part]:
        job.start_anew()
        for k in range(1, job.calls + 1):
            ended = job.run(FaultyDisk(k, fault, once=once))
            job.check_kept()
            if not ended.killed and how(ended, fault) == CLEAR:
                told(job, ended)
            hits += bool(ended.status)
        finish(job)
    return f"{hits} commands killed or failed, over {len(ways[part])} results; results equal"


def how(ended: Ended, fault: Fault) -> str:
    """How a command ended that met a failing disk; a short write alone is no failure."""
    assert ended.status or not ended.hits or fault == "short", f"{fault}, and nothing was said"
    return CLEAR if ended.status else "gone on after a short write" if ended.hits else "not hit"


def full(job: Job, part: slice) -> str:
    """A real disk is filled before the k-th call, and later emptied."""
    outcomes, calls = Counter[str](), range(1, job.calls + 1)[part]
    for k in calls:
        job.start_anew()
        filler = job.root / "filler"
        ended = job.run(FillingDisk(k, filler))
        filler.unlink()
        job.check_kept()
        outcomes[CLEAR if ended.status else "what was left found its place"] += 1
        finish_after(job, ended)
    return f"before {len(calls)} calls: {dict(outcomes)}, results equal"


def on_a_small_disk() -> str:
    """This script on a file system of its own, to be filled."""
    if not shutil.which("unshare"):
        return "no unshare, nothing done"
    with tempfile.TemporaryDirectory() as folder:
        again = [
            sys.executable,
            "-m",
            "campaigns.command_faults",
            *sys.argv[1:],
            "--only",
            "full",
            "--mounted",
            folder,
        ]
        subprocess.run(["unshare", "-rm", "sh", "-ec", MOUNT, "sh", folder, *again], check=True)
    return "as told above"


def finish(job: Job, words: list[str] | None = None) -> None:
    """Go on, by the same command or by the one that the error told."""
    if not job.is_final:
        ended = job.run(words=words)
        assert ended.status == 0, (words or job.words, ended)
    job.check_finished()


def finish_after(job: Job, ended: Ended) -> None:
    """Go on with a command that failed; one that did not must have finished."""
    if ended.status:
        finish(job, told(job, ended))
    else:
        job.check_finished()


def check_end(ended: Ended) -> bool:
    """Whether a command was killed; anything but an end of its own is an error."""
    assert ended.killed or ended.status == 0, ended
    return ended.killed


def told(job: Job, ended: Ended) -> list[str]:
    """The command to go on with, from one line that also names the file and the free space."""
    lines = ended.said.splitlines()
    assert ended.status == 2 and lines and lines[-1].startswith("error: "), ended
    assert "Traceback" not in ended.said, ended
    for part in (str(job.out), " free", RESUME):
        assert part in lines[-1], f"{part!r} is not in: {lines[-1]}"
    return [*shlex.split(lines[-1].split(RESUME)[1]), "--quiet"]


if __name__ == "__main__":
    main()
