"""Frozen-dataclass configs that account for every key of the JSON they are read from."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import msgspec
from msgspec import Meta

from lydite.core.errors import ConfigError, shown

# A config may be hostile or mistyped: without bounds it could ask for a terabyte.
Count = Annotated[int, Meta(ge=1, le=1024)]  # layers, heads, groups, buckets
Size = Annotated[int, Meta(ge=1, le=2**20)]  # widths, vocabularies, resolutions
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
