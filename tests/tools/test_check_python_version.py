"""The check before .venv is made, for machines that are not here."""

import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "check_python_version.py"
reason = run_path(str(SCRIPT))["reason"]


@pytest.mark.parametrize(
    ("version", "system", "machine", "macos", "expected"),
    [
        ((3, 9), "Darwin", "arm64", (15, 1), "brew install python@3.12. Then: make demo PYTHON="),
        ((3, 15), "Linux", "x86_64", (), "needs Python 3.11 to 3.14; this is 3.15"),
        ((3, 12), "Darwin", "x86_64", (14, 0), "arm64 Python"),
        ((3, 12), "Darwin", "arm64", (13, 6), "macOS 14 or newer; this is 13.6"),
        ((3, 12), "Windows", "AMD64", (), "this is Windows"),
    ],
)
def test_says_what_to_do(version, system, machine, macos, expected):
    assert expected in reason("demo", version, system, machine, macos)


@pytest.mark.parametrize("version", [(3, 11), (3, 14)])
@pytest.mark.parametrize(("system", "macos"), [("Darwin", (14, 0)), ("Linux", ())])
def test_says_nothing(version, system, macos):
    assert reason("demo", version, system, "arm64", macos) is None


def test_this_python_passes():
    assert subprocess.run([sys.executable, SCRIPT]).returncode == 0
