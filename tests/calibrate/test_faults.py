"""The fault campaigns with small counts: kills, failures, changed bits, power cuts."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

TESTS = Path(__file__).parents[1]
FORKS = pytest.mark.skipif(
    sys.platform == "darwin" or mx.cuda.is_available(),
    reason="forks a process that has imported MLX, which has threads for a GPU",
)


def campaign(name: str, folder: Path, *options: str) -> None:
    """Run one; it ends with an error at the first loss."""
    command = [sys.executable, "-m", f"campaigns.{name}", "--folder", str(folder), *options]
    paths = os.pathsep.join([str(TESTS), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kills_at_random_times_and_at_each_call_lose_nothing(memory: Path) -> None:
    campaign("store_faults", memory, "--only", "kills", "--kills", "15")


def test_every_call_that_fails_is_one_clear_error(memory: Path) -> None:
    campaign("store_faults", memory, "--only", "faults")


def test_every_changed_bit_is_found_and_only_its_sample_is_dropped(memory: Path) -> None:
    campaign("store_faults", memory, "--only", "flips", "--flips", "150")


def test_a_power_cut_takes_nothing_that_was_acknowledged(memory: Path) -> None:
    campaign("store_power", memory, "--states", "80")


@FORKS
@pytest.mark.parametrize(
    ("job", "kills", "faults"),
    [("run", "2/13", "5/43"), ("activations", "1/5", "3/37"), ("blocks", "4/13", "6/53")],
)
def test_a_command_that_is_killed_or_fails_at_a_call_is_resumed(
    job: str, kills: str, faults: str, memory: Path
) -> None:
    words = ["--job", job, "--images", "2", "--only", "boundaries", "faults"]
    campaign("command_faults", memory, *words, "--part", kills, faults)


@FORKS
def test_a_quantization_that_is_killed_is_resumed_to_the_same_files(memory: Path) -> None:
    words = ["--job", "quantize", "--images", "2", "--only", "boundaries", "--part", "50/1000"]
    campaign("command_faults", memory, *words)
