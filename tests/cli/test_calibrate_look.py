"""What `verify --json` promises to scripts, and lists that say when they are cut."""

import json
import shlex
from pathlib import Path

import pytest

from lydite.cli.calibrate.verify import listed
from support.calibration import FaultyDisk, draw, faulty
from support.calibration_cli import calibrate


def test_a_verdict_for_scripts_tells_damage_from_bad_values(tmp_path: Path) -> None:
    draw(tmp_path / "set", 3)
    whole = calibrate("verify", tmp_path / "set", "--json")
    told = json.loads(whole.stdout)
    assert (whole.exit_code, told["verdict"], told["healthy"]) == (0, "whole", True)
    assert list(told)[:5] == ["folder", "verdict", "sound", "complete", "healthy"]
    assert list(told["items"]) == sorted(told["items"])

    result = calibrate("verify", tmp_path / "set", "--json", "--absmax", 0.001)
    told = json.loads(result.stdout)
    assert result.exit_code == 1 and told["verdict"] == "unhealthy"
    assert told["sound"] and told["complete"] and not told["healthy"]
    names = [each["item"] for each in told["suspects"]]
    assert len(set(names)) > 1 and names == sorted(names)

    next((tmp_path / "set/shards").iterdir()).unlink()
    told = json.loads(calibrate("verify", tmp_path / "set", "--json").stdout)
    assert told["verdict"] == "damaged" and not told["sound"] and not told["complete"]


def test_a_list_that_is_cut_says_so() -> None:
    assert listed(["a", "b", "c", "d"]) == "a, b, c, d"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c, d, …"


def test_help_says_what_each_exit_status_means() -> None:
    told = " ".join(calibrate("--help").stdout.split())
    assert "0 fine, 1 a set that verify finds damaged, incomplete or unhealthy" in told
    assert "130 interrupted" in told


@pytest.mark.parametrize(
    "options", [["--no-run"], ["--workers", "2"], ["--ray", "auto"], ["--model", "a folder"]]
)
def test_the_advice_of_repair_has_the_options_it_was_given(
    tmp_path: Path, options: list[str]
) -> None:
    draw(tmp_path / "set", 1)
    with faulty(FaultyDisk(1, "EIO")):
        message = str(calibrate("repair", tmp_path / "set", *options).exception)
    told = shlex.split(message.split("go on with: ")[1])
    assert told == ["lydite", "calibrate", "repair", str(tmp_path / "set"), *options]
