"""Files that are either whole or not there: write beside, flush, rename, flush the folder."""

import contextlib
import os
import secrets
from collections.abc import Generator
from pathlib import Path

from lydite.core.errors import FileError


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` under its final name only when every byte is on disk."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def atomic_path(path: Path) -> Generator[Path]:
    """A temporary path in the same folder, renamed to `path` when the block ends well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _flush(temporary)
        temporary.replace(path)
        _flush(path.parent)
    except OSError as error:
        raise FileError(f"{path}: could not be written ({error.strerror or error}).") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
