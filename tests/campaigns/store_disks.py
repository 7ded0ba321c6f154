"""A calibration set on disks that fail: failing system calls, and a disk that is full.

    python -m campaigns.store_disks               Linux; some ten minutes
    python -m campaigns.store_disks --only full

`calls` (needs strace) lets each system call by which Python writes fail in turn, or kills
the process there. `full` (needs unshare) fills a real file system of 4 MiB, then makes it larger.
Any loss ends the script.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lydite.calibrate.store.verify import verify
from lydite.core.errors import LyditeError
from support.calibration import check_finished, check_kept, draw

CALLS = ("write", "fsync", "ftruncate", "rename", "link", "unlink", "mkdir")
IMAGES, MANY = 2, 1000
FILL = """
set -e
mount -t tmpfs -o size=4m none "$1"
"$2" -m campaigns.store_disks --draw "$1/set" --images "$3" || true
"$2" -m campaigns.store_disks --look "$1/set"
mount -o remount,size=64m "$1"
"$2" -m campaigns.store_disks --draw "$1/set" --images "$3" > /dev/null
"$2" -m campaigns.store_disks --look "$1/set"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--only", choices=("calls", "full"))
    parser.add_argument("--draw", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--look", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--images", type=int, default=IMAGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.draw:
        draw_here(options.draw, options.images)
    elif options.look:
        found = verify(options.look)
        print(f"{found.items}, sound: {found.sound}, complete: {found.complete}")
    else:
        with tempfile.TemporaryDirectory() as folder:
            for name, part in (("full", full), ("calls", calls)):
                if options.only in (None, name):
                    start = time.perf_counter()
                    part(Path(folder))
                    print(f"  {time.perf_counter() - start:.1f} s", flush=True)


def draw_here(folder: Path, images: int) -> None:
    """A run in a process of its own: prints what is committed, and an error in one line."""
    try:
        draw(folder, images, say)
    except LyditeError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


def say(image: int) -> None:
    with contextlib.suppress(OSError):  # strace may let this very call fail
        os.write(1, f"{image}\n".encode())


def calls(root: Path) -> None:
    """Each system call fails once, fails from then on, or is where the process is killed."""
    if not shutil.which("strace"):
        print("calls: no strace, nothing done")
        return
    whole = draw(root / "whole", IMAGES)
    runs = stopped = 0
    for call in CALLS:
        count = counted(root, call)
        for fault in ("error=ENOSPC", "error=EIO", "signal=SIGKILL"):
            for when in (f"{k}{more}" for k in range(1, count + 1) for more in ("", "+")):
                if fault.startswith("signal") and when.endswith("+"):
                    continue
                runs += 1
                stopped += traced(root / "set", call, f"{fault}:when={when}", whole)
        print(f"  {call}: {count} calls", flush=True)
    print(f"{runs} runs in which system calls failed or were the last, {stopped} ended early:")
    print("  0 lost, 0 torn, no traceback, every set opened and finished")


def counted(root: Path, call: str) -> int:
    """How many such calls a run makes."""
    log = root / "calls.log"
    strace = ["strace", "-f", "-qq", "--seccomp-bpf", "-o", str(log), "-e", f"trace={call}"]
    run([*strace, *myself(root / "counted")])
    shutil.rmtree(root / "counted")
    return sum(f"{call}(" in line for line in log.read_text().splitlines())


def traced(folder: Path, call: str, fault: str, whole: str) -> bool:
    """One run under a fault, and what is left of it; whether it ended early."""
    strace = ["strace", "-f", "-qq", "--seccomp-bpf", "-o", "/dev/null"]
    strace += ["-e", f"trace={call}", "-e", f"inject={call}:{fault}"]
    done = run([*strace, *myself(folder)])
    acknowledged = {int(line) for line in done.stdout.split() if line.isdigit()}
    if "Traceback" in done.stderr:
        raise SystemExit(f"{call} {fault}: {done.stderr}")
    if folder.exists() and any(folder.iterdir()):
        check_kept(folder, IMAGES, acknowledged)
    check_finished(folder, IMAGES, whole)
    shutil.rmtree(folder)
    return done.returncode != 0


def full(root: Path) -> None:
    """A real file system that fills up; then it is given more room, and the run goes on."""
    if not shutil.which("unshare"):
        print("full: no unshare, nothing done")
        return
    (root / "mount").mkdir()
    arguments = ["sh", str(root / "mount"), sys.executable, str(MANY)]
    done = run(["unshare", "-rm", "sh", "-c", FILL, *arguments])
    lines = done.stdout.splitlines()
    committed = sum(line.isdigit() for line in lines)
    print(f"a disk of 4 MiB: {committed} images acknowledged, then: {done.stderr.strip()}")
    for line in lines:
        if not line.isdigit():
            print(f"  {line}")


def myself(folder: Path) -> list[str]:
    return [sys.executable, "-m", "campaigns.store_disks", "--draw", str(folder)]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


if __name__ == "__main__":
    main()
