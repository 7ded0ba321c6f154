"""What decides a value, and the hashes made of it: settings, keys of items, digests of content."""

import hashlib
import json
from typing import Any, Literal, cast

import msgspec

from lydite.core.errors import CalibrationError, shown

Dtype = Literal["F32", "F16", "BF16"]
Kind = Literal["sample", "picture", "conditioning"]
BLOCKS = "blocks"  # in the conditions of a set of what modules take and give
EXACT = 2**53  # whole numbers up to here are the same as int and as float


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything but prompt, seed and step that decides the values of a set."""

    model_hash: str  # of all parameters
    conditions: dict[str, Any]  # sampler, schedule and its numbers, steps, guidance, size, …
    dtype: Dtype = "F32"  # of stored floats
    model: str = ""  # a name for people; in no hash, since a path differs between machines

    @property
    def hash(self) -> str:
        """Equal for sets that can be resumed or merged."""
        return digest(self.decisive)

    @property
    def decisive(self) -> dict[str, Any]:
        """All but the name for people: what a shard says of the run it belongs to."""
        return {"model_hash": self.model_hash, "conditions": self.conditions, "dtype": self.dtype}

    @property
    def identity(self) -> dict[str, Any]:
        """What enters every key."""
        return {"model": self.model_hash, "conditions": self.conditions}


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One picture of a plan: its number in the set, and what it is drawn from."""

    number: int
    prompt: str
    seed: int


def sample_key(settings: Settings, image: Image, step: int) -> str:
    """The key of one step of one picture; its number does not enter."""
    return item_key(settings, "sample", image.prompt, image.seed, step)


def picture_key(settings: Settings, image: Image) -> str:
    """The key of a finished picture."""
    return item_key(settings, "picture", image.prompt, image.seed, None)


def conditioning_key(settings: Settings, prompt: str) -> str:
    """The key of a prompt's conditioning: once per prompt, whatever the seeds and steps."""
    return item_key(settings, "conditioning", prompt, None, None)


def item_key(
    settings: Settings, kind: Kind, prompt: str, seed: int | None, step: int | None
) -> str:
    """SHA-256 over all that decides an item's values."""
    return digest({**settings.identity, "kind": kind, "prompt": prompt, "seed": seed, "step": step})


def digest(value: object) -> str:
    """SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical(value)).hexdigest()


def canonical(value: object) -> bytes:
    """JSON with one spelling for each value: sorted keys, no spaces, 7.0 as 7, UTF-8."""
    try:
        text = json.dumps(
            _plain(value),
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
            allow_nan=False,
        )
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
        raise CalibrationError(
            f"settings or labels cannot be written as JSON ({error}); expected text, finite "
            f"numbers, lists and objects, found {shown(value)}."
        ) from error


def differences(ours: Settings, theirs: Settings) -> list[str]:
    """Where two settings differ, as `name: ours, theirs` for an error message."""
    one, other = _flat(ours), _flat(theirs)
    names = sorted(one.keys() | other.keys())
    return [
        f"{name}: {shown(one.get(name))}, {shown(other.get(name))}"
        for name in names
        if canonical(one.get(name)) != canonical(other.get(name))
    ]


def _flat(settings: Settings) -> dict[str, Any]:
    own = {"model_hash": settings.model_hash, "dtype": settings.dtype}
    return own | settings.conditions


def _plain(value: object) -> object:
    """Equal numbers made equal: a whole float becomes an int, and −0 becomes 0."""
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) <= EXACT
        return int(value) if whole else value
    if isinstance(value, dict):
        items = cast(dict[object, object], value)
        if not all(isinstance(key, str) for key in items):
            raise TypeError("a key of an object is not text")
        return {key: _plain(item) for key, item in items.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast(list[object], value)]
    return value
