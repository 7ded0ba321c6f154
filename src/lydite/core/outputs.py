"""Output files that users name: created, or replaced only where lydite made the old one."""

import stat
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lydite.core.errors import FileError, at

HEAD = 2**16  # bytes of a file by which its kind is recognized
_PNG, _AFTER_HEADER = b"\x89PNG\r\n\x1a\n", 33  # bytes: signature and IHDR


@dataclass(frozen=True)
class OutputKind:
    """A kind of file that lydite makes, and how to recognize one."""

    name: str
    made_here: Callable[[bytes], bool]  # by its first bytes


def check_output(path: Path, kind: OutputKind) -> None:
    """Refuse a path whose file would replace something else, before any work is done."""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise FileError(f"{at(path)}: is a link. Give the name of the file itself, or another.")
        if stat.S_ISDIR(mode):
            raise FileError(f"{at(path)}: is a folder. Give the name of a file.")
        if not stat.S_ISREG(mode):
            raise FileError(f"{at(path)}: is a device or a pipe. Give the name of a file.")
        with path.open("rb") as file:
            head = file.read(HEAD)
    except FileNotFoundError:
        return
    except OSError as error:
        raise FileError(
            f"{at(path)}: cannot be read ({error.strerror}). Give another name."
        ) from error
    if not kind.made_here(head):
        raise FileError(
            f"{at(path)}: exists and is not a lydite {kind.name}; not overwritten. Give another "
            "name, or remove it first."
        )


def png_kind(name: str) -> OutputKind:
    """A PNG that `mark_png` marked with that name."""
    return OutputKind(name, lambda head: head.startswith(_PNG) and _mark(name) in head)


def mark_png(data: bytes, kind: OutputKind) -> bytes:
    """The PNG with a text chunk that names its kind, after the header."""
    return data[:_AFTER_HEADER] + _mark(kind.name) + data[_AFTER_HEADER:]


def _mark(name: str) -> bytes:
    """A tEXt chunk: length, type, key and text, checksum."""
    text = b"Software\0lydite: " + name.encode("latin-1")
    body = b"tEXt" + text
    return len(text).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
