"""One exception per kind of trouble; each message says what, where, expected, found, next."""

import reprlib
from pathlib import Path


class LyditeError(Exception):
    """Anything a user can mend: one line on the command line, which ends with `exit_code`."""

    exit_code = 2


class FileError(LyditeError):
    """A path that is missing, not readable, or of a kind we do not open."""


class TensorFileError(LyditeError):
    """A safetensors file that breaks a rule of the format."""


class ConfigError(LyditeError):
    """A config with keys we miss, do not understand, or whose value we cannot run."""


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
    """NaN or Inf where a number should be, with the name of the place."""

    exit_code = 1


def shown(value: object) -> str:
    """`value` for an error message: one line, and short whatever a stranger put in it."""
    return _SHORT.repr(value)


def at(path: Path) -> str:
    """A path for an error message: one line whatever its name."""
    text = str(path)
    return text if text.isprintable() else repr(text)


_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxlist, _SHORT.maxtuple = 100, 8, 8
