"""The limits that SECURITY.md promises are those of the code."""

import re
from pathlib import Path

from lydite.calibrate import npz_files
from lydite.calibrate.store import set_file
from lydite.conform import answers
from lydite.core import config, request, tensorfile
from lydite.pipelines import picture
from lydite.trace import json_files

PAGE = Path(__file__).parents[1] / "SECURITY.md"


def test_limits_are_those_of_the_page() -> None:
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", PAGE.read_text(), re.MULTILINE))
    mebibytes = [
        limit / 2**20 for limit in (config.MAX_BYTES, set_file.MAX_BYTES, json_files.MAX_WEIGHTS)
    ]
    expected = {
        "header of a safetensors file": f"{tensorfile.MAX_HEADER_BYTES / 1e6:g} MB, "
        f"{tensorfile.MAX_TENSORS:,} tensors",
        "picture": f"{picture.MOST_PIXELS / 1e6:.0f} million pixels and "
        f"{picture.LONGEST_SIDE:,} of a side",
        "prompt": f"{request.LONGEST_PROMPT:,} characters",
        "JSON": "{:g} MiB for a config, {:g} MiB for `set.json` and answers, {:g} MiB for "
        "`weights.json` of a trace".format(*mebibytes),
        "trace": f"{json_files.MAX_EVENTS:,} events",
        "npz file": f"{npz_files.MAX_BYTES / 2**30:g} GiB unpacked",
    }
    for name, limit in expected.items():
        assert rows[name].startswith(limit), name
    assert answers.MOST_BYTES == set_file.MAX_BYTES
