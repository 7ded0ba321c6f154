"""Files from outside are regular and bounded; files we write are whole or absent.

A file is written beside its place, flushed and renamed, and the folder is flushed. Every system
call that may fail goes through `system`, so that a test can let the k-th one fail.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import BinaryIO, cast

from lydite.core.errors import FileError, at

PART = ".part"  # ends the name of a file that is not complete yet
RESERVE = 16 * 2**20  # bytes that stay free when space is checked
Bytes = bytes | memoryview
# What `link` answers on a file system without hard links, or for a file that has too many.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
PIECE = 2**20  # bytes read at a time: a wrong limit never asks for memory that is not needed


class SystemCalls:
    """The calls to the operating system that write."""

    def open(self, path: Path, flags: int) -> int:
        """A file descriptor; new files get the rights that the user's mask leaves."""
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def write(self, handle: int, data: Bytes) -> int:
        """How many bytes were written, which may be fewer than given."""
        return os.write(handle, data)

    def sync(self, handle: int) -> None:
        """Flush to the drive, or as far as its file system can."""
        try:
            _full_sync(handle)
        except OSError as error:  # of shares, exFAT and FUSE on macOS
            if error.errno not in (errno.ENOTSUP, errno.ENOTTY, errno.EINVAL):
                raise
            os.fsync(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Replace `new` atomically."""
        os.replace(old, new)

    def link(self, old: Path, new: Path) -> None:
        """Give a file a second name."""
        os.link(old, new)

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        """Make one folder."""
        os.mkdir(path)


system = SystemCalls()


class NotRegular(FileError):
    """A path of a folder, a pipe or a device where a file is expected."""


class NameTaken(FileError):
    """A new file was asked for, and one of that name exists."""


class DiskError(FileError):
    """A file could not be written: its path, the reason, the free space."""

    def __init__(self, path: Path, error: Exception) -> None:
        reason = error.strerror or error if isinstance(error, OSError) else error
        super().__init__(f"{at(path)}: could not be written ({reason}; {free_text(path)}).")


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a file for reading if it is a regular one: a pipe would wait, a device never ends.

    Every file that the package reads and did not write in the same run is opened here.
    """
    try:
        link = 0 if follow else os.O_NOFOLLOW
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | link)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        if isinstance(error, FileNotFoundError):
            raise FileError(f"{at(path)}: no such file.") from error
        reason = error.strerror if isinstance(error, OSError) else error
        raise FileError(f"{at(path)}: cannot be read ({reason or error}).") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotRegular(f"{at(path)}: not a file. Expected the path of a regular file.")
    return os.fdopen(handle, "rb")


def read_bounded(path: Path, most: int, what: str = "bytes", *, follow: bool = True) -> bytes:
    """The content of a regular file of at most `most` bytes."""
    data = bytearray()
    try:
        with open_regular(path, follow=follow) as file:
            while len(data) <= most and (piece := file.read(min(PIECE, most + 1 - len(data)))):
                data += piece
    except OSError as error:
        raise FileError(f"{at(path)}: cannot be read ({error.strerror or error}).") from error
    if len(data) > most:
        raise FileError(f"{at(path)}: more than {most} {what}.")
    return bytes(data)


def write_atomic(
    path: Path,
    data: Bytes | Iterable[Bytes],
    *,
    make_parents: bool = True,
    replace: bool = True,
) -> None:
    """Write a file under its final name only when every byte is on disk.

    With `replace` false a file that exists by then stays, and NameTaken is raised. The temporary
    file is locked while it is written, so `remove_leftovers` does not remove it.
    """
    try:
        _check_replaceable(path)
        if make_parents:
            make_folder(path.parent)
        temporary, handle = _create_locked(path.parent)
        try:
            single = isinstance(data, (bytes, memoryview))
            for piece in cast("Iterable[Bytes]", (data,) if single else data):
                _write_all(handle, piece)
            system.sync(handle)
            _give_name(temporary, path, replace=replace)
            sync_path(path.parent)
        finally:
            os.close(handle)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DiskError(path, error) from error


