"""Files that users name for results: made, or replaced where we made them; all else is left."""

import os
import stat
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lydite.calibrate.store.index import NAME as INDEX
from lydite.calibrate.store.set_file import NAME as SET
from lydite.calibrate.store.set_file import SHARDS
from lydite.core.errors import FileError, at

HEAD = 2**16  # bytes of a file that tell its kind
_PNG, _AFTER_HEADER = b"\x89PNG\r\n\x1a\n", 33  # bytes: signature and IHDR


@dataclass(frozen=True)
class Kind:
    """A kind of file that we make, and how one of ours is told from a stranger's."""

    name: str
    made_here: Callable[[bytes], bool]  # by its first bytes


def check_output(path: Path, kind: Kind) -> None:
    """Refuse a name whose file would replace something else, before any work is done."""
    check_outside(path)
    try:
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            raise FileError(f"{at(path)}: is a link. Give the name of the file itself, or another.")
        if stat.S_ISDIR(found.st_mode):
            raise FileError(f"{at(path)}: is a folder. Give the name of a file.")
        if not stat.S_ISREG(found.st_mode):
            raise FileError(f"{at(path)}: is a device or a pipe. Give the name of a file.")
        with path.open("rb") as file:
            head = file.read(HEAD)
    except FileNotFoundError:
        return
    except OSError as error:
        raise FileError(
            f"{at(path)}: cannot be looked at ({error.strerror}). Give another name."
        ) from error
    if not kind.made_here(head):
        raise FileError(
            f"{at(path)}: is there, and no {kind.name} of ours; it is left as it is. Give another "
            "name, or remove it first."
        )


def check_outside(path: Path) -> None:
    """Refuse a place inside a calibration set, which holds nothing but its own files."""
    for folder in Path(os.path.realpath(path)).parents:
        if (folder / SHARDS).is_dir() and any((folder / name).exists() for name in (SET, INDEX)):
            raise FileError(
                f"{at(path)}: lies inside the calibration set {at(folder)}. Give a place outside."
            )


def png_kind(name: str) -> Kind:
    """A picture that `mark_png` marked with that name."""
    return Kind(name, lambda head: head.startswith(_PNG) and _mark(name) in head)


def mark_png(data: bytes, kind: Kind) -> bytes:
    """The picture with a note of what it is, after its header."""
    return data[:_AFTER_HEADER] + _mark(kind.name) + data[_AFTER_HEADER:]


def _mark(name: str) -> bytes:
    """A tEXt chunk: length, type, key and text, check sum."""
    text = b"Software\0lydite: " + name.encode("latin-1")
    body = b"tEXt" + text
    return len(text).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
