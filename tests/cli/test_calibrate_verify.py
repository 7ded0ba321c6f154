"""What `verify --json` promises to scripts, and lists that say when they are cut."""

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lydite.calibrate.settings import plan_of
from lydite.calibrate.store.status import Status
from lydite.calibrate.store.verify import Damage, SuspiciousItem, VerifyResult
from lydite.calibrate.store.writer import Writer
from lydite.cli.calibrate.status import _print_status, duration
from lydite.cli.calibrate.verify import SHOWN, _as_json, _print_result, _verdict, first_names
from lydite.report import contact_sheets
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


def test_what_is_left_of_a_set_is_a_set(tmp_path: Path) -> None:
    folder = tmp_path
    for gone in ("set.json", "shards"):
        folder = tmp_path / f"without {gone}"
        draw(folder, 1)
        (folder / gone).rename(tmp_path / f"its {gone}")
        result = calibrate("verify", folder)
        assert result.exit_code == 1 and "no calibration set" not in str(result.exception)
    assert "no calibration set" in str(calibrate("verify", tmp_path).exception)
    for limit in ("0", "-1", "nan", "inf"):
        result = calibrate("verify", folder, "--absmax", limit)
        assert "--absmax" in str(result.exception)


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (89, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h"), (36000, "10.0 h")],
)
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_verify_prints_what_it_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def printed(result: VerifyResult) -> str:
        _print_result(tmp_path, result)
        return capsys.readouterr().out

    whole = VerifyResult({"sample": 3, "picture": 2}, 4, 2000, "abc", 0, (), ())
    text = printed(whole)
    assert "2 pictures, 3 samples undamaged in 4 shards" in text and "content   abc" in text
    assert text.endswith("verdict   whole\n") and "missing" not in text and "incoming" not in text
    suspects = tuple(SuspiciousItem(f"item {n}", "NaN") for n in range(SHOWN + 2))
    text = printed(replace(whole, suspects=suspects, pending=2, quarantined=5, broken=("x",)))
    assert text.count("suspect ") == SHOWN + 1 and "… and 2 more" in text
    few = printed(replace(whole, suspects=suspects[:SHOWN]))
    assert few.count("suspect ") == SHOWN == 10 and "more" not in few
    assert "incoming  2 shards" in text and "incoming  x; " in text and "quarantine 5" in text
    assert "verdict   unhealthy" in text
    text = printed(
        replace(whole, missing=7, damage=(Damage("s", "cut", ("a", "b")), Damage("t", "w")))
    )
    assert "damaged   s: cut (a, b)\n" in text and "damaged   t: w\n" in text
    assert "missing   7 items" in text and "verdict   damaged. Run: lydite calibrate repair" in text
    text = printed(replace(whole, missing=7, writer="process 3"))
    assert text.endswith("verdict   incomplete; process 3 is writing it\n")
    text = printed(replace(whole, writer="process 3"))
    assert text.endswith("verdict   whole\n")
    told = _as_json(tmp_path, replace(whole, damage=(Damage("s", "cut"),)))
    assert not told["complete"] and not told["sound"] and told["healthy"]
    for changes, verdict in (
        ({"missing": 1, "suspects": suspects}, "incomplete"), ({"missing": None}, "whole"),
    ):  # fmt: skip
        assert _verdict(replace(whole, **changes)) == verdict


def test_status_prints_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(**changes: Any) -> str:
        known = Status("set", "m", "h", {"sample": 3, "picture": 1}, 8, 0, 2, 2, 4, (), 2000, "abc",
                       None, None, "again")  # fmt: skip
        _print_status(replace(known, **changes))
        return capsys.readouterr().out

    text = printed()
    assert "1 pictures, 3 samples in 4 shards" in text and "images    2 of 2 complete" in text
    assert "content   abc" in text
    assert not [word for word in ("missing", "writer", "damaged", "resume") if word in text]
    text = printed(missing=5, seconds_left=60.0, content_hash=None)
    assert "missing   5 of 8 items, about 60 s left" in text and "resume    again" in text
    assert "content" not in text and "left" not in printed(missing=5)
    assert "repair set" in printed(missing=5, lost=("a", "b")) and "2 shards" in printed(
        lost=("a", "b")
    )
    busy = printed(missing=5, lost=("a",), writer="pid 3")
    assert "writer    pid 3" in busy and "repair" not in busy and "resume" not in busy


def test_a_manifest_that_cannot_be_written_is_found_before_the_export(tmp_path: Path) -> None:
    draw(tmp_path / "set", 1)
    taken = tmp_path / "manifest.json"
    taken.write_text("mine")
    words = ("export", tmp_path / "set", "--out", tmp_path / "npz", "--manifest", taken)
    assert "exists" in str(calibrate(*words).exception)
    assert not (tmp_path / "npz").exists() and taken.read_text() == "mine"
    assert calibrate(*words, "--overwrite").exit_code == 0 and taken.read_text() != "mine"
    assert "nothing to write" in str(calibrate("export", tmp_path / "set").exception)


def test_captions_of_a_sheet_are_cut_where_they_are_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [("x" * length, 0) for length in (5, 77, 78)]
    with Writer.start(tmp_path / "set", SETTINGS, plan_of(images, ())) as writer:
        for number in range(3):
            writer.commit([writer.builder.picture(number, pixels(number))])
    captions: list[str] = []
    sheet = contact_sheets.contact_sheet

    def seen(tiles: Any, **settings: Any) -> Any:
        captions.extend(tile.caption for tile in tiles)
        return sheet(tiles, **settings)

    monkeypatch.setattr(contact_sheets, "contact_sheet", seen)
    calibrate("verify", tmp_path / "set", "--sheet", tmp_path / "sheet.png")
    assert captions == ["0: xxxxx", f"1: {'x' * 77}", f"2: {'x' * 77} …"]