@contextlib.contextmanager
def atomic_path(path: Path, *, replace: bool = True) -> Generator[Path]:
    """A temporary path in the same folder, renamed to `path` when the block ends well.

    With `replace` false a file that exists by then stays, and NameTaken is raised.
    """
    temporary = _temporary_name(path.parent)
    try:
        _check_replaceable(path)
        make_folder(path.parent)
        yield temporary
        sync_path(temporary)
        _give_name(temporary, path, replace=replace)
        sync_path(path.parent)
    except OSError as error:
        raise DiskError(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def move(old: Path, new: Path) -> None:
    """Move a complete file to another folder: its new name is on disk before the old one goes.

    A rename between folders is two changes to a disk, and a power cut may keep only the second.
    """
    try:
        try:
            system.link(old, new)
        except OSError as error:
            if error.errno not in (errno.EEXIST, *_NO_LINKS):
                raise
            system.rename(old, new)
        sync_path(new.parent)
    except OSError as error:
        raise DiskError(new, error) from error
    remove(old)


def remove(path: Path) -> None:
    """Remove a file, durably; one that does not exist is no error."""
    try:
        if path.exists():
            system.unlink(path)
            sync_path(path.parent)
    except OSError as error:
        raise DiskError(path, error) from error


def make_folder(path: Path) -> None:
    """Make a folder and its parents, durably; one that exists stays."""
    try:
        if path.is_dir():
            return
        if not path.parent.exists():
            make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            system.mkdir(path)
        if not path.is_dir():
            raise FileError(f"{at(path)}: not a folder. Give another one, or remove it first.")
        sync_path(path.parent)
    except OSError as error:
        raise DiskError(path, error) from error


def try_folder(folder: Path) -> None:
    """Refuse a folder that no file can be written to; it need not exist yet."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        temporary = _temporary_name(folder)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
        temporary.unlink()
    except OSError as error:
        raise DiskError(folder, error) from error


def sync_path(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to the drive."""
    handle = system.open(path, os.O_RDONLY)
    try:
        system.sync(handle)
    finally:
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of interrupted writes; those of a live process are locked.

    The lock ends with the process, however that ends, so neither age nor process ids matter.
    A folder that is a link is left alone: what lies there is not ours.
    """
    if folder.is_symlink():
        return
    for path in folder.glob(f".*{PART}"):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)


def disk_abilities(folder: Path) -> dict[str, bool | int | None]:
    """What the file system of a folder can do; whatever it lacks is done in another way here."""
    abilities: dict[str, bool | int | None] = {
        "writable": False,
        "hard_links": False,
        "file_locks": False,
        "full_sync": False,
        "free": free_bytes(folder),
    }
    try:
        name, handle = _create_locked(folder)
    except OSError:
        return abilities
    other = name.with_name(f"{name.name}2")
    try:
        abilities["writable"] = True
        for ability, try_it in (
            ("hard_links", lambda: os.link(name, other)),
            ("file_locks", lambda: fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)),
            ("full_sync", lambda: _full_sync(handle)),
        ):
            with contextlib.suppress(OSError):
                try_it()
                abilities[ability] = True
    finally:
        os.close(handle)
        for path in (name, other):
            path.unlink(missing_ok=True)
    return abilities


def _full_sync(handle: int) -> None:
    """Flush to the drive; on macOS fsync alone leaves the data in the drive's cache."""
    if sys.platform == "darwin":
        fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
    else:
        os.fsync(handle)


def cache_folder() -> Path | None:
    """The user's folder for what can be made again; None without a home."""
    homes = (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache"))
    home = next(filter(os.path.isabs, homes), None)
    return None if home is None else Path(home, "lydite")


def free_bytes(path: Path) -> int | None:
    """Free space where `path` is or would be; None when the disk does not say."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def free_text(path: Path) -> str:
    """The free space as text."""
    free = free_bytes(path)
    return "free space unknown" if free is None else f"{size_text(free)} free"


def size_text(count: float) -> str:
    """A number of bytes as text."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def require_space(folder: Path, needed: int) -> None:
    """Refuse work whose result would not fit: `needed` bytes and a reserve must be free."""
    free = free_bytes(folder)
    if free is not None and free < needed + RESERVE:
        raise FileError(
            f"{at(folder)}: needs about {size_text(needed)} and a reserve of {size_text(RESERVE)}; "
            f"{size_text(free)} are free. Free some space, or write to another disk."
        )


def _check_replaceable(path: Path) -> None:
    try:  # once: another process may take the file away meanwhile
        mode = path.stat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        raise FileError(f"{at(path)}: not a file; only files are replaced.")


def _temporary_name(folder: Path) -> Path:
    return folder / f".{secrets.token_hex(8)}{PART}"


def _create_locked(folder: Path) -> tuple[Path, int]:
    """A new file, locked while it is written."""
    while True:
        path = _temporary_name(folder)
        handle = system.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(path), os.fstat(handle)):
                return path, handle
        except (BlockingIOError, FileNotFoundError):
            pass  # `remove_leftovers` of another process was faster
        except OSError:
            return path, handle  # a file system without locks
        os.close(handle)


def _write_all(handle: int, data: Bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[system.write(handle, rest) :]


def _give_name(temporary: Path, path: Path, *, replace: bool) -> None:
    """Rename a finished file; without `replace` only if the name is free."""
    if replace:
        system.rename(temporary, path)
        return
    try:
        try:
            system.link(temporary, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.close(system.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            system.rename(temporary, path)
    except FileExistsError as error:
        raise NameTaken(f"{at(path)}: exists already.") from error
