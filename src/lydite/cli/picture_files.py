"""Names of pictures: templates with a few plain fields, and never an overwrite unasked."""

import re
import string
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from lydite.core.errors import InputError, shown
from lydite.core.files import NameTaken

if TYPE_CHECKING:
    from lydite.core.request import Request

FIELDS = ("seed", "index", "prompt", "model", "steps", "guidance", "width", "height")
DEFAULT = "lydite_{seed}.png"
LONGEST_NAME = 150  # bytes, before seed, prompt and step are filled in; file systems take 255


def check_template(template: str) -> str:
    """The template, completed when it names a folder; InputError before any work is done."""
    from lydite.pipelines.picture import check_format

    if not template:
        raise InputError("--out is empty; expected a file, a folder or a template.")
    if template.endswith("/") or _is_folder(template):
        template = f"{template.rstrip('/')}/{DEFAULT}"
    try:
        for _, field, spec, conversion in string.Formatter().parse(template):
            if field is not None and (field not in FIELDS or conversion or "{" in (spec or "")):
                known = " ".join(f"{{{name}}}" for name in FIELDS)
                raise InputError(f"--out has {{{field}}}; the fields are {known}.")
            if re.search(r"\d{3}", spec or ""):
                raise InputError(f"--out has {{{field}:{spec}}}; at most 99 characters wide.")
        name = template.format(
            **{name: "" if name in ("prompt", "model") else 0 for name in FIELDS}
        )
    except (ValueError, TypeError) as error:
        raise InputError(f"--out {shown(template)}: {error}.") from error
    if len(Path(name).name.encode()) > LONGEST_NAME:
        raise InputError(
            f"--out {shown(template)}: makes a name of more than {LONGEST_NAME} bytes."
        )
    check_format(Path(template))
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
            guidance=request.guidance,
            width=request.width,
            height=request.height,
        )
    )


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


def _is_folder(template: str) -> bool:
    try:
        return Path(template).is_dir()
    except OSError as error:  # a name too long to ask about
        raise InputError(f"--out {shown(template)}: {error.strerror}.") from error


def _slug(text: str) -> str:
    """Letters and digits of any script, joined by underscores: safe in a file name."""
    joined = "_".join(re.findall(r"\w+", text)).encode()[:60].decode(errors="ignore")
    return joined or "untitled"
