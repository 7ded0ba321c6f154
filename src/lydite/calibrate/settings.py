"""What a set is made with (settings), what it is to hold (plan), and the keys of its items."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from lydite.core.errors import CalibrationError, at, shown

Dtype = Literal["F32", "F16", "BF16"]
STORE_DTYPES: dict[str, Dtype] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
Kind = Literal["sample", "picture", "conditioning"]
BLOCKS = "blocks"  # in the conditions of a set of what modules take and give
_encode = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
).encode
EXACT = 2**53  # whole numbers up to here are the same as int and as float


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Everything but prompt, seed and step that decides the values of a set."""

    model_hash: str  # of all parameters
    conditions: dict[str, Any]  # sampler, schedule and its numbers, steps, guidance, size, …
    dtype: Dtype = "F32"  # of stored floats
    model: str = ""  # a name for people; in no hash, since a path differs between machines

    @cached_property
    def hash(self) -> str:
        """Equal for sets that can be resumed or merged."""
        return digest(self.hashed_fields)

    @property
    def hashed_fields(self) -> dict[str, Any]:
        """All but the model's name; every shard holds this."""
        return {"model_hash": self.model_hash, "conditions": self.conditions, "dtype": self.dtype}

    @cached_property
    def key_texts(self) -> tuple[str, str]:
        """Conditions and model hash as canonical JSON: the same part of every key."""
        return canonical(self.conditions).decode(), canonical(self.model_hash).decode()


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One picture of a plan: its number in the set, and what it is drawn from."""

    number: int
    prompt: str
    seed: int


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the set holds when it is complete."""

    images: tuple[Image, ...]
    steps: tuple[int, ...]  # those that are kept of each image
    pictures: bool = True  # finished pictures are kept too
    conditioning: bool = False  # each prompt's conditioning is kept once

    def keys(self, settings: Settings) -> Iterator[tuple[str, Image, int | None]]:
        """The key of every planned item with its image, and its step; None for what has none."""
        prompts: set[str] = set()
        for image in self.images:
            for step in self.steps:
                yield sample_key(settings, image, step), image, step
            if self.pictures:
                yield picture_key(settings, image), image, None
            if self.conditioning and image.prompt not in prompts:
                prompts.add(image.prompt)
                yield conditioning_key(settings, image.prompt), image, None

    def joined(self, other: "Plan", where: Path) -> "Plan":
        """Both plans in one; an image number means one prompt and one seed."""
        images = {image.number: image for image in self.images}
        for image in other.images:
            known = images.setdefault(image.number, image)
            if known != image:
                raise CalibrationError(
                    f"{at(where)}: image {image.number} is {shown(known.prompt)} with seed "
                    f"{known.seed} there, and {shown(image.prompt)} with seed {image.seed} here. "
                    "Give the same prompts and seeds, or another folder."
                )
        return Plan(
            tuple(images[number] for number in sorted(images)),
            tuple(sorted({*self.steps, *other.steps})),
            self.pictures or other.pictures,
            self.conditioning or other.conditioning,
        )


class Description(msgspec.Struct, frozen=True):
    """A set's settings and plan."""

    settings: Settings
    plan: Plan


def plan_of(images: Iterable[tuple[str, int]], steps: Iterable[int], **keeps: bool) -> Plan:
    """A plan from prompts with their seeds, numbered from 0, and the steps that are kept."""
    numbered = tuple(Image(number, *image) for number, image in enumerate(images))
    return Plan(numbered, tuple(sorted(set(steps))), **keeps)


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
    """SHA-256 of the canonical JSON of all that decides an item's values."""
    conditions, model = settings.key_texts  # written once: a large set has a million keys
    text = canonical(prompt).decode()
    seed_text, step_text = ("null" if value is None else int(value) for value in (seed, step))
    return hashlib.sha256(
        f'{{"conditions":{conditions},"kind":"{kind}","model":{model},"prompt":{text},'
        f'"seed":{seed_text},"step":{step_text}}}'.encode()
    ).hexdigest()


def digest(value: object) -> str:
    """SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical(value)).hexdigest()


def canonical(value: object) -> bytes:
    """JSON with one spelling for each value: sorted keys, no spaces, 7.0 as 7, UTF-8."""
    try:
        return _encode(_plain(value)).encode()
    except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
        raise CalibrationError(
            f"settings or labels cannot be written as JSON ({error}); expected text, finite "
            f"numbers, lists and objects, found {shown(value)}."
        ) from error


def differences(first: Settings, second: Settings) -> str:
    """Where two settings differ, as `name: first, second; …` for an error message."""
    one, other = _flat(first), _flat(second)
    names = sorted(one.keys() | other.keys())
    return "; ".join(
        f"{name}: {shown(one.get(name))}, {shown(other.get(name))}"
        for name in names
        if canonical(one.get(name)) != canonical(other.get(name))
    )


def _flat(settings: Settings) -> dict[str, Any]:
    own = {"model_hash": settings.model_hash, "dtype": settings.dtype}
    asked = {"compute": "--dtype"}  # as users give it
    return own | {asked.get(name, name): value for name, value in settings.conditions.items()}


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
