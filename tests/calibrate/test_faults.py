"""The scripts of the fault campaigns, with small numbers: kills, failures, bits, power cuts."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def campaign(folder: Path, *options: str, script: str = "calibrate_faults.py") -> str:
    command = [sys.executable, str(SCRIPTS / script), "--folder", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kills_at_random_times_and_at_each_call_lose_nothing(memory: Path) -> None:
    said = campaign(memory, "--only", "kills", "--kills", "20")
    assert (
        "20 kills at random times" in said
        and "20 interrupts" in said
        and "one before each call" in said
    )


def test_every_call_that_fails_is_one_clear_error(memory: Path) -> None:
    assert "0 silent losses" in campaign(memory, "--only", "faults")


def test_every_changed_bit_is_found_and_only_its_sample_is_dropped(memory: Path) -> None:
    said = campaign(memory, "--only", "flips", "--flips", "150")
    assert "150 single bits of a closed set changed, all found" in said


def test_a_power_cut_takes_nothing_that_was_acknowledged(memory: Path) -> None:
    said = campaign(memory, "--states", "80", script="calibrate_power.py")
    assert "80 states after a power cut" in said


@pytest.mark.skipif(sys.platform == "darwin", reason="forks a process that has imported MLX")
@pytest.mark.parametrize(
    ("job", "kills", "faults"),
    [("run", "2/9", "5/29"), ("activations", "1/2", "3/17"), ("blocks", "4/7", "6/37")],
)
def test_a_command_is_killed_or_fails_at_a_call_and_is_gone_on_with(
    job: str, kills: str, faults: str, memory: Path
) -> None:
    for only, part in (("boundaries", kills), ("faults", faults)):
        words = ["--job", job, "--images", "2", "--only", only, "--part", part]
        said = campaign(memory, *words, script="calibrate_commands.py")
        assert "results equal" in said and ("promises kept" in said or "clear errors" in said)
