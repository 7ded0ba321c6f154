"""A short part of the campaign of damaged and hostile files, with every command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the size of the process from /proc")
def test_damaged_and_hostile_files_are_one_clear_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "campaigns.command_fuzz", "--inputs", "120", "--seed", "3"]
    paths = os.pathsep.join([str(TESTS), *sys.path])
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
