"""What `verify --json` promises to scripts, and lists that say when they are cut."""

import json
import os
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lydite.calibrate.store.writer import Writer
from lydite.cli.calibrate.verify import first_names
from lydite.report.contact_sheets import scale_to_width
from support.calibration import SETTINGS, FaultyDisk, draw, faulty, pixels, plan
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

    first, second, _ = (tmp_path / "set/shards").iterdir()
    first.unlink()
    told = json.loads(calibrate("verify", tmp_path / "set", "--json").stdout)
    assert told["verdict"] == "incomplete" and told["sound"] and not told["complete"]
    os.truncate(second, 100)
    told = json.loads(calibrate("verify", tmp_path / "set", "--json").stdout)
    assert told["verdict"] == "damaged" and not told["sound"] and not told["complete"]


def test_a_list_that_is_cut_says_so() -> None:
    assert first_names(["a", "b", "c", "d"]) == "a, b, c, d"
    assert first_names(["a", "b", "c", "d", "e"]) == "a, b, c, d, …"


def test_the_sheet_shows_the_pictures_in_the_order_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(tmp_path / "set", 5)
    result = calibrate("verify", tmp_path / "set", "--sheet", tmp_path / "sheet.png")
    assert "5 pictures" in result.stdout
    with Image.open(tmp_path / "sheet.png") as picture:
        sheet = np.asarray(picture.convert("RGB"))
    tile = scale_to_width(pixels(4), 128)  # the second of the second row
    column = sheet[:, 12 + 140 : 12 + 140 + 128]
    places = [top for top in range(len(column) - 128) if (column[top : top + 128] == tile).all()]
    assert len(places) == 1 and places[0] > 128
    monkeypatch.setattr("lydite.cli.calibrate.verify.MOST_PICTURES", 2)  # of more, some of all
    calibrate("verify", tmp_path / "set", "--sheet", tmp_path / "few.png")
    with Image.open(tmp_path / "few.png") as picture:
        few = np.asarray(picture.convert("RGB"))
    assert (few[12:140, 12 + 140 : 12 + 140 + 128] == scale_to_width(pixels(2), 128)).all()
    Writer.start(tmp_path / "empty", SETTINGS, plan(1)).close()
    result = calibrate("verify", tmp_path / "empty", "--sheet", tmp_path / "none.png")
    assert "no picture" in str(result.exception) and not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    "options", [["--no-run"], ["--workers", "2"], ["--ray", "auto"], ["--model", "a folder"]]
)
def test_the_advice_of_repair_has_the_options_it_was_given(
    tmp_path: Path, options: list[str]
) -> None:
    draw(tmp_path / "set", 1)
    with faulty(FaultyDisk(1, "EIO")):
        message = str(calibrate("repair", tmp_path / "set", *options).exception)
    told = shlex.split(message.split("resume with: ")[1])
    assert told == ["lydite", "calibrate", "repair", str(tmp_path / "set"), *options]
