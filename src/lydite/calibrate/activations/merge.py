"""Statistics of several runs in one file, and the folder in which such a file is made."""

import contextlib
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path

from lydite.calibrate.activations.file import KIND, read_file, told_by, write_file
from lydite.calibrate.outputs import check_output
from lydite.calibrate.store import files as disk
from lydite.calibrate.store.lock import Claim
from lydite.calibrate.store.writer import command_line, resumable
from lydite.core.errors import FileError, at

STATE, FINISHED = "state.safetensors", "finished.sqlite"


def merge(paths: Sequence[Path], out: Path) -> int:
    """Join the statistics of different samples into one file; how many samples it has."""
    check_output(out, KIND)
    if out.exists():  # unlike a page or a sheet it may have taken hours
        raise FileError(f"{at(out)}: is there already. Give another name, or remove it first.")
    first, *rest = paths
    collected, told = read_file(first), told_by(first)
    for path in rest:
        collected.join(read_file(path), path)
    sets = {told_by(path)["set"] for path in paths}
    whose = told["set"] if len(sets) == 1 else None
    told |= {"samples": len(collected.keys), "part": None, "set": whose}
    again = command_line("lydite", "calibrate", "activations", *paths, "--out", out)
    with resumable(again), working(out) as work:
        write_file(collected, out, work / FINISHED, told)
    return len(collected.keys)


@contextlib.contextmanager
def working(out: Path) -> Generator[Path]:
    """The folder of the state, claimed: one process collects into one file.

    It stays as long as it holds a state.
    """
    work = workplace(out)
    claim = _claimed(work)
    try:
        disk.sweep(work)
        yield work
    finally:
        if not (work / STATE).exists():
            shutil.rmtree(work, ignore_errors=True)  # while nobody else can have it
        claim.release()


def workplace(out: Path) -> Path:
    """The folder beside a file in which it is made."""
    return out.with_name(f"{out.name}.work")


def _claimed(work: Path) -> Claim:
    """The folder for us alone; made again when the last one took it away while we waited."""
    while True:
        disk.make_folder(work)
        claim = Claim(work)
        if claim.stands:
            return claim
        claim.release()
