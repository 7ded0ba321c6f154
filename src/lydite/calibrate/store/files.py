"""The only way from a calibration set to its disk: whole files, flushed names, clear failures.

Every call that may fail goes through `system`, so that a test can let the k-th one fail.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import sqlite3
import sys
from collections.abc import Iterable
from pathlib import Path

from lydite.core.errors import FileError, at

PART = ".part"
RESERVE = 16 * 2**20  # bytes left alone for the index and its journal
Bytes = bytes | memoryview
# The name is taken, or the file system has no links: then a rename has to do.
_WITHOUT_LINK = (errno.EEXIST, errno.EPERM, errno.ENOTSUP, errno.EMLINK)


class System:
    """What the store asks of the operating system."""

    def open(self, path: Path, flags: int) -> int:
        """A handle; new files get the rights the user's mask leaves."""
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def write(self, handle: int, data: Bytes) -> int:
        """How many bytes were taken, which may be fewer than given."""
        return os.write(handle, data)

    def sync(self, handle: int) -> None:
        """Back only when the drive has it: on macOS fsync alone leaves it in the drive's cache."""
        if sys.platform == "darwin":
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
        else:
            os.fsync(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Replace `new`, in one step."""
        os.replace(old, new)

    def link(self, old: Path, new: Path) -> None:
        """Give a file a second name."""
        os.link(old, new)

    def unlink(self, path: Path) -> None:
        """Take a name away."""
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        """Make one folder."""
        os.mkdir(path)

    def execute(self, connection: sqlite3.Connection, statement: str) -> None:
        """BEGIN, COMMIT or ROLLBACK."""
        connection.execute(statement)


system = System()


class DiskError(FileError):
    """A disk that does not take what is written: the file, the reason, the free space."""

    def __init__(self, path: Path, error: Exception) -> None:
        reason = error.strerror or error if isinstance(error, OSError) else error
        super().__init__(f"{at(path)}: could not be written ({reason}; {free_text(path)}).")


def write_sealed(path: Path, pieces: Iterable[Bytes]) -> None:
    """Write a file under its final name only when every byte is on disk; then flush the name."""
    try:
        temporary, handle = _temporary(path.parent)
        try:
            for piece in pieces:
                _write_all(handle, piece)
            system.sync(handle)
            system.rename(temporary, path)
            sync_folder(path.parent)
        finally:
            os.close(handle)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DiskError(path, error) from error


def move(old: Path, new: Path) -> None:
    """Bring a sealed file into another folder: it is flushed there before it goes from here.

    A rename between folders is two changes to a disk, and a power cut may keep only the second.
    """
    try:
        try:
            system.link(old, new)
        except OSError as error:
            if error.errno not in _WITHOUT_LINK:
                raise
            system.rename(old, new)
        sync_folder(new.parent)
    except OSError as error:
        raise DiskError(new, error) from error
    remove(old)


def remove(path: Path) -> None:
    """Remove a file, durably; one that is not there is no error."""
    try:
        if path.exists():
            system.unlink(path)
            sync_folder(path.parent)
    except OSError as error:
        raise DiskError(path, error) from error


def make_folder(path: Path) -> None:
    """Make a folder whose name survives a power cut; one that is there stays."""
    try:
        if path.is_dir():
            return
        if not path.parent.exists():
            make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            system.mkdir(path)
        if not path.is_dir():
            raise FileError(f"{at(path)}: not a folder. Give another one, or remove it first.")
        sync_folder(path.parent)
    except OSError as error:
        raise DiskError(path, error) from error


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder."""
    handle = system.open(folder, os.O_RDONLY)
    try:
        system.sync(handle)
    finally:
        os.close(handle)


def sweep(folder: Path) -> None:
    """Remove what interrupted writes left; a file that a live process writes is locked, and stays.

    The lock goes with the process, however it ends, so neither age nor process numbers matter.
    """
    for path in folder.glob(f".*{PART}"):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)


def free_bytes(path: Path) -> int | None:
    """Free space where `path` is or would be; None when the disk does not say."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def free_text(path: Path) -> str:
    """The free space in words."""
    free = free_bytes(path)
    return "free space unknown" if free is None else f"{size_text(free)} free"


def size_text(count: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def require_room(folder: Path, needed: int) -> None:
    """Refuse to start what could not end: `needed` bytes and a reserve must be free."""
    free = free_bytes(folder)
    if free is not None and free < needed + RESERVE:
        raise FileError(
            f"{at(folder)}: about {size_text(needed)} are still to be written and "
            f"{size_text(RESERVE)} left alone, and {size_text(free)} are free. Free some space, or "
            "write to another disk."
        )


def _temporary(folder: Path) -> tuple[Path, int]:
    """A new file, locked while it is written."""
    while True:
        path = folder / f".{secrets.token_hex(8)}{PART}"
        handle = system.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with contextlib.suppress(OSError):  # between the two calls a sweep may have taken it
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                return path, handle
        os.close(handle)


def _write_all(handle: int, data: Bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[system.write(handle, rest) :]
