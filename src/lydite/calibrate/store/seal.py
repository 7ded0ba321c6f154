"""The seal of a closed index: a hash of the whole file, so that any changed bit is found.

SQLite itself does not look at unused space, at spare fields of its header, or at values.
"""

import hashlib
import re
from pathlib import Path

from lydite.calibrate.store import files as disk
from lydite.calibrate.store.index import NAME

SEAL = "index.seal"


def write_seal(path: Path) -> None:
    """Keep a hash of a closed index beside it."""
    disk.write_sealed(path.with_name(SEAL), [f"sha256 {_file_hash(path)}\n".encode()])


def break_seal(path: Path) -> None:
    """Before the first change: from here to the next seal the rows speak for themselves."""
    disk.remove(path.with_name(SEAL))


def is_sealed(path: Path) -> bool:
    """Whether the last writer closed it."""
    return path.with_name(SEAL).exists()


def seal_fault(path: Path) -> str | None:
    """What is wrong with a sealed index, or None."""
    try:
        kept = path.with_name(SEAL).read_bytes()
        if not re.fullmatch(rb"sha256 [0-9a-f]{64}\n", kept):
            return "the seal is damaged"
        if kept != f"sha256 {_file_hash(path)}\n".encode():
            return "the file does not match its seal"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def remove_index(path: Path) -> None:
    """Remove the index with its seal and journal; the shards are what counts."""
    for name in (SEAL, f"{NAME}-wal", f"{NAME}-shm", NAME):
        disk.remove(path.with_name(name))


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
