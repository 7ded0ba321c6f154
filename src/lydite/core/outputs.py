"""The rule for output files that users name, the same in every command.

Nothing that exists is replaced unless that was asked for, an input is never replaced, and what
cannot be written is refused before the work.
"""

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from lydite.core.errors import FileError, at
from lydite.core.files import Bytes, NameTaken, try_folder, write_atomic


def check_output(path: Path, *, overwrite: bool = False, inputs: Iterable[Path] = ()) -> None:
    """Refuse a path that cannot be written, or whose file would replace something it must not."""
    try:
        _check_kind(path, overwrite)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FileError(f"{at(path)}: cannot be written ({reason}). Give another name.") from error
    real = Path(os.path.realpath(path))
    for source in inputs:
        place = Path(os.path.realpath(source))
        if real == place or (real.is_relative_to(place) and place.is_dir()) or _same(path, source):
            raise FileError(f"{at(path)}: belongs to the input {at(source)}. Give another name.")
    try_folder(path.parent)


def write_output(path: Path, data: Bytes | Iterable[Bytes], *, overwrite: bool = False) -> None:
    """Write what `check_output` allowed; a file that came there meanwhile is not replaced."""
    try:
        write_atomic(path, data, replace=overwrite)
    except NameTaken:
        raise _exists(path) from None


def _check_kind(path: Path, overwrite: bool) -> None:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise FileError(f"{at(path)}: is a link. Give the name of the file itself, or another.")
    if stat.S_ISDIR(mode):
        raise FileError(f"{at(path)}: is a folder. Give the name of a file.")
    if not stat.S_ISREG(mode):
        raise FileError(f"{at(path)}: is a device or a pipe. Give the name of a file.")
    if not overwrite:
        raise _exists(path)


def _exists(path: Path) -> FileError:
    return FileError(f"{at(path)}: exists already. Give another name, or --overwrite it.")


def _same(path: Path, source: Path) -> bool:
    """Whether both are names of one file."""
    with contextlib.suppress(OSError):
        return os.path.samefile(path, source)
    return False
