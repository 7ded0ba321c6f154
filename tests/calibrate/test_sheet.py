"""The contact sheet shows the pictures that are in the set."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from calibrating import SETTINGS, draw, pixels, plan
from lydite.calibrate.sheet import CAPTION, SIDE, write_sheet
from lydite.calibrate.writer import Writer
from lydite.core.errors import CalibrationError


def test_pictures_stand_side_by_side_in_the_order_of_images(tmp_path: Path) -> None:
    draw(tmp_path / "set", 5)
    assert write_sheet(tmp_path / "set", tmp_path / "sheet.png") == 5
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (3 * SIDE, 2 * (SIDE + CAPTION))
        found = np.asarray(sheet)
    top = SIDE + 2 * CAPTION
    np.testing.assert_array_equal(found[top : top + 16, SIDE : SIDE + 16], pixels(4))


def test_of_many_pictures_some_are_shown_evenly_spread(tmp_path: Path) -> None:
    draw(tmp_path / "set", 9)
    assert write_sheet(tmp_path / "set", tmp_path / "sheet.png", most=3) == 3
    with Image.open(tmp_path / "sheet.png") as sheet:
        found = np.asarray(sheet)
    np.testing.assert_array_equal(found[CAPTION : CAPTION + 16, SIDE : SIDE + 16], pixels(3))


def test_a_set_without_pictures_has_no_sheet(tmp_path: Path) -> None:
    with Writer.start(tmp_path / "set", SETTINGS, plan(1)):
        pass
    with pytest.raises(CalibrationError, match="no picture in it yet"):
        write_sheet(tmp_path / "set", tmp_path / "sheet.png")
    assert not (tmp_path / "sheet.png").exists()
