"""JSON from untrusted files: bounded, UTF-8, no duplicate keys, no NaN, one clear error."""

import json
import math
import reprlib
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn, cast

from lydite.core.errors import FileError, at
from lydite.core.files import read_bounded

MAX_BYTES = 16 * 2**20  # configs, shard indexes and tokenizers are far below


class JsonError(ValueError):
    """Why a text is not a JSON object; the caller adds the file's name."""


def read_json(path: Path, most: int = MAX_BYTES, *, infinity: bool = False) -> dict[str, Any]:
    """The JSON object in `path`, or a FileError that names the file and the reason.

    `infinity` allows Infinity and -Infinity, which Python writes and JSON does not have.
    """
    data = read_bounded(path, most, "bytes of JSON")
    try:
        return parse_object(data, infinity=infinity)
    except JsonError as error:
        raise FileError(f"{at(path)}: {error}.") from error


def parse_object(data: bytes, *, infinity: bool = False) -> dict[str, Any]:
    """Parse a JSON object strictly; raises JsonError with the reason in a few words."""
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_infinity if infinity else _no_constant,
            parse_float=_finite,
            parse_int=_integer if b"-0" in data else int,  # a call per number is slow
        )
    except UnicodeDecodeError as error:
        raise JsonError(f"not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise JsonError(f"not JSON ({error.msg}, at character {error.pos})") from error
    except RecursionError as error:
        raise JsonError("JSON nested too deep") from error
    except ValueError as error:  # those below, and Python's limit on the digits of an integer
        raise JsonError(str(error)) from error
    if not isinstance(value, dict):
        raise JsonError(f"expected a JSON object, found {type(value).__name__}")
    return cast(dict[str, Any], value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"duplicate key {reprlib.repr(key)}")
    return result


def _no_constant(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")


def _infinity(token: str) -> float:
    return _no_constant(token) if token == "NaN" else float(token)


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{reprlib.repr(text)} is beyond the range of numbers")
    return value


def _integer(text: str) -> int:
    # Other parsers read -0 as a float; as an integer it would pass their checks and ours.
    if text == "-0":
        raise ValueError("-0 is not an integer")
    return int(text)
