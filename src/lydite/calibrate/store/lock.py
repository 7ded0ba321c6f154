"""One writer per set: a file lock that ends with its process, and a note that names the owner."""

import contextlib
import fcntl
import json
import os
import socket
import stat
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from lydite.core import files
from lydite.core.errors import CalibrationError, FileError, at, shown

NAME = "claim"  # the name that earlier versions gave the file
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK  # a link may lead anywhere, a pipe would wait
MOST_NOTE = 2**12  # bytes of the note
PATIENCE = 0.2  # seconds, twice at most: for the lock, then for the note of a new holder


@dataclass(frozen=True)
class LockOwner:
    """The process that writes, for messages. Whether one does, the lock alone decides."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class WriterLock:
    """The exclusive right to write a set, until it is released or the process ends in any way."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        try:
            flags = os.O_RDWR | os.O_CREAT | _FLAGS
            self._handle: int | None = files.system.open(self.path, flags)
        except OSError as error:
            raise files.DiskError(self.path, error) from error
        try:
            if not stat.S_ISREG(os.fstat(self._handle).st_mode):
                raise FileError(f"{at(self.path)}: not a file. Remove it.")
            self._lock()
            self._write_owner()
        except BaseException:
            self._close()
            raise
        _LOCKS.add(self)

    @property
    def is_current(self) -> bool:
        """Whether the locked file still has its name; its folder may have been removed."""
        assert self._handle is not None
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._handle), os.stat(self.path))
        return False

    def release(self) -> None:
        """Release the lock; the empty file stays, since removing a lock file is a race."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, 0)
            self._close()

    def _lock(self) -> None:
        assert self._handle is not None
        until = time.monotonic() + PATIENCE  # `lock_owner` of a reader holds it for an instant
        try:
            while not _try_lock(self._handle):
                if time.monotonic() > until:
                    who = _read_owner(self.path, patience=PATIENCE) or "another process"
                    raise CalibrationError(
                        f"{at(self.path.parent)}: being written by {who}. Wait for it or stop it; "
                        "a set has one writer, and any number of readers."
                    )
                time.sleep(0.02)
        except OSError as error:
            raise CalibrationError(
                f"{at(self.path)}: cannot be locked ({error.strerror}). Keep the set on a local "
                "disk, and merge sets made elsewhere."
            ) from error

    def _write_owner(self) -> None:
        assert self._handle is not None
        since = time.strftime("%Y-%m-%d %H:%M:%S%z")
        note = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        try:
            os.ftruncate(self._handle, 0)
            files.system.write(self._handle, json.dumps(note).encode())
        except OSError as error:
            raise files.DiskError(self.path, error) from error

    def _close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def lock_owner(folder: Path) -> LockOwner | None:
    """The process that writes the set now, or None."""
    path = folder / NAME
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | _FLAGS)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_owner(path, patience=PATIENCE) or LockOwner(0, "unknown", "unknown")
    except OSError:
        return None
    finally:
        os.close(handle)
    return None


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_owner(path: Path, *, patience: float) -> LockOwner | None:
    until = time.monotonic() + patience
    while True:
        try:
            note = json.loads(files.read_bounded(path, MOST_NOTE, follow=False))
            return LockOwner(
                int(note["pid"]), shown(note["host"])[1:-1], shown(note["since"])[1:-1]
            )
        except (FileError, ValueError, KeyError, TypeError, RecursionError):
            if time.monotonic() > until:
                return None
            time.sleep(0.02)


# A forked child shares the lock; it releases it at once, or it would outlive the writer.
_LOCKS: "weakref.WeakSet[WriterLock]" = weakref.WeakSet()


def _release_in_child() -> None:
    for lock in list(_LOCKS):
        lock._close()


os.register_at_fork(after_in_child=_release_in_child)
