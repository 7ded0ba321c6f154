"""The contact sheet shows the pictures that are in the set."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFont

from lydite.calibrate.sheet import ACROSS, DOWN, GAP, LINE, LINES, SIDE, TEXT, caption, write_sheet
from lydite.calibrate.store.writer import Writer
from lydite.core.errors import CalibrationError
from support.calibration import SETTINGS, draw, pixels, plan


def test_pictures_stand_side_by_side_in_the_order_of_images(tmp_path: Path) -> None:
    draw(tmp_path / "set", 5)
    assert write_sheet(tmp_path / "set", tmp_path / "sheet.png") == 5
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (GAP + 3 * ACROSS, GAP + 2 * DOWN)
        found = np.asarray(sheet)
    left, top = GAP + ACROSS, GAP + DOWN
    np.testing.assert_array_equal(found[top : top + 16, left : left + 16], pixels(4))
    paper = found[0, 0]
    assert (found[top : top + 16, left - GAP : left] == paper).all()  # pictures do not touch
    assert (found[top + 18 : top + 18 + LINE, left : left + SIDE] != paper).any()  # its caption


def test_of_many_pictures_some_are_shown_evenly_spread(tmp_path: Path) -> None:
    draw(tmp_path / "set", 9)
    assert write_sheet(tmp_path / "set", tmp_path / "sheet.png", most=3) == 3
    with Image.open(tmp_path / "sheet.png") as sheet:
        found = np.asarray(sheet)
    left = GAP + ACROSS
    np.testing.assert_array_equal(found[GAP : GAP + 16, left : left + 16], pixels(3))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3: a red ring", ["3: a red ring"]),
        (
            "4: a large red star above a small blue ring",
            ["4: a large red star above", "a small blue ring"],
        ),
        ("5: one\ntwo", ["5: one two"]),
    ],
)
def test_a_caption_is_the_number_and_the_beginning_of_the_prompt(text: str, expected) -> None:
    assert caption(text, ImageFont.load_default(TEXT)) == expected


def test_a_caption_is_never_wider_than_its_picture() -> None:
    font = ImageFont.load_default(TEXT)
    for text in ("6  " + "x" * 10_000, "7  " + "wide words " * 900):
        lines = caption(text, font)
        assert len(lines) == LINES and lines[-1].endswith("…")
        assert max(font.getlength(line) for line in lines) <= SIDE


def test_a_set_without_pictures_has_no_sheet(tmp_path: Path) -> None:
    with Writer.start(tmp_path / "set", SETTINGS, plan(1)):
        pass
    with pytest.raises(CalibrationError, match="no picture in it yet"):
        write_sheet(tmp_path / "set", tmp_path / "sheet.png")
    assert not (tmp_path / "sheet.png").exists()
