"""One writer per set: a lock that dies with its process, and a note that says who holds it."""

import contextlib
import fcntl
import json
import os
import socket
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from lydite.calibrate.store import files as disk
from lydite.core.errors import CalibrationError, at, shown

NAME = "claim"
PATIENCE = 0.2  # seconds, twice at most: for the lock, then for the note of a new holder


@dataclass(frozen=True)
class Holder:
    """Who writes: for people. Whether somebody does is the lock's matter alone."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Claim:
    """The right to write a set, until released or until the process ends in any way."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        try:
            self._handle: int | None = disk.system.open(self.path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise disk.DiskError(self.path, error) from error
        try:
            self._lock()
            self._note()
        except BaseException:
            self._close()
            raise
        _CLAIMS.add(self)

    @property
    def stands(self) -> bool:
        """Whether the file that is locked is the one others see: its folder may be gone by now."""
        assert self._handle is not None
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._handle), os.stat(self.path))
        return False

    def release(self) -> None:
        """Give the right back; the empty file stays, since removing a lock is a race."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, 0)
            self._close()

    def _lock(self) -> None:
        assert self._handle is not None
        until = time.monotonic() + PATIENCE  # a reader that asks who writes holds it for an instant
        try:
            while not _taken(self._handle):
                if time.monotonic() > until:
                    who = _read_note(self.path, patience=PATIENCE) or "another process"
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

    def _note(self) -> None:
        assert self._handle is not None
        since = time.strftime("%Y-%m-%d %H:%M:%S%z")
        note = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        try:
            os.ftruncate(self._handle, 0)
            disk.system.write(self._handle, json.dumps(note).encode())
        except OSError as error:
            raise disk.DiskError(self.path, error) from error

    def _close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def holder(folder: Path) -> Holder | None:
    """Who is writing the set now, or None; the lock itself is asked, not the note."""
    path = folder / NAME
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_note(path, patience=PATIENCE) or Holder(0, "unknown", "unknown")
    except OSError:
        return None
    finally:
        os.close(handle)
    return None


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_note(path: Path, *, patience: float) -> Holder | None:
    until = time.monotonic() + patience
    while True:
        try:
            note = json.loads(path.read_bytes())
            return Holder(int(note["pid"]), shown(note["host"])[1:-1], shown(note["since"])[1:-1])
        except (OSError, ValueError, KeyError, TypeError):
            if time.monotonic() > until:
                return None
            time.sleep(0.02)


# A forked child shares the lock; it lets go at once, or it would outlive the writer.
_CLAIMS: "weakref.WeakSet[Claim]" = weakref.WeakSet()


def _forget_claims() -> None:
    for claim in list(_CLAIMS):
        claim._close()


os.register_at_fork(after_in_child=_forget_claims)
