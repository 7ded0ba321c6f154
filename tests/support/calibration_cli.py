"""`lydite calibrate` in this process, and what a set of the untrained model needs to be small."""

import json
from pathlib import Path

from click.testing import CliRunner, Result

from lydite.cli.main import lydite
from lydite.core.errors import LyditeError

SMALL = ["--steps", 2, "--size", "32x32", "--text-length", 4]


def calibrate(*arguments: object) -> Result:
    """Run in this process; a LyditeError comes back as the result's exception."""
    result = CliRunner().invoke(lydite, ["calibrate", *(str(each) for each in arguments)])
    if result.exception and not isinstance(result.exception, (LyditeError, SystemExit)):
        raise result.exception
    return result


def content(folder: Path) -> str:
    return json.loads(calibrate("status", folder, "--json").stdout)["content_hash"]
