"""One exception per kind of error; each message says what, where, expected, found, next."""

import reprlib
from collections.abc import Sequence
from pathlib import Path


class LyditeError(Exception):
    """Anything a user can correct: one line on the command line, which ends with `exit_code`."""

    exit_code = 2


class FileError(LyditeError):
    """A path that is missing, not readable, or of a format that is not supported."""


class TensorFileError(LyditeError):
    """A safetensors file that breaks a rule of the format."""


class ConfigError(LyditeError):
    """A config with missing or unknown keys, or with a value that is not supported."""


class WeightsError(LyditeError):
    """A checkpoint that does not fill its model exactly, or holds values no model can use."""

    exit_code = 1


class InputError(LyditeError):
    """An option or argument outside what the model can do."""


class TraceError(LyditeError):
    """A trace that breaks a rule of its format, or that cannot be compared."""


class CalibrationError(LyditeError):
    """A calibration set that breaks a rule of its format, or that another run is writing."""


class NotFiniteError(LyditeError):
    """NaN or Inf where a number should be; the message names the value."""

    exit_code = 1


def shown(value: object) -> str:
    """`value` for an error message: one line, and short whatever a file contains."""
    return _SHORT.repr(value)


def at(path: Path) -> str:
    """A path for an error message: one line whatever its name."""
    text = str(path)
    return text if text.isprintable() else repr(text)


def is_unicode(text: str) -> bool:
    """Whether a text can be written: names and JSON may hold lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def counted(number: int, noun: str) -> str:
    """`1 picture`, `2 pictures`: a number with its noun."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def first_of(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first `most` items in one line, and how many more there are."""
    text = separator.join(items[:most])
    return f"{text}{separator}and {len(items) - most} more" if len(items) > most else text


_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxlist, _SHORT.maxtuple = 100, 8, 8
