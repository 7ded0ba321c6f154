"""What is printed: text from files and names cannot control the terminal.

The streams of the command line escape control characters, whoever prints: messages, tables, errors
and other packages. Progress bars, which move the cursor, print to `progress_stream` instead.
"""

import codecs
import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import IO, Any, TextIO, cast

# C0 and C1 controls, line separators, and marks that reorder or hide text; not tab and newline.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]"
)
_CODE = "(?:[0-2]|[39][0-7])"  # colours, bold, dim, and back: what click and rich print
_COLOR = re.compile(f"(\x1b\\[{_CODE}(?:;{_CODE})*m)")


def escape(text: str) -> str:
    """The text with control characters as escapes, `\\x1b` for instance; colours stay."""
    if not _UNSAFE.search(text):
        return text
    parts = _COLOR.split(text)  # text, colour, text, …
    parts[::2] = [_UNSAFE.sub(_escape_one, part) for part in parts[::2]]
    return "".join(parts)


def one_line(text: str) -> str:
    """The text without line breaks, for an error."""
    return escape(text).replace("\n", "\\n")


class PipeClosed(Exception):
    """Who read our output has gone, as `head` does; not an error."""


class SafeStream(io.TextIOWrapper):
    """A text stream that escapes control characters and what its encoding does not have."""

    def __init__(self, stream: TextIO) -> None:
        ascii_only = codecs.lookup(stream.encoding).name == "ascii"
        super().__init__(
            cast(IO[bytes], stream.buffer),
            encoding="utf-8" if ascii_only else stream.encoding,  # else click makes its own stream
            errors="backslashreplace",
            line_buffering=True,
        )

    @property
    def unescaped(self) -> "_BarStream":
        """The same stream for progress bars, which move the cursor."""
        return _BarStream(self)

    def write(self, text: str, /) -> int:
        try:
            return super().write(escape(text))
        except BrokenPipeError as error:
            raise PipeClosed from error

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError as error:
            raise PipeClosed from error


@contextlib.contextmanager
def safe_streams() -> Iterator[None]:
    """Let everything that is printed meanwhile pass through `SafeStream`."""
    before = sys.stdout, sys.stderr
    replaced: list[SafeStream] = []
    for name, stream in zip(("stdout", "stderr"), before, strict=True):
        if getattr(stream, "buffer", None) is not None:  # none: it was closed
            replaced.append(SafeStream(stream))
            setattr(sys, name, replaced[-1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in replaced:
            with contextlib.suppress(PipeClosed, OSError, ValueError):
                stream.detach()


def discard_output() -> None:
    """Send what is still buffered nowhere: its reader has gone."""
    with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.__stdout__, sys.__stderr__):
            if stream is not None:
                os.dup2(nowhere, stream.fileno())


def progress_stream() -> Any:
    """Where bars are drawn: stderr, with control characters. Print no text of others here."""
    return sys.stderr.unescaped if isinstance(sys.stderr, SafeStream) else sys.stderr


class _BarStream:
    """Stderr without escaping."""

    def __init__(self, stream: SafeStream) -> None:
        self._stream, self.encoding = stream, stream.encoding

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def _escape_one(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
