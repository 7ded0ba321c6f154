"""The options of `lydite generate`: typed, replayed from a picture, and checked."""

import re
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lydite import embedded
from lydite.cli.guidance import read_interval, read_numbers, read_scales
from lydite.cli.paths import check_template
from lydite.core.errors import InputError

if TYPE_CHECKING:
    from lydite.pipelines.metadata import Record
    from lydite.pipelines.sd3 import Request

DTYPES = ("auto", "float32", "bfloat16", "float16")
MOST_AT_ONCE = 1024
DEBUG = ("nan", "timing", "shapes")
MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Settings:
    """The options as they come, one field each."""

    prompt: str | None
    model: str | None
    components: str | None
    negative: str
    seeds: tuple[str, ...]
    steps: int | None  # None: as the model is meant to be run
    guidance: str | None
    guidance_rescale: float
    guidance_interval: str | None
    size: str | None
    batch: int
    dtype: str
    sampler: str
    eta: float | None
    options: tuple[str, ...]
    schedule: str
    convention: str
    noise: str
    text_length: int | None
    image: str | None
    strength: float
    out: str
    overwrite: bool
    preview: int | None
    low_memory: bool
    debug: str | None
    source: str | None
    quiet: bool


@dataclass(frozen=True)
class Plan:
    """What the options ask for, every one of them checked before a model is loaded."""

    settings: Settings
    model: str
    request: "Request"
    seeds: tuple[int, ...]
    template: str
    debug: set[str]
    image_hash: str | None


def replay(settings: Settings, typed: set[str]) -> "tuple[Settings, Record | None]":
    """With --from, the settings the picture remembers, except those in `typed`."""
    if not settings.source:
        return settings, None
    from lydite.pipelines.metadata import read_record

    record = read_record(Path(settings.source))
    remembered: dict[str, Any] = {
        "prompt": record.prompt,
        "negative": record.negative,
        "model": record.model,
        "components": record.components,
        "seeds": (str(record.seed),),
        "steps": record.steps,
        "guidance": ",".join(map(repr, record.guidance_steps or (record.guidance,))),
        "guidance_rescale": record.guidance_rescale,
        "guidance_interval": "{!r}:{!r}".format(*record.guidance_interval),
        "size": f"{record.width}x{record.height}",
        "dtype": record.dtype,
        "sampler": record.sampler,
        "schedule": record.schedule,
        "convention": record.convention,
        "noise": record.noise,
        "text_length": record.text_length,
        "image": record.image,
    }
    if record.strength is not None:
        remembered["strength"] = record.strength
    if "sampler" not in typed:
        remembered["options"] = (
            *(f"{name}={value!r}" for name, value in record.options.items()),
            *settings.options,
        )
        typed = typed - {"options"}
    if "image" in typed:
        record = replace(record, image_hash=None)
    kept = {name: value for name, value in remembered.items() if name not in typed}
    return replace(settings, **kept), record


def make_plan(settings: Settings, record: "Record | None") -> Plan:
    """Check every option; the image of img2img is read, and must be the one `record` names."""
    from lydite.pipelines.images import pixel_hash, read_pixels
    from lydite.pipelines.sd3 import Request

    if settings.prompt is None:
        raise InputError('no prompt. Say what to draw: lydite generate "a red star".')
    model = settings.model or embedded.NAME
    steps, usual, text_length = 28, 7.0, 256
    if model == embedded.NAME:
        steps, usual, text_length = embedded.STEPS, embedded.GUIDANCE, embedded.TEXT_LENGTH
    scales = read_scales(settings.guidance) if settings.guidance is not None else (usual,)
    seeds = read_seeds(settings.seeds, settings.batch)
    template = check_template(settings.out)
    if settings.overwrite and len(seeds) > 1 and not re.search(r"\{(seed|index)", template):
        raise InputError(
            f"--out {template}: {len(seeds)} pictures of one name; add {{seed}} to it."
        )
    debug = read_modes(settings.debug)
    width, height = read_size(settings.size)
    image = read_pixels(Path(settings.image)) if settings.image else None
    image_hash = pixel_hash(image) if image is not None else None
    if record and record.image_hash not in (None, image_hash):
        raise InputError(
            f"{settings.image}: not the image this picture was made from; "
            "name the right one with --image."
        )
    request = Request(
        prompt=settings.prompt,
        negative=settings.negative,
        steps=steps if settings.steps is None else settings.steps,
        guidance=max(scales),
        guidance_steps=scales if len(scales) > 1 else (),
        guidance_rescale=settings.guidance_rescale,
        guidance_interval=read_interval(settings.guidance_interval),
        width=width,
        height=height,
        sampler=settings.sampler,
        options=read_numbers(settings.options, settings.eta),
        schedule=settings.schedule,
        convention=settings.convention,
        text_length=text_length if settings.text_length is None else settings.text_length,
        noise=settings.noise,
        image=image,
        strength=settings.strength,
    )
    return Plan(settings, model, request, seeds, template, debug, image_hash)


def read_size(text: str | None) -> tuple[int | None, int | None]:
    """`1024x768` as width and height."""
    if text is None:
        return None, None
    found = re.fullmatch(r"([1-9]\d{0,5})[xX×]([1-9]\d{0,5})", text)
    if not found:
        raise InputError(f"--size is {text!r}; expected WIDTHxHEIGHT in pixels, e.g. 1024x768.")
    return int(found[1]), int(found[2])


def read_seeds(texts: tuple[str, ...], batch: int) -> tuple[int, ...]:
    """`1`, `1-4`, `1,5,9` as numbers; one seed is the first of as many as the batch holds."""
    if not 1 <= batch <= MOST_AT_ONCE:
        raise InputError(f"--batch is {batch}; expected 1 to {MOST_AT_ONCE}.")
    seeds: list[int] = []
    for part in ",".join(texts).split(",") if texts else [str(secrets.randbelow(2**32))]:
        found = re.fullmatch(r"\s*(-?\d{1,20})(?:-(\d{1,20}))?\s*", part)
        if not found:
            raise InputError(f"--seed is {part!r}; expected a number, a range 1-4, or 1,5,9.")
        first = int(found[1])
        last = int(found[2]) if found[2] else first
        if not first <= last < first + MOST_SEEDS:
            raise InputError(f"--seed {part}: expected a rising range of at most {MOST_SEEDS:,}.")
        seeds.extend(range(first, last + 1))
    if len(seeds) == 1:
        seeds = list(range(seeds[0], seeds[0] + batch))
    if outside := [seed for seed in seeds if not -(2**63) <= seed < 2**64]:
        raise InputError(f"--seed {outside[0]}: expected a number from -2^63 to 2^64 - 1.")
    return tuple(seeds)


def read_modes(text: str | None) -> set[str]:
    """The modes of --debug."""
    modes = {mode.strip() for mode in text.split(",")} if text else set[str]()
    if unknown := modes - {*DEBUG, "all"}:
        raise InputError(
            f"--debug has {', '.join(sorted(unknown))}; expected {', '.join(DEBUG)} or all."
        )
    return set(DEBUG) if "all" in modes else modes
