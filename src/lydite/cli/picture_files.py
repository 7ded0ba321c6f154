"""Names of pictures: templates with a few plain fields. Files are replaced only on request."""

import os
import re
import string
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lydite import embedded
from lydite.core.errors import FileError, InputError, at, shown
from lydite.core.files import NameTaken

if TYPE_CHECKING:
    from lydite.core.request import Request

LONGEST_TEXT = 60  # bytes of a prompt or of a model's name
# Each field with a value that is as long as any.
FIELDS: dict[str, int | float | str] = {
    "seed": 2**64 - 1,
    "index": 999_999,
    "prompt": "x" * LONGEST_TEXT,
    "model": "x" * LONGEST_TEXT,
    "steps": 9_999,
    "guidance": 1000 / 7,
    "width": 999_999,
    "height": 999_999,
}
_SPEC = re.compile(r"0?\d{0,2}(\.\d{1,2})?[dfgs]?")  # as 05d or .1f
DEFAULT = "lydite_{seed}.png"
LONGEST_NAME = 240  # bytes; file systems take 255, and a step and a number may be added


def check_template(template: str) -> str:
    """The template, completed when it names a folder; InputError before any work is done."""
    from lydite.pipelines.picture import check_format

    template = os.path.expanduser(template)
    if not template:
        raise InputError("--out is empty; expected a file, a folder or a template.")
    if template.endswith("/") or _is_folder(template):
        template = f"{template.rstrip('/')}/{DEFAULT}"
    try:
        for _, field, spec, conversion in string.Formatter().parse(template):
            if field is not None and (field not in FIELDS or conversion or "{" in (spec or "")):
                known = " ".join(f"{{{name}}}" for name in FIELDS)
                raise InputError(f"--out has {{{field}}}; the fields are {known}.")
            if not _SPEC.fullmatch(spec or ""):
                raise InputError(f"--out has {{{field}:{spec}}}; expected a width, as 05d or .1f.")
        name = template.format(**FIELDS)
    except (ValueError, TypeError) as error:
        raise InputError(f"--out {shown(template)}: {error}.") from error
    if len(os.fsencode(Path(name).name)) > LONGEST_NAME:
        raise InputError(
            f"--out {shown(template)}: may make a name of more than {LONGEST_NAME} bytes."
        )
    check_format(Path(template), ", or in / for a folder")
    return template


def picture_path(template: str, request: "Request", *, seed: int, index: int, model: str) -> Path:
    """The path a picture is written to, unless it is taken."""
    return Path(
        template.format(
            seed=seed,
            index=index,
            prompt=_slug(request.prompt),
            model=_slug(Path(model).stem),
            steps=request.steps,
            guidance=float(request.guidance or 0),
            width=request.width,
            height=request.height,
        )
    )


def save_picture(path: Path, save: Callable[[Path], object], *, overwrite: bool) -> Path:
    """The same as `save_new`; a picture that cannot be written there goes to a folder for it.

    It may have taken hours, and a disk may be full or gone by now.
    """
    try:
        return save_new(path, save, overwrite=overwrite)
    except FileError as error:
        try:
            fallback = Path(tempfile.mkdtemp(prefix="lydite-"), f"picture{path.suffix}")
            save(fallback)
        except (OSError, FileError):
            raise error from None
        raise FileError(f"{error} The finished picture is at {at(fallback)}.") from error


def save_new(path: Path, save: Callable[[Path], object], *, overwrite: bool) -> Path:
    """Let `save` write a file at `path`, or at the first free number where that name is taken."""
    for number in count(1):
        free = path if number == 1 else path.with_name(f"{path.stem}_{number}{path.suffix}")
        if overwrite or not free.exists():
            try:
                save(free)
            except NameTaken:  # another process was faster
                continue
            return free
    raise AssertionError("counting does not end")


def recorded_name(name: str | None, *, absolute: bool) -> Any:
    """What a picture remembers of a path; an absolute one tells of the user's disk."""
    if name is None or name == embedded.NAME or not Path(name).exists():
        return name
    path = Path(name).expanduser()
    if absolute:
        path = path.absolute()
    elif path.is_absolute():
        path = Path(path.name)
    return os.fsencode(path).decode(errors="backslashreplace")  # a name need not be UTF-8


def _is_folder(template: str) -> bool:
    try:
        return Path(template).is_dir()
    except OSError as error:  # a name too long to ask about
        raise InputError(f"--out {shown(template)}: {error.strerror}.") from error


def _slug(text: str) -> str:
    """Letters and digits of any script, joined by underscores: safe in a file name."""
    joined = "_".join(re.findall(r"\w+", text)).encode()[:LONGEST_TEXT]
    return joined.decode(errors="ignore") or "untitled"
