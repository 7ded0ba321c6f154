"""Statistics of several runs in one file, and the folder in which such a file is made."""

import contextlib
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path

from lydite.calibrate import disk
from lydite.calibrate.activations_file import read_file, told_by, write_file
from lydite.calibrate.claim import Claim
from lydite.core.errors import FileError, at

STATE, FINISHED = "state.safetensors", "finished.sqlite"


def merge(paths: Sequence[Path], out: Path) -> int:
    """Join the statistics of different samples into one file; how many samples it has."""
    first, *rest = paths
    collected, told = read_file(first), told_by(first)
    for path in rest:
        collected.join(read_file(path), path)
    with working(out) as work:
        told |= {"samples": len(collected.keys), "part": None}
        write_file(collected, out, work / FINISHED, told)
    return len(collected.keys)


@contextlib.contextmanager
def working(out: Path) -> Generator[Path]:
    """The folder of the state, claimed: one process collects into one file.

    It stays as long as it holds a state.
    """
    if out.is_dir():
        raise FileError(f"{at(out)}: is a folder. Give the name of a file, such as stats.sqlite.")
    work = out.with_name(f"{out.name}.work")
    disk.make_folder(work)
    claim = Claim(work)
    try:
        disk.sweep(work)
        yield work
    finally:
        claim.release()
        if not (work / STATE).exists():
            shutil.rmtree(work, ignore_errors=True)


def clear(out: Path) -> None:
    """Remove the state of a run that was killed when its file was finished already."""
    if out.with_name(f"{out.name}.work").exists():
        with working(out) as work:
            disk.remove(work / STATE)
