"""Files that are either whole or not there: write beside, flush, rename, flush the folder."""

import contextlib
import os
import secrets
from collections.abc import Generator
from pathlib import Path

from lydite.core.errors import FileError, at


class NameTaken(FileError):
    """A new file was asked for, and one of that name is there."""


def read_bounded(path: Path, most: int, what: str = "bytes") -> bytes:
    """A stranger's file, which must be a file and not have more than `most` bytes."""
    try:
        if path.exists() and not path.is_file():  # a pipe would wait for a writer
            raise FileError(f"{at(path)}: not a file.")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise FileError(f"{at(path)}: cannot be read ({error.strerror or error}).") from error
    if len(data) > most:
        raise FileError(f"{at(path)}: more than {most} {what}.")
    return data


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` under its final name only when every byte is on disk."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def atomic_path(path: Path, *, replace: bool = True) -> Generator[Path]:
    """A temporary path in the same folder, renamed to `path` when the block ends well.

    With `replace` false a file that is there by then stays, and NameTaken is raised.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        if path.exists() and not path.is_file():  # a device or a folder is not ours to replace
            raise FileError(f"{at(path)}: not a file that could be replaced.")
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _flush(temporary)
        if replace:
            temporary.replace(path)
        else:
            _link(temporary, path)
        _flush(path.parent)
    except OSError as error:
        raise FileError(f"{at(path)}: could not be written ({error.strerror or error}).") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)  # the one rename that fails when the name is taken
    except FileExistsError as error:
        raise NameTaken(f"{at(path)}: is there already.") from error


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
