"""JSON from untrusted files, and configs that account for every key of it."""

import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, Protocol, TypeVar, cast

import msgspec
from msgspec import Meta

from lydite.core.errors import ConfigError, FileError, at, shown
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
    if _SURROGATE.search(data):  # half of a pair is no text, and could not be written again
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise JsonError("text that is not valid Unicode") from error
    if not isinstance(value, dict):
        raise JsonError(f"expected a JSON object, found {type(value).__name__}")
    return cast(dict[str, Any], value)


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


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


# A config may be hostile or mistyped: without bounds it could ask for a terabyte.
Count = Annotated[int, Meta(ge=1, le=1024)]  # layers, heads, groups, buckets
Size = Annotated[int, Meta(ge=1, le=2**20)]  # widths, vocabularies, resolutions
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]  # MLX compares ids as 32-bit integers
MAX_ITEMS = 64  # a list has one item per layer or per resolution
Epsilon = Annotated[float, Meta(gt=0, lt=1)]


class Config(Protocol):
    """What `read_config` can fill: a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


C = TypeVar("C", bound=Config)


def read_config(
    cls: type[C],
    raw: Mapping[str, Any],
    *,
    where: object,
    ignored: frozenset[str] = frozenset(),
    fixed: Mapping[str, Any] | None = None,
) -> C:
    """Fill `cls` from `raw`, accounting for every key.

    A key is a field of `cls`, or in `ignored` (no influence on the numbers), or in `fixed` (we run
    only that value, so any other is an error), or starts with "_" (library bookkeeping). Anything
    else may change the arithmetic in a way we do not know, and is refused.
    """
    fixed = fixed or {}
    known = {field.name: field for field in fields(cls)}
    missing = [
        name
        for name, field in known.items()
        if name not in raw and field.default is MISSING and field.default_factory is MISSING
    ]
    unknown = [
        key
        for key in raw
        if key not in known and key not in ignored and key not in fixed and not key.startswith("_")
    ]
    if missing or unknown:
        wrong = {"missing": missing, "not understood": unknown}
        parts = ", ".join(f"{what} {shown(keys)}" for what, keys in wrong.items() if keys)
        raise ConfigError(f"{where}: {cls.__name__}: {parts}.")
    for key, only in fixed.items():
        if key in raw and raw[key] != only:
            raise ConfigError(
                f"{where}: {cls.__name__}: {key} is {shown(raw[key])}; only {only!r} is supported."
            )
    for key in known:
        if isinstance(raw.get(key), list) and len(raw[key]) > MAX_ITEMS:
            raise ConfigError(f"{where}: {cls.__name__}: {key} has more than {MAX_ITEMS} items.")
    try:
        return msgspec.convert({name: raw[name] for name in known if name in raw}, cls)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {cls.__name__}: {error}.") from error
