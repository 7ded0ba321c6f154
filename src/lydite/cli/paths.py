"""Names of pictures: templates with a few plain fields, and never an overwrite unasked."""

import re
import string
from pathlib import Path
from typing import TYPE_CHECKING

from lydite.core.errors import InputError

if TYPE_CHECKING:
    from lydite.pipelines.sd3 import Request

FIELDS = ("seed", "index", "prompt", "model", "steps", "guidance", "width", "height")
DEFAULT = "lydite_{seed}.png"


def check_template(template: str) -> str:
    """The template, completed when it names a folder; InputError before any work is done."""
    if template.endswith(("/", "\\")) or Path(template).is_dir():
        template = f"{template.rstrip('/')}/{DEFAULT}"
    try:
        for _, field, spec, conversion in string.Formatter().parse(template):
            if field is not None and (field not in FIELDS or conversion or "{" in (spec or "")):
                known = " ".join(f"{{{name}}}" for name in FIELDS)
                raise InputError(f"--out has {{{field}}}; the fields are {known}.")
        template.format(**{name: "" if name in ("prompt", "model") else 0 for name in FIELDS})
    except (ValueError, TypeError) as error:
        raise InputError(f"--out {template!r}: {error}.") from error
    if Path(template).suffix.lower() != ".png":
        raise InputError(f"--out {template!r}: pictures are PNG; end the name in .png.")
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


def free_path(path: Path, *, overwrite: bool) -> Path:
    """`path`, or with a number added when a file of that name is there."""
    if overwrite or not path.exists():
        return path
    number = 2
    while (candidate := path.with_name(f"{path.stem}_{number}{path.suffix}")).exists():
        number += 1
    return candidate


def _slug(text: str) -> str:
    """Letters and digits of any script, joined by underscores: safe in a file name."""
    return "_".join(re.findall(r"\w+", text))[:80] or "untitled"
